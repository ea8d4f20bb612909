"""Trace `training_step` into a joint forward and backward graph, and cut the graph into passes of regions.

The sub-packages, each of which imports only sub-packages above it:

- `torch_private`: private names of torch and torchmetrics that Piper relies on
- `user_code`: the line of the user's code that an operation or an error comes from
- `joint`: the nodes of a joint graph, and the region of each node
- `proxies`: placeholders for the values that a trace does not have, and the spec of a batch
- `metrics`: calls of metric objects in a step
- `python_state`: the Python state that a step reads and changes, and guards on it
- `graph_cache`: stored graphs of steps, and new graphs built from recorded operations
- `tracing`: the trace of a step into one joint graph
- `losses`: how losses, logged values and gradients of parts of the batch combine
- `tensor_sharding`: the shard of each value that a rank holds if tensors are sharded
- `cutting`: the passes of regions that a joint graph is cut into
- `steps`: captured steps, with their code for each batch size
- `eager`: steps, and parts of steps, that run without a graph
"""

from lightning_piper.capture.eager.partial_step import PartlyCaptured
from lightning_piper.capture.joint.trace_text import difference
from lightning_piper.capture.proxies.batch import BatchSpec, flatten
from lightning_piper.capture.python_state.rollback import as_before
from lightning_piper.capture.python_state.state_reads import History
from lightning_piper.capture.steps.captured_step import CapturedStep
from lightning_piper.capture.steps.entry import capture, check_step
from lightning_piper.capture.torch_private._torch import (
    clipping_replaced,
    dict_version,
    has_gradient_hooks,
    storage_id,
)

__all__ = [
    "BatchSpec", "CapturedStep", "History", "PartlyCaptured", "as_before", "capture", "check_step",
    "clipping_replaced", "dict_version",
    "difference", "flatten", "has_gradient_hooks", "storage_id",
]  # fmt: skip
