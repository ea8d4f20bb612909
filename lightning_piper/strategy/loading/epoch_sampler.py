"""A sampler that knows its position in an epoch, and can continue an epoch that other replicas have begun."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_piper.errors import PiperError
from lightning_piper.strategy._lightning import wrapped_sampler, wrapped_samples
from lightning_piper.strategy.loading.epoch_order import EpochOrder, Position

# torchdata's loader has samplers of its own, with the order of torch's.
TORCHDATA = "torchdata.stateful_dataloader.sampler"


class EpochSampler(Sampler[int]):
    """The sampler of a loader, with a record of the epoch's order.

    Iteration gives the samples of the loader's own sampler. After `resume`, the next iteration that is
    used gives the samples that were left of another run's epoch.

    Args:
        own: The loader's own sampler, which has a length. With several replicas, a `DistributedSampler`.
        replicas: The number of replicas.
        replica: The index of the replica for which this process draws.

    """

    def __init__(self, own: Any, replicas: int, replica: int) -> None:
        self.own, self.replicas, self.replica = own, replicas, replica
        self._start: Position | None = None
        self._resumed: Position | None = None
        self._drawn: _Drawn | None = None  # the current iteration, if only the sampler knows its order

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[int]:
        if self._resumed is not None:
            return self._left(self._resumed)
        order, self._drawn = _order_of(self.own), None
        self._start = None if order is None else Position(order)
        if order is not None:
            return iter(self.own)
        if isinstance(self.own, DistributedSampler):  # has drawn all samples for all replicas
            samples = list(self.own)
            order = _listed(self.own, samples)
            self._start = None if order is None else Position(order)
            return iter(samples)
        self._drawn = _Drawn(self.own)
        return self._drawn.samples()

    def _left(self, position: Position) -> Iterator[int]:
        # A loader may make iterators that it does not use. So the position is taken with the first sample.
        self._start, self._resumed, self._drawn = position, None, None
        yield from position.share(self.replicas, self.replica, self.drops)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.own, "set_epoch"):
            self.own.set_epoch(epoch)

    @property
    def start(self) -> Position | None:
        """The position at which the current iteration has begun, or will begin after `resume`. None before the
        first iteration, and for samples that are not integers. A sampler of the user's draws the rest of its order
        now."""
        if self._drawn is not None:
            order, self._drawn = _listed(self.own, self._drawn.whole()), None
            self._start = None if order is None else Position(order)
        return self._start if self._resumed is None else self._resumed

    @property
    def drops(self) -> bool:
        """Whether the sampler leaves samples out that do not divide evenly over the replicas."""
        return self.replicas > 1 and bool(self.own.drop_last)

    def resume(self, position: Position) -> None:
        """Begin the next iteration at a position of another run.

        Raises:
            PiperError: The number of samples in the data set has changed.
        """
        length = len(self.own.dataset) if self.replicas > 1 else len(self.own)
        if length != position.order.length:
            raise PiperError(
                f"the checkpoint is in the middle of an epoch of {position.order.length} samples, but the "
                f"loader's sampler has {length} samples here. Resume with the same data set and sampler, or from a "
                "checkpoint at the end of an epoch [PIPER-K012]"
            )
        self._resumed = position

    def forget(self) -> None:
        """Begin the next iteration with the loader's own sampler, at its first sample."""
        self._resumed = None


class _Drawn:
    """An iteration of a sampler that draws its order sample by sample, and may learn from the epoch.

    Args:
        sampler: The sampler, which has a length.
    """

    def __init__(self, sampler: Any) -> None:
        self._found: list[Any] = []
        self._own, self._length = iter(sampler), len(sampler)

    def samples(self) -> Iterator[Any]:
        """Yield the samples. A sample is drawn when it is needed, unless `whole` has drawn it."""
        for at in itertools.count():
            if at == len(self._found):
                drawn = list(itertools.islice(self._own, 1))
                if not drawn:
                    return
                self._found += drawn
            yield self._found[at]

    def whole(self) -> list[Any]:
        """Return all samples of the epoch. A sampler that never ends has as many as its length."""
        self._found += itertools.islice(self._own, max(0, self._length - len(self._found)))
        return self._found[:]


def epoch_sampler(loader: object) -> EpochSampler | None:
    """Return the `EpochSampler` of a loader; None if the loader does not have one."""
    found = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return found if isinstance(found, EpochSampler) else None


def problem_of(loader: DataLoader[Any], replicas: int) -> str | None:
    """Return why Piper cannot know the order in which a loader takes its samples; None if it can."""
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable, so only the data set knows its position"
    batches: Any = loader.batch_sampler
    if batches is None:
        return "its batch_size is None"
    if type(batches) is not BatchSampler and not _is_torchdata(batches, "BatchSampler"):
        return f"it has a batch sampler of its own, {type(batches).__name__}"
    own = batches.sampler
    if replicas > 1 and not _divides(own):
        return f"its sampler {type(own).__name__} divides the data over the replicas in its own way"
    if any(hasattr(x, "state_dict") for x in (loader.dataset, _inner(own)) if not _is_known(x)):
        return "its data set or sampler has a state of its own"
    return None if hasattr(own, "__len__") else f"its sampler {type(own).__name__} does not have a length"


def _divides(sampler: object) -> bool:
    """Return whether a sampler gives replica r of R the samples r, r + R, ... of one common order."""
    return (
        type(sampler) is DistributedSampler
        or wrapped_sampler(sampler) is not None
        or _is_torchdata(sampler, "StatefulDistributedSampler")
    )


def _inner(sampler: object) -> object:
    inner = wrapped_sampler(sampler)
    return sampler if inner is None else inner


def _is_known(sampler: object) -> bool:
    return _is_torchdata(sampler, "StatefulDistributedSampler")


def _is_torchdata(sampler: object, name: str) -> bool:
    kind = type(sampler)
    return kind.__module__ == TORCHDATA and kind.__name__ == name


def _order_of(sampler: Any) -> EpochOrder | None:
    """Return the order that the next iteration of a sampler gives; None if only the iteration can tell."""
    if not isinstance(sampler, DistributedSampler):
        return _order_of_one(sampler)
    inner, seed = wrapped_sampler(sampler), sampler.seed + sampler.epoch if sampler.shuffle else None
    if inner is None:
        return EpochOrder(len(sampler.dataset), seed=seed)  # type: ignore[arg-type]
    found = _order_of_one(inner)
    return (
        None if found is None or found.seed is not None else EpochOrder(found.length, None, found.state, seed)
    )


def _order_of_one(sampler: Any) -> EpochOrder | None:
    """Return what `_order_of` returns if the sampler does not divide its samples."""
    if type(sampler) is SequentialSampler:
        return EpochOrder(len(sampler))
    random = type(sampler) is RandomSampler or _is_torchdata(sampler, "RandomSampler")
    length = len(sampler)
    if not random or sampler.replacement or length != len(sampler.data_source):
        return None
    if sampler.generator is not None:
        return EpochOrder(length, state=sampler.generator.get_state())
    # Without a generator of its own, torch's sampler draws a seed from the default generator.
    default = torch.Generator().set_state(torch.get_rng_state())
    return EpochOrder(length, seed=int(torch.empty((), dtype=torch.int64).random_(generator=default)))


def _listed(sampler: Any, samples: list[Any]) -> EpochOrder | None:
    """Return the order of an iteration that has given `samples` to this process; None if they are not
    integers."""
    divided = isinstance(sampler, DistributedSampler)
    every = wrapped_samples(sampler) if divided else samples
    if not all(isinstance(sample, int) for sample in every):
        return None
    order = torch.tensor(every, dtype=torch.int64)
    if len(order) == 0 or int(order.max()) < 2**31:
        order = order.int()  # checkpoints have the order
    seed = sampler.seed + sampler.epoch if divided and sampler.shuffle else None
    return EpochOrder(len(order), order, seed=seed)
