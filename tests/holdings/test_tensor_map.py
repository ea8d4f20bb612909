"""Which process holds which elements: each element counts once, and a single process keeps its parameters in
the flat tensors that the plans work on.
"""

from __future__ import annotations

import pytest
import torch

import lightning_piper as piper
from lightning_piper.compiler import Compiled
from lightning_piper.holdings.materialization import Known
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_map import HolderGroup, TensorMap
from lightning_piper.processes.world import World
from tests.strategy.fitting import same, values
from tests.strategy.models import make
from tests.strategy.sharded import dp2, pp2_dp2

ALONE = World(0, 1, torch.device("cpu"))


def compiled(program) -> tuple[torch.nn.Module, Compiled]:
    module, loader = make("mlp")
    return module, piper.compile(module, next(iter(loader)), program)


def counted(ranges, numel: int) -> list[int]:
    """For each element, how many of the ranges contain it."""
    counts = torch.zeros(numel, dtype=torch.int64)
    for start, stop in ranges:
        counts[start:stop] += 1
    return counts.tolist()


@pytest.mark.parametrize(
    "program, ranks", [(dp2(3), 2), (pp2_dp2(3, 1), 4)], ids=["ZeRO-3", "two stages, ZeRO-3 and ZeRO-1"]
)
def test_each_element_counts_once(program, ranks):
    tensor_map = TensorMap(compiled(program)[1], ranks)
    copies = set()
    for name, spec in tensor_map.specs.items():
        assert counted(tensor_map.canonical_holders(name).values(), spec.numel) == [1] * spec.numel, name
        (several,) = set(
            counted([held for rank in range(ranks) if (held := tensor_map.held(name, rank))], spec.numel)
        )
        copies.add((tensor_map.is_sharded(name), several))
    # What is not sharded lies on both replicas, or, if nothing uses it, on all processes.
    assert copies == {(True, 1), (False, 2), (False, ranks)}


def test_what_no_device_uses():
    _, program = compiled(dp2(3))
    tensor_map = TensorMap(program, 2)
    assert all(tensor_map.holds_whole("unused.weight", rank) for rank in range(2))
    assert list(tensor_map.canonical_holders("unused.weight")) == [0]
    assert not tensor_map.holds_whole("first.0.weight", 0)


def test_one_process_has_all_in_flat_tensors_until_the_end():
    module, program = compiled(dp2(3))
    before = values(module)
    own = Ownership(module, program, ALONE)
    own.distribute(0, Known())
    assert same(values(module), before)
    halves = [
        flat
        for device in (0, 1)
        for bucket, flat in own.shards[device].items()
        if "first.0.weight" in bucket.names
    ]
    with torch.no_grad():
        for half in halves:
            half.fill_(7)
    assert bool((module.first[0].weight == 7).all())
    own.end()
    with torch.no_grad():
        for half in halves:
            half.fill_(8)
    assert bool((module.first[0].weight == 7).all())


def test_nobody_holds_a_part_of_what_has_no_elements():
    assert HolderGroup({}).canonical_holders == {} and HolderGroup(
        {1: (0, 4), 2: (0, 4)}
    ).canonical_holders == {1: (0, 4)}
