"""Loaders with a state of their own, whose position only they know, in fits that stop in the middle of an
epoch.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import datasets
import lightning as L
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_piper as piper
from lightning_piper.strategy.loading import loaders
from tests.distributed.processes import launch_trainings
from tests.strategy.middle_of_epoch import How, fit, on_processes, samples, together

LENGTH = 48


class Stream:
    """An iterable of batches, of which each replica takes its part. Its length is not known."""

    def __init__(self, replicas: int, replica: int, length: int) -> None:
        self.replicas, self.replica, self.length, self.position = replicas, replica, length, 0

    def __iter__(self):
        while self.position < self.length:
            index, self.position = self.position, self.position + 1
            if index % self.replicas == self.replica:
                yield torch.tensor([[index / self.length]]), torch.tensor([index])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Sized(Stream):
    def __len__(self):
        return len(range(self.replica, self.length, self.replicas))

    def __iter__(self):
        if self.position + self.replicas > self.length:  # Lightning did not ask for more than the last batch
            self.position = 0
        yield from super().__iter__()


class Dividing(Stream):
    """Can continue the parts of other replicas."""

    def load_replica_states(self, states, replica, replicas):
        assert (replica, replicas) == (self.replica, self.replicas)
        self.position = max(state["position"] for state in states)


class Numbers(IterableDataset):
    """An iterable data set with a state, of which each worker takes its part."""

    def __init__(self, replicas: int, replica: int, length: int) -> None:
        self.replicas, self.replica, self.length, self.position = replicas, replica, length, 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        count, index = (1, 0) if info is None else (info.num_workers, info.id)
        own = range(self.replica + index * self.replicas, self.length, self.replicas * count)
        for number in own[self.position :]:
            self.position += 1
            yield torch.tensor([number / self.length]), number
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Bare(IterableDataset):
    """An iterable data set without a state."""

    def __iter__(self):
        return ((torch.tensor([i / LENGTH]), i) for i in range(LENGTH))


@dataclass(frozen=True)
class Of(How):
    """Replicas with loaders of a class that divides its data itself."""

    def loader(self, length, replica):
        if self.kind is StatefulDataLoader:
            data = Numbers(self.replicas, replica, length)
            return StatefulDataLoader(data, batch_size=self.batch_size, num_workers=self.workers)
        return self.kind(self.replicas, replica, length)


@dataclass(frozen=True)
class Streamed(How):
    """Replicas with streams of Hugging Face's datasets."""

    shards: int = 4  # 3: each replica takes one sample of two
    buffer: int = 0
    epoch: int = 0

    def loader(self, length, replica):
        stream = datasets.Dataset.from_dict({"x": range(length)}).to_iterable_dataset(num_shards=self.shards)
        if self.buffer:
            stream = stream.shuffle(seed=1, buffer_size=self.buffer)
        if self.replicas > 1:
            stream = split_dataset_by_node(stream, replica, self.replicas)
        return StatefulDataLoader(
            stream, batch_size=self.batch_size, num_workers=self.workers, collate_fn=numbered
        )


def numbered(rows):
    return torch.tensor([[row["x"] / LENGTH] for row in rows]), torch.tensor([row["x"] for row in rows])


CASES = {
    "a stream": Of(2, kind=Stream),
    "a stream with a length": Of(2, kind=Sized),
    "gradients are accumulated": Of(2, kind=Stream, accumulate=2),
    "a stateful data set": Of(2, kind=StatefulDataLoader),
    "a stateful data set in workers": Of(2, kind=StatefulDataLoader, workers=2),
    "Hugging Face, shards": Streamed(2),
    "Hugging Face, one sample of two": Streamed(2, shards=3),
    "Hugging Face, workers": Streamed(2, workers=2),
}


@pytest.mark.parametrize("name", CASES)
def test_as_many_replicas_continue_at_their_own_states(name, tmp_path):
    how = CASES[name]
    first = together(how, LENGTH, tmp_path / "first", 5)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, epochs=2)
    # Two batches are accumulated for an update: the fifth batch is trained again.
    lost = first[0].module.seen[0][4] + first[1].module.seen[0][4] if how.accumulate == 2 else []
    assert sorted(samples(first) + samples(second)) == sorted([*range(LENGTH), *lost])
    assert samples(second, 1) == list(range(LENGTH))


@pytest.mark.parametrize("name", [name for name in CASES if name != "a stream with a length"])
def test_after_the_last_batch_of_an_epoch_the_next_epoch_is_whole(name, tmp_path):
    how = CASES[name]
    batches = sum(len(seen) for seen in together(how, LENGTH, tmp_path / "whole")[0].module.seen.values())
    first = together(how, LENGTH, tmp_path / "first", batches)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, epochs=3)
    assert samples(first) == samples(second, 1) == samples(second, 2) == list(range(LENGTH))
    assert second[0].module.indices == [*range(batches)] * 2


@pytest.mark.parametrize(
    "name", ["a stateful data set in workers", "Hugging Face, shards", "Hugging Face, workers"]
)
def test_an_epoch_that_a_limit_ends_is_over(name, tmp_path):
    how, limit = CASES[name], {"limit_train_batches": 3}
    whole = together(how, LENGTH, tmp_path / "whole", epochs=2, **limit)
    first = together(how, LENGTH, tmp_path / "first", 3, **limit)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, epochs=2, **limit)
    assert [each.module.seen[1] for each in second] == [each.module.seen[1] for each in whole]
    assert set(second[0].module.seen) == {1}


def test_the_state_of_an_epoch_that_a_limit_ends_would_continue_it(monkeypatch, tmp_path):
    monkeypatch.setattr(loaders, "at_epoch_end", lambda loader, state: state)
    how, limit = CASES["Hugging Face, shards"], {"limit_train_batches": 3}
    first = together(how, LENGTH, tmp_path / "first", 3, **limit)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, epochs=2, **limit)
    assert set(samples(second, 1)).isdisjoint(samples(first))


class Epochs(L.Callback):
    """Gives a stream another order in each epoch, as the documentation of datasets says."""

    def on_train_epoch_start(self, trainer, module):
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


def test_a_stream_continues_in_a_later_epoch(tmp_path):
    """A stream ignores the state of another epoch than its own, which is 0 until a hook sets it."""
    how, more = Streamed(), {"more": [Epochs()], "epochs": 3}
    first = together(how, LENGTH, tmp_path / "first", 24 + 5, **more)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, **more)
    assert sorted(samples(first, 1) + samples(second, 1)) == list(range(LENGTH))
    assert samples(second, 2) == list(range(LENGTH))
    content = torch.load(first[0].path, weights_only=True)
    del content["lightning_piper"]["loaders"]["loaders"][0]["epoch"]
    torch.save(content, first[0].path)
    second = together(how, LENGTH, tmp_path / "third", path=first[0].path, **more)
    assert len(samples(first, 1) + samples(second, 1)) > LENGTH


def test_a_shuffle_buffer_warns(tmp_path):
    with pytest.warns(UserWarning, match=r"samples in the shuffle buffer .*PIPER-W029"):
        together(Streamed(buffer=8), LENGTH, tmp_path, 5)


@pytest.mark.filterwarnings("ignore:a checkpoint is in the middle")
def test_a_stream_that_is_empty_after_a_resume_is_whole_in_the_next_epoch(tmp_path):
    """All samples that are left were in the shuffle buffer."""
    how = Streamed(buffer=8)
    first = together(how, LENGTH, tmp_path / "first", 22)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path, epochs=2)
    assert len(samples(first)) == 44 and samples(second) == []
    assert samples(second, 1) == list(range(LENGTH))


@pytest.mark.parametrize(
    "how",
    [How(2), How(2, kind=StatefulDataLoader), Of(2, kind=Stream)],
    ids=["positions", "torchdata", "states"],
)
def test_processes_continue(how, tmp_path):
    """On real processes, which exchange the states; then on one."""
    path = tmp_path / "half.ckpt"
    jobs = [{"stop": 5, "save": path}, {"path": path}]
    ranks = launch_trainings(2, on_processes, tmp_path / "run", how, LENGTH, jobs)
    first, second = ([x for rank in ranks for batch in rank[index] for x in batch] for index in range(2))
    assert sorted(first + second) == list(range(LENGTH))
    if how.kind is not Stream:
        alone = fit(How(batch_size=3), lambda: How(batch_size=3).loader(LENGTH, 0), tmp_path, path=path)
        assert sorted(first + samples([alone])) == [*range(LENGTH)]


def test_another_state_loses_samples(tmp_path):
    """Without `load_replica_states`, Lightning gives each replica the state of the first, after a batch that no
    step has taken."""
    how = Of(2, kind=Stream)
    first = together(how, LENGTH, tmp_path / "first", 5)
    content = torch.load(first[0].path, weights_only=True)
    del content["lightning_piper"]["loaders"]
    torch.save(content, first[0].path)
    second = together(how, LENGTH, tmp_path / "second", path=first[0].path)
    assert len(samples(first) + samples(second)) < LENGTH


@pytest.mark.parametrize("before, after", [(2, 1), (1, 3), (3, 2)])
def test_another_number_of_replicas_with_a_method(before, after, tmp_path):
    first = together(Of(before, kind=Dividing), LENGTH, tmp_path / "first", 4)
    second = together(Of(after, kind=Dividing), LENGTH, tmp_path / "second", path=first[0].path)
    assert sorted(samples(first) + samples(second)) == list(range(LENGTH))


def test_another_number_of_replicas_needs_a_method(tmp_path):
    first = together(Of(2, kind=Stream), LENGTH, tmp_path / "first", 4)
    with pytest.raises(
        piper.PiperError,
        match=r"has the loader states of 2 replicas\. The training loader .* of 1 replica cannot .* load_replica_states",
    ):
        together(Of(1, kind=Stream), LENGTH, tmp_path / "second", path=first[0].path)
    # At the end of an epoch, there is nothing to continue.
    whole = together(Of(2, kind=Stream), LENGTH, tmp_path / "whole", 24)
    second = together(Of(1, kind=Stream), LENGTH, tmp_path / "next", path=whole[0].path, epochs=2)
    assert samples(second, 1) == list(range(LENGTH))


def test_another_number_of_workers_is_refused(tmp_path):
    how = Of(kind=StatefulDataLoader, workers=1)
    first = together(how, LENGTH, tmp_path / "first", 4)
    with pytest.raises(piper.PiperError, match=r"num_workers=1. The training loader .* num_workers=2"):
        together(Of(kind=StatefulDataLoader, workers=2), LENGTH, tmp_path / "second", path=first[0].path)


def test_a_loader_without_a_position_warns_when_it_is_saved_and_when_it_resumes(tmp_path):
    how, bare = How(), lambda: DataLoader(Bare(), batch_size=2)
    with pytest.warns(UserWarning, match=r"middle of an epoch, .* does not have a state_dict.*PIPER-W029"):
        first = fit(how, bare, tmp_path, stop=4)
    with pytest.warns(UserWarning, match=r"middle of an epoch, .*PIPER-W029"):
        second = fit(how, bare, tmp_path, path=first.path)
    assert len(samples([first]) + samples([second])) > LENGTH  # as the warning says
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="a checkpoint is in the middle")
        fit(how, bare, tmp_path, stop=24)  # the end of the epoch


def test_another_number_of_loaders_is_refused(tmp_path):
    first = together(How(), LENGTH, tmp_path / "first", 3)
    how = How()
    with pytest.raises(piper.PiperError, match="positions of 1 training loader"):
        fit(how, lambda: [how.loader(LENGTH, 0), how.loader(LENGTH, 0)], tmp_path, path=first[0].path)
