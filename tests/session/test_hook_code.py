"""What hooks look at is found in their code, however it is written, and what looks at nothing is not taken for it."""

from __future__ import annotations

import functools
import re
import types

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.nn.utils import clip_grad_value_ as clip

import lightning_piper as piper
from lightning_piper.session.hook_code import changes_gradients_of_each_batch, reads_whole
from tests.strategy.models import MLP


def total(module: L.LightningModule) -> float:
    return sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)


helpers = types.ModuleType("helpers")
helpers.total = total
helpers.shape = lambda module: module.device


class Histograms(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        for name, p in pl_module.named_parameters():
            trainer.logger.experiment.add_histogram(name, p)


class Helped(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        self.show(pl_module)

    def show(self, module):
        print(helpers.total(module))


class Norms(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.log_dict(grad_norm(pl_module, 2))


class WholeNorms(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.log_dict(piper.grad_norm(pl_module, 2))


class Clips(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


class ClipsGroups(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)


class Early(L.Callback):
    def on_train_start(self, trainer, pl_module):
        print(sum(p.numel() for p in pl_module.parameters()))


class Layer(nn.Linear):
    def show(self):
        return self.weight.norm()


class Held(MLP):
    def __init__(self):
        super().__init__()
        self.extra = Layer(2, 2)

    def on_validation_epoch_end(self):
        self.log("norm", self.extra.show())


class Rates(MLP):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        print(helpers.shape(self), batch[0].shape)


class Impatient(MLP):
    def on_after_backward(self):
        clip(self.parameters(), 1.0)


def show(scale, trainer, pl_module):
    print(scale * total(pl_module))


class Options(dict):
    __getattr__ = dict.__getitem__


class Optioned(MLP):
    """With an object whose attributes are what it likes."""

    def __init__(self):
        super().__init__()
        self.options = Options(every=2)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % self.options.every == 0:
            self.second[0].weight.clamp_(-1, 1)


def found(module=None, *callbacks):
    module = MLP() if module is None else module
    trainer = L.Trainer(callbacks=list(callbacks), accelerator="cpu", logger=False)
    module.trainer = trainer
    return reads_whole(module), changes_gradients_of_each_batch(module)


@pytest.mark.parametrize("callback, words", [
    (Histograms(), "Histograms.on_train_epoch_end may look at .*'named_parameters' in its code"),
    (Helped(), r"Helped.on_train_batch_end, by total, may look at .*'parameters' in its code"),
    (ClipsGroups(), "'param_groups' in its code"),
    (Norms(), "Norms.on_before_optimizer_step, by grad_norm, may look"),
    (cb.LambdaCallback(on_train_epoch_end=lambda trainer, module: print(module.second[0].weight)), "'weight' in its code"),
    (cb.LambdaCallback(on_train_epoch_end=functools.partial(show, 2.0)), "LambdaCallback.on_train_epoch_end, by total"),
])  # fmt: skip
def test_callbacks_that_look(callback, words):
    reads, _ = found(None, callback)
    assert reads is not None
    assert re.search(words, reads), reads


@pytest.mark.parametrize("callback", [
    WholeNorms(), Clips(), Early(), cb.LearningRateMonitor(), cb.EarlyStopping("x"), cb.ModelCheckpoint(), cb.ModelSummary(),
    cb.LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch)),
])  # fmt: skip
def test_callbacks_that_do_not(callback):
    assert found(None, callback)[0] is None


def test_modules():
    reads, _ = found(Held())
    assert reads is not None and "Held.on_validation_epoch_end, by Layer.show" in reads
    assert found(Rates()) == (None, False)
    reads, _ = found(Optioned())
    assert reads is not None and reads.startswith("Optioned.on_train_batch_end may look")
    assert found(MLP()) == (None, False)
    hooked = MLP()
    hooked.first[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))
    reads, changes = found(hooked)
    assert reads == "a hook on the gradient of 'first.0.weight' needs it whole in each process" and changes


def test_gradients_of_each_batch():
    assert found(Impatient()) == (None, True)
    assert found(None, Helped())[1]
    assert not found(None, Norms())[1] and not found(None, Clips())[1]  # with the last batch alone
