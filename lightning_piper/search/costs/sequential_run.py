"""Run the passes of a captured step one after the other on one device, to measure or count each pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from lightning_piper.ir.regions import Code, Interface, Output, PassKey, StepCode

# Takes (region, pass), its code and its arguments. Returns the outputs as a flat tuple.
Run = Callable[[PassKey, Code, list[torch.Tensor]], tuple[torch.Tensor, ...]]
_Ref = tuple[int, str, int]  # (region, pass, index of the output bundle)


# Takes an output and its tensors. Returns the tensors that later passes receive.
Arrive = Callable[[Output, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]


def walk(
    step: StepCode,
    tensors: Mapping[str, torch.Tensor],
    leaves: Sequence[torch.Tensor],
    run: Run,
    arrive: Arrive = lambda output, bundle: bundle,
    split: bool = False,
) -> None:
    """Run all passes: F of each region from the first to the last, then B of each region from the last to the
    first. Skip passes that a region does not have. The outputs that `run` returns are passed on to later
    passes.

    A value is freed after the last pass that reads it.

    Args:
        step: The code of the passes.
        tensors: Canonical name -> parameter or buffer.
        leaves: The tensors of the batch, and the step's numbers.
        run: Runs one pass.
        arrive: Changes the tensors of an output before later passes read them (default: no change).
        split: Run BI and BW instead of B, if a region's backward pass has both.
    """
    order = list(_order(step, split))
    readers = Counter(step.whole(*ref) for key in order for ref in step.interface_of(key).inputs)
    values: dict[_Ref, tuple[torch.Tensor, ...]] = {}
    for key in order:
        interface, code = step.interface_of(key), step.code_of(key)
        given = [x for ref in interface.inputs for x in values[step.whole(*ref)]]
        made = iter(run(key, code, given + _own(step, interface, tensors, leaves)))
        for i, (output, specs) in enumerate(zip(interface.outputs, code.outputs, strict=True)):
            bundle = tuple(next(made) for _ in specs)
            made_here = step.whole(*key, i)  # also with split passes, a gradient is an output of B
            if readers[made_here]:
                values[made_here] = arrive(output, bundle)
        for read in (step.whole(*ref) for ref in interface.inputs):
            readers[read] -= 1
            if not readers[read]:
                del values[read]


def _order(step: StepCode, split: bool) -> Iterator[PassKey]:
    """Yield the passes of the step in the order of `walk`."""
    regions = range(len(step.regions))
    yield from ((region, "F") for region in regions if (region, "F") in step.interfaces)
    for region in reversed(regions):
        if (region, "B") in step.interfaces:
            parts = step.backward_passes_of(region)
            yield from ((region, part) for part in (parts if split and len(parts) > 1 else ("B",)))


def _own(
    step: StepCode, interface: Interface, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return the arguments of a pass that no other pass outputs. The gradients of the loss's terms are 1."""
    found = [tensors[name] for name in (*interface.params, *interface.buffers, *interface.state)]
    found += [leaves[leaf] for leaf in interface.batch]
    device = (found or list(leaves))[0].device
    return found + [torch.ones((), dtype=step.loss_dtype, device=device) for _ in interface.seeds]
