"""How far each process has come in the training, and whether those who wait for each other can meet.

A process that leaves the training loop before the others (its data ended, or it was told to stop) goes on to what comes after it,
and waits there, or ends, while the others wait for it in their next batch. Neither is an error in any of them, and each wait may
be a long one. Together they tell: one has left after so many batches, another one is at a later one, and both wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Progress = dict[str, Any]  # as JSON has it; see `progress`


def progress(batches: int, epoch: int, in_epoch: int, left: str | None = None, over: bool = False) -> Progress:
    """Where a process is.

    Args:
        batches: that it has done, in all epochs.
        epoch: that it is in, or has left and not gone on from.
        in_epoch: batches that it has done of it.
        left: why there is no next batch in this epoch; None: there is one, or one is being done.
        over: nor is there another epoch.
    """
    return {"batches": batches, "epoch": epoch, "in_epoch": in_epoch, "left": left, "over": over}


def parted(found: Mapping[int, Progress | None]) -> tuple[int, str] | None:
    """Who has left the training loop while another one is at a batch that needs both, and how it came to that.

    One that is in a later epoch has not been left: it is ahead of one that is still at the end of the epoch before.

    Args:
        found: where processes are, by rank; None for one that does not train.
    """
    known = [(rank, each) for rank, each in sorted(found.items()) if each is not None]
    for rank, one in known:
        for other, two in known:
            behind = two["batches"] >= one["batches"] and (one["over"] or two["epoch"] <= one["epoch"])
            if one["left"] is not None and two["left"] is None and behind:
                return rank, (
                    f"it has left the training loop after {one['batches']} batches ({one['in_epoch']} in its last epoch), for "
                    f"{one['left']}, while rank {other} has done {two['batches']} and goes on with the next one, which needs both. "
                    "Let all processes train on as many batches (limit_train_batches= cuts what some have more), and stop together "
                    "(trainer.should_stop = trainer.strategy.reduce_boolean_decision(stop, all=False))"
                )
    return None
