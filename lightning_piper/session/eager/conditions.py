"""The handling of a step that cannot be captured. The step runs uncaptured if the program only replicates the
whole step. Otherwise there is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_piper.directives.place import Place
from lightning_piper.directives.replicate import Replicate, rounds_params, shards_of
from lightning_piper.errors import BatchError, CaptureError, DirectiveError, LongStepError, PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.session.available_memory import lacks_memory
from lightning_piper.session.eager.eager_replicas import why_not
from lightning_piper.session.eager.standalone_module import Standalone

LINE = 150  # characters of a reason in the log
# Errors of a captured step after which the step may run uncaptured (`check_may_be`).
NOT_CAPTURED = (CaptureError, DirectiveError, BatchError)


def check_may_be(
    before: Standalone, step: str, problem: str | Exception, capture: str, accumulate: str = "batches"
) -> None:
    """Check that a module's step may run uncaptured. Warn that the step runs uncaptured, unless the user
    asked for that with `capture="never"`. Collective.

    Args:
        before: The module and its settings.
        step: Name of the method.
        problem: Why the step is not captured.
        capture: The strategy's argument `capture`.
        accumulate: The strategy's argument `accumulate`.

    Raises:
        Exception: The step may not run uncaptured. The error is the one that the step's own code raised, if
            there is one. Otherwise the error is `problem`, or a PiperError with this text.
    """
    advice = ". Leave capture out, so that Piper captures the step" if problem == "capture='never'" else ""
    error = (
        problem
        if isinstance(problem, Exception)
        else PiperError(f"PiperStrategy cannot capture a step with {problem}{advice} [PIPER-S013]")
    )
    if capture == "always" or (isinstance(error, CaptureError | BatchError) and error.late):
        raise shown(error)
    settings = before.settings
    # A step without a backward pass can run whole in every process under any program, if all processes of a
    # replica have one batch.
    trains = step == "training_step" or isinstance(error, BatchError)
    reason = why_not(before.module, settings, before.world.device) if trains else None
    if accumulate == "tokens":
        reason = (
            "accumulate='tokens' needs the denominators of a captured loss. Follow the message above, or use "
            "accumulate='batches'"
        )
    elif trains and any(isinstance(each, Replicate) and each.overlap_update for each in settings.program):
        reason = (
            "overlap_update computes updates during a captured backward pass. Follow the message above, or set "
            "overlap_update=False"
        )
    elif reason is None:
        reason = _why_not_whole(before, trains)
    if reason is not None:
        # The cause of a DirectiveError is the program, so that an uncaptured step would not help.
        if not isinstance(error, DirectiveError):
            error.add_note(f"{step} cannot run uncaptured instead, like DDP, because {reason}")
        raise shown(error)
    if capture != "never":
        shards = sorted(
            {field for each in settings.program for field in shards_of(each)} - {"shard_optimizer"}
        )
        before.world.warn(_said(step, before, problem, shards))


def _why_not_whole(before: Standalone, trains: bool) -> str | None:
    """Return why a process cannot have the whole module; None if every process can. Collective.

    Args:
        before: The module and its settings.
        trains: Whether every process is to keep the whole module, not only until the evaluation ends.
    """
    parts, on_meta = parts_of(before.module), is_on_meta(before.module)
    stays = (
        on_meta and (trains or bool(before.known.later))
        if parts is None
        else trains and not parts.can_be_whole
    )
    if before.world.decide(stays, all=False):
        return (
            "the module is on the meta device and has no values yet. Follow the message above, or "
            "build the module with values"
        )
    if trains or (parts is not None and parts.whole):
        return None
    lacking = lacks_memory(before.module, before.world)
    if lacking is None:
        return None
    return f"{lacking}. Change the step so that Piper can capture it, as the message above says"


def may_run_uncaptured(before: Standalone) -> bool:
    """Return whether the module's steps may run uncaptured under its program, at any ZeRO stage."""
    return (
        not is_on_meta(before.module) and why_not(before.module, before.settings, before.world.device) is None
    )


def is_as_under_ddp(before: Standalone, capture: str, accumulate: str) -> bool:
    """Return whether the training step may run uncaptured as under DDP: every process has the whole module,
    so only the checks are lost.

    Args:
        before: The module and its settings.
        capture: The strategy's argument `capture`.
        accumulate: The strategy's argument `accumulate`.
    """
    return (
        capture == "auto"
        and accumulate == "batches"
        and not any(map(shards_of, before.settings.program))
        and may_run_uncaptured(before)
    )


def _said(step: str, before: Standalone, problem: str | Exception, shards: Sequence[str]) -> str:
    """Return the warning for a step that runs uncaptured.

    If the whole step is only replicated, as without directives, the warning does not name the directive.
    """
    processes, program, could = before.world.size, before.settings.program, isinstance(problem, LongStepError)
    if all(
        isinstance(each, Place | Replicate) and not each.filter and not shards_of(each) for each in program
    ):
        problem = re.sub(
            r"^(?:directive \d+ \(\w+\): field '\w+'|PiperStrategy\([^)]*\)): ", "", str(problem)
        )
    where = "on this device" if processes == 1 else "in every process"
    if 1 < processes == before.world.count:
        where += ", data-parallel like DDP"
    lost = ["the step is not checked"]
    if processes > 1:
        if step == "training_step":
            lost.append("gradients are averaged over the replicas")
            if shards:
                lost.append(
                    f"each process has whole parameters and gradients, so {' and '.join(shards)} shards "
                    "only the optimizer state"
                )
        else:
            lost.append("every process holds the whole module during the step")
            if rounds_params(program):
                lost.append(
                    "the step reads unrounded parameters, but the training rounds them (gather_dtype)"
                )
        lost.append("self.log keeps the value of rank 0 unless sync_dist=True")
    instead = "" if could else ". To get an error instead, use PiperStrategy(capture='always')"
    return (
        f"Piper could not capture {step}, so it runs uncaptured {where}. Reason: {problem}. Consequences: "
        f"{'; '.join(lost)}{instead} [PIPER-W001]"
    )


def summary_of(devices: int, problem: str) -> str:
    """Return the line that rank 0 logs when the training step begins to run uncaptured."""
    reason = problem.splitlines()[0].partition(". ")[0]
    reason = reason if len(reason) <= LINE else f"{reason[:LINE]}..."
    where = "1 device" if devices == 1 else f"{devices} devices, data-parallel like DDP"
    return (
        f"PiperStrategy: training_step runs uncaptured on {where}, so Piper checks no graph and no plan. "
        f"Reason: {reason}"
    )


def shown(error: Exception) -> Exception:
    """Return the error to raise: the error that the step's own code raised, if there is one."""
    raised = error.raised if isinstance(error, CaptureError) else None
    return error if raised is None else raised
