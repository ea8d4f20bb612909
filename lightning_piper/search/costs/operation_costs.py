"""The calculated cost of operations: floating point operations, and bytes that they read and write.

Matrix products and attention are counted by the formulas of `torch.utils.flop_counter`. A multiplication and
an addition count as 2, and causal attention counts like attention without a mask. All other operations count
only their memory traffic. Each operation reads its operands and writes its results once. Chunked scores also
count the traffic of the scores, in the products and in the other operations on them. Views cost nothing.
Nothing is fused, because captured code runs one operation at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import lightning_piper.grouped_matmul  # noqa: F401  (registers its operations)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.placements.chunked_scores import CHUNKED, SCORES_BACKWARD, score_traffic
from lightning_piper.simulate.hardware import Hardware

aten, _ops = torch.ops.aten, torch.ops.lightning_piper
# Operations without a cost. Views do not have a cost either.
_FREE = {aten._unsafe_view.default, aten.detach.default, aten.empty.memory_format, aten.empty_strided.default}


class Cost(NamedTuple):
    """A cost of an operation: its name, its floating point operations (`flops`) and their dtype, and the
    bytes that it reads and writes (`nbytes`)."""

    name: str
    flops: int
    dtype: torch.dtype
    nbytes: int


class Counting(_torch.TorchDispatchMode):
    """A dispatch mode that records the cost of each operation, except views and operations in `_FREE`. It
    works with fake tensors.

    Attributes:
        costs: The costs of the operations so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.costs: list[Cost] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _FREE and not _torch.is_view(func):
            given, results = _tensors((args, kwargs)), _tensors(made)
            nbytes = sum(_nbytes(x) for x in {id(x): x for x in (*given, *results)}.values())
            dtype = next((x.dtype for x in (*results, *given) if x.is_floating_point()), torch.float32)
            if func in CHUNKED:
                products, others = score_traffic(func, args)
                nbytes += products
                dtype = args[3 if func is SCORES_BACKWARD else 1].dtype  # of the weight, as of the products
                self.costs.append(Cost(str(func), 0, dtype, others))
            self.costs.append(Cost(str(func), _flops(func, args, kwargs or {}, made), dtype, nbytes))
        return made


def seconds(costs: Iterable[Cost], hardware: Hardware) -> float:
    """Return the seconds of operations that run one after the other.

    An operation takes the longer of the times of its arithmetic and of its memory traffic.

    Raises:
        SimulationError: The hardware has no speed for a data type of floating point operations.
    """
    total = 0.0
    for cost in costs:
        arithmetic = cost.flops / hardware.flops_of(cost.dtype) if cost.flops else 0.0
        total += max(arithmetic, cost.nbytes / hardware.bandwidth) / hardware.efficiency
    return total


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in _torch.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _nbytes(x: torch.Tensor) -> int:
    """Return the bytes of memory that a tensor covers. An expanded dimension counts like size 1."""
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride else min(size, 1)
    return numel * x.element_size()


def _flops(func: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the number of floating point operations of a call; 0 for operations that are not counted."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=made))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu:
        q, k, v = args[:3]
        return int(sdpa_flop_count(q.shape, k.shape, v.shape))
    if packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        grad, q, k, v = args[:4]
        return int(sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))
    # `grouped_mm` multiplies each row of x with a matrix of y, and `grouped_outer` with a row of y.
    if func in (_ops.grouped_mm.default, _ops.grouped_outer.default):
        x, y = args[:2]
        return 2 * int(x.shape[0] * x.shape[1] * y.shape[-1])
    if func in CHUNKED:
        hidden, weight = args[2:4] if func is SCORES_BACKWARD else args[:2]
        # The backward operation computes the scores again, and the wanted gradients of `hidden` and `weight`.
        products = 1 + sum(args[-1][:2]) if func is SCORES_BACKWARD else 1
        return 2 * products * int(hidden.shape[:-1].numel() * weight.numel())
    return 0
