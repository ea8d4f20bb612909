"""The time and memory of rows for given stage costs, computed fast enough for thousands of calls.

The model is the simulator's model of the compiled program. Passes occupy their rank one after the other.
Messages take turns in each direction between two ranks. A rank receives messages one after the other, in the
order in which it needs them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from lightning_piper.common.limits import integer, is_number, shown
from lightning_piper.common.units import counted
from lightning_piper.errors import DirectiveError
from lightning_piper.schedules.actions import Row

Number = int | float | Fraction


@dataclass(frozen=True)
class StageCosts:
    """The costs of one stage for one microbatch. Times are in any one unit, memory in bytes or any one unit.

    Attributes:
        forward: The time of F.
        backward_input: The time of BI.
        backward_weights: The time of BW.
        backward: The time of a whole B (default: the sum of BI and BW). The first stage outputs no gradient,
            so its backward pass is always whole.
        saved: The memory that F saves for the backward pass.
        saved_for_weights: The part of `saved` that stays from the end of BI to the end of BW.
        transfer: The time of one message between this stage and the next stage, in either direction. Within a
            rank there is no message.
        static: Memory that is always in use: parameters, gradients, optimizer states, and working memory of
            passes.

    Raises:
        DirectiveError: A time is neither 0 nor a number from 1e-15 to 1e15, or a memory is not an integer >=
            0.
    """

    forward: Number
    backward_input: Number
    backward_weights: Number
    backward: Number | None = None
    saved: int = 0
    saved_for_weights: int = 0
    transfer: Number = 0
    static: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        for name in ("forward", "backward_input", "backward_weights", "transfer", "backward"):
            value = getattr(self, name)
            if not is_number(value) and not (name == "backward" and value is None):
                raise DirectiveError(
                    f"StageCosts({name}={shown(value)}). Give a time: 0, or a number from 1e-15 to 1e15"
                    " [PIPER-D022]"
                )
        for name in ("saved", "saved_for_weights", "static"):
            value = integer(getattr(self, name))
            if value is None or value < 0:
                raise DirectiveError(
                    f"StageCosts({name}={shown(getattr(self, name))}). Give bytes, an integer >= 0"
                    " [PIPER-D022]"
                )

    @property
    def whole(self) -> Number:
        """The time of a whole backward pass."""
        return self.backward_input + self.backward_weights if self.backward is None else self.backward


class Timed(NamedTuple):
    """The time and memory of rows.

    Attributes:
        end: The end of the last pass.
        busy: For each rank, the sum of the times of its passes.
        peak: For each rank, the maximum memory: `static` of its stages, plus saved values.
    """

    end: Number
    busy: tuple[Number, ...]
    peak: tuple[int, ...]


class Times(NamedTuple):
    """The times of stages, multiplied by `unit`. They are integers if all costs are int or Fraction.

    Attributes:
        passes: For each stage, pass -> time.
        transfer: For each stage, the time of a message to or from the next stage.
        unit: The smallest factor that makes all times integers; 1 if a cost is a float.
    """

    passes: list[dict[str, Number]]
    transfer: list[Number]
    unit: int


def times_of(costs: Sequence[StageCosts]) -> Times:
    """Return the times of stages. If any cost is a float, all times are floats. Otherwise they are integers.

    The BI of the first stage takes no time, and its BW takes the time of B.
    """
    given = [t for c in costs for t in (c.forward, c.backward_input, c.backward_weights, c.whole, c.transfer)]
    rough = any(isinstance(t, float) for t in given)
    unit = 1 if rough else math.lcm(*(Fraction(t).denominator for t in given))

    def scaled(time: Number) -> Number:
        return float(time) if rough else int(time * unit)

    passes = [
        {
            "F": scaled(c.forward),
            "BI": scaled(c.backward_input),
            "BW": scaled(c.backward_weights),
            "B": scaled(c.whole),
        }
        for c in costs
    ]
    passes[0] |= {"BI": 0, "BW": passes[0]["B"]}
    return Times(passes, [scaled(c.transfer) for c in costs], unit)


def plain_time(time: Number, unit: int) -> Number:
    """Convert a time in the unit of `times_of` to the unit of the costs. A float remains a float. Other
    numbers become an int if possible, otherwise a Fraction."""
    if unit == 1 or isinstance(time, float):
        return time
    found = Fraction(time, unit)
    return found.numerator if found.denominator == 1 else found


def timed(rows: Sequence[Row], costs: Sequence[StageCosts], times: Times | None = None) -> Timed:
    """Run the rows in virtual time. This is exact for int and Fraction, and linear in the number of actions.

    A BI of the first stage is skipped, and its BW is the whole backward pass, as in the compiled program.

    Args:
        rows: The rows by rank, with one action in each entry. Each stage is on one rank.
        costs: The costs by stage.
        times: The result of `times_of(costs)`, if known.

    Raises:
        DirectiveError: Actions overlap, a stage has no costs or is on two ranks, or ranks wait for each
            other.
    """
    times = times_of(costs) if times is None else times
    ranks = _ranks(rows, len(costs))
    walk = _RankClocks(rows, ranks, times)
    walk.run()
    busy = tuple(plain_time(sum(times.passes[a.stage][a.kind] for (a,) in row), times.unit) for row in rows)
    return Timed(plain_time(max(walk.clock), times.unit), busy, peaks(rows, costs))


def peaks(rows: Sequence[Row], costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """Return the maximum memory of each rank. It depends only on the order of each row, because a rank runs
    one pass at a time."""
    found = []
    for row in rows:
        now = most = sum(costs[stage].static for stage in {action.stage for (action,) in row})
        for ((stage, kind, _),) in row:
            now += change(costs, stage, kind)
            most = max(most, now)
        found.append(most)
    return tuple(found)


def change(costs: Sequence[StageCosts], stage: int, kind: str) -> int:
    """Return the memory that a pass adds to its rank, or a negative number if the pass frees memory. An F
    adds memory at its start, and other passes free memory at their end."""
    cost = costs[stage]
    if kind == "F":
        return cost.saved
    if kind == "B" or (stage == 0 and kind == "BW"):
        return -cost.saved
    if stage == 0:
        return 0
    return cost.saved_for_weights - cost.saved if kind == "BI" else -cost.saved_for_weights


def _ranks(rows: Sequence[Row], stages: int) -> list[int]:
    """Return the rank of each stage; -1 for a stage that no row has.

    Raises:
        DirectiveError: An entry of a row has several actions, a stage has no costs, or a stage is in two
            rows.
    """
    found: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for group in row:
            if len(group) != 1:
                raise DirectiveError(
                    f"timed: an entry of rank {rank} has {counted(len(group), 'action')}. Give rows with one action in "
                    "each entry [PIPER-D022]"
                )
            stage = group[0].stage
            if not 0 <= stage < stages:
                raise DirectiveError(
                    f"timed: rank {rank} runs stage {stage}, but there are costs of {counted(stages, 'stage')} only. "
                    "Give a StageCosts for each stage [PIPER-D022]"
                )
            if (first := found.setdefault(stage, rank)) != rank:
                raise DirectiveError(
                    f"timed: stage {stage} is on rank {first} and on rank {rank}. Put each stage on one rank "
                    "[PIPER-D022]"
                )
    return [found.get(stage, -1) for stage in range(stages)]


_Message = tuple[int, bool, int]  # stage that reads it, whether it is forward, microbatch


class _RankClocks:
    """The clocks of all ranks, and the messages between them, while `timed` runs the rows."""

    def __init__(self, rows: Sequence[Row], ranks: list[int], times: Times) -> None:
        """Set all clocks to 0. `ranks` has the rank of each stage."""
        self._rows, self._ranks, self._times = rows, ranks, times
        self.clock: list[Number] = [0] * len(rows)
        # For each rank, the latest arrival of a message that it has read.
        self._taken: list[Number] = [0] * len(rows)
        # Message -> its arrival, if it was made on the reading rank or has been received.
        self._there: dict[_Message, Number] = {}
        self._sent: set[_Message] = set()  # messages sent to another rank
        # Channel (sending rank, receiving rank) -> messages that have been sent and not received, as (time of
        # the send, message, transfer time).
        self._channels: dict[tuple[int, int], deque[tuple[Number, _Message, Number]]] = {}
        self._free: dict[tuple[int, int], Number] = {}  # channel -> arrival of its last received message
        self._done: set[tuple[int, str, int]] = set()  # (stage, pass, microbatch)
        self._waiting: dict[_Message, int] = {}  # message that has not been sent -> rank that waits for it

    def run(self) -> None:
        """Run each rank until its next pass waits for a message, and continue when the message is sent.

        Raises:
            DirectiveError: Ranks wait for each other.
        """
        position = [0] * len(self._rows)
        ready = deque(range(len(self._rows)))
        while ready:
            rank = ready.popleft()
            row = self._rows[rank]
            while position[rank] < len(row):
                ((stage, kind, mb),) = row[position[rank]]
                if not self._enter(rank, stage, kind, mb):
                    break
                position[rank] += 1
                freed = self._leave(rank, stage, kind, mb)
                if freed is not None:
                    ready.append(freed)
        stuck = [
            (rank, row[position[rank]][0]) for rank, row in enumerate(self._rows) if position[rank] < len(row)
        ]
        if stuck:
            waits = "; ".join(
                f"rank {rank} at {a.kind} of stage {a.stage}, microbatch {a.microbatch}"
                for rank, a in stuck[:8]
            )
            raise DirectiveError(
                f"timed: no rank can continue: {waits}. Give all passes, each after the passes whose "
                "results it needs [PIPER-D022]"
            )

    def _enter(self, rank: int, stage: int, kind: str, mb: int) -> bool:
        """Advance the rank's clock to the arrival of the pass's input, and return True. Return False if the
        input has not been made or sent. If it is a message, `_leave` then returns the rank when it is sent.
        """
        if stage == 0 and kind == "BI":  # the first stage has no BI
            return True
        # The rank must have run F before a backward pass, and BI (in the first stage F) before BW.
        before = "F" if kind in ("B", "BI") or stage == 0 else "BI"
        if kind != "F" and (stage, before, mb) not in self._done:
            return False
        if kind == "BW" and stage:
            return True
        if stage == (0 if kind == "F" else len(self._ranks) - 1):
            return True
        message = (stage, kind == "F", mb)
        if message not in self._there:
            if message not in self._sent:
                self._waiting[message] = rank
                return False
            self._receive(rank, message)
        if message in self._sent:
            self._taken[rank] = max(self._taken[rank], self._there[message])
        self.clock[rank] = max(self.clock[rank], self._there[message])
        return True

    def _receive(self, rank: int, message: _Message) -> None:
        """Receive a message, and before it all messages that were sent earlier on its channel."""
        stage, forward, _ = message
        channel = (self._ranks[stage - 1 if forward else stage + 1], rank)
        queue = self._channels[channel]
        while message not in self._there:
            sent, other, transfer = queue.popleft()
            self._free[channel] = max(sent, self._free.get(channel, 0), self._taken[rank]) + transfer
            self._there[other] = self._free[channel]

    def _leave(self, rank: int, stage: int, kind: str, mb: int) -> int | None:
        """Run a pass and send its output. Return the rank that waits for the output; None if no rank
        waits."""
        self.clock[rank] += self._times.passes[stage][kind]
        self._done.add((stage, kind, mb))
        forward = kind == "F"
        reader = stage + 1 if forward else stage - 1
        if kind == "BW" or not 0 <= reader < len(self._ranks):
            return None
        message, to = (reader, forward, mb), self._ranks[reader]
        if to == rank:
            self._there[message] = self.clock[rank]
        else:
            transfer = self._times.transfer[min(stage, reader)]
            self._channels.setdefault((rank, to), deque()).append((self.clock[rank], message, transfer))
            self._sent.add(message)
        return self._waiting.pop(message, None)
