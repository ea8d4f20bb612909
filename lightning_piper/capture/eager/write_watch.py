"""Notice operations that change given tensors. A version counter does not show changes through `x.data`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_piper.accelerators._torch_dispatch import OperationWatch, aliased_arguments
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import user_line


class TensorWriteWatch(OperationWatch):
    """A mode that notes which tensors operations have changed, and where.

    Args:
        tensors: Name -> tensor. An operation that changes other elements of the same memory also counts.

    Attributes:
        written: Name -> the line of the user's code that first changed the tensor.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {x.untyped_storage().data_ptr(): name for name, x in tensors.items() if x.numel()}
        self.written: dict[str, str] = {}

    def before(self, operation: Any, args: Any, kwargs: Any) -> None:
        for x in _torch.tree_leaves(aliased_arguments(operation, args, kwargs, changed=True)):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided:
                name = self._names.get(x.untyped_storage().data_ptr())
                if name is not None and name not in self.written:
                    self.written[name] = user_line()
