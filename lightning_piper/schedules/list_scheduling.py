"""List scheduling: each rank repeatedly runs the possible pass that its rule prefers. `fitted` tries many
rules.

Microbatches have equal costs. So each stage runs each kind of pass in the order of microbatches. The
microbatches of any other schedule can be renumbered to this order, which does not change its times. Then a
few counters for each stage describe the state.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lightning_piper.schedules.actions import Action, Row
from lightning_piper.schedules.timing import Number, StageCosts, Times, change, times_of

Step = tuple[int, str]  # a stage and a pass
_Channel = tuple[int, int]  # (sending rank, receiving rank)


@dataclass(frozen=True)
class Chain:
    """Stages on ranks, and the memory of each rank.

    Attributes:
        costs: The costs of each stage.
        times: The scaled times of the stages.
        microbatches: The number of microbatches.
        ranks: The rank of each stage.
        local: The stages of each rank, sorted.
        changes: For each stage, pass -> the change of the memory of the stage's rank.
    """

    costs: Sequence[StageCosts]
    times: Times
    microbatches: int
    ranks: Sequence[int]
    local: Sequence[Sequence[int]]
    room: Sequence[int | None]  # for each rank, the memory for saved values; None is unlimited
    changes: Sequence[dict[str, int]]

    @property
    def actions(self) -> int:
        """The number of passes of a step in which all backward passes are split."""
        return 3 * len(self.ranks) * self.microbatches


def chain_of(
    costs: Sequence[StageCosts], microbatches: int, ranks: Sequence[int], memory: Sequence[int | None]
) -> Chain:
    """Return the chain of stages with these costs. `memory` has the memory of each rank for saved
    values and `static` together; None is unlimited."""
    local = [[s for s, rank in enumerate(ranks) if rank == r] for r in range(max(ranks) + 1)]
    room = [
        None if m is None else m - sum(costs[s].static for s in own)
        for m, own in zip(memory, local, strict=True)
    ]
    changes = [{kind: change(costs, s, kind) for kind in ("F", "BI", "BW", "B")} for s in range(len(costs))]
    return Chain(costs, times_of(costs), microbatches, ranks, local, room, changes)


class PartialSchedule:
    """The passes done so far, and the time when each rank is free. `run` adds a pass.

    Messages on one channel travel one after the other, as in `timing.timed`. Times are in the unit of
    `chain.times`.
    """

    __slots__ = (
        "_chain",
        "_free",
        "_queues",
        "_there",
        "backward",
        "clock",
        "forward",
        "kept",
        "taken",
        "weights",
    )

    def __init__(self, chain: Chain) -> None:
        """Begin at time 0, before any pass."""
        stages, ranks = len(chain.ranks), len(chain.local)
        self._chain = chain
        # Counts of passes done. A B counts as BI and BW.
        self.forward, self.backward, self.weights = [0] * stages, [0] * stages, [0] * stages
        # For each rank: when it is free, the latest arrival of a message that it has read, and the memory of
        # its saved values.
        self.clock: list[Number] = [0] * ranks
        self.taken: list[Number] = [0] * ranks
        self.kept = [0] * ranks
        # By slot (see `_arrival`): arrival times of messages that no pass has read.
        self._there: list[deque[Number]] = [deque() for _ in range(2 * stages)]
        pairs = [pair for a, b in itertools.pairwise(chain.ranks) for pair in ((a, b), (b, a)) if a != b]
        # By channel: messages that have been sent and not received, as (time of the send, slot, transfer
        # time).
        self._queues: dict[_Channel, deque[tuple[Number, int, Number]]] = {pair: deque() for pair in pairs}
        # By channel: the arrival of its last received message.
        self._free: dict[_Channel, Number] = dict.fromkeys(pairs, 0)

    def copy(self) -> PartialSchedule:
        """Return a copy. Later passes of the copy do not change this schedule."""
        other = PartialSchedule.__new__(PartialSchedule)
        other._chain = self._chain
        other.forward, other.backward, other.weights = self.forward[:], self.backward[:], self.weights[:]
        other.clock, other.taken, other.kept = self.clock[:], self.taken[:], self.kept[:]
        other._there = [there.copy() for there in self._there]
        other._queues = {channel: queue.copy() for channel, queue in self._queues.items()}
        other._free = self._free.copy()
        return other

    def key(self) -> object:
        """Return a value that is equal for two states only if both can continue with the same passes at the
        same times."""
        traveling = (*map(tuple, self._there), *map(tuple, self._queues.values()), *self._free.values())
        return (*self.forward, *self.backward, *self.weights, *self.clock, *self.taken, *traveling)

    def start(self, stage: int, kind: str) -> Number | None:
        """Return when the stage's next pass of this kind could start. None if its input has not been made or
        sent, or if all F of the stage are done."""
        chain = self._chain
        rank = chain.ranks[stage]
        if kind == "F":
            if self.forward[stage] == chain.microbatches:
                return None
            return self.clock[rank] if stage == 0 else self._arrival(rank, 2 * stage)
        if kind == "BW":
            return self.clock[rank] if self.backward[stage] > self.weights[stage] else None
        if self.backward[stage] == self.forward[stage]:
            return None
        return self.clock[rank] if stage == len(chain.ranks) - 1 else self._arrival(rank, 2 * stage + 1)

    def _arrival(self, rank: int, slot: int) -> Number | None:
        """Return when a pass that reads a message can start, or None if the message has not been sent.

        Args:
            rank: The rank of the pass.
            slot: 2 s for the forward pass of stage s, and 2 s + 1 for its backward pass.
        """
        clock = self.clock[rank]
        if there := self._there[slot]:
            return max(clock, there[0])
        channel = (self._chain.ranks[slot // 2 + (1 if slot % 2 else -1)], rank)
        if channel not in self._queues:
            return None  # from a stage of the same rank, which has not produced it yet
        free, taken = self._free[channel], self.taken[rank]
        for sent, other, transfer in self._queues[channel]:
            free = max(sent, free, taken) + transfer
            if other == slot:
                return max(clock, free)
        return None

    def fits(self, stage: int) -> bool:
        """Return whether the stage's next F fits into the memory, so that all microbatches can still finish.

        A microbatch frees memory only after it has passed all stages of the rank, and no later microbatch
        frees memory before it does. So the memory must hold all values that are saved after the F, and the
        values that the first unfinished microbatch still has to save. Later microbatches do not need more.
        This is the banker's algorithm (Dijkstra 1965) with one order in which all can finish.
        """
        chain = self._chain
        rank = chain.ranks[stage]
        room = chain.room[rank]
        if room is None:
            return True
        if self.kept[rank] + chain.costs[stage].saved > room:
            return False
        own = chain.local[rank]
        if len(own) == 1:
            return True
        saved = [(chain.costs[s].saved, self.forward[s] + (s == stage)) for s in own]
        first = saved[-1][1]
        return sum(n * max(1, f - first) for n, f in saved) <= room

    def run(self, stage: int, kind: str) -> int:
        """Run the stage's next pass of this kind, for which `start` returns a time. Return the rank that gets
        its output as a message, or the rank of the stage if no other rank gets it.
        """
        chain = self._chain
        rank = chain.ranks[stage]
        if kind != "BW" and stage != (0 if kind == "F" else len(chain.ranks) - 1):
            self._read(rank, 2 * stage + (kind != "F"))
        self.clock[rank] += chain.times.passes[stage][kind]
        self.kept[rank] += chain.changes[stage][kind]
        if kind == "BW":
            self.weights[stage] += 1
            return rank
        if kind == "F":
            self.forward[stage] += 1
            return self._hand_on(rank, stage, stage + 1)
        self.backward[stage] += 1
        self.weights[stage] += kind == "B"
        return self._hand_on(rank, stage, stage - 1)

    def _read(self, rank: int, slot: int) -> None:
        """Read the message of a pass, and advance the rank's clock to its arrival. This receives all messages
        that were sent before it on its channel."""
        neighbor = self._chain.ranks[slot // 2 + (1 if slot % 2 else -1)]
        if not self._there[slot]:
            channel = (neighbor, rank)
            queue = self._queues[channel]
            while not self._there[slot]:
                sent, other, transfer = queue.popleft()
                self._free[channel] = max(sent, self._free[channel], self.taken[rank]) + transfer
                self._there[other].append(self._free[channel])
        time = self._there[slot].popleft()
        if neighbor != rank:
            self.taken[rank] = max(self.taken[rank], time)
        self.clock[rank] = max(self.clock[rank], time)

    def _hand_on(self, rank: int, stage: int, reader: int) -> int:
        """Send a pass's output to stage `reader`. Return the reader's rank, or `rank` if no such stage
        exists."""
        chain = self._chain
        if not 0 <= reader < len(chain.ranks):
            return rank
        slot, to = 2 * reader + (reader < stage), chain.ranks[reader]
        if to == rank:
            self._there[slot].append(self.clock[rank])
        else:
            message = (self.clock[rank], slot, chain.times.transfer[min(stage, reader)])
            self._queues[rank, to].append(message)
        return to


class PassPreference(NamedTuple):
    """The rule by which a rank chooses its next pass in list scheduling.

    Attributes:
        prefer: The letters of the kinds of passes, the best first: F, I (BI or B) and W (BW).
        kept: The maximum number of F on a rank whose BW or B has not run; None is unlimited.
        patience: How long a rank waits for a preferred pass, as a share of the time of the first pass that it
            could start.
        whole: Whether all backward passes are B. If not, only the first stage runs B, and the other stages
            run BI and BW.
    """

    prefer: str
    kept: int | None
    patience: float
    whole: bool


def listed(chain: Chain, rules: Sequence[PassPreference]) -> list[Step]:
    """Return the steps in a feasible order, in which each rank follows its rule.

    Args:
        chain: The stages and ranks.
        rules: The rule of each rank.
    """
    world = PartialSchedule(chain)
    done: list[Step] = []
    heap: list[tuple[Number, int, int]] = []
    # The heap has (start, rank, turn). An entry counts only if it has the rank's current turn.
    turn = [0] * len(chain.local)
    chosen: list[Step | None] = [None] * len(chain.local)  # the next step of each rank, if it has one

    def look(rank: int) -> None:
        """Choose the rank's next step again, and put it into the heap if the rank can run one."""
        turn[rank] += 1
        found = _choice(world, chain, rank, rules[rank])
        if found is not None:
            chosen[rank] = found[1]
            heapq.heappush(heap, (found[0], rank, turn[rank]))

    for rank in range(len(chain.local)):
        look(rank)
    while heap:
        _, rank, of = heapq.heappop(heap)
        step = chosen[rank]
        if of != turn[rank] or step is None:
            continue
        other = world.run(*step)
        done.append(step)
        look(rank)
        if other != rank:
            look(other)
    return done


def _choice(
    world: PartialSchedule, chain: Chain, rank: int, rule: PassPreference
) -> tuple[Number, Step] | None:
    """Return the step that a rank runs next under its rule, and its start. None if it cannot run any step
    yet.

    Among the options that start soon enough, the rule's favorite kind wins, and then the latest stage for an
    F, or the earliest stage for other passes.
    """
    # (start, index of the kind in `rule.prefer`, s, kind): s is the stage, or -stage if the kind is F.
    options: list[tuple[Number, int, int, str]] = []
    own = chain.local[rank]
    flying = sum(world.forward[s] - world.weights[s] for s in own)
    # Of the `kept` passes in flight, an F leaves one for each later stage of the rank, so that these stages
    # can run.
    for later, stage in enumerate(reversed(own)):
        if (rule.kept is None or flying + later < max(rule.kept, len(own))) and world.fits(stage):
            start = world.start(stage, "F")
            if start is not None:
                options.append((start, rule.prefer.index("F"), -stage, "F"))
        kind = "B" if stage == 0 or rule.whole else "BI"
        start = world.start(stage, kind)
        if start is not None:
            options.append((start, rule.prefer.index("I"), stage, kind))
        if world.backward[stage] > world.weights[stage]:
            options.append((world.clock[rank], rule.prefer.index("W"), stage, "BW"))
    if not options:
        return None
    first = min(options)
    limit = first[0] + rule.patience * chain.times.passes[abs(first[2])][first[3]]
    start, _, stage, kind = min((o for o in options if o[0] <= limit), key=lambda o: o[1:])
    return start, (abs(stage), kind)


def rows_of(chain: Chain, steps: Sequence[Step]) -> list[Row]:
    """Return the rows of steps in a feasible order. Each step becomes an action for the next microbatch of
    its stage and kind."""
    rows: list[Row] = [[] for _ in chain.local]
    forward, backward = [0] * len(chain.ranks), [0] * len(chain.ranks)
    halves: list[list[int]] = [[] for _ in chain.ranks]  # stage -> microbatches of its BI so far
    position = [0] * len(chain.ranks)  # stage -> number of its BW so far
    for stage, kind in steps:
        if kind == "F":
            mb = forward[stage]
            forward[stage] += 1
        elif kind == "BW":
            mb = halves[stage][position[stage]]
            position[stage] += 1
        else:
            mb = backward[stage]
            backward[stage] += 1
            if kind == "BI":
                halves[stage].append(mb)
        rows[chain.ranks[stage]].append((Action(stage, kind, mb),))
    return rows
