"""Training data are read as with any strategy: the step is captured with the batch on which it then runs."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from tests.capture.test_batch import Unseen
from tests.strategy.fitting import Batches, local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, vectors


class Seeing(MLP):
    """Keeps the batches on which it is trained."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append(batch[0].clone())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset):
    """Continues where it has stopped: a second iteration does not start anew."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return self

    def __next__(self):
        if not self.samples:
            raise StopIteration
        return self.samples.pop(0)


def samples():
    return list(vectors().dataset)


def batches():
    return list(vectors())


SOURCES = {
    "loader": vectors,
    "iterable dataset": lambda: DataLoader(Stream(samples()), batch_size=8),
    "generator": lambda: (batch for batch in batches()),
    "iterable": lambda: Batches(batches()),
    "own batches": lambda: DataLoader(
        vectors().dataset, batch_sampler=BatchSampler(range(40), 8, drop_last=False)
    ),
    "no collation": lambda: DataLoader(batches(), batch_size=None),
}


@pytest.mark.parametrize("source", SOURCES)
@sharing_captures
def test_no_batch_is_lost(source):
    module = Seeing()
    fit, _ = trainer(local(), max_steps=-1, max_epochs=1)
    fit.fit(module, SOURCES[source]())
    expected = [x for x, _ in batches()]
    assert len(module.seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(module.seen, expected, strict=True))


@pytest.mark.parametrize("reload", [0, 1])
def test_a_module_is_asked_for_its_data_as_often_as_on_one_device(reload):
    """What it gives can be read once; a Trainer that reloads asks anew in each epoch."""

    class Asked(Seeing):
        count = 0

        def train_dataloader(self):
            self.count += 1
            return (batch for batch in batches())

    results = []
    for strategy in ("auto", local()):
        module = Asked()
        epochs = 3 if reload else 1
        fit, _ = trainer(strategy, max_steps=-1, max_epochs=epochs, reload_dataloaders_every_n_epochs=reload)
        fit.fit(module)
        results.append((module.count, torch.stack(module.seen)))
    assert results[0][0] == results[1][0] == (3 if reload else 1)
    assert torch.equal(results[0][1], results[1][1])


def test_data_of_a_fit_that_failed_are_not_kept():
    class Fails(Seeing):
        def configure_optimizers(self):
            raise ZeroDivisionError

    fit, _ = trainer(local(), max_steps=-1, max_epochs=1)
    with pytest.raises(ZeroDivisionError):
        fit.fit(Fails(), vectors(seed=1))
    module = Seeing()
    fit.fit(module, vectors())
    assert torch.equal(module.seen[0], batches()[0][0])


def test_several_loaders():
    class Two(Seeing):
        def training_step(self, batch, batch_idx):
            return super().training_step([batch["a"][0], batch["b"][1]], batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            self.seen.append(batch["a"][0])

    module = Two()
    fit, record = trainer(local(), max_steps=-1, max_epochs=1)
    fit.fit(module, {"a": vectors(), "b": vectors(seed=1)})
    assert len(record.losses) == 5


@pytest.mark.parametrize("own", [True, False])
@sharing_captures
def test_random_numbers_go_on_as_on_one_device(own):
    """The global generators, and those that samplers have of their own."""
    data = TensorDataset(torch.arange(40.0).repeat(8, 1).T.contiguous(), torch.randn(40, 4))
    seen = []
    for strategy in ("auto", local()):
        torch.manual_seed(5)
        random.seed(5)
        generator = torch.Generator().manual_seed(7) if own else None
        sampler = BatchSampler(RandomSampler(data, generator=generator), 8, drop_last=False)
        module = Seeing()
        torch.manual_seed(5)
        fit, _ = trainer(strategy, max_steps=-1, max_epochs=2)
        fit.fit(module, DataLoader(data, batch_sampler=sampler))
        seen.append(torch.stack(module.seen))
    assert torch.equal(*seen)
    assert not torch.equal(seen[0][:5], seen[0][5:])


def test_step_sees_the_batch_after_the_transfer_hooks():
    class Hooked(MLP):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return {"x": batch[0], "y": batch[1]}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch["x"] + 1, batch["y"]

    fit, record = trainer(local(), max_steps=2)
    fit.fit(Hooked(), vectors())
    assert len(record.losses) == 2


def test_names_beside_the_tensors_make_no_new_captures():
    """Every batch has other ones; hooks see them."""
    traced, given = Unseen(), []  # what a step puts into a list would be refused
    put = traced.put

    class Named(Seeing):
        def training_step(self, batch, batch_idx):
            put().append(len(batch))
            return super().training_step(batch[:2], batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            given.extend(batch[2:])

    names = [[f"{i}.{k}" for k in range(8)] for i in range(5)]
    torch.manual_seed(0)
    initial, trained = MLP().state_dict(), []
    for data in (batches(), [[*batch, own] for batch, own in zip(batches(), names, strict=True)]):
        module = Named()
        module.load_state_dict(initial)
        fit, _ = trainer(local(verify="first_batch"), max_steps=-1, max_epochs=1)
        fit.fit(module, Batches(data))
        trained.append(values(module))
    assert traced.count(2) == traced.count(3) > 0
    assert same(*trained) and given == names


@pytest.mark.parametrize("loader", [lambda: Batches([]), lambda: DataLoader([])])
def test_without_a_batch_nothing_is_trained(loader):
    for strategy in ("auto", local()):
        module = MLP()
        before = values(module)
        fit, _ = trainer(strategy, max_steps=-1, max_epochs=1)
        fit.fit(module, loader())
        assert fit.global_step == 0 and same(values(module), before)
