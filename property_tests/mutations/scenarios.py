"""The fixed cases that seeded bugs are shown on: every kind of node and instruction is in one of them, and
uneven microbatches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_piper.capture import capture
from lightning_piper.capture.graph_cache import cached_graphs
from lightning_piper.directives import (
    Directive,
    Offload,
    Order,
    Place,
    Recompute,
    Replicate,
    ShardExperts,
    Split,
)
from lightning_piper.schedules import interleaved_one_f_one_b, one_f_one_b, zero_bubble
from lightning_piper.testing import POOL, Case, Model, Spec, case, make_batch


@dataclass(frozen=True)
class Scenario:
    """A model, a batch size and a program."""

    name: str
    spec: Spec
    size: int
    program: Sequence[Directive]

    def case(self, recapture: bool = False) -> Case:
        """With `recapture` the step is captured anew, under whatever is patched now."""
        if not recapture:
            return case(self.spec, self.size)
        module, batch = Model(self.spec), make_batch(self.spec, self.size)
        cached_graphs.forget()
        step = capture(module, batch)
        named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
        return Case(self.spec, module, batch, step, {step.canonical[name]: x.detach() for name, x in named})


def _split(parts: int, **condition: Any) -> Split:
    return Split(filter=condition, dim_name="MB", num_microbatches=parts)


def _places(*devices: int) -> list[Directive]:
    return [Place(filter={"PP": stage}, devices=[device]) for stage, device in enumerate(devices)]


def _groups(*groups: list[int]) -> list[Directive]:
    """A group for each stage, or one for all."""
    if len(groups) == 1:
        return [Place(filter={}, devices=groups[0])]
    return [Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(groups)]


def _replicate(*groups: list[int], **fields: Any) -> Replicate:
    return Replicate(filter={}, devices=list(groups), **{"bucket_size": 0.0003, **fields})


_GROUPS = Order(
    filters=[
        [{"MB": 0, "PASS": "F"}, {"MB": 1, "PASS": "F"}],
        [{"MB": 0, "PASS": "B"}, {"MB": 1, "PASS": "B"}],
        {"MB": 2, "PASS": "F"},
        {"MB": 2, "PASS": "B"},
    ]
)


def _order(stage: int, chunks: str) -> Order:
    """For example `_order(1, "BI0 B1 BW0")`."""
    passes = [(chunk.rstrip("0123456789"), chunk.lstrip("FBIW")) for chunk in chunks.split()]
    return Order(filters=[{"PP": stage, "MB": int(mb), "PASS": kind} for kind, mb in passes])


_ALL = (
    Scenario("pipeline", POOL[4], 5, one_f_one_b(2, 3)),
    Scenario("tied over three", POOL[7], 5, one_f_one_b(3, 3)),
    Scenario("one stage split", POOL[4], 5, [_split(3, PP=1), *_places(0, 1)]),
    Scenario("batch norm", POOL[5], 5, [*_places(0, 1), _split(3)]),
    # Of five samples, the last two of which are microbatches of their own, some have no position that counts.
    Scenario("empty microbatch", Spec(("linear", "norm"), (0, 1), loss="tokens"), 5,
        [*_places(0, 1), _split(5)]),
    Scenario("dropout", POOL[6], 5, [*_places(0, 1, 2), _split(2)]),
    Scenario("tied over two", POOL[7], 5, [*_places(0, 1, 0), _split(3)]),
    Scenario("auxiliary on one", POOL[7], 5, [_split(3)]),
    Scenario("scored", Spec(("scored", "scored"), (0, 1)), 5, one_f_one_b(2, 3)),
    Scenario("scored in replicas", Spec(("scored", "scored"), (0, 1)), 8,
             [*_groups([0, 2], [1, 3]), _split(2), _replicate([0, 2], [1, 3])]),
    Scenario("scored over two groups", Spec(("scored", "linear"), (0, 1)), 5, [_split(3), *(
        Place(filter={"PP": stage, "MB": parts}, devices=[(stage + k) % 2])
        for stage in range(2) for k, parts in enumerate(([0, 1], [2])))]),
    Scenario("convolution", Spec(("conv", "linear"), (0, 1)), 5, [*_places(0, 1), _split(3)]),
    # Its order names groups of several chunks.
    Scenario("one device", POOL[3], 8, [_split(3), _GROUPS]),
    Scenario("split twice", POOL[4], 5, [_split(2), Split(filter={}, dim_name="UB", num_microbatches=2)]),
    # Microbatches of uneven sizes, some of whose backwards are in halves; the first stage has only BW.
    Scenario(
        "halves",
        POOL[7],
        5,
        [
            *_places(0, 1, 2),
            _split(3),
            _order(2, "BI0 F1 B1 BW0 BI2 BW2"),
            _order(1, "BI0 BI1 BW0 B2 BW1"),
            _order(0, "F2 BI0 BW0 B1 BI2 BW2"),
        ],
    ),
    Scenario(
        "two device groups",
        POOL[7],
        8,
        [
            _split(4),
            *(
                Place(filter={"PP": stage, "MB": parts}, devices=[(stage + k) % 2])
                for stage in range(3)
                for k, parts in enumerate(([0, 1], [2, 3]))
            ),
        ],
    ),
    Scenario("used twice", Spec(("tied", "frozen", "tied"), (0, 0, 0)), 2, []),
    Scenario("split twice", POOL[4], 8, [_split(2), Split(filter={}, dim_name="UB", num_microbatches=2)]),
    # Two replicas each, buckets of several tensors that end inside of shards, but for the last two: one for
    # each tensor.
    Scenario("replicas", POOL[4], 8, [*_groups([0, 2], [1, 3]), _split(2), _replicate([0, 2], [1, 3])]),
    Scenario("replicas with dropout", POOL[6], 8, [*_groups([0, 1]), _split(2), _replicate([0, 1])]),
    Scenario("sharded optimizer", POOL[4], 8, [*_groups([0, 2], [1, 3]), _split(2),
                                              _replicate([0, 2], [1, 3], shard_optimizer=True)]),
    Scenario("whole parameters", POOL[4], 8,
        [*_groups([0, 2], [1, 3]), _split(2),
             _replicate([0, 2], [1, 3], shard_optimizer=True, shard_by="parameter")]),
    Scenario("sharded gradients", POOL[4], 8,
        [*_groups([0, 2], [1, 3]), _replicate([0, 2], [1, 3], shard_grads=True), _split(4)]),
    Scenario("sharded parameters", Spec(("residual", "frozen", "linear"), (0, 1, 2)), 8,
             [*one_f_one_b(3, 4, devices=[[0, 3], [1, 4], [2, 5]]),
                 _replicate([0, 3], [1, 4], [2, 5], shard_params=True)]),
    Scenario("sharded, tied", POOL[7], 8, [*_groups([0, 1], [2, 3], [0, 1]), _split(2),
                                          _replicate([0, 1], [2, 3], shard_params=True)]),
    Scenario("sharded on two", POOL[0], 8,
        [*_groups([0, 1]), _split(2), _replicate([0, 1], shard_params=True)]),
    Scenario("sharded chain", Spec(("linear", "residual", "residual", "linear"), (0, 1, 2, 3)), 8,
             [*_groups([0, 1]), _split(2), _replicate([0, 1], shard_params=True, bucket_size=1e-6)]),
    # Experts divided: in two stages, by one directive after the sum over replicas; over two groups; with
    # places.
    Scenario("experts", Spec(("experts", "experts"), (0, 1)), 8,
        [*one_f_one_b(2, 2, devices=[[0, 2], [1, 3]]),
             _replicate([0, 2], [1, 3], shard_grads=True),
             ShardExperts(filter={"EP": "*"}, devices=[[0, 2], [1, 3]])]),
    Scenario("experts twice", Spec(("crowded", "experts"), (0, 0), exact=True), 8,
        [*_groups([0, 1, 2, 3]), _split(2),
             _replicate([0, 1, 2, 3]), ShardExperts(filter={"EP": "*"}, devices=[[0, 3], [1, 2]])]),
    Scenario("places", Spec(("places", "linear"), (0, 0)), 8,
        [*_groups([0, 1]), _split(2), _replicate([0, 1]),
             ShardExperts(filter={"EP": "*"}, devices=[0, 1])]),
    Scenario("whole batch", Spec(("synced", "linear", "synced"), (0, 1, 1)), 8,
             [_split(2), *_groups([0, 2], [1, 3]), _replicate([0, 2], [1, 3])]),
    Scenario("gathered samples", Spec(("linear", "gathered", "residual"), (0, 1, 1)), 8,
             [_split(2), *_groups([0, 2], [1, 3]), _replicate([0, 2], [1, 3])]),
    # Forward passes that run again, and backward passes that compute a part of them.
    Scenario("second passes", Spec(("residual", "norm"), (0, 1)), 5,
        [*one_f_one_b(2, 3), Recompute(filter={})]),
    Scenario("second passes with dropout", Spec(("dropout", "dropout"), (0, 1)), 5,
        [*one_f_one_b(2, 3), Recompute(filter={})]),
    Scenario("second passes with buffers", Spec(("batchnorm", "linear"), (0, 1)), 5,
        [*one_f_one_b(2, 3), Recompute(filter={})]),
    Scenario("second passes in halves", Spec(("attention", "residual"), (0, 1)), 5,
        [*zero_bubble(2, 3), Recompute(filter={})]),
    Scenario("second passes, sharded", Spec(("linear", "residual", "residual", "linear"), (0, 1, 2, 3)), 8,
             [*_groups([0, 1]), _split(2), _replicate([0, 1], shard_params=True, bucket_size=1e-6),
                 Recompute(filter={})]),
    # What passes keep waits on the host.
    Scenario("stored on the host", Spec(("attention", "residual", "norm"), (0, 1, 1)), 6,
             [*one_f_one_b(2, 3), Offload(filter={}, ahead=1)]),
    Scenario("inputs of second passes stored", Spec(("linear", "residual", "norm"), (0, 1, 1)), 6,
             [*zero_bubble(2, 3), Recompute(filter={}), Offload(filter={}, ahead=2)]),
    Scenario("computed again, by name", Spec(("attention", "branch"), (0, 1)), 5,
             [*one_f_one_b(2, 3), Recompute(filter={}, keep=["*mm"])]),
    Scenario("computed again, a fraction", Spec(("attention", "norm"), (0, 1)), 5,
             [*one_f_one_b(2, 3), Recompute(filter={}, keep=0.3)]),
    Scenario("interleaved", Spec(("linear",) * 4, (0, 1, 2, 3)), 4, interleaved_one_f_one_b(4, 4)),
    Scenario("zero bubble in replicas", Spec(("linear", "residual"), (0, 1)), 8,
             [*zero_bubble(2, 2, devices=[[0, 2], [1, 3]]), _replicate([0, 2], [1, 3])]),
    Scenario("groups of shards", POOL[4], 8, [*_groups([0, 1, 2, 3]), _split(2),
                                             _replicate([0, 1, 2, 3], shard_grads=True, shard_size=2)]),
    Scenario("random numbers kept", Spec(("dropout", "attention"), (0, 1)), 5,
             [*one_f_one_b(2, 3), Recompute(filter={}, keep=0.0)]),
)  # fmt: skip
SCENARIOS = {scenario.name: scenario for scenario in _ALL}


@functools.cache
def batches(spec: Spec, size: int, count: int) -> tuple[tuple[Any, ...], ...]:
    """The leaves of further batches, one for each step of a training."""
    return tuple(tuple(make_batch(spec, size, seed=10 + i).values()) for i in range(count))
