"""Check that a program finds the tensors where the first program has distributed them.

Each process checks the plans of all devices, so all processes raise the same error.
"""

from __future__ import annotations

from lightning_piper.common.units import counted
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.tensor_map import TensorMap


def check_shards(first: Compiled, compiled: Compiled) -> None:
    """Check that a program has the same buckets as the first program, because all programs share the flat tensors of
    these buckets.

    Raises:
        PiperError: The program uses other buckets.
    """
    for device, plan in compiled.plans.representatives.items():
        others = sorted(
            {n for b, _ in plan.shards.items() - first.plans[device].shards.items() for n in b.names}
        )
        if others:
            raise PiperError(
                f"PiperStrategy: for this batch ({compiled.dag.size} samples), the step uses parameters in different "
                f"regions than for the first batch, so device {device} would need different shards of "
                f"{', '.join(others[:3])}. Let the step use the same parameters in the same annotated regions for "
                "all batches [PIPER-D025]"
            )


def check_none_idle(first: Compiled, compiled: Compiled) -> None:
    """Check that a training step has work for each device of the first training step.

    Raises:
        PiperError: A device has no work. It would not run the step with the other devices.
    """
    idle = set(first.plans) - set(compiled.plans)
    if compiled.step.name == first.step.name and idle:
        raise PiperError(
            f"batch of {counted(compiled.dag.size, 'sample')}: device {min(idle)} would have no part in the step, because a "
            "batch with fewer samples has fewer microbatches, and the program places microbatches on devices. Give all "
            "batches at least as many samples as there are microbatches, for example by DataLoader(drop_last=True) "
            "[PIPER-D025]"
        )


def check_held(first: Compiled, compiled: Compiled, tensors: TensorMap, before_fit: bool = False) -> None:
    """Check that every process holds the tensors that its plan works on.

    Args:
        compiled: The program to check.
        tensors: The tensors that each process holds.
        before_fit: Whether the program was compiled before it was known which parameters the first program
            shards. Parameters of the first program then count as held, because they can be gathered.

    Raises:
        PiperError: A process does not hold a tensor.
    """
    by, step = first.step.name, compiled.step.name
    for device, plan in sorted(compiled.plans.representatives.items()):
        needed = compiled.params_on(device) | compiled.buffers_on(device)
        if before_fit and not needed <= tensors.specs.keys():
            return  # the module has lost tensors, for example by pruning, so the step is captured again
        needed -= {name for bucket in plan.shards for name in bucket.names}
        needed -= first.params_on(device) if before_fit else set()
        missing = sorted(name for name in needed if tensors.held(name, device) is None)
        names, it = ", ".join(missing[:3]), "it" if len(missing) == 1 else "them"
        if missing and step != by:
            raise PiperError(
                f"{step} uses {names} on device {device}, but {by} does not use {it} there, so this device does not hold "
                f"{it}. Use the same parameters and buffers in the same annotated region in both steps [PIPER-D025]"
            )
        if missing:
            raise PiperError(
                f"batch of {compiled.dag.size} samples: device {device} uses {names}, which it does not hold, because it "
                f"did not use {it} in the first batch. Use the same parameters and buffers in the same annotated "
                "region for all batches [PIPER-D025]"
            )
