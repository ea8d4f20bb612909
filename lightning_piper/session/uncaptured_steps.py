"""The handling of a step that cannot be captured: it runs uncaptured if the program only replicates the whole
step."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_piper.directives.zero_stages import shards_of
from lightning_piper.errors import BatchError, CaptureError, DirectiveError, PiperError
from lightning_piper.holdings.distributed_marks import parts_of
from lightning_piper.holdings.materialization import is_on_meta
from lightning_piper.session.eager_replicas import why_not
from lightning_piper.session.standalone_module import Standalone

NOT_CAPTURED = (CaptureError, DirectiveError, BatchError)


def check_may_be(before: Standalone, step: str, problem: str | Exception, capture: str, accumulate: str = "batches") -> None:
    """Check that a module's step may run uncaptured, and warn the user that it does. Collective.

    Args:
        before: The module and its settings.
        step: Name of the method.
        problem: Why it is not captured.
        capture: As in `PiperStrategy`.
        accumulate: As in `PiperStrategy`.

    Raises:
        PiperError: The step may not run uncaptured; the error is `problem`, or the error that the step's own
            code raised.
    """
    error = problem if isinstance(problem, Exception) else PiperError(f"PiperStrategy: no step is captured with {problem}")
    if capture == "always" or (isinstance(error, CaptureError | BatchError) and error.late):
        raise shown(error)
    settings, parts = before.settings, parts_of(before.module)
    # Without a backward pass, every process can run the whole step under any program, if all processes of a
    # replica have one batch.
    trains = step == "training_step" or isinstance(error, BatchError)
    reason = why_not(before.module, settings, before.world.device) if trains else None
    if accumulate == "tokens":
        reason = "accumulate='tokens' needs the denominators of a captured loss"
    elif not before.world.decide(not is_on_meta(before.module) if parts is None else parts.can_be_whole, all=True):
        reason = reason or "the module has no values yet, for it is on the meta device"
    if reason is not None:
        error.add_note(f"a step that is not captured runs as it is where the program replicates the whole of it; {reason}")
        raise shown(error)
    if capture != "never":
        shards = sorted({field for each in settings.program for field in shards_of(each)} - {"shard_optimizer"})
        before.world.warn(_said(step, before.world.size, problem, shards))


def is_whole(before: Standalone) -> bool:
    """Whether every process has the whole module between steps, whether they are captured or not."""
    if is_on_meta(before.module):
        return False
    shards = {field for each in before.settings.program for field in shards_of(each)}
    return "shard_parameters" not in shards and why_not(before.module, before.settings, before.world.device) is None


def _said(step: str, processes: int, problem: str | Exception, shards: Sequence[str]) -> str:
    """Return the warning for a step that runs uncaptured."""
    where = "on this device" if processes == 1 else "in every process"
    lost = ["nothing inside of it is checked"]
    if processes > 1:
        if step == "training_step":
            lost.append("gradients are the mean of the replicas', as with DistributedDataParallel")
            if shards:
                lost.append(
                    f"parameters and gradients are whole, so that {' and '.join(shards)} divides the optimizer's state alone"
                )
        else:
            lost.append("every process has the whole module meanwhile")
        lost.append("a logged value is that of rank 0's data, unless sync_dist=True")
    found = f"{step} is not captured, and runs as it is {where}: {problem}. So {', and '.join(lost)}"
    return f"{found}; PiperStrategy(capture='always') refuses it"


def shown(error: Exception) -> Exception:
    """Return the error to raise: the error that the step's own code raised, if there is one."""
    raised = error.raised if isinstance(error, CaptureError) else None
    return error if raised is None else raised
