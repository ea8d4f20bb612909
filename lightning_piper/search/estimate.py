"""Estimate the time and memory of a candidate by running its schedule in virtual time.

The simulator (`lightning_piper.simulate`) does the same with a plan. A search compares too many candidates to
write a plan for each, so this module needs only the passes of the schedule and the costs of the blocks.

Each rank runs its passes one after the other. A message starts when three things are done: the pass that
makes it, the previous message on its channel, and the start of its receive (`plan.irecv`). The message takes
the time of its link, while both ranks go on computing. When the last backward pass of a stage is done, the
gradients of the stage are summed over the replicas. At ZeRO levels 2 and 3, a sum follows each run of
consecutive backward passes of a stage. With groups of replicas (HSDP), these sums are within a group,
and a sum of the shards over the groups follows the last one. A rank sums one stage at a time within its group,
and one stage at a time over the groups. At levels 1 and 2, parameters are gathered at the beginning of the step.
The estimate differs from the simulator in three points:

- Level 3: a pass takes at least as long as the gather of its parameters, which overlaps the pass before,
  block by block. In the simulator, gathers run as far ahead as their stream allows, and happen once for a
  rank with one region. If processes share cores, a process that gathers does not compute. Then the step waits
  for the first gathers, as at levels 1 and 2.
- The gradients of a tied parameter are added after the sums over replicas, at the cost of one message from
  the first rank to the last one.
- The gradients of each stage are one bucket. The estimate does not include the sum of logged values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_piper.search.links import message
from lightning_piper.search.rows import BW, B, F, Kept, Rows, rows_of
from lightning_piper.search.space import Candidate
from lightning_piper.search.stage_costs import CostModel, Costs, Span
from lightning_piper.simulate.durations import Number

Interval = tuple[Number, Number]  # start and end
Way = int  # how a stage keeps saved values: `PLAIN`, `AGAIN` or `AWAY`
Option = tuple[int, Way]  # (ZeRO level of a stage, way of the stage to keep saved values)
# The values that a stage keeps on the device: all that its forward pass saves (PLAIN), only its input (AGAIN,
# recomputed), or saved values only until they are in host memory (AWAY, offloaded).
PLAIN, AGAIN, AWAY = range(3)


@dataclass(frozen=True)
class Estimate:
    """An estimate of the time and memory that a candidate needs.

    Attributes:
        time: Seconds of a step.
        memory: For each rank, the bytes of one of its devices, including the margin.
        host: For each rank, the bytes of host memory for one of its devices.
        busy: For each rank, the seconds of its passes and of its update.
        ideal: Seconds of the step if messages between stages, gathers before passes and sums of gradients
            took no time.
        transferred: Seconds of the step if only the gathers and sums took no time.
    """

    time: Number
    memory: tuple[Number, ...]
    host: tuple[Number, ...]
    busy: tuple[Number, ...]
    ideal: Number
    transferred: Number

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they would be idle if communication took no time."""
        return max(0.0, float(1 - sum(self.busy) / (len(self.busy) * self.ideal))) if self.ideal else 0.0

    @property
    def exposed_share(self) -> float:
        """The share of the step's time that communication adds."""
        return max(0.0, float(1 - self.ideal / self.time)) if self.time else 0.0


def rows_for(candidate: Candidate) -> Rows:
    """Return the rows of the candidate's schedule. Candidates with the same schedule share them."""
    layout = candidate.layout
    return rows_of(layout.schedule, layout.per_rank, layout.ranks, layout.microbatches)


def estimate(model: CostModel, candidate: Candidate) -> Estimate:
    """Return the estimate of a candidate of the model's space, in time linear in the passes of one
    pipeline."""
    rows, costs = rows_for(candidate), model.costs(candidate.layout)
    passes = passes_of(costs, candidate)
    updates = _updates(costs, rows, candidate)

    def until(hops: Sequence[Number]) -> Number:
        return _updated(model, candidate, *virtual_time(rows, passes, hops)[::2], updates)

    ideal, transferred = until([0] * rows.stages), until(_hops(costs, candidate))
    busy = [
        sum((passes[step.stage][step.kind] for step in row), start=update)
        for row, update in zip(rows.wires.steps, updates, strict=True)
    ]
    memory, host = memory_of(model, candidate)
    return Estimate(time_of(model, candidate), memory, host, tuple(busy), ideal, transferred)


def ways_of(candidate: Candidate) -> list[Way]:
    """Return the way of each stage: `AGAIN` (recomputes), `AWAY` (offloads) or `PLAIN` (keeps all)."""
    again, away = candidate.recomputed, candidate.offloaded
    return [AGAIN] * again + [AWAY] * away + [PLAIN] * (candidate.layout.stages - again - away)


def options_of(candidate: Candidate) -> list[Option]:
    """Return the level and way of each stage."""
    return list(zip(candidate.levels, ways_of(candidate), strict=True))


def passes_of(costs: Costs, candidate: Candidate) -> list[tuple[Number, Number, Number, Number]]:
    """Return, for each stage, the seconds of F, B, BI and BW."""
    spans = candidate.spans(costs.blocks)
    return [
        costs.passes(span, level, way == AGAIN, way == AWAY)
        for span, (level, way) in zip(spans, options_of(candidate), strict=True)
    ]


def _hops(costs: Costs, candidate: Candidate) -> list[Number]:
    """Return the seconds of a message across each boundary between stages."""
    return [costs.hop(border, block) for border, block in enumerate(candidate.cuts)]


def time_of(model: CostModel, candidate: Candidate) -> Number:
    """Return the seconds of a step of a candidate."""
    rows, costs, levels = rows_for(candidate), model.costs(candidate.layout), candidate.levels
    spans = candidate.spans(costs.blocks)
    hops = _hops(costs, candidate)
    sums = [costs.repeated_sum(span, level) for span, level in zip(spans, levels, strict=True)]
    lasts = [costs.last_sum(span, level) for span, level in zip(spans, levels, strict=True)]
    gathers = gathers_of(model, candidate, rows)
    each = [level > 1 for level in levels]
    ends, done, busy = virtual_time(rows, passes_of(costs, candidate), hops, sums, lasts, gathers, each)
    for tied in costs.params.tied:
        users = {s for s, (i, j) in enumerate(spans) if any(i <= block < j for block in tied.blocks)}
        ranks = {rows.rank[s] for s in users}
        if len(ranks) > 1 and tied.trains:
            met = max(done[s] for s in users) + message(costs.links.ends, tied.nbytes)
            for rank in ranks:
                ends[rank] = max(ends[rank], met)
    return _updated(model, candidate, ends, busy, _updates(costs, rows, candidate))


def gathers_of(model: CostModel, candidate: Candidate, rows: Rows) -> list[Number]:
    """Return, for each stage, the seconds of the gather for which its first pass waits; 0 if it does not
    wait.

    Stages at level 0 do not wait, and all stages at levels 1 and 2 wait. At level 3, only the first stage
    that a rank runs waits, because the gathers of later stages overlap the pass before. But if processes
    share cores, all stages at level 3 wait.
    """
    costs, shared = model.costs(candidate.layout), model.space.hardware.at_once is not None
    first = {pairs[0].first[0] for pairs in rows.between}
    return [
        costs.ring(span) if level in (1, 2) or (level == 3 and (shared or stage in first)) else 0
        for stage, (span, level) in enumerate(
            zip(candidate.spans(costs.blocks), candidate.levels, strict=True)
        )
    ]


def _updated(
    model: CostModel,
    candidate: Candidate,
    ends: Sequence[Number],
    busy: Sequence[Interval],
    updates: Sequence[Number],
) -> Number:
    """Return the time at which the last rank has updated its parameters.

    If more devices compute at a time than the hardware has cores (`Hardware.at_once`), all of them slow down
    in the same proportion. The order of events stays the same, so the time is only stretched.

    Args:
        ends: The time at which each rank has its gradients.
        busy: The interval of each pass of each rank, in any order.
        updates: The seconds of each rank's update.
    """
    end = max(end + update for end, update in zip(ends, updates, strict=True))
    layout, cores = candidate.layout, model.space.hardware.at_once
    if cores is None or layout.devices <= cores:
        return end
    # While more devices compute than there are cores, time passes more slowly by the ratio of the two
    # numbers.
    found = [*busy, *((end, end + update) for end, update in zip(ends, updates, strict=True))]
    changes = sorted([(start, 1) for start, _ in found] + [(stop, -1) for _, stop in found])
    at_work, before = 0, changes[0][0]
    for moment, change in changes:
        if (share := at_work * layout.replicas * layout.tensor) > cores:
            end += (moment - before) * (share - cores) / cores
        at_work, before = at_work + change, moment
    return end


def _updates(costs: Costs, rows: Rows, candidate: Candidate) -> list[Number]:
    """Return the seconds of the optimizer's update on each rank."""
    spans = candidate.spans(costs.blocks)
    return [
        costs.update([spans[s] for s in local], [candidate.levels[s] for s in local]) for local in rows.local
    ]


def virtual_time(
    rows: Rows,
    passes: Sequence[Sequence[Number]],
    hops: Sequence[Number],
    sums: Sequence[Number] = (),
    lasts: Sequence[Number] = (),
    gathers: Sequence[Number] = (),
    each: Sequence[bool] = (),
) -> tuple[list[Number], list[Number], list[Interval]]:
    """Run a schedule in virtual time. The step begins at 0.

    Returns:
        For each rank, the time at which its passes and sums are done. For each stage, the time at which its
        gradients are summed. The interval of each pass of any rank, in no particular order.

    Args:
        rows: The passes of each rank, in order.
        passes: For each stage, seconds of F, B, BI and BW.
        hops: For each boundary between stages, seconds of a message across it.
        sums: For each stage, seconds of the sum of its gradients over the replicas (default: 0).
        lasts: For each stage, seconds of the sum over groups of replicas after the last of these sums
            (default: 0).
        gathers: For each stage, seconds of the gather before its first pass (default: 0).
        each: For each stage, whether a sum follows every run of consecutive backward passes of the stage. If
            not, a sum follows only the last backward pass (default).
    """
    run = _ClockSimulation(
        rows,
        passes,
        hops,
        sums or [0] * rows.stages,
        lasts or [0] * rows.stages,
        gathers or [0] * rows.stages,
        each or [False] * rows.stages,
    )
    ready = list(range(rows.ranks))
    while ready:
        run.advance(ready.pop(), ready)
    ends = [
        max(time, *(run.done[s] for s in local)) for time, local in zip(run.time, rows.local, strict=True)
    ]
    return ends, run.done, run.busy


class _ClockSimulation:
    """A simulation of the clocks of all ranks. `virtual_time` explains its arguments.

    Attributes:
        time: For each rank, the time that it has reached.
        done: For each stage, the end of the latest sum of its gradients.
        busy: Intervals in which a rank computes.
    """

    def __init__(
        self,
        rows: Rows,
        passes: Sequence[Sequence[Number]],
        hops: Sequence[Number],
        sums: Sequence[Number],
        lasts: Sequence[Number],
        gathers: Sequence[Number],
        each: Sequence[bool],
    ) -> None:
        """Set all clocks to 0."""
        self._wires, self._passes, self._hops, self._each = rows.wires, passes, hops, each
        self._sums, self._lasts = sums, lasts
        n = len(self._wires.messages)
        # For each message: when it was sent, when its receive was started, when it ends. None: not known yet.
        self._sent: list[Number | None] = [None] * n
        self._posted: list[Number | None] = [None] * n
        self._end: list[Number | None] = [None] * n
        self._free: list[Number] = [0] * self._wires.channels  # channel -> end of its latest message
        self._waiting: list[int | None] = [None] * n  # message -> rank that waits for it
        for at_once in self._wires.at_once:
            for m in at_once:
                self._posted[m] = 0
        self._position = [0] * rows.ranks  # rank -> index of its next pass
        # Rank -> latest end of a message that it has received.
        self._received: list[Number] = [0] * rows.ranks
        self.time: list[Number] = [0] * rows.ranks
        self.done: list[Number] = [0] * rows.stages
        self.busy: list[Interval] = []
        self._lane: list[Number] = [0] * rows.ranks  # rank -> end of its latest sum
        self._across: list[Number] = [0] * rows.ranks  # rank -> end of its latest sum over groups of replicas
        # Rank -> end of the sum that its previous pass has started, if the stage sums several times;
        # otherwise 0.
        self._arriving: list[Number] = [0] * rows.ranks
        self._left = [0] * rows.stages  # stage -> remaining passes that make weight gradients
        # Stage -> when its parameters are gathered; None after its first pass.
        self._first: list[Number | None] = [None] * rows.stages
        for row in self._wires.steps:
            there: Number = 0
            for step in row:
                if step.kind in (B, BW):
                    self._left[step.stage] += 1
                if self._first[step.stage] is None:
                    there = self._first[step.stage] = there + gathers[step.stage]
        self._summed_often = [often and left > 1 for often, left in zip(each, self._left, strict=True)]

    def advance(self, rank: int, ready: list[int]) -> None:
        """Run a rank until it waits for a message whose end is not known, or has run all passes.

        Args:
            rank: The rank to run.
            ready: The function appends the ranks that waited for a message whose end is now known.
        """
        steps, passes = self._wires.steps[rank], self._passes
        time, received, position = self.time[rank], self._received[rank], self._position[rank]
        arriving, first = self._arriving[rank], self._first
        while position < len(steps):
            stage, kind, needs, posts, sends, complete = steps[position]
            if needs >= 0:
                end = self._end[needs]
                if end is None:
                    self._waiting[needs] = rank
                    break
                received = max(received, end)
                time = max(time, received)
            for m in posts:
                self._posted[m] = received
                if self._sent[m] is not None:
                    self._meet(m, ready)
            if kind == F and first[stage] is not None:
                time, first[stage] = max(time, first[stage] or 0), None
            start, time = time, time + passes[stage][kind]
            self.busy.append((start, time))
            if sends >= 0:
                self._sent[sends] = time
                if self._posted[sends] is not None:
                    self._meet(sends, ready)
            # The pass overlaps the sum that the pass before it has started. The next pass begins after this
            # sum.
            made = time
            if arriving > time:
                time = arriving
            arriving = 0
            if kind in (B, BW):
                self._left[stage] -= 1
                if (complete and self._each[stage]) or not self._left[stage]:
                    arriving = self._sum(rank, stage, made)
            position += 1
        self.time[rank], self._received[rank], self._position[rank], self._arriving[rank] = (
            time,
            received,
            position,
            arriving,
        )

    def _sum(self, rank: int, stage: int, made: Number) -> Number:
        """Start a sum of the stage's gradients, which the rank has made at the time `made`.

        Returns:
            The time until which the pass after the next one must wait, because a stage that sums several
            times uses its bucket again. 0 if the stage sums once.
        """
        end = self.done[stage] = self._lane[rank] = max(made, self._lane[rank]) + self._sums[stage]
        if not self._left[stage] and self._lasts[stage]:
            across = max(end, self._across[rank]) + self._lasts[stage]
            self.done[stage] = self._across[rank] = across
        return end if self._summed_often[stage] else 0

    def _meet(self, m: int, ready: list[int]) -> None:
        """Set the end of message m, which was sent and whose receive was started. Append the rank that waits
        for it to `ready`."""
        channel, border, _, _ = self._wires.messages[m]
        sent, posted = self._sent[m], self._posted[m]
        assert sent is not None and posted is not None
        self._end[m] = self._free[channel] = max(sent, posted, self._free[channel]) + self._hops[border]
        self._waiting[m], waiting = None, self._waiting[m]
        if waiting is not None:
            ready.append(waiting)


def memory_of(model: CostModel, candidate: Candidate) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """Return two tuples with a number for each rank: the bytes of one of its devices, including the margin,
    and the bytes of host memory for this device."""
    memory, host = zip(*bytes_of_ranks(model, candidate), strict=True)
    return memory, host


def bytes_of_ranks(model: CostModel, candidate: Candidate) -> Iterator[tuple[Number, Number]]:
    """Yield the numbers of `memory_of` for each rank."""
    rows, costs = rows_for(candidate), model.costs(candidate.layout)
    spans = candidate.spans(costs.blocks)
    ways, keep = ways_of(candidate), 1 + model.space.margin
    fixed = model.fixed_bytes(candidate.layout, candidate.levels, candidate.cuts)
    for stages, states, own in zip(rows.local, rows.kept, fixed, strict=True):
        saved, host = saved_bytes(costs, [(s, spans[s], ways[s]) for s in stages], states)
        yield (own.static + max(saved + own.messages, own.ends)) * keep, host


def saved_bytes(
    costs: Costs,
    stages: Sequence[tuple[int, Span, Way]],
    states: Sequence[tuple[int, Kept]],
    least: bool = False,
) -> tuple[Number, Number]:
    """Return the largest number of bytes that a rank saves for its backward passes on the device, and the
    largest number on the host. The two may belong to different times.

    Offloaded values are on the device for at most two microbatches: one whose values go to the host, and one
    whose values come back.

    Args:
        costs: The costs of the layout.
        stages: (index, blocks, way) of each stage of the rank.
        states: The memory states of the rank; see `Rows.kept`.
        least: Compute a lower bound: the input of each stage is the smallest output of any block.
    """
    # For each stage: bytes of a microbatch that are saved for BI, that are kept for BW, and that exist only
    # while B or BI runs; whether the host keeps the saved bytes.
    device: list[tuple[Number, Number, Number, bool]] = []
    for _, (i, j), way in stages:
        saved, kept = costs.saved[j] - costs.saved[i], costs.kept[j] - costs.kept[i]
        entry = costs.least_output if least else costs.output[i - 1]
        device.append(
            (entry if i else 0, kept, saved, False) if way == AGAIN else (saved, kept, 0, way == AWAY)
        )
    most: Number = 0
    host: Number = 0
    for runs, state in states:
        here: Number = 0
        there: Number = 0
        for (s, _, _), (a, w), (saved, kept, again, moved) in zip(stages, state, device, strict=True):
            here += saved * (min(a, 2) if moved else a) + kept * w + (again if runs == s else 0)
            there += saved * a if moved else 0
        most, host = max(most, here), max(host, there)
    return most, host
