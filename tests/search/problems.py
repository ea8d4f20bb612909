"""Small problems for a search, and the best value among all their candidates."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from lightning_piper.search import Block, Found, Space, Work, Workload, best_of
from lightning_piper.search.bounds import INFINITE, Cutting, bound_of
from lightning_piper.search.choices import everything
from lightning_piper.search.coarse_bounds import Coarse
from lightning_piper.search.estimate import Option, memory_of, options_of, time_of
from lightning_piper.search.joint_bounds import Together
from lightning_piper.search.space import Candidate, shards_some
from lightning_piper.search.stage_costs import CostModel
from lightning_piper.simulate import Link, Number
from lightning_piper.simulate.hardware import Collectives, Hardware

SCHEDULES = ("gpipe", "one_f_one_b", "zero_bubble", "interleaved_one_f_one_b", "zbv", "dualpipev")


def fraction(rng: random.Random, most: int = 12) -> Fraction:
    return Fraction(rng.randint(1, most), rng.randint(1, 4))


def link(rng: random.Random) -> Link:
    return Link(rng.choice([0, fraction(rng, 3)]), rng.choice([None, Fraction(rng.randint(8, 200))]))


def problem(seed: int, blocks: int | None = None, most: int = 8) -> Space:
    """A random problem: the works are fractions, memory may be scarce or too little, links may be slow,
    collectives may be measured, and updates may take time. Some problems have a tied parameter, parameters
    without gradients, tensors that can be divided, or parameters of experts.
    """
    rng, own = random.Random(seed), random.Random(-1 - seed)
    n, samples, divides = blocks or rng.choice([3, 3, 4, 4, 5, 6]), rng.choice([2, 3, 4]), rng.random() < 0.2
    most = most if n < 5 else 4
    routed = rng.random() < 0.2
    chain = []
    for k in range(n):
        work = {(1, 1): _work(rng)}
        if divides:
            work[1, 2] = Work(*(x / 2 for x in work[1, 1][:6]), fraction(rng, 20), work[1, 1].apart / 2)
        params = {f"w{k}": rng.randint(1, 40)}
        if routed:
            params[f"r{k}"] = rng.randint(1, 40)
        if rng.random() < 0.5 and k in (0, n - 1):
            params["tied"] = 16
        beside = [fraction(own) if own.random() < 0.5 else 0 for _ in range(4)]
        experts = frozenset({f"r{k}"} if routed else ())
        chain.append(
            Block(
                f"block {k}",
                work,
                params,
                frozenset({f"w{k}"}),
                experts,
                4 * routed,
                *beside,
                packed_one_microbatch=beside[0] / 2,
            )
        )
    if own.random() < 0.3:  # a parameter that several blocks have is frozen in all of them
        frozen = {
            name
            for name in ("tied", *(f"{kind}{k}" for kind in "wr" for k in range(n)))
            if own.random() < 0.5
        }
        chain = [dataclasses.replace(block, frozen=block.params.keys() & frozen) for block in chain]
    near = rng.choice([1, 2, 4])
    links = ((near, link(rng)), (8, link(rng)))
    collectives = {2: Collectives(link(own), link(own), link(own))}
    more = {"collectives": collectives if own.random() < 0.5 else {}, "at_once": own.choice([None, None, 2])}
    hardware = Hardware("device", 1, {}, 1.0, links, link(rng), rng.choice([60, 10**6]), **more)  # type: ignore[arg-type]
    schedules = (rng.choice(("gpipe", "one_f_one_b")), rng.choice(SCHEDULES[2:]))
    memory = rng.choice([100, 200, 300, 500, 10**6])
    levels = tuple(sorted(rng.sample(range(4), 2)))
    margin = rng.choice([0, Fraction(1, 10)])
    return Space(
        Workload(tuple(chain), samples, 2), hardware, rng.randint(1, most), memory, schedules, levels, margin
    )


def _work(rng: random.Random) -> Work:
    saved = rng.randint(1, 30)
    numbers = (
        saved,
        rng.randint(0, saved),
        rng.randint(1, 16),
    )  # fractions, so that the work for other numbers of samples is exact
    apart = Fraction(saved % 3, 2)
    return Work(fraction(rng), fraction(rng), fraction(rng), *map(Fraction, numbers), Fraction(0), apart)


def found(space: Space, **more: Any) -> Found:
    """The result of a search in a space."""
    return best_of(
        space.workload,
        space.hardware,
        space.devices,
        space.memory,
        schedules=space.schedules,
        levels=space.levels,
        margin=space.margin,
        **more,
    )


def fits(space: Space, model: CostModel, candidate: Candidate) -> bool:
    memory, host = memory_of(model, candidate)
    return max(memory) <= space.memory and max(host) <= space.hardware.host_memory


def best_of_all(space: Space, by_memory: bool = False) -> Number | None:
    """The best value of all candidates that fit, tried one after the other; None if none of them fits."""
    model = CostModel(space)
    values = [
        max(memory_of(model, c)[0]) if by_memory else time_of(model, c)
        for c in space
        if fits(space, model, c)
    ]
    return min(values, default=None)


def some(space: Space, seed: int) -> Iterator[tuple[CostModel, Candidate]]:
    """Random candidates of a problem with five blocks, whether they fit into the memory or not."""
    rng = random.Random(seed)
    model, layouts = CostModel(space), list(space.layouts())
    for layout in rng.sample(layouts, min(6, len(layouts))):
        for _ in range(3):
            recomputed = rng.randint(0, layout.stages)
            offloaded = rng.randint(0, layout.stages - recomputed)
            cuts = tuple(sorted(rng.sample(range(1, 5), layout.stages - 1)))
            some = rng.choice(space.levels_of(layout))
            levels = tuple(sorted((rng.choice(some) for _ in range(layout.stages)), reverse=True))
            if shards_some(layout, levels):
                yield model, Candidate(layout, levels, recomputed, offloaded, cuts)


def anything(space: Space, candidate: Candidate) -> list[list[Option]]:
    """For each stage, every level and every way of storing activations that is possible."""
    levels = next(levels for levels in space.levels_of(candidate.layout) if candidate.levels[0] in levels)
    return everything(candidate.layout, levels).options()


def broken_bounds(spaces: Sequence[Space]) -> tuple[int, int, int]:
    """How many bounds of candidates of spaces with five blocks were computed, how many of them exceeded the value
    that they bound, and how many would exceed it if they were one percent higher.
    """
    found = [
        _bounds_of(model, candidate) for k, space in enumerate(spaces) for model, candidate in some(space, k)
    ]
    pairs = [pair for own, _ in found for pair in own]
    wrong = sum(bound > value for bound, value in pairs) + sum(missing for _, missing in found)
    return len(pairs), wrong, sum(bound * Fraction(101, 100) > value for bound, value in pairs)


def _bounds_of(model: CostModel, candidate: Candidate) -> tuple[list[tuple[Number, Number]], int]:
    """The bounds of a candidate with the values that they bound, and how many enumerations lack its cuts."""
    time, memory, missing = time_of(model, candidate), max(memory_of(model, candidate)[0]), 0
    coarse = Coarse(model)
    pairs = [
        (bound_of(model, candidate), time),
        (coarse.time(candidate.layout), time),
        (coarse.memory(candidate.layout), memory),
    ]
    unlimited = CostModel(dataclasses.replace(model.space, memory=INFINITE))
    for options in ([[option] for option in options_of(candidate)], anything(model.space, candidate)):
        together = Together(model if fits(model.space, model, candidate) else unlimited)
        # Exactly as much as the candidate needs.
        tight = CostModel(dataclasses.replace(model.space, memory=memory))
        if fits(tight.space, model, candidate):
            # The bound may assume that the program takes less than a limit.
            for enough in (time * 2, time * Fraction(1001, 1000)):
                pairs.append((Together(tight).time(candidate.layout, options, enough), time))
        if fits(together.space, model, candidate):
            pairs.append((together.time(candidate.layout, options, time * 2), time))
        for by_memory, value in ((False, time), (True, memory)):
            cutting = Cutting(unlimited, candidate.layout, options, by_memory)
            pairs += [(cutting.stage(s, i, j)[0], value) for s, (i, j) in enumerate(candidate.spans(5))]
            within = [bound for bound, cuts in cutting.cuts(INFINITE, lambda: None) if cuts == candidate.cuts]
            pairs += [(within[0], value)] if within else []
            missing += not within and model.space.hardware.host_memory > 1000
    return pairs, missing
