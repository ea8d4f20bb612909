"""Runs a training step three times, and compares all bits of the results (`verify="determinism"`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.fx import Node

from lightning_piper.capture import as_before
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.replaced_attribute import replaced_entries
from lightning_piper.common.units import counted
from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.ops.instruction import Instruction
from lightning_piper.processes.world import World
from lightning_piper.runtime import StepResult
from lightning_piper.runtime.watching import tensors_in
from lightning_piper.session.first_operation import LastStep, WatchedUncaptured, described, order_of


@dataclass(frozen=True)
class _Operation:
    """One run of an operation: the digests of its inputs and its result.

    Attributes:
        order: Its position in the step.
        text: Its name and its line in the user's code.
        inputs, result: Digests of the tensors.
    """

    order: int
    text: str
    inputs: bytes
    result: bytes


@dataclass
class _Run:
    """One run of a step.

    Attributes:
        operations: Key of an operation, which is the same in every run -> the operation, in the order of
            this run.
        results: Name of a gradient, a buffer or the reported values -> its digest.
    """

    operations: dict[Any, _Operation] = field(default_factory=dict)
    results: dict[str, bytes] = field(default_factory=dict)


def digest(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a digest of the bits of tensors: 16 bytes. A sparse tensor has the bits of its indices and values."""
    found = hashlib.blake2b(digest_size=16)
    for x in tensors:
        dense = [x.coalesce().indices(), x.coalesce().values()] if x.layout == torch.sparse_coo else [x]
        for part in dense:
            bits = part.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
            found.update(bits.contiguous().view(torch.uint8).numpy().tobytes())
    return found.digest()


def run_compared(
    last: LastStep,
    sums: bool,
    alone: bool,
    buffers: Mapping[str, torch.Tensor],
    world: World,
    module: nn.Module,
) -> StepResult:
    """Run a captured step as planned, after two runs operation by operation, and compare all bits. Collective.

    Args:
        sums: `LastStep.run` explains it.
        alone: Whether the planned run returns the gradients of this batch alone. If not, the gradients of the
            first two runs are compared only.
        buffers: This process's buffers by name.
        module: The LightningModule, which knows the number of the step.

    Returns:
        The result of the planned run.

    Raises:
        ExecutionError: Two runs gave different bits on any process; raised on every process.
    """
    first, second = _watched(last, buffers), _watched(last, buffers)
    _compare(first, second, world, module)
    result = last.run(sums, digest=1)
    planned = _results(result, buffers)
    if not last.runtime.compiles:  # Inductor's code differs from the operations by rounding
        planned = {name: bits for name, bits in planned.items() if alone or not name.startswith(_GRADIENT)}
        _compare(_Run({}, planned), first, world, module)
    return result


def compare_uncaptured(step: Callable[[], Any], module: nn.Module, world: World) -> None:
    """Run an uncaptured step twice, forward and backward, and compare all bits of the loss, the logged values, the
    gradients and the buffers. The module, its gradients, logged values and random numbers stay as they were.
    Collective.

    Raises:
        ExecutionError: Both runs gave different bits on any process; raised on every process.
        PiperError: The step updates parameters itself.
    """
    if not module.automatic_optimization:
        raise PiperError(
            "PiperStrategy(verify='determinism') cannot run a step with manual optimization "
            "(automatic_optimization=False) twice, because the step updates parameters. Pass verify='static' "
            "[PIPER-S002]"
        )
    first, second = (_uncaptured(step, module, world.device) for _ in range(2))
    _compare(
        first,
        second,
        world,
        module,
        "Let no code of the step depend on the time or on unseeded random numbers",
    )


_GRADIENT = "the gradient of "


def _results(result: StepResult, buffers: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        "the loss and the logged values": digest([result.metrics]),
        **{f"{_GRADIENT}{name!r}": digest([x]) for name, x in result.grads.items()},
        **{f"buffer {name!r}": digest([x]) for name, x in buffers.items()},
    }


def _watched(last: LastStep, buffers: Mapping[str, torch.Tensor]) -> _Run:
    """Run a captured step operation by operation. Collective."""
    found, order = _Run(), order_of(last.prepared)

    def see(at: Instruction, node: Node, inputs: Sequence[torch.Tensor], value: Any) -> None:
        found.operations[id(at), node.name] = _Operation(
            order[at.node], described(at, node), digest(inputs), digest(tensors_in(value))
        )

    with last.again(see) as result:
        found.results = _results(result, buffers)
    return found


def _uncaptured(step: Callable[[], Any], module: nn.Module, device: torch.device) -> _Run:
    """Run an uncaptured step, forward and backward."""
    found = _Run()
    params = {name: x for name, x in module.named_parameters() if x.requires_grad}

    def see(
        name: str,
        inputs: Sequence[torch.Tensor],
        value: Any,
        arguments: Any,
        order: int,
        text: Callable[[], str],
    ) -> None:
        numbers = [
            x for x in _torch.tree_leaves(arguments) if isinstance(x, bool | int | float | complex | str)
        ]
        read = digest(inputs) + repr(numbers).encode()
        found.operations[order, name] = _Operation(order, text(), read, digest(tensors_in(value)))

    with _kept(module, device), _logs_noted(module) as logged:
        loss, grads = WatchedUncaptured(see).run(step, list(params.values()))
        if loss is not None:
            given = {name: x for name, x in zip(params, grads, strict=True) if x is not None}
            found.results = _results(StepResult(given, loss.detach()), dict(module.named_buffers()))
        found.results |= {f"the logged value {name!r}": bits for name, bits in logged.items()}
    return found


@contextmanager
def _kept(module: nn.Module, device: torch.device) -> Iterator[None]:
    """At the end, restore the state that a run of the step changes, so that the next run reads the same values.

    This is the state of the module (parameters, buffers, other tensors, Python objects) and of random numbers.
    """
    stores = [
        (store, dict(store)) for part in module.modules() for store in (part._parameters, part._buffers)
    ]
    tensors = {
        id(x): x
        for part in module.modules()
        for x in _torch.tree_leaves([part._parameters, part._buffers, vars(part)])
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta
    }
    before = [(x, x.detach().clone()) for x in tensors.values()]
    random = torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type)
    with random, isolate_rng(), as_before(module):
        try:
            yield
        finally:
            for store, kept in stores:
                store.update(kept)  # type: ignore[arg-type]
            with torch.no_grad():
                for x, old in before:
                    if digest([x]) != digest([old]):
                        x.copy_(old)


@contextmanager
def _logs_noted(module: nn.Module) -> Iterator[dict[str, bytes]]:
    """In this context, the module's `log` notes digests of values by their names, and logs nothing. The Trainer
    logs the values of the run that trains."""
    found: dict[str, bytes] = {}

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, torch.Tensor | bool | int | float):
            found[name] = digest([torch.as_tensor(value)])

    with ExitStack() as stack:
        for part in module.modules():
            if hasattr(type(part), "log_dict"):
                stack.enter_context(replaced_entries(vars(part), {"log": log}))
        yield found


def _compare(
    first: _Run, second: _Run, world: World, module: nn.Module, fix_of_inputs: str | None = None
) -> None:
    """Compare two runs on all processes. Collective.

    Args:
        fix_of_inputs: The advice if no operation alone is the cause, because the first that differs read
            different values. By default, torch may choose other operations.

    Raises:
        ExecutionError: They differ on any process.
    """
    different = [name for name, bits in first.results.items() if second.results.get(name) != bits]
    everyones = world.gather(different)
    names = list(dict.fromkeys(name for each in everyones for name in each))
    if not names:
        return
    causes = world.gather(_first_difference(first, second))
    rank, cause = min(
        ((rank, each) for rank, each in enumerate(causes) if each is not None),
        key=lambda pair: pair[1][:2],
        default=(0, None),
    )
    more = f" and in {counted(len(names) - 1, 'more result')}" if len(names) > 1 else ""
    where = f" on rank {world.members[rank]}" if world.size > 1 else ""
    if cause is not None:
        why = f"The first operation that {cause[2]} is {cause[3]}{where}"
    elif first.operations:
        why = "All operations read and returned the same bits, so the difference comes from code that torch does not show"
    else:  # the run as planned
        why = (
            "Its operations, run one after another, gave the same bits twice, so the difference comes from the "
            "order in which the plan runs them, or from an exchange"
        )
    option = (
        "Trainer(deterministic=True), which makes torch choose deterministic operations or raise an error"
    )
    fix = fix_of_inputs or f"Pass {option}. If the message stays, report it"
    if cause is not None and cause[0] == 0:
        # Piper seeds the random numbers of a captured step.
        seeds = "" if fix_of_inputs is None else "If it draws random numbers, seed them. Otherwise, "
        fix = f"{seeds}{'replace' if seeds else 'Replace'} the operation, or pass {option}"
    raise ExecutionError(
        f"PiperStrategy(verify='determinism'): two runs of step {module.global_step} gave different bits in {names[0]}"
        f"{more}. {why}. The optimizer has not applied these gradients. {fix} [PIPER-X007]"
    )


def _first_difference(first: _Run, second: _Run) -> tuple[int, int, str, str] | None:
    """Return the first operation that differs: the certainty that it is the cause (0: most certain), its
    position, how it differs, and its text. None if all
    operations read and returned the same bits."""
    later = None
    for name, here in first.operations.items():
        there = second.operations.get(name)
        if there is None or there.inputs != here.inputs:
            if later is None:
                how = "ran only once" if there is None else "read different values"
                later = (1, here.order, how, here.text)
        elif there.result != here.result and "empty" not in str(name[-1]):
            return (0, here.order, "read the same values and returned different ones", here.text)
    return later
