"""The verification before the first step, as `PiperStrategy(verify=...)` asks for it, and warnings of later
captures whose results differ from one device's."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_piper.capture import as_before
from lightning_piper.capture.proxies.batch_changes import contents
from lightning_piper.common.tensor_overlap import share_elements
from lightning_piper.common.units import counted
from lightning_piper.compiler import Compiled
from lightning_piper.directives import Order, Recompute
from lightning_piper.errors import PiperError, VerificationError
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World
from lightning_piper.summary import batch_statistics
from lightning_piper.verify import verify_step
from lightning_piper.verify.report import Report
from lightning_piper.verify.trial import Difference, largest_difference

Verify = Literal["static", "first_batch", "each", "determinism", "off"]
ACCEPTED = get_args(Verify)


def verify_by_execution(
    how: Verify,
    compiled: Compiled,
    module: nn.Module,
    leaves: Sequence[torch.Tensor],
    world: World,
    say: Callable[[str], None],
) -> tuple[str | None, Difference | None]:
    """Verify the program before the first step, as `PiperStrategy(verify=...)` says. With `off`, do nothing.
    If the verification fails on one process, all processes raise an error. Collective.

    With `first_batch` and `each`, rank 0, which still has the whole module, runs the program on a batch. A
    warning says if the verdict is `verified except`. With `static` and `determinism`, rank 0 only tries the step on
    a few samples, and warnings name visible differences from one device.

    Args:
        how: The strategy's argument `verify`.
        module: The whole module.
        leaves: The tensors of this process's batch. If the replicas' batches have different shapes, the first
            batch is used for all replicas.
        say: Shows the report to the user, on rank 0.

    Returns:
        The report of `first_batch` or `each`, and the difference that the trial of `static` found. Both are
            None on ranks other than rank 0. The first is also None if no program was run, and the second if
            the trial found no difference.

    Raises:
        VerificationError: The finished program, or a directive with `each`, differs from one device.
        PiperError: The program cannot run in one process: the module has no values, or the tensors of the
            replicas' batches cannot be joined.
    """
    if how in ("static", "determinism"):
        found = None if _trial(compiled, world) is None else _tried(compiled, module, leaves, world)
        _warn(list(_plain_to_see(compiled)), found, world)
        return None, found
    if how not in ("first_batch", "each"):
        return None, None

    undivided = compiled.dag.code.undivided
    if undivided is not None and undivided.batches > 1:
        raise PiperError(
            f"PiperStrategy(verify={how!r}) joins the replicas' batches, which is not possible for this batch, because "
            f"{undivided.why}. Use verify='static' [PIPER-S001]"
        )
    gathered = world.gather([x.cpu() for x in leaves] if world.rank in world.first_ranks else [])

    def run() -> str:
        report = _run_whole(how, compiled, module, gathered, world)
        if how == "each":
            say(str(report))
        _judge(report if how == "each" else replace(report, rows=report.rows[-1:]), report, world)
        return str(report)

    return world.on_rank_zero(run, share=False), None


def _run_whole(
    how: Verify,
    compiled: Compiled,
    module: nn.Module,
    gathered: Sequence[Sequence[torch.Tensor]],
    world: World,
) -> Report:
    """Run the program on the batch of all replicas in this process, and compare it with one device.

    Args:
        how: "first_batch" or "each", which an error shows.
        gathered: The tensors of the batches of all processes, by rank.

    Raises:
        PiperError: The module does not have values.
    """
    if is_on_meta(module):
        raise PiperError(
            f"PiperStrategy(verify={how!r}) runs the whole module in one process, but the module is on "
            "the meta device. Use verify='static' [PIPER-S009]"
        )
    module.to(world.device)
    of_replicas = [gathered[rank] for rank in world.first_ranks]
    if any([x.shape for x in one] != [x.shape for x in of_replicas[0]] for one in of_replicas):
        of_replicas = of_replicas[:1] * len(of_replicas)
    parts = zip(*of_replicas, strict=True)
    batch = [(torch.cat(xs) if xs[0].ndim else xs[0]).to(world.device) for xs in parts]
    step = compiled.step
    with isolate_rng(), as_before(module) if step.executed else contextlib.nullcontext():
        return verify_step(step, module, step.batch_spec.rebuild(batch), compiled.program)


def _judge(judged: Report, report: Report, world: World) -> None:
    """Raise an error if the program fails, and warn if it is verified except for something.

    Args:
        judged: A report with only the rows that must be equal to one device: all rows with `each`, otherwise
            the row of the finished program.
        report: The whole report. The error shows it.

    Raises:
        VerificationError: A row differs from one device.
    """
    if not judged.ok:
        raise VerificationError(
            f"the program does not compute what one device computes on the first batch:\n{report}\n"
            "If you wrote a directive or an operation, correct it. Otherwise, report this [PIPER-V001]"
        )
    if judged.verdict == "verified except":
        within = judged.whole.verdict == "equal within the bound"
        how_on = (
            "within that bound"
            if within
            else "with the result of one device that accumulates over the same microbatches"
        )
        if any(row.contract == "rounded" for row in report.rows):
            how_on += ", for parameters that are rounded in the same way"
        world.warn(f"the program is {judged.conclusion}. Training continues {how_on} [PIPER-W012]")


def summary_of(compiled: Compiled, report: str | None) -> str:
    """Return the text that rank 0 logs about a captured step: the program's summary, and the verdict of the
    verification.

    Args:
        report: The report of `verify_by_execution`. None if no program was run, so that there is no verdict.
    """
    verdict = "" if report is None else report.splitlines()[-1].partition(":")[0]
    return f"PiperStrategy: {compiled.summary()}" + f"\n  on the first batch: {verdict}" * bool(verdict)


def _warn(texts: Sequence[str], found: Difference | None, world: World) -> None:
    """Warn that the result may differ from one device's.

    Args:
        texts: The causes that are visible without a run.
        found: The difference that a trial found; None without a difference.
    """
    for text in texts:
        seen = f". On the first samples, {found}" if text is texts[0] and found is not None else ""
        world.warn(
            f"{text}{seen}. PiperStrategy(verify='first_batch') measures the difference from one device"
        )
    if found is not None and not texts:
        world.warn(
            "parts of the batch give a different result than the whole batch on one device: on the first "
            f"samples, {found}. If this matters, use one microbatch (microbatches=1) and no replicas, so that the batch "
            "stays whole. "
            "PiperStrategy(verify='first_batch') measures the difference for the whole batch [PIPER-W010]"
        )


class LaterWarnings:
    """Warnings of later captures and shapes that give a different result than one device.

    Args:
        first: The program of the first batch.
        module: The module. Each process may later have only a part of it.
        found: The difference that the trial of the first batch found.
    """

    def __init__(
        self,
        first: Compiled,
        module: nn.Module,
        world: World,
        found: Difference | None,
    ) -> None:
        self._module, self._world = module, world
        self._said = set(_plain_to_see(first))
        self._found = set[str]() if found is None else {found.where}
        # Piper does not try a module that was built on the meta device, which may be too large for one
        # process.
        self._tries = not is_on_meta(module)

    def warn(
        self,
        compiled: Compiled,
        leaves: Sequence[torch.Tensor],
        captured: bool,
        traced: bool,
        own: Ownership | None,
    ) -> None:
        """Warn if a program for a later batch gives a different result than one device, and no earlier
        program had the same cause.

        Args:
            leaves: The tensors of this process's batch.
            captured: Whether the step was captured for this batch.
            traced: Whether the step was captured or traced for this batch.
            own: The tensors that this process holds, if all processes call this method, which is then
                collective. None: Piper does not try the step.
        """
        texts = [text for text in _plain_to_see(compiled) if text not in self._said] if captured else []
        self._said.update(texts)
        found = None
        wanted = own is not None and traced and _trial(compiled, self._world) is not None
        if own is not None and self._tries and self._world.decide(wanted, all=False):
            with own.whole_on_rank_zero():
                found = _tried(compiled, self._module, leaves, self._world)
        if found is not None and found.where in self._found:
            found = None
        if found is not None:
            self._found.add(found.where)
        _warn(texts, found, self._world)


def _trial(compiled: Compiled, world: World) -> tuple[int, bool] | None:
    """Return the number of samples of the smallest microbatch or local batch, and whether the step's Python
    code depends on this number. In that case, the trial needs as many samples as all replicas have.

    None if the step cannot be tried, or if no part is smaller than a replica's samples and the code does not
    depend on their number.
    """
    step, dag = compiled.step, compiled.dag
    own = dag.size // world.count
    size = min((len(part) for parts in dag.slices().values() for part in parts), default=own)
    if step.executed or dag.code.undivided is not None:
        return None
    depends = size < dag.size and step.depends_on_size(size)
    return (size, depends) if size < own or depends else None


def _tried(
    compiled: Compiled, module: nn.Module, leaves: Sequence[torch.Tensor], world: World
) -> Difference | None:
    """On rank 0, run the step on a few samples together and on parts of these samples, and compare the
    results. Return the difference on rank 0. Return None without a difference, on the other ranks, and if the
    program does not divide the batch or the module has no values. Collective.

    If the step's Python code depends on the number of samples, try as many samples as all replicas have, with
    copies of rank 0's samples for the other replicas.
    """

    def run() -> Difference | None:
        found = _trial(compiled, world)
        if found is None or is_on_meta(module):
            return None
        size, depends = found
        copies, step = world.count if depends else 1, compiled.step
        own = [torch.cat([x] * copies) if x.ndim else x for x in leaves]
        module.to(world.device)
        tensors = {
            step.canonical[n]: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]
        }
        with isolate_rng():
            return largest_difference(step, tensors, [x.to(world.device) for x in own], size, whole=depends)

    return world.on_rank_zero(run, share=False)


def _plain_to_see(compiled: Compiled) -> Iterator[str]:
    """Iterate over the causes, visible without a run, that make a result differ from one device's."""
    dag = compiled.dag
    if found := list(batch_statistics(dag)):
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        cut = len(dag.microbatches() or ()) > dag.replicas
        instead = "Trainer(sync_batchnorm=True)"
        if cut and any(isinstance(directive, Order) for directive in compiled.program):
            # An order of microbatches contradicts statistics of the whole batch.
            instead = "one microbatch (microbatches=1)" + f" with {instead}" * (dag.replicas > 1)
        instead += ", or norms without statistics of a batch (GroupNorm, LayerNorm)"
        yield (
            f"the batch norm of region {found[0]}{more} computes its statistics over "
            f"{'microbatches' if cut else 'the samples of each replica'}, not over the whole batch of {dag.size} "
            f"samples. Use {instead} [PIPER-W004]"
        )
    if any(len(parts) > 1 for parts in dag.slices().values()):
        yield from _dependent_samples(compiled)
    if changes := str(compiled.step.reads.batch_changes):
        yield (
            f"{compiled.step.name} changes its batch ({changes}). A captured step does not: hooks after the "
            "step, and later steps with the same batch, get the batch unchanged. Work on a copy, such as x = "
            "x - 0.1 or batch = dict(batch) [PIPER-W008]"
        )
    yield from _number_of_processes(compiled)
    yield from unlike_one_device(compiled)


def _number_of_processes(compiled: Compiled) -> Iterator[str]:
    """If the step reads the number of processes, and that differs from the number of replicas, describe the
    read."""
    replicas, processes = compiled.dag.replicas, len(compiled.plans)
    if compiled.device is None or processes == replicas:
        return
    for answer in compiled.step.reads.inputs.answers.values():
        if re.search(r"(world_size|num_devices|num_nodes)\b", answer.where):
            yield (
                f"{compiled.step.name} reads {answer.where}. It counts {processes} processes, which hold "
                f"stages or shards of {counted(replicas, 'replica')}, so the step computes something else than on one "
                f"device. Count replicas instead: this program has {replicas} [PIPER-W009]"
            )
            return


def check_batch_writes(compiled: Compiled, batch: Any) -> None:
    """Check that a step does not write into a tensor of its batch that shares elements with another tensor of
    the batch.

    Raises:
        PiperError: The step does so. The message names both tensors.
    """
    written = compiled.step.reads.batch_changes.written
    if not written:
        return
    tensors = {
        path: x
        for path, x in contents(batch).items()
        if isinstance(x, torch.Tensor) and x.layout is torch.strided
    }
    for own, other in itertools.product(tensors.keys() & set(written), tensors):
        if own != other and share_elements(tensors[own], tensors[other]):
            raise PiperError(
                f"{compiled.step.name} writes into batch{own}, which shares memory with batch{other}. A "
                f"captured step would not change batch{other}. Write into a copy: x = batch{own}.clone()"
                " [PIPER-C009]"
            )


def warn_of_checkpointing(compiled: Compiled, module: nn.Module, world: World) -> None:
    """If a Hugging Face model has gradient checkpointing on, warn that this saves no memory in a captured
    step. Do not warn if the program has a `Recompute`."""
    parts = module.named_modules()
    found = next(
        (
            name
            for name, part in parts
            if getattr(part, "gradient_checkpointing", False) is True
            and hasattr(part, "gradient_checkpointing_disable")
        ),
        None,
    )
    if found is None or compiled.step.executed:
        return
    if not any(isinstance(directive, Recompute) for directive in compiled.program):
        world.warn(
            f"{found or type(module).__name__} has gradient checkpointing on, which saves no memory in a captured "
            "step. Call gradient_checkpointing_disable(), and use piper.Recompute to save memory "
            "(docs/howto/recompute.md) [PIPER-W025]"
        )


def _dependent_samples(compiled: Compiled) -> Iterator[str]:
    """Describe the first operation that mixes samples which the program separates, or a loss that no weights
    can combine."""
    dag, code = compiled.dag, compiled.dag.code
    if code.assumed and not compiled.step.executed:
        where = "" if code.meet is None else f" (it mixes samples in {code.meet})"
        yield (
            f"the loss is not a sum of means{where}, so Piper cannot combine it exactly from parts of the batch. It "
            "averages the losses of the parts, weighted by their numbers of samples, which may differ from the loss of "
            f"all {dag.size} samples [PIPER-W006]"
        )
    elif code.meet is not None:
        apart = "Each microbatch or replica sees only its own samples, so"
        if len(dag.microbatches() or ()) == dag.replicas:
            apart = "As under DDP, each replica sees only its own samples, so"
        yield (
            f"the loss or a gradient mixes samples, or indexes into the batch, in {code.meet}. {apart} the "
            f"result may differ from that of all {dag.size} samples on one device. To compute with the samples of "
            "the whole batch, gather them with piper.gather_samples (docs/losses.md) [PIPER-W005]"
        )
    if code.nonlinear is not None:
        yield (
            f"the backward pass is not linear in the gradient of the loss: {code.nonlinear}. Piper runs the "
            "backward pass of each replica and microbatch with a loss gradient of 1 and averages the "
            "gradients, as DistributedDataParallel does. They may differ from the gradients of all "
            f"{dag.size} samples on one device [PIPER-W007]"
        )


def unlike_one_device(compiled: Compiled) -> Iterator[str]:
    """Iterate over descriptions of the logged values that differ from one device's. A run may show more of
    them."""
    dag, code = compiled.dag, compiled.dag.code
    if any(len(parts) > 1 for parts in dag.slices().values()):
        for log in code.logs:
            if log.name in code.unknown:
                yield (
                    f"self.log({log.name!r}) at {log.where}: the value is not computed from means, sums and "
                    "ratios over the batch alone. Piper logs the mean over samples of the values of "
                    f"microbatches and replicas, not the value of all {dag.size} samples. Log the means or "
                    "sums from which it is computed, or pass its arguments to a metric object (torchmetrics)"
                    " [PIPER-W011]"
                )
