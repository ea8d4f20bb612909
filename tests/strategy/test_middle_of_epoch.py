"""A fit that resumes in the middle of an epoch trains on the samples that are left, under any number of
replicas.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

import lightning_piper as piper
from tests.strategy.middle_of_epoch import How, Numbers, Seeing, fit, samples, together

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


@pytest.mark.parametrize(
    "after, options",
    [
        (How(batch_size=32, drop_last=True), {}),
        (How(batch_size=1), {"limit_train_batches": 8}),
    ],
    ids=["left out", "limited"],
)
def test_an_epoch_whose_rest_makes_no_batch_ends(after, options, tmp_path):
    first = together(How(2), LENGTH, tmp_path / "first", 6)  # 24 samples
    second = together(after, LENGTH, tmp_path / "second", None, first[0].path, epochs=2, **options)
    assert samples(second, 0) == []
    assert len(samples(second, 1)) == min(32, 8 * after.batch_size)
    assert second[0].module.indices == list(range(len(second[0].module.indices)))


def test_a_fit_of_a_number_of_steps(tmp_path):
    """With `max_steps`, Lightning resumes each epoch as one that is not complete."""
    for stop in (5, 12):  # in the middle, and at the end of the epoch
        folder = tmp_path / str(stop)
        folder.mkdir()
        first = together(How(2), LENGTH, folder / "first", stop)
        # 12 steps are an epoch of two replicas, 24 an epoch of one.
        second = together(How(1), LENGTH, folder / "second", None, first[0].path, epochs=-1, steps=stop + 14)
        taken = [x for epoch in (0, 1) for x in samples(second, epoch)]
        assert len(taken) == 28
        if stop == 5:
            assert sorted(samples(first) + samples(second)) == list(range(LENGTH))
        else:
            assert len(set(taken)) == 28 and samples(second, 0) == []


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size"])
def test_several_loaders(mode, tmp_path):
    """The shorter loader is in its second pass when the fit stops."""

    def loaders(how, replica):
        parts = {"long": how.loader(LENGTH, replica), "short": how.loader(16, replica)}
        return partial(CombinedLoader, parts, mode)

    def run(how, stop, path, name):
        folder = tmp_path / name
        folder.mkdir()
        return [
            fit(how, loaders(how, replica), folder, replica, stop, path, make=Both)
            for replica in range(how.replicas)
        ]

    def drawn(fits, name):
        return [x for each in fits for batch in each.module.drawn.get(name, []) for x in batch]

    stop = 2 if mode == "min_size" else 6
    first = run(How(2), stop, None, "first")
    second = run(How(1), None, first[0].path, "second")
    if mode != "min_size":
        assert sorted(drawn(first, "long") + drawn(second, "long")) == list(range(LENGTH))
    short = Counter(drawn(first, "short") + drawn(second, "short")[: 16 - 4 * stop % 16])
    passes = {"min_size": 1, "max_size": 1, "max_size_cycle": 2}
    assert set(short.values()) == {passes[mode]} and len(short) == 16


class Both(Seeing):
    """Notes the samples of two loaders."""

    def __init__(self):
        super().__init__()
        self.drawn = {}

    def training_step(self, batch, batch_idx):
        return self.layer(batch["long"][0]).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for name, part in batch.items():
            self.drawn.setdefault(name, []).append([] if part is None else part[1].tolist())


def test_validation_comes_at_the_same_place_of_the_epoch(tmp_path):
    first = together(How(2), LENGTH, tmp_path / "first", 8)
    at = Validated()
    how = How(1)
    second = fit(
        how, partial(how.loader, LENGTH, 0), tmp_path, path=first[0].path, more=[at], make=Evaluated,
        val_check_interval=0.25,
    )  # fmt: skip
    assert at.indices == [17, 23]  # batches 0 to 15 were trained before
    assert len(samples([second])) == 16


class Evaluated(Seeing):
    def validation_step(self, batch, batch_idx):
        pass

    def val_dataloader(self):
        return How(shuffle=False).loader(4, 0)


class Validated(L.Callback):
    def __init__(self):
        self.indices = []

    def on_validation_start(self, trainer, module):
        if not trainer.sanity_checking:
            self.indices.append(module.indices[-1])


class Learning(Sampler):
    """Draws sample by sample. It never ends, and each sample depends on what was drawn and trained before."""

    def __init__(self, ends=False):
        self.trained, self.ends, self.asked = 0, ends, 0

    def __len__(self):
        return LENGTH

    def __iter__(self):
        for number in itertools.count():
            if self.ends and number == LENGTH:
                return
            self.asked += 1
            yield (number + 7 * self.trained) % LENGTH

    def note(self, *args):
        self.trained += 1


@pytest.mark.parametrize("ends", [True, False])
def test_a_sampler_draws_when_a_sample_is_needed(ends, tmp_path):
    """As with a plain Trainer, until a checkpoint has the order of the epoch."""
    sampler, how = Learning(ends), How()
    after = L.pytorch.callbacks.LambdaCallback(on_train_batch_end=sampler.note)
    make = lambda: DataLoader(Numbers(LENGTH), batch_size=2, sampler=sampler)  # noqa: E731
    found = fit(how, make, tmp_path, more=[after], epochs=1).module.seen[0]
    assert found == [
        [(i + 7 * (i // 2)) % LENGTH, (i + 1 + 7 * (i // 2)) % LENGTH] for i in range(0, LENGTH, 2)
    ]
    assert sampler.asked == LENGTH
    sampler.trained = 0
    first = fit(how, make, tmp_path, more=[after], stop=5)
    rest = fit(how, make, tmp_path, path=first.path).module.seen[0]
    drawn = [(i + 7 * (i // 2)) % LENGTH if i < 10 else (i + 7 * 4) % LENGTH for i in range(LENGTH)]
    assert [
        sample for batch in first.module.seen[0] + rest for sample in batch
    ] == drawn  # the checkpoint was saved before the fifth `note`


class Wrapping(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


def test_a_loader_whose_batches_are_not_counted_says_so(tmp_path):
    with pytest.warns(UserWarning, match=r"Wrapping, which has its own __iter__\. .*PIPER-W029"):
        fit(How(), lambda: Wrapping(Numbers(LENGTH), batch_size=2), tmp_path, stop=4)


@pytest.mark.parametrize("kind", [DataLoader, S])
def test_an_epoch_that_begins_with_a_resumed_fit_is_resumed_in_its_middle(kind, tmp_path):
    """Lightning counts the epoch after a checkpoint of a last batch as ended while it runs."""
    how, path, fits = How(2, kind=kind), None, []
    for number, stop in enumerate((12, 3, 4, None)):
        folder = tmp_path / str(number)
        fits.append(together(how, LENGTH, folder, stop, path, epochs=3))
        path = fits[-1][0].path
    assert sorted(itertools.chain(*(samples(each, 1) for each in fits))) == list(range(LENGTH))
    assert samples(fits[-1], 2) == list(range(LENGTH))
    indices = [each[0].module.indices for each in fits]
    assert indices == [[*range(12)], [0, 1, 2], [3, 4, 5, 6], [*range(7, 12), *range(12)]]
