"""Find parameters and buffers that share memory although they are different tensors, such as a matrix and a
view of one of its rows.

On one device, a write to one tensor also changes the other. On several devices, each tensor has its own
memory, so the two would diverge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.common.user_lines import member
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import ParamInfo, StepCode
from lightning_piper.ir.values import Kind

Pair = tuple[str, str]


def sharing_memory(tensors: Mapping[str, torch.Tensor]) -> list[Pair]:
    """Return the pairs of names whose tensors have elements in common, in the order of `tensors`.

    Tensors without data, sparse tensors and tensors of a subclass are in no pair. A pair may also have no
    element in common if its dtypes differ (see `_meet`).
    """
    # (device, first address, address after the last element, position in `tensors`, name)
    spans = sorted(
        (str(x.device), start, start + _extent(x) * x.element_size(), index, name)
        for index, (name, x) in enumerate(tensors.items())
        if (start := _address(x))
    )
    found: list[tuple[int, int, Pair]] = []
    for i, (device, _, stop, index, name) in enumerate(spans):
        for other_device, start, _, other_index, other in spans[i + 1 :]:
            if other_device != device or start >= stop:
                break
            if _meet(tensors[name], tensors[other]):
                (one, a), (two, b) = sorted([(index, name), (other_index, other)])
                found.append((one, two, (a, b)))
    return [pair for _, _, pair in sorted(found)]


def refuse_sharing(pairs: Sequence[Pair], code: StepCode, params: Mapping[str, ParamInfo]) -> None:
    """Raise an error if the step or the optimizer would change one of two tensors that share memory.

    Args:
        pairs: names of parameters and buffers that share memory.
        code: the code of the step.
        params: the parameters by name.

    Raises:
        CaptureError: one tensor of a pair changes.
    """
    outputs = [out for interface in code.interfaces.values() for out in interface.outputs]
    changing = {name for out in outputs if out.kind == Kind.BUFFER for name in out.names}
    if not code.forward_only:
        changing |= {name for name, info in params.items() if info.requires_grad}
    for one, two in pairs:
        if one in changing or two in changing:
            raise CaptureError(f"{_problem(one, two, changing, params)} [PIPER-C018]")


def _problem(one: str, two: str, changing: Collection[str], params: Mapping[str, ParamInfo]) -> str:
    """Return the text of the error for two tensors that share memory. `changing` has the names of tensors that
    change."""
    if one in params and two in params:
        alike = params[one].spec.shape == params[two].spec.shape
        fix = (
            f"To tie them, register one Parameter under both names: {member(two)} = {member(one)}"
            if alike
            else f"Give one of them its own memory: {member(two)}.data = {member(two)}.data.clone()"
        )
        return (
            f"the parameters {one!r} and {two!r} are two tensors that share memory. On one device training "
            f"changes both at once, but on several devices they would diverge. {fix}"
        )
    if one in params or two in params:
        param, buffer = (one, two) if one in params else (two, one)
        trained = param in changing
        change, fix = (
            (
                f"training changes {param!r}",
                f"Remove the buffer, and read {member(param)}.detach() in the step",
            )
            if trained
            else (f"the step changes {buffer!r}", "Register a clone of the tensor as the buffer (.clone())")
        )
        return (
            f"the buffer {buffer!r} shares memory with the parameter {param!r}, and {change}. On several "
            f"devices they would diverge. {fix}"
        )
    changed, other = (one, two) if one in changing else (two, one)
    return (
        f"the step changes the buffer {changed!r}, which shares memory with the buffer {other!r}. On several "
        f"devices they would diverge. Compute {other!r} from {changed!r} in the step, or register a clone as {other!r} "
        "(.clone())"
    )


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's first element. Return 0 if the tensor has no elements or no data, is
    not strided, or is of a subclass other than `Parameter`."""
    if (
        tensor.is_meta
        or type(tensor) not in (torch.Tensor, nn.Parameter)
        or tensor.layout is not torch.strided
    ):
        return 0
    return tensor.data_ptr() if tensor.numel() else 0


def _extent(tensor: torch.Tensor) -> int:
    """Return the length of the tensor's memory range in elements, from its first element to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _meet(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping memory ranges have an element in common.

    Two columns of a matrix have overlapping ranges, but no element in common. For tensors whose elements
    cannot be compared by index, return True: the dtypes differ, or an element of `b` begins inside an element
    of `a`.
    """
    dense = a.numel() == _extent(a) and b.numel() == _extent(b)
    if dense or a.dtype != b.dtype or (a.data_ptr() - b.data_ptr()) % a.element_size():
        return True
    offset = (b.data_ptr() - a.data_ptr()) // a.element_size()
    return bool(torch.isin(_addresses(a), _addresses(b) + offset).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    """Return the offset of each element from the first element, in elements: a one-dimensional int64
    tensor."""
    return torch.arange(_extent(tensor)).as_strided(tensor.shape, tensor.stride()).reshape(-1)
