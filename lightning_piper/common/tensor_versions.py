"""Changes of tensors in place, by the counters that torch keeps of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Name, tensor, and torch's count of the changes of the tensor.
Version = tuple[str, torch.Tensor, int]


def tensor_versions(tensors: Mapping[str, torch.Tensor]) -> list[Version]:
    """Return the versions of named tensors. `changed_tensors` takes them."""
    return [(name, x, x._version) for name, x in tensors.items()]


def changed_tensors(versions: list[Version]) -> list[str]:
    """Return the names of the tensors that have changed in place since `tensor_versions`."""
    return [name for name, x, version in versions if x._version != version]
