"""R1, the other system: interleaved 1F1B if a rank sends and receives on one stream, in the order of its program.

torch 2.13 works like this if all messages use one process group. `issued` is its order, without sums of gradients.
A message starts when all earlier messages and passes of both ranks are over. A pass waits for its input alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.paper.table import compared, gain, percent, show
from lightning_piper.schedules.actions import Action, Row
from lightning_piper.schedules.interleaving import interleaved_rows
from lightning_piper.schedules.pipeline import one_f_one_b_rows


class Model(NamedTuple):
    """The times of passes and messages. The unit is the forward pass of an average stage of 1F1B, without the output
    layer. A backward pass takes twice the time of a forward pass.

    Attributes:
        ranks: The number of pipeline ranks. The step has twice as many microbatches.
        output: The time of the forward pass of the output layer.
        message: The time of a message.
    """

    ranks: int
    output: float = 0
    message: float = 0

    def seconds(self, action: Action, stages: int) -> float:
        """Return the time of a pass."""
        forward = self.ranks / stages + (self.output if action.stage == stages - 1 else 0)
        return forward if action.kind == "F" else 2 * forward


def needed(action: Action, stages: int) -> Action | None:
    """Return the pass whose output a pass reads. None: it reads the batch."""
    if action.kind == "F":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.stage == stages - 1:
        return action._replace(kind="F")
    return action._replace(stage=action.stage + 1)


def issued(rows: Sequence[Row], stages: int) -> Iterator[tuple[Action, int, int]]:
    """Yield each pass, its rank, and the rank that receives its output (the rank itself: no message).

    Both ranks issue the message after all passes that came before. Stage s runs on rank s modulo the number of
    ranks.
    """
    left = [[action for group in row for action in group] for row in rows]
    over: set[Action] = set()
    while any(left):
        for rank, passes in enumerate(left):
            if passes and ((source := needed(passes[0], stages)) is None or source in over):
                action = passes.pop(0)
                over.add(action)
                stage = action.stage + (1 if action.kind == "F" else -1)
                yield action, rank, stage % len(rows) if 0 <= stage < stages else rank


def step(rows: Sequence[Row], stages: int, model: Model, one_stream: bool) -> float:
    """Return the time of a step. Without `one_stream`, messages do not wait for other messages or passes."""
    arrived: dict[Action, float] = {}
    computed, sent = [0.0] * len(rows), [0.0] * len(rows)
    for action, rank, receiver in issued(rows, stages):
        source = needed(action, stages)
        start = max(computed[rank], arrived[source] if source else 0)
        arrived[action] = computed[rank] = start + model.seconds(action, stages)
        if receiver != rank:
            waits = [rank, receiver] if one_stream else []
            arrived[action] = (
                max(arrived[action], *(max(computed[i], sent[i]) for i in waits), 0) + model.message
            )
            for i in waits:
                sent[i] = arrived[action]
    return max(computed)


def one_stream() -> None:
    """Print the gain of interleaved 1F1B over 1F1B, with one stream for messages and without.

    An output layer at the full speed of an A100 takes 0.22 (9B) and 1.1 (1B) forward passes. A message between
    nodes takes 0.7 ms (9B) and 2.7 ms (1B) of the 40 ms of a forward pass.
    """
    rows = []
    for name, ranks, output, message in (("9B, PP4", 4, 0.22, 0.7 / 40), ("1B, PP8", 8, 1.1, 2.7 / 40)):
        microbatches = 2 * ranks
        made = (
            (one_f_one_b_rows(ranks, microbatches), ranks),
            (interleaved_rows(ranks, microbatches, 2), 2 * ranks),
        )
        for assumption, model, single in (
            ("messages wait for nothing", Model(ranks), False),
            ("one stream", Model(ranks), True),
            ("one stream, and the output layer takes time", Model(ranks, output=output), True),
            ("one stream, and messages cross nodes", Model(ranks, message=message), True),
        ):
            times = [step(*each, model, single) for each in made]
            paper = compared(gain(*times), -14)[1:] if single else ["", ""]
            rows.append([name, assumption, *times, percent(gain(*times)), *paper])
    show(["", "assumption", "1F1B", "interleaved", "gain", "paper", "points"], rows)
