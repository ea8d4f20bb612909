"""What a process holds of a module and its optimizer: which tensors or shards of them, values, gradients and state."""
