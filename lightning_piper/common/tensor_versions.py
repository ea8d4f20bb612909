"""Changes of tensors in place, by the counters that torch keeps of them, or by sums of their bits."""

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


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits as integers, modulo 2**64. It also shows changes that torch does not count,
    such as changes of `tensor.data`."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    size = flat.element_size()
    # Without a conversion to int64, the sum needs no memory.
    whole = flat.numel() * size % 8 == 0 and flat.storage_offset() * size % 8 == 0
    kind = torch.int64 if whole else _INTEGERS[min(size, 8)]
    return int(flat.view(kind).sum(dtype=torch.int64))


def sum_of_elements(tensor: torch.Tensor) -> int:
    """Return the sum of the bits of a tensor's elements as integers, modulo 2**64. Unlike `sum_of_bits`, the sums of
    the shards of a tensor add up to the sum of the whole tensor."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    numbers = flat.view(_INTEGERS[min(flat.element_size(), 8)])
    # The parts bound the memory of the conversion to int64.
    return sum(int(part.sum(dtype=torch.int64)) for part in numbers.split(2**22)) % 2**64


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
