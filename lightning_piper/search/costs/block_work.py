"""Convert measured or calculated seconds of regions' passes to the work of blocks, which a search distributes
over stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from lightning_piper.common.limits import integer, shown
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import StepCode
from lightning_piper.ir.values import Kind
from lightning_piper.runtime.inplace_grads import written_in_place
from lightning_piper.search.costs.blocks import BlockCut
from lightning_piper.search.costs.microbatch_check import meets
from lightning_piper.search.costs.parameters import OfParam
from lightning_piper.search.costs.workload import Block, Work, Workload
from lightning_piper.simulate.durations import Number


class Seconds(NamedTuple):
    """The seconds of the passes of a region, or of a block.

    Attributes:
        forward, backward_input, backward_weights: Seconds of F, BI and BW. B takes the sum of the last two.
        apart: Additional seconds of BW as a pass of its own.
    """

    forward: Number = 0
    backward_input: Number = 0
    backward_weights: Number = 0
    apart: Number = 0


def seconds_of(passes: Mapping[str, Number]) -> Seconds:
    """Return the seconds of a region, from the times of its passes: `F`, `B`, `BI`, `BW` -> seconds. A
    missing pass takes 0 seconds.

    If BI and BW together take more time than B, the difference is work that both passes do, and that B does
    once. Without times of BI and BW, the time of B is the time of BI.
    """
    forward, whole, first, second = (passes.get(kind, 0) for kind in ("F", "B", "BI", "BW"))
    if not first + second:
        return Seconds(forward, whole)
    if first >= whole:  # a busy machine can make the measured part longer than the whole
        first = whole * first / (first + second)
    return Seconds(forward, first, whole - first, max(first + second - whole, 0))


def single_part(code: StepCode, region: int, passes: Mapping[str, float]) -> dict[str, float]:
    """Return {"BI": seconds of B} or {"BW": seconds of B} if a region's backward pass has only this part. If
    it has both or none, return an empty dict."""
    parts = code.backward_passes_of(region)
    return {parts[0]: passes["B"]} if len(parts) == 1 else {}


def total(found: Iterable[Seconds]) -> Seconds:
    """Return the sum of the seconds of several regions, for each pass."""
    return Seconds(*(sum(column) for column in zip(Seconds(), *found, strict=True)))


def written_in_place_of(code: StepCode) -> frozenset[str]:
    """Return the parameters (by their names in `code`) whose gradient exactly one backward pass makes, if
    this pass can write the gradient directly into its bucket."""
    found: dict[str, list[bool]] = {}
    for (region, kind), interface in code.interfaces.items():
        of_pass, first = code.code[region, kind], 0
        for output, specs in zip(interface.outputs, of_pass.outputs, strict=True):
            if output.kind == Kind.GRAD:
                for name, there in zip(output.names, written_in_place(of_pass, first, specs), strict=True):
                    found.setdefault(name, []).append(there)
            first += len(specs)
    return frozenset(name for name, terms in found.items() if terms == [True])


def checked_samples(cut: BlockCut, samples: Iterable[int]) -> list[int]:
    """Return the requested numbers of samples for which the step can be traced, in rising order.

    If the step cannot be traced for some number, the result does not have smaller numbers either. If the
    batch cannot be divided, return only the number of its samples, whatever was requested.

    Raises:
        CaptureError: A number is below 1, or there are no numbers.
        Exception: The step cannot be traced for the largest number. The error is the error of the trace.
    """
    found = sorted({number if (number := integer(x)) is not None else 0 for x in samples})
    if not found or found[0] < 1:
        raise CaptureError(
            f"samples={shown(samples)} is not usable. Give a list of integers >= 1 [PIPER-P005]"
        )
    if cut.step.batch_spec.undivided is not None:
        return [cut.step.size]
    why = {n: error for n in found if n != cut.step.size and (error := cut.refuses(n)) is not None}
    if kept := [n for n in found if n > max(why, default=0)]:
        return kept
    raise why[found[-1]]


def workload(
    cut: BlockCut,
    works: Mapping[tuple[int, int], list[Work]],
    states: float,
    of_param: OfParam,
    divided: frozenset[str] = frozenset(),
    meet: bool | None = None,
    least: Mapping[int, int] | None = None,
) -> Workload:
    """Assemble a workload from the work of its blocks.

    Args:
        cut: The blocks of the module.
        works: (samples, size of the tensor axis) -> the work of each block.
        states: Bytes of optimizer state for each byte of parameters.
        of_param: Takes the name of a parameter, and returns the seconds that it takes besides passes.
        divided: Parameters that are sharded along the tensor axis.
        meet: Whether the step mixes samples. None: `meets` decides from the step's operations.
        least: Size of the tensor axis -> smallest number of samples of a microbatch. A size is absent if this
            number is not larger than for one device.
    """
    sent = cut.sent(cut.step.size)
    fewest = 1 if cut.refuses(1) is None else min(samples for samples, _ in works)
    # Parameter -> the first block that uses it. The optimizer updates a tied parameter once.
    first = {name: i for i, params in reversed([*enumerate(cut.params)]) for name in params}
    packed = [sum(of_param(name).packed for name in params) for params in cut.params]
    in_place = cut.all_named(written_in_place_of(cut.step.at(cut.step.size)))
    packed_apart = [
        sum(of_param(name).packed for name in params if name not in in_place) for params in cut.params
    ]
    added = [sum(of_param(name).added for name in params) for params in cut.params]
    new = [[of_param(name) for name in params if first[name] == i] for i, params in enumerate(cut.params)]
    updated = [(sum(each.updated for each in found), sum(each.in_parts for each in found)) for found in new]
    blocks = tuple(
        Block(
            name,
            {key: found[i] for key, found in works.items()},
            cut.params[i],
            divided & cut.params[i].keys(),
            cut.routed[i],
            sent[i] / cut.step.size,
            packed[i],
            added[i],
            *updated[i],
            frozenset(cut.params[i]) - cut.trains,
            packed_apart[i],
        )
        for i, name in enumerate(cut.names)
    )
    met = meets(cut) if meet is None else meet
    return Workload(blocks, cut.step.size, states, least=fewest, least_divided=least or {}, meets=met)
