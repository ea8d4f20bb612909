"""Hooks that read gradients are recognized by their code in whatever way it is written, and no other hook is
taken for one.
"""

from __future__ import annotations

import functools
import types

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as cb
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_value_ as clip

from lightning_piper.session.hook_code import hooks_may_use_gradients
from tests.strategy.models import MLP


def total(module: L.LightningModule) -> float:
    return sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None)


helpers = types.ModuleType("helpers")
helpers.total = total
helpers.shape = lambda module: module.device


class Helped(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        self.show(pl_module)

    def show(self, module):
        print(helpers.total(module))


class Norms(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        pl_module.log_dict(grad_norm(pl_module, 2))


class Clips(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


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
    """A module with an object that answers any attribute."""

    def __init__(self):
        super().__init__()
        self.options = Options(every=2)

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % self.options.every == 0:
            self.second[0].weight.clamp_(-1, 1)


class Hooked(MLP):
    def __init__(self):
        super().__init__()
        self.first[0].weight.register_hook(lambda grad: grad.clamp(-1, 1))


@pytest.mark.parametrize(("looks", "module", "callbacks"), [
    (True, Impatient(), []),
    (True, Hooked(), []),
    (True, MLP(), [Helped()]),
    (True, MLP(), [cb.LambdaCallback(on_train_batch_end=functools.partial(show, 2.0))]),
    (False, MLP(), [cb.LambdaCallback(on_train_epoch_end=functools.partial(show, 2.0))]),
    (False, MLP(), [Norms(), Clips()]),  # they read gradients only after the last batch
    (False, Rates(), [cb.LearningRateMonitor(), cb.EarlyStopping("x")]),
    (False, Optioned(), []),
])  # fmt: skip
def test_gradients_of_each_batch(looks, module, callbacks):
    module.trainer = L.Trainer(callbacks=callbacks, accelerator="cpu", logger=False)
    assert hooks_may_use_gradients(module) == looks
