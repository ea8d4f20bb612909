"""How far each process has come in the training, and whether processes that wait for each other can meet.

A process may leave the training loop before its peers because its data ended or its script stopped it. It
then runs the code after the loop and waits there, or ends, while its peers wait for it in their next batch.
No process sees an error, and each wait may be long. The progress of all processes shows it: one process has
left after some number of batches, another process is at a later batch, and both wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Progress = dict[str, Any]  # JSON-serializable; see `progress`


def progress(
    batches: int, epoch: int, in_epoch: int, left: str | None = None, over: bool = False
) -> Progress:
    """Describe how far a process has come.

    Args:
        batches: Number of batches that it has done, in all epochs.
        epoch: The current epoch; between two epochs, the epoch that has ended.
        in_epoch: Number of batches that it has done in this epoch.
        left: Why this epoch does not have a next batch; None if it has one, or a batch is running.
        over: Whether no further epoch follows.
    """
    return {"batches": batches, "epoch": epoch, "in_epoch": in_epoch, "left": left, "over": over}


def parted(found: Mapping[int, Progress | None]) -> tuple[int, str] | None:
    """Find a process that left the training loop while another process is at a batch that needs both.

    A process in a later epoch does not count, because it is ahead of the process that left.

    Args:
        found: Progress of each process by rank; None for a process that does not train.

    Returns:
        The rank of the process that left, and the explanation; None if there is no such process.
    """
    known = [(rank, each) for rank, each in sorted(found.items()) if each is not None]
    for rank, one in known:
        for other, two in known:
            # `two` is at a batch that `one` does not train, because `one` has left
            behind = two["batches"] >= one["batches"] and (one["over"] or two["epoch"] <= one["epoch"])
            if one["left"] is not None and two["left"] is None and behind:
                return rank, (
                    f"it has left the training loop after {one['batches']} batches ({one['in_epoch']} in its "
                    f"last epoch), because {one['left']}, while rank {other} has done {two['batches']} and "
                    "continues with the next batch, which needs both processes. Train on the same number of "
                    "batches in all processes (limit_train_batches= sets a limit), and stop all processes "
                    "together (trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, "
                    "all=False))"
                )
    return None
