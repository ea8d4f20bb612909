"""A fit that resumes in the middle of an epoch trains on the samples that are left, under any number of
replicas.
"""

from __future__ import annotations

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_piper as piper
from tests.strategy.middle_of_epoch import How, samples, together

S = StatefulDataLoader
CASES = {
    "one replica, shuffled": (How(), 3, How()),
    "1 to 2 replicas": (How(), 3, How(replicas=2)),
    "2 to 1 replicas": (How(replicas=2), 3, How()),
    "2 to 3 replicas, workers": (How(2, workers=1), 3, How(3, workers=2)),
    "4 to 2 replicas, other batches": (How(4), 2, How(2, batch_size=3)),
    "3 to 4 replicas, torchdata": (How(3, kind=S), 2, How(4, kind=S)),
    "2 to 1 replicas, torchdata with workers": (How(2, kind=S, workers=2), 3, How(kind=S, workers=1)),
    "in order": (How(shuffle=False), 5, How(2, shuffle=False)),
    "last batches left out": (How(2, 3, drop_last=True), 2, How(3, 2, drop_last=True)),
    "accumulated": (How(2, accumulate=2), 4, How(1, accumulate=3)),
}
LENGTH = 48


@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_trained_once(name, tmp_path):
    before, stop, after = CASES[name]
    first = together(before, LENGTH, tmp_path / "first", stop)
    second = together(after, LENGTH, tmp_path / "second", path=first[0].path, epochs=2)
    assert sorted(samples(first) + samples(second)) == list(range(LENGTH))
    assert samples(second, 1) == list(range(LENGTH))  # the next epoch is whole
    # Batches have the indices that they have in a whole epoch, and validation and schedules count on them.
    whole = LENGTH // (after.batch_size * after.replicas)
    done = stop * before.batch_size * before.replicas // (after.batch_size * after.replicas)
    assert second[0].module.indices[: whole - done] == list(range(done, whole))


def test_another_position_trains_samples_twice(tmp_path):
    first = together(How(2), LENGTH, tmp_path / "first", 3)
    content = torch.load(first[0].path, weights_only=True)
    content["lightning_piper"]["loaders"]["loaders"][0]["taken"] -= 4
    torch.save(content, tmp_path / "wrong.ckpt")
    second = together(How(1), LENGTH, tmp_path / "second", path=tmp_path / "wrong.ckpt")
    assert len(samples(first) + samples(second)) == LENGTH + 4


def test_a_checkpoint_between_two_updates_trains_the_accumulated_batches_again(tmp_path):
    how = How(2, accumulate=3)
    first = together(how, LENGTH, tmp_path / "first", 5)
    second = together(How(3, accumulate=2), LENGTH, tmp_path / "second", path=first[0].path)
    done = [sample for each in first for batch in each.module.seen[0][:3] for sample in batch]
    assert sorted(done + samples(second)) == list(range(LENGTH))


def test_an_epoch_in_three_parts(tmp_path):
    first = together(How(3), LENGTH, tmp_path / "first", 2)
    second = together(How(1, 3), LENGTH, tmp_path / "second", 4, first[0].path)
    third = together(How(2, 3, workers=1), LENGTH, tmp_path / "third", None, second[0].path)
    assert sorted(samples(first) + samples(second) + samples(third)) == list(range(LENGTH))


def test_as_many_replicas_train_on_the_same_batches_as_without_a_checkpoint(tmp_path):
    how = How(2)
    whole = together(how, LENGTH, tmp_path / "whole", epochs=2)
    first = together(how, LENGTH, tmp_path / "first", 5)
    second = together(how, LENGTH, tmp_path / "second", None, first[0].path, epochs=2)
    # `fit` seeds a resumed fit otherwise, and Lightning's sampler has the seed of the fit.
    for replica in range(2):
        begun, rest = first[replica].module.seen, second[replica].module.seen
        assert begun[0] + rest[0] == whole[replica].module.seen[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_epoch_has_its_own_order(workers, tmp_path):
    """Workers draw samples before Lightning sets the epoch of the sampler."""
    how = How(2, workers=workers)
    whole = together(how, LENGTH, tmp_path / "whole", epochs=2, reseed=False)
    first = together(how, LENGTH, tmp_path / "first", 12, reseed=False)
    second = together(how, LENGTH, tmp_path / "second", None, first[0].path, epochs=2, reseed=False)
    assert second[0].module.seen[1] == whole[0].module.seen[1]
    assert whole[0].module.seen[0] != whole[0].module.seen[1]


def test_the_loader_has_its_own_sampler_afterwards(tmp_path):
    how = How()
    (found,) = together(how, LENGTH, tmp_path / "first", 2)
    loader = found.trainer.train_dataloader
    assert loader.batch_sampler.sampler is loader.sampler


def test_another_data_set_is_refused(tmp_path):
    first = together(How(2), LENGTH, tmp_path / "first", 3)
    with pytest.raises(piper.PiperError, match=r"epoch of 48 samples, but .* has 40 samples") as error:
        together(How(2), 40, tmp_path / "second", path=first[0].path)
    assert "PIPER-K012" in str(error.value)
