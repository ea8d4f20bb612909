"""The part of a module and its optimizer that a process holds: tensors or shards of them, values, gradients
and state."""
