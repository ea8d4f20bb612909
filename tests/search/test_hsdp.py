"""Groups of replicas, each with all shards (HSDP), in a search: what they cost, that the search finds them if they
are best and not otherwise, and that its bounds hold for them.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch

from lightning_piper import Replicate, schedules
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.compiler import compile as compile_module
from lightning_piper.ir.nodes import Chunk
from lightning_piper.search import Block, Candidate, Layout, Space, Work, Workload, search
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.comparison import _simulated
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.estimate import memory_of, time_of
from lightning_piper.search.program_writer import write
from lightning_piper.search.report import described
from lightning_piper.search.stage_costs import CostModel, Costs
from lightning_piper.simulate import Link, Number, Simulation, simulate
from lightning_piper.simulate.hardware import Hardware
from tests.search.nets import Module
from tests.search.problems import best_of_all, broken_bounds, found, fraction, problem
from tests.simulate.programs import ROW, chain

# Costs


class Case(NamedTuple):
    """A candidate of a space, and the simulation of its program."""

    space: Space
    candidate: Candidate
    result: Simulation


@functools.cache
def program(layout: Layout, levels: tuple[int, ...]) -> Compiled:
    """The program of a chain with one layer in each stage, and one sample for each microbatch of each replica."""
    places = [[layout.device(x, rank) for x in range(layout.replicas)] for rank in range(layout.ranks)]
    more: dict[str, Any] = {} if layout.per_rank == 1 else {"stages_per_device": layout.per_rank}
    directives = getattr(schedules, layout.schedule)(
        layout.stages, layout.microbatches, devices=places, **more
    )
    for stage, level in enumerate(levels):
        size = layout.shard_size if level and layout.groups > 1 else None
        directives.append(Replicate(filter={"PP": stage}, devices=places, zero=level, shard_size=size))
    step = chain(layout.stages, layout.replicas * layout.microbatches)
    return compile_step(step, tuple(directives), verify=False)


def case(layout: Layout, levels: tuple[int, ...], near: int) -> Case:
    """Works, latencies and bandwidths that nobody chose. `near` devices in a row are a node. The simulation takes
    the links of the hardware.
    """
    rng = random.Random(f"{layout} {levels}")
    compiled = program(layout, levels)
    works = [[fraction(rng), fraction(rng), fraction(rng)] for _ in range(layout.stages)]
    table = {}
    for chunk in compiled.dag.of_type(Chunk):
        f, bi, bw = works[chunk.tags["PP"]]
        table[f"{chunk.kind}[PP={chunk.tags['PP']}]"] = {"F": f, "B": bi + bw}[chunk.kind]
    links = (
        (near, Link(fraction(rng), Fraction(rng.randint(50, 500)))),
        (layout.devices, Link(fraction(rng), Fraction(rng.randint(4, 16)))),
    )
    hardware = Hardware("device", 1, {}, 1.0, links, Link(), 1)
    result = simulate(compiled.dag, compiled.plans, table, hardware.network(compiled.plans))
    # A bucket is padded to a multiple of 64 elements for each shard.
    blocks = tuple(
        Block(f"{s}", {(1, 1): Work(*work, 1, 1, ROW)}, {f"{s}": 256 * layout.shard_size})
        for s, work in enumerate(works)
    )
    samples = layout.replicas * layout.microbatches
    space = Space(Workload(blocks, samples), hardware, layout.devices, 10**9)
    return Case(space, Candidate(layout, levels, 0, 0, tuple(range(1, layout.stages))), result)


# (layout, devices of a node). Replicas of one rank have near numbers, or the ranks of one pipeline do.
LAYOUTS = [
    (Layout("gpipe", 1, 1, 4, 1, 1, 1, True), 2),
    (Layout("one_f_one_b", 1, 1, 4, 1, 1, 4, True), 2),
    (Layout("one_f_one_b", 1, 2, 4, 1, 1, 4, True), 2),
    (Layout("one_f_one_b", 1, 2, 4, 1, 1, 4, False), 4),
    (Layout("gpipe", 1, 2, 8, 1, 1, 2, True), 4),
    (Layout("interleaved_one_f_one_b", 2, 2, 4, 1, 1, 4, True), 2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("groups", "level"), [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_time_is_that_of_the_simulator(layout: tuple[Layout, int], groups: int, level: int) -> None:
    """Exactly, if parameters are not gathered for each use. Sums over all replicas of several nodes are
    hierarchical rings in both.
    """
    own, near = layout[0]._replace(groups=groups), layout[1]
    space, candidate, result = case(own, (level,) * own.stages, near)
    time = time_of(CostModel(space), candidate)
    if level < 3:
        assert isinstance(time, int | Fraction) and time == result.step_time
    else:
        assert result.step_time <= time <= 2 * result.step_time


def test_stages_without_shards_have_no_groups() -> None:
    for levels in ((2, 0), (1, 0), (2, 1)):
        space, candidate, result = case(LAYOUTS[2][0]._replace(groups=2), levels, 2)
        bytes_of = [256 * (2 if level else 4) for level in levels]
        blocks = tuple(
            replace(block, params=dict.fromkeys(block.params, nbytes))
            for block, nbytes in zip(space.workload.blocks, bytes_of, strict=True)
        )
        model = CostModel(replace(space, workload=replace(space.workload, blocks=blocks)))
        assert time_of(model, candidate) == result.step_time


@pytest.mark.parametrize("which", [0, 1])
def test_a_slower_link_is_noticed(which: int) -> None:
    """The negative control: with a latency inside of nodes or across them that the simulator does not have, times
    differ. So they do with another number of groups.
    """
    space, candidate, result = case(LAYOUTS[2][0]._replace(groups=2), (2, 2), 2)
    links = list(space.hardware.links)
    count, link = links[which]
    links[which] = count, Link(link.latency + 1, link.bandwidth)
    slower = replace(space, hardware=replace(space.hardware, links=tuple(links)))
    assert time_of(CostModel(slower), candidate) > result.step_time
    flat = candidate._replace(layout=candidate.layout._replace(groups=1))
    assert time_of(CostModel(space), flat) > result.step_time


def test_memory_computed_by_hand() -> None:
    """100 bytes of parameters, states twice as large. A replica of two groups of two holds a half, where a replica
    of four holds a quarter.
    """
    block = Block("0", {(1, 1): Work(1, 1, 1, 0, 0, 0)}, {"a": 100})
    links = ((2, Link()), (4, Link(1)))
    hardware = Hardware("device", 1, {}, 1.0, links, Link(), 100)
    model = CostModel(Space(Workload((block,), 4, 2), hardware, 4, 1000))

    def needed(groups: int) -> list[Number]:
        layout = Layout("gpipe", 1, 1, 4, 1, 1, 1, True, groups)
        return [memory_of(model, Candidate(layout, (level,), 0, 0, ()))[0][0] for level in (1, 2, 3)]

    # Parameters, gradients and states. A gathered block counts whole.
    assert needed(2) == [100 + 100 + 100, 100 + (50 + 100) + 100, (50 + 100) + (50 + 100) + 100]
    assert needed(1) == [100 + 100 + 50, 100 + (25 + 100) + 50, (25 + 100) + (25 + 100) + 50]


def test_experts_are_sharded_over_their_holders() -> None:
    """Two groups of four replicas, of which each two divide the experts: two replicas of a group have an expert."""
    block = Block("0", {(1, 1): Work(1, 1, 1, 0, 0, 0)}, {"e": 80}, experts=frozenset({"e"}), routed=1)
    links = ((4, Link(0, 10)), (8, Link(0, 1)))
    space = Space(Workload((block,), 8, 2), Hardware("device", 1, {}, 1.0, links, Link(), 1), 8, 1000)
    layout = Layout("gpipe", 1, 1, 8, 1, 2, 1, True, 2)
    assert layout in set(space.layouts())
    costs = CostModel(space).costs(layout)
    # 40 bytes of experts on a device, and 20 bytes of a shard of them.
    assert costs.ring((0, 1)) == costs.repeated_sum((0, 1), 1) == Fraction(40, 2) / 10
    assert costs.last_sum((0, 1), 1) == 2 * Fraction(20, 2)
    assert not any(own.groups > 1 and own.shard_size % own.routed for own in space.layouts())


# The space


def chain_of(blocks: int = 2, params: int = 64, samples: int = 4) -> Workload:
    work = {(1, 1): Work(Fraction(4), Fraction(4), Fraction(4), Fraction(4), Fraction(2), Fraction(1))}
    return Workload(tuple(Block(f"{k}", work, {f"{k}": params}) for k in range(blocks)), samples, 2)


def on(near: Fraction | int, far: Fraction | int, each: int = 2, devices: int = 4) -> Hardware:
    """Nodes of `each` devices, with the bandwidth `near` inside and `far` across."""
    links = ((each, Link(0, Fraction(near))), (devices, Link(0, Fraction(far))))
    return Hardware("device", 1, {}, 1.0, links, Link(0, Fraction(1)), 0)


def divided(space: Space) -> set[tuple[int, int]]:
    """(groups, replicas of a group) of all layouts without a pipeline and with several groups."""
    return {(own.groups, own.shard_size) for own in space.layouts() if own.ranks == 1 and own.groups > 1}


def test_groups_are_inside_of_nodes() -> None:
    workload = chain_of(samples=8)
    assert divided(Space(workload, on(8, 1, 4, 8), 8, 10**6)) == {(4, 2), (2, 4)}
    assert divided(Space(workload, on(8, 1, 2, 8), 8, 10**6)) == {(2, 2), (4, 2)}
    # Not with one kind of links, not if nothing is sharded, and not with nodes that a group would cross.
    same = replace(on(8, 1), links=((8, Link(0, Fraction(8))),))
    assert not divided(Space(workload, same, 8, 10**6))
    assert not divided(Space(workload, on(8, 1, 4, 8), 8, 10**6, levels=(0,)))
    assert not divided(Space(workload, on(8, 1, 3, 8), 8, 10**6))
    far = [
        own for own in Space(workload, on(8, 1, 2, 8), 8, 10**6).layouts() if own.ranks == 2 < own.replicas
    ]
    assert {own.groups > 1 for own in far if not own.data_inside} == {False}
    assert {own.groups > 1 for own in far if own.data_inside} == {True, False}


def test_candidates_with_groups_are_counted_once() -> None:
    space = Space(chain_of(3), on(8, 1), 4, 10**6, ("one_f_one_b",), (0, 1, 3))
    candidates = list(space)
    assert len(candidates) == len(set(candidates)) == space.size
    grouped = [own for own in candidates if own.layout.groups > 1]
    assert grouped and all(any(own.levels) for own in grouped)
    assert any(own.levels == (0,) for own in candidates if own.layout.replicas == 4)


# The search


def nodes(seed: int) -> Space:
    """A problem on two nodes of four devices with slow links between the nodes, of which at least four are replicas."""
    rng, drawn = random.Random(seed), problem(seed, blocks=2 + seed % 2)
    far = Fraction(rng.choice([1, 5, 100]), 2)
    links = ((4, Link(0, Fraction(rng.randint(50, 200)))), (8, Link(0, far)))
    return Space(
        replace(drawn.workload, samples=8 * rng.choice([1, 2]), states=2),
        replace(drawn.hardware, links=links, collectives={}, at_once=None),
        8,
        rng.choice([200, 350, 10**6]),
        ("one_f_one_b",),
        rng.choice([(1, 3), (2, 3), (3,)]),
        all_devices=True,
        ranks=rng.choice([1, 2]),
    )


@functools.cache
def results() -> list[tuple[Number | None, Any]]:
    """For each problem, the best time of all candidates, and the result of the search."""
    every = []
    for seed in range(24):
        space = nodes(seed)
        wanted = best_of_all(space)
        more: dict[str, Any] = {"all_devices": True, "ranks": space.ranks, "budget": 10**6}
        result = None if wanted is None else found(space, **more)
        every.append((wanted, result))
    return every


def test_the_search_finds_the_best_of_all_candidates() -> None:
    known = [(wanted, result) for wanted, result in results() if result is not None]
    for wanted, result in known:
        assert result.estimate.time == wanted and result.gap == 0
        assert result.evaluated + sum(result.cut.values()) == result.size
    grouped = [result.best.layout.groups > 1 for _, result in known]
    assert min(grouped.count(True), grouped.count(False)) >= 4


def test_without_groups_the_best_is_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    before = [result for _, result in results() if result is not None and result.best.layout.groups > 1]
    monkeypatch.setattr(Space, "_groups", lambda self, layout: [])
    worse = 0
    for result in before:
        wanted = best_of_all(result.space)
        worse += wanted is None or wanted > result.estimate.time
    assert worse >= 4


def test_bounds_are_never_above_what_they_bound() -> None:
    """And the control: one percent more, and they would be wrong."""
    spaces = [
        replace(nodes(seed), workload=replace(problem(seed, blocks=5).workload, samples=8), ranks=None)
        for seed in range(12)
    ]
    only = [_only_groups(space) for space in spaces]
    taken, wrong, more = broken_bounds(only)
    assert taken > 1000 and wrong == 0 and more > 20


class _Grouped(Space):
    """The layouts of a space that have several groups of replicas."""

    def layouts(self) -> Any:
        return (layout for layout in super().layouts() if layout.groups > 1)


def _only_groups(space: Space) -> Space:
    return _Grouped(**{name: getattr(space, name) for name in space.__dataclass_fields__})


def best(hardware: Hardware, memory: int = 10**6, devices: int = 8) -> str:
    workload = chain_of(4, samples=2 * devices)
    space = Space(workload, hardware, devices, memory, ("one_f_one_b",), (2, 3))
    return described(found(space, all_devices=True, ranks=1, budget=10**6).best)


def test_slow_links_between_nodes_make_groups() -> None:
    """dp=(nodes, devices of a node) is chosen if the links between nodes are slow, and not if the links are equal,
    or if the memory suffices only for shards over all replicas.
    """
    slow, equal = on(200, 1, 4, 8), on(200, 200, 4, 8)
    assert best(slow) == "8 replicas in groups of 4 at ZeRO 3"
    assert "groups" not in best(equal)
    # In bytes: 256 of parameters, 256 of gradients and 512 of states, in 4 parts or in 8, two blocks of 64 of
    # gradients and of parameters that are gathered, and 16 saved by each block.
    assert best(slow, 600) == best(slow) and "groups" not in best(slow, 500)


def test_a_sum_over_groups_that_costs_nothing_changes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the sum over the groups counts."""
    slow = on(200, 4)
    layout = Layout("gpipe", 1, 1, 4, 1, 1, 1, True, 2)
    model = CostModel(Space(chain_of(), slow, 4, 10**6))
    time = time_of(model, Candidate(layout, (2,), 0, 0, ()))
    monkeypatch.setattr(Costs, "last_sum", lambda self, span, level: 0)
    assert time_of(model, Candidate(layout, (2,), 0, 0, ())) == time - 2 * Fraction(64, 2) / 4


# Programs


@functools.cache
def model() -> tuple[Any, Any, BlockCut]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    module, batch = Module(net), (torch.randn(8, 32), torch.arange(8))
    return module, batch, blocks_of(module, batch)


def programs(far: float, memory: int) -> tuple[str, list[str]]:
    """The program that a search with ZeRO-3 chooses on two nodes of four devices, and the programs that fit, from
    the fastest to the slowest one in a simulation.
    """
    module, batch, cut = model()
    links = ((4, Link(1e-7, 1e9)), (8, Link(1e-7, far)))
    hardware = Hardware("device", memory, {"float32": 1e10}, 1e10, links, Link(), 0)
    workload = analytic(module, batch, hardware, [1], tensor=[1], cut=cut)
    options: dict[str, Any] = {"levels": (3,), "ranks": 1, "schedules": ("one_f_one_b",), "all_devices": True}
    found = search(module, batch, 8, hardware=hardware, workload=workload, cut=cut, margin=0, **options)
    times = {}
    for groups in (1, 2, 4):
        layout = Layout("one_f_one_b", 1, 1, 8, 1, 1, 1, True, groups)
        if layout._replace(schedule="gpipe") == found.chosen.layout:  # the same with one microbatch
            layout = found.chosen.layout
        candidate = Candidate(layout, (3,), 0, 0, ())
        compiled = compile_module(module, batch, write(candidate, [[]]).directives)
        if max(bytes_needed(compiled, workload.states).values()) <= memory:
            stages = [[*range(len(cut.names))]]
            times[described(candidate)] = _simulated(compiled, workload, stages, hardware).step_time
    return described(found.chosen), sorted(times, key=lambda name: times[name])


@pytest.mark.parametrize(("memory", "wanted"), [
    (10**9, "8 replicas in groups of 2 at ZeRO 3"),
    (40_000, "8 replicas in groups of 4 at ZeRO 3"),
    (34_000, "8 replicas at ZeRO 3"),
])  # fmt: skip
def test_the_program_is_the_fastest_of_all_simulated(memory: int, wanted: str) -> None:
    chosen, order = programs(1e6, memory)
    assert chosen == order[0] == wanted


def test_links_of_one_speed_make_no_groups() -> None:
    """The negative control."""
    assert programs(1e9, 10**9)[0] == "8 replicas at ZeRO 3"
