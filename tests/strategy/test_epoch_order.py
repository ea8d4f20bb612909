"""A sampler continues an epoch at the position of a checkpoint: under other numbers of replicas and other batch
sizes, every sample is taken once.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from torchdata.stateful_dataloader.sampler import RandomSampler as TorchdataRandomSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from lightning_piper.strategy.loading.epoch_order import EpochOrder, Position
from lightning_piper.strategy.loading.epoch_sampler import EpochSampler

# `STEPS=500` is the number of examples that was run once.
EXAMPLES = int(os.environ.get("STEPS", 0)) or (500 if settings.default.max_examples > 100 else 60)


class Backwards(Sampler[int]):
    """A sampler of a user, whose order only an iteration shows."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self):
        return iter(range(self.length - 1, -1, -1))


def random(length: int) -> Sampler[int]:
    return RandomSampler(range(length))


def seeded(length: int) -> Sampler[int]:
    return RandomSampler(range(length), generator=torch.Generator().manual_seed(length))


def torchdatas(length: int) -> Sampler[int]:
    return TorchdataRandomSampler(range(length), generator=torch.Generator().manual_seed(length))


SAMPLERS = {
    "sequential": lambda length: SequentialSampler(range(length)),
    "random": random,
    "seeded": seeded,
    "torchdata": torchdatas,
    "own": Backwards,
}


@dataclass(frozen=True)
class Part:
    """A part of an epoch: how a fit draws batches until it ends."""

    replicas: int
    batch_size: int
    batches: int  # the fit draws at most this many
    sampler: str
    stateful: bool
    drop: bool  # of samples that do not divide evenly
    drop_batch: bool

    def own(self, length: int, replica: int) -> Sampler[int]:
        inner = SAMPLERS[self.sampler](length)
        if self.replicas == 1:
            return inner
        if isinstance(inner, SequentialSampler | RandomSampler):
            kind = StatefulDistributedSampler if self.stateful else DistributedSampler
            return kind(
                range(length),
                self.replicas,
                replica,
                shuffle=self.sampler != "sequential",
                drop_last=self.drop,
            )
        return DistributedSamplerWrapper(
            inner, num_replicas=self.replicas, rank=replica, shuffle=True, drop_last=self.drop
        )


parts = st.builds(
    Part,
    replicas=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    batches=st.integers(0, 12),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    stateful=st.booleans(),
    drop=st.booleans(),
    drop_batch=st.booleans(),
)


@dataclass
class Drawn:
    """The batches of a part, and the position after them."""

    samples: list[int]
    batches: int
    position: Position


def draw(part: Part, length: int, saved: dict | None, whole: bool) -> Drawn:
    """Draw a part of an epoch on all replicas: from the position `saved`, to the end if `whole`."""
    drawn: list[list[list[int]]] = []
    for replica in range(part.replicas):
        torch.manual_seed(length)  # the replicas have equal generators
        sampler = EpochSampler(part.own(length, replica), part.replicas, replica)
        if saved is not None:
            sampler.resume(Position.read(saved))
        batches = iter(BatchSampler(sampler, part.batch_size, part.drop_batch))
        drawn.append(list(islice(batches, None if whole else part.batches)))
    assert len({len(each) for each in drawn}) == 1
    start = sampler.start
    if start is None:  # no batch was asked for
        start = Position(EpochOrder(length)) if saved is None else Position.read(saved)
    if whole:
        left = start.batches_left(part.batch_size, part.replicas, sampler.drops, part.drop_batch)
        assert left == len(drawn[0])
        fresh = BatchSampler(part.own(length, 0), part.batch_size, part.drop_batch)
        assert 0 <= left <= len(fresh)
    samples = [sample for each in drawn for batch in each for sample in batch]
    return Drawn(samples, len(drawn[0]), start.after(len(drawn[0]), part.batch_size, part.replicas))


def epoch(length: int, all_parts: list[Part], change=lambda content: content) -> tuple[list[int], list[Part]]:
    """Draw an epoch in parts, each from the checkpoint of the previous one. Return all samples."""
    saved, samples = None, []
    for index, part in enumerate(all_parts):
        found = draw(part, length, saved, whole=index == len(all_parts) - 1)
        samples += found.samples
        if found.batches or saved is not None:
            saved = change(found.position.content())
    return samples, all_parts


def wrong(length: int, samples: list[int], all_parts: list[Part]) -> list[int]:
    """Return the samples that were taken twice or not at all, beyond the end of an epoch as of any sampler."""
    counts = Counter(samples)
    missing = [each for each in range(length) if not counts[each]]
    twice = [each for each, count in counts.items() for _ in range(count - 1)]
    # A part that reaches the end may leave samples out that fill no batch, and repeat samples in its last batch.
    may_miss = [
        (part.replicas - 1 if part.drop and part.replicas > 1 else 0)
        + (part.replicas * (part.batch_size - 1) if part.drop_batch else 0)
        for part in all_parts
    ]
    may_repeat = [0 if part.replicas == 1 or part.drop else part.replicas - 1 for part in all_parts]
    return (missing if len(missing) > max(may_miss) else []) + (twice if len(twice) > max(may_repeat) else [])


@given(length=st.integers(1, 80), all_parts=st.lists(parts, min_size=2, max_size=4))
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_sample_is_taken_once(length, all_parts):
    assert wrong(length, *epoch(length, all_parts)) == []


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_position_takes_samples_twice_or_loses_them(shift):
    first = Part(2, 3, 2, "random", False, False, False)
    second = Part(3, 2, 0, "random", False, False, False)

    def change(content):
        return {**content, "taken": content["taken"] + shift * 3}

    assert wrong(30, *epoch(30, [first, second])) == []
    assert wrong(30, *epoch(30, [first, second], change)) != []


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@pytest.mark.parametrize("replicas", [1, 3])
def test_as_many_replicas_draw_what_they_had_drawn_without_a_checkpoint(sampler, replicas):
    part = Part(replicas, 2, 3, sampler, False, False, False)
    whole = draw(part, 31, None, whole=True)
    begun = draw(part, 31, None, whole=False)
    ended = draw(part, 31, begun.position.content(), whole=True)
    by_replica = [_of_each(found, replicas) for found in (whole, begun, ended)]
    assert by_replica[0] == [x + y for x, y in zip(by_replica[1], by_replica[2], strict=True)]
    assert begun.batches + ended.batches == whole.batches


def _of_each(drawn: Drawn, replicas: int) -> list[list[int]]:
    size = len(drawn.samples) // replicas
    return [drawn.samples[i * size : (i + 1) * size] for i in range(replicas)]


def test_a_position_of_an_order_is_a_number():
    """Only the order of a sampler that is not known needs as many integers as there are samples."""
    found = draw(Part(2, 2, 3, "random", False, False, False), 1000, None, whole=False).position.content()
    assert found == {"length": 1000, "seed": 0, "taken": 12}
    found = draw(Part(1, 2, 3, "own", False, False, False), 1000, None, whole=False).position.content()
    assert found["indices"].shape == (1000,) and found["indices"].dtype == torch.int32
