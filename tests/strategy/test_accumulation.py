"""Gradients of several batches are summed over replicas once, with the last batch. All processes have the
same loss scale.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

import lightning_piper as piper
from tests.groups import marked
from tests.strategy.fitting import PROGRAM, distance, local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, Model, vectors
from tests.strategy.replicated import dp2
from tests.strategy.sharded import fit
from tests.strategy.sharded_jobs import ALONE, BRAINS, QUICK, ROUNDING, SCALED, SUMS, Job


def test_accumulation_with_clipping_is_that_of_one_device(sharded_ranks, folder):
    """With two kinds of shards, and a parameter that both stages use."""
    job = SUMS[-1]
    one = fit(job, folder, None)
    for rank in sharded_ranks(job.name):
        assert distance(one["values"], rank["values"]) < ROUNDING
    # Negative control: without accumulation.
    other = fit(
        Job("", "", samples=28, options={**job.options, "accumulate_grad_batches": 1}, change=job.change),
        folder,
        None,
    )
    assert distance(other["values"], sharded_ranks(job.name)[0]["values"]) > 1e-3


@pytest.mark.parametrize("job", marked(SUMS, QUICK), ids=lambda job: job.name)
def test_what_is_not_sharded_is_summed_once(job, sharded_ranks):
    """Buckets summed after each of four batches, of which two and two are accumulated."""
    for rank, outcome in enumerate(sharded_ranks(job.name)):
        first, second, third, fourth = outcome["sums"]
        assert second > 1 and (third, fourth) == (second + first, 2 * second)
        if job.program in ("dp2 zero0", "dp2 zero1"):
            assert first == 0
        elif job.program == "dp2 zero3" or rank % 2 == 0:
            assert first == second / 2
        else:
            assert first == 1  # the tied parameter, whose gradients are sharded on the other stage


@sharing_captures
def test_the_last_batch_of_an_epoch_closes_an_accumulation():
    results = []
    for strategy in ("auto", local(dp2())):
        torch.manual_seed(0)
        module = MLP()
        run, _ = trainer(strategy, accumulate_grad_batches=3, max_steps=-1, max_epochs=2)
        run.fit(module, vectors())  # five batches: three, and two
        assert run.global_step == 4
        results.append({name: x.detach().clone() for name, x in module.state_dict().items()})
    assert distance(*results) < ROUNDING


class Weighted(MLP):
    def backward(self, loss):
        (loss * (1 + self.trainer.fit_loop.epoch_loop.batch_idx)).backward()


class Forgetful(MLP):
    def backward(self, loss):
        if self.trainer.fit_loop.epoch_loop.batch_idx:
            loss.backward()


@pytest.mark.parametrize("kind, words", [
    (Weighted, r"different factors \(1, 2\)"),
    (Forgetful, "backward did not run on the loss of an earlier batch"),
])  # fmt: skip
@sharing_captures
def test_factors_that_cannot_be_told_apart_are_refused(kind, words):
    run, record = trainer(local(dp2()), accumulate_grad_batches=2)
    with pytest.raises(piper.PiperError, match=words):
        run.fit(kind(), vectors())
    assert len(record.losses) == 1


class Impatient(MLP):
    def on_after_backward(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Clamping(MLP):
    def on_after_backward(self):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.01, 0.01)


class Hooked(MLP):
    def configure_optimizers(self):
        for p in self.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return super().configure_optimizers()


class Indirect(MLP):
    """Clips gradients in a way that the search of the code does not find."""

    def on_after_backward(self):
        getattr(torch.nn.utils, "clip_grad_norm" + "_")(self.parameters(), 0.05)


@sharing_captures
@pytest.mark.parametrize("kind", [Impatient, Clamping, Hooked])
def test_hooks_that_look_at_the_gradients_of_each_batch(kind):
    """They are summed over replicas with each batch, then: not with the last one of an accumulation alone."""
    found = {}
    for name, strategy, each in [
        ("one", "auto", kind),
        ("replicas", local(dp2()), kind),
        ("control", "auto", MLP),
    ]:
        torch.manual_seed(0)
        module = each()
        run, _ = trainer(strategy, accumulate_grad_batches=2, max_steps=-1, max_epochs=2)
        run.fit(module, vectors())
        found[name] = {name: x.detach().clone() for name, x in module.state_dict().items()}
    assert distance(found["one"], found["replicas"]) < ROUNDING
    assert distance(found["one"], found["control"]) > 1e-3


@sharing_captures
def test_norms_of_gradients_that_are_kept_back():
    run, record = trainer(local(dp2()), accumulate_grad_batches=2)
    with pytest.raises(piper.PiperError, match="in the middle of a gradient accumulation"):
        run.fit(Indirect(), vectors())
    assert record.losses == []
    run, record = trainer(local(), accumulate_grad_batches=2)  # nothing is kept back without replicas
    run.fit(Indirect(), vectors())
    assert record.losses
    assert torch.nn.utils.get_total_norm is torch.nn.utils.clip_grad._get_total_norm


@sharing_captures
def test_factors_may_differ_where_nothing_is_kept():
    run, record = trainer(local(), accumulate_grad_batches=2)
    run.fit(Weighted(), vectors())
    assert record.losses


# Loss scale


@pytest.mark.parametrize("job", marked(SCALED, QUICK), ids=lambda job: job.name)
def test_an_overflow_on_one_rank_is_one_of_all(job, sharded_ranks, folder):
    one, half = fit(job, folder, None), fit(job, folder, "local")
    assert one["scales"] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    for rank in sharded_ranks(job.name):
        assert rank["scales"] == one["scales"]
        # float16: 2**-11 of a number, more for sums of them. Measured: 1.2e-3 after four steps.
        assert distance(one["values"], rank["values"]) < 5e-3
        assert distance(half["values"], rank["values"]) == 0
        torch.testing.assert_close(
            torch.stack(rank["losses"]), torch.stack(one["losses"]), rtol=5e-3, atol=5e-3
        )
    saved = [
        torch.load(folder / f"{job.name}, {how}, step=5.ckpt", weights_only=True)["MixedPrecision"]
        for how in ("process", None)
    ]
    assert saved[0] == saved[1] and saved[0]["scale"] == 2048.0


def test_ranks_that_do_not_agree_train_something_else(sharded_ranks, folder):
    one = fit(ALONE, folder, None)
    first, second = sharded_ranks(ALONE.name)
    assert first["scales"] != second["scales"]
    assert distance(one["values"], first["values"]) > 0.05


@pytest.mark.parametrize("job", marked(BRAINS, QUICK), ids=lambda job: job.name)
def test_gradients_summed_in_another_dtype(job, sharded_ranks, folder):
    one, same = fit(job, folder, None), fit(job, folder, "local")
    for rank in sharded_ranks(job.name):
        assert {x.dtype for x in rank["values"].values()} == {torch.bfloat16}
        assert distance(same["values"], rank["values"]) == 0
        assert distance(one["values"], rank["values"]) < 0.05  # bfloat16: 2**-8 of a number; measured 0.02


class Steep(Model):
    """A model whose gradients overflow in float16 with a scale of 2**16, but not with a scale of 2**14."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 4), torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with piper.annotate("PP"):
            hidden = self.first(x)
        with piper.annotate("PP"):
            return self.done((self.second(hidden) * y).mean() * 32)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Scales(L.Callback):
    """Records the scale of the loss before each step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        self.found.append(trainer.precision_plugin.scaler.get_scale())


@sharing_captures
def scales_of(strategy: Any, accumulated: int) -> list[float]:
    """The scale of the loss before each step."""
    torch.manual_seed(0)
    scales = Scales()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    options = {
        "accumulate_grad_batches": accumulated,
        "plugins": [precision],
        "max_steps": 6,
        "max_epochs": -1,
    }
    run, _ = trainer(strategy, [scales], **options)
    run.fit(Steep(), vectors())
    return scales.found


def test_gradients_overflow_in_the_steps_in_which_they_do_on_one_device():
    """Lightning divides a loss by the number of batches before it is scaled. Without microbatches, which are
    rounded alone.
    """
    four, one = scales_of("auto", 4), scales_of("auto", 1)
    for accumulated, alone in ((4, four), (1, one)):
        assert scales_of(local(PROGRAM[:2]), accumulated) == alone
    assert four[2] > one[2]  # overflows depend on the division


class Counting(MLP):
    """Counts the batches that it has seen in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.count.add_(1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        pass


def test_a_checkpoint_in_the_middle_of_an_accumulation_ends_with_the_same_weights(tmp_path):
    """The fit that resumes takes the batch since the last update again, which its buffers count twice."""
    found = []
    for path in (None, tmp_path / "step=1.ckpt"):
        save = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, save_on_train_epoch_end=False)
        options = {"accumulate_grad_batches": 2, "val_check_interval": 3, "enable_checkpointing": True}
        alone, _ = trainer(local(), [save], max_steps=-1, max_epochs=1, **options)
        torch.manual_seed(0)
        module = Counting()
        alone.fit(module, vectors(32, batch_size=4), vectors(4), ckpt_path=path)
        found.append(values(module))
    assert [int(each.pop("count")) for each in found] == [8, 9]
    assert same(*found)
