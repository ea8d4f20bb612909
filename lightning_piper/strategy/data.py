"""One batch before the first step, without taking it away from the training.

Ownership and optimizers need the captured step, so a batch's layout is needed before Lightning draws one. In this order:

1. `example_batch` of the strategy.
2. A DataLoader over a map-style dataset: the lead collates a batch's worth of samples itself, in this process. No worker is
   started, no sampler advances, and random numbers continue as if nothing had happened.
3. Everything else (an IterableDataset, a generator, a list of batches): every process draws the first batch and puts it back,
   so that the training begins with it.

What gives the loaders (`train_dataloader` of the module, say) is asked once: the Trainer gets the ones that were looked at.

Where the program is to be run before the training, and has replicas, it takes a batch for each: 2. goes on in the dataset, and
begins again at its end; otherwise all replicas get the same one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_piper.errors import PiperError
from lightning_piper.strategy.agreement import generators_of
from lightning_piper.strategy.world import World

EMPTY = "the training data are empty: there is no batch to capture the step with; give a loader that has at least one"


class PutBack:
    """An iterable whose first batch was drawn already, and comes first all the same when it is iterated over.

    Everything else that is asked of it (length, state, sampler) the original answers.
    """

    def __init__(self, loader: Any, iterator: Iterator[Any], first: Any) -> None:
        self.loader = loader
        self._drawn: Iterator[Any] | None = itertools.chain([first], iterator)

    def __iter__(self) -> Iterator[Any]:
        drawn, self._drawn = self._drawn, None
        return iter(self.loader) if drawn is None else drawn

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not yet set, in a copy
            raise AttributeError(name)
        return getattr(self.loader, name)


class Peek:
    """Looks at the first training batch.

    Args:
        trainer: of which the training data are meant.
        world: whose lead draws.
        transfer: from a batch as it is drawn to one as the step gets it.
        example: `example_batch`, None to draw one.
        count: batches to take.
    """

    def __init__(
        self, trainer: pl.Trainer, world: World, transfer: Callable[[Any], Any], example: Any | None, count: int = 1
    ) -> None:
        self._source, self._count = trainer.fit_loop._data_source, count
        self._world, self._transfer, self._example = world, transfer, example
        self._put_back: list[PutBack] = []
        self._source.__dict__.pop("dataloader", None)  # of a fit that failed before it was asked

    def batches(self) -> list[Any] | None:
        """Batches as the step gets them, for the lead; the others may get None.

        Raises:
            PiperError: no batch can be drawn.
        """
        if self._example is not None:
            with isolate_rng():
                return [self._transfer(self._example)] * self._count  # every process has it
        loaders = self._loaders()
        batches = self._draw(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)
        with isolate_rng():
            return self._world.on_lead(lambda: [self._transfer(batch) for batch in batches], share=False)

    def _loaders(self) -> Any:
        """What the source gives, which it gives once more when the Trainer asks it."""
        source, loaders = self._source, _request_dataloader(self._source)

        def again() -> Any:
            del source.dataloader
            return loaders

        source.dataloader = again  # type: ignore[method-assign]
        return loaders

    def _draw(self, loaders: Any) -> list[Any]:
        """Lists, tuples and dicts of loaders give batches of the same form."""
        numbers = range(self._count)
        if isinstance(loaders, list | tuple):
            parts = [self._draw(loader) for loader in loaders]
            return [type(loaders)([part[i] for part in parts]) for i in numbers]
        if isinstance(loaders, dict):
            named = {name: self._draw(loader) for name, loader in loaders.items()}
            return [{name: part[i] for name, part in named.items()} for i in numbers]
        if isinstance(loaders, DataLoader) and not isinstance(loaders.dataset, IterableDataset):
            with isolate_rng():
                drawn = self._world.on_lead(lambda: [_collate(loaders, i) for i in numbers], share=False)
            return drawn or [None] * self._count
        iterator = iter(loaders)
        try:
            first = next(iterator)
        except StopIteration:
            raise PiperError(EMPTY) from None
        self._put_back.append(PutBack(loaders, iterator, first))
        return [first] * self._count

    def with_first(self, loader: object) -> object:
        """The loader with its first batch in place again."""
        for found in self._put_back:
            if found.loader is loader:
                self._put_back.remove(found)
                return found
        return loader


def _collate(loader: DataLoader[Any], number: int) -> Any:
    """A batch's worth of samples, collated as the loader does it; another one for each number, where the order is open."""
    dataset, sampler = loader.dataset, loader.sampler
    if loader.batch_size is not None and isinstance(sampler, RandomSampler | SequentialSampler | DistributedSampler):
        total = len(dataset)  # type: ignore[arg-type]
        size = min(loader.batch_size, total)
        indices: Any = [i % total for i in range(number * size, (number + 1) * size)]
    else:
        indices = _first(loader.batch_sampler if loader.batch_sampler is not None else sampler, loader)
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[indices])
    fetch = getattr(dataset, "__getitems__", None)
    samples = fetch(list(indices)) if fetch is not None else [dataset[i] for i in indices]
    return loader.collate_fn(samples)


def _first(sampler: Any, loader: DataLoader[Any]) -> Any:
    generators = generators_of(loader)
    states = [g.get_state() for g in generators]
    try:
        return next(iter(sampler))
    except StopIteration:
        raise PiperError(EMPTY) from None
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
