"""Messages about training steps, each with a step that triggers it and the fix that it names."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import lightning_piper as piper
from tests.errors.case import PLACES, SPLIT, batch, net
from tests.strategy.fitting import Batches, local, trainer

Change = tuple[str, str]
# a line of the step, and other changes of the module
Step = tuple[Any, ...]


def hook(head: str, line: str) -> Change:
    method = f"def {head}:\n        {line}\n\n    "
    return "def configure_optimizers", f"{method}def configure_optimizers"


def attribute(line: str) -> Change:
    return "self.seen, ", f"{line}\n        self.seen, "


def fit(step: Step, more: Any = None) -> None:
    given = batch() if more is None else (*batch(), more)
    program = [*PLACES, SPLIT]
    made, _ = trainer(local(program, capture="always"), max_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(net(*step), Batches([given] * 2))


BEFORE, END = (
    "on_train_batch_start(self, batch, batch_idx)",
    "on_train_batch_end(self, outputs, batch, batch_idx)",
)
UPDATE = "on_before_optimizer_step(self, optimizer)"
MEAN = attribute("self.mean = 0.0")
BUFFER = attribute("self.register_buffer('mean', torch.zeros(()))")
THIRD = attribute("self.third = nn.Linear(6, 6)")
MORE = ("x, y = batch", "x, y, more = batch")
# name: the wrong step, the message, the step with the fix
CASES: dict[str, tuple[Step, str, Step]] = {
    "a power": (
        ("loss = loss * 2 ** int(y.sum() > 0)",),
        r"as a Python number \(such as a size or an argument of a function\).*Compute with tensors",
        ("loss = loss * 2 ** (y.sum() > 0).long()",),
    ),
    "an index": (
        ("loss = loss + h[int(y.sum() > 0)].mean()",),
        r"x\.index_select\(0, index\.reshape\(1\)\)",
        ("loss = loss + h.index_select(0, (y.sum() > 0).long().reshape(1)).mean()",),
    ),
    "an array": (
        ("self.seen.append(h.detach().numpy())",),
        r"Compute with tensors, or make the array in a hook",
        ("pass", hook(END, "self.seen.append(outputs['loss'].detach().numpy())")),
    ),
    "a mask": (
        ("loss = loss + h[h > 0].mean()",),
        r"Use torch\.where, a product with a mask",
        ("loss = loss + torch.where(h > 0, h, 0).mean() + (h * (h > 0)).mean()",),
    ),
    "a running mean of numbers": (
        ("self.mean = 0.9 * self.mean + 0.1 * loss.item()", MEAN),
        r"changes self\.mean\..*write it into a buffer instead \(register_buffer, copy_\)",
        ("self.mean.copy_(0.9 * self.mean + 0.1 * loss.detach())", BUFFER),
    ),
    "a running mean that the step reads": (
        ("self.mean = 0.9 * self.mean + 0.1 * loss.item(); loss = loss + 0 * self.mean", MEAN),
        r"changes self\.mean\..*Change it in a hook, such as on_train_batch_end",
        (
            "loss = loss + 0 * self.mean",
            MEAN,
            hook(END, "self.mean = 0.9 * self.mean + 0.1 * outputs['loss'].item()"),
        ),
    ),
    "a submodule": (
        ("self.third = nn.Linear(6, 6); loss = loss + 0 * self.third(h).mean()",),
        r"creates the submodule self\.third.*Create it in __init__",
        ('\n        with piper.annotate("PP", 1): loss = loss + 0 * self.third(h).mean()', THIRD),
    ),
    "a log in the backward pass": (
        ("h.register_hook(lambda grad: self.log('norm', grad.norm()))",),
        r"Log the gradients of parameters in on_before_optimizer_step: self\.log_dict\(piper\.grad_norm\(self, 2\)\)",
        ("pass", hook(UPDATE, "self.log_dict(piper.grad_norm(self, 2))")),
    ),
    "a gradient": (
        ("loss = loss if self.first.weight.grad is None else 2 * loss",),
        r"Read gradients in a hook, such as on_before_optimizer_step",
        ("pass", hook(UPDATE, "assert self.first.weight.grad.norm() > 0")),
    ),
    "a parameter in place": (
        ("self.first.weight.data.clamp_(-1, 1)",),
        r"Change it in a hook, such as on_train_batch_start",
        ("pass", hook(BEFORE, "self.first.weight.data.clamp_(-1, 1)")),
    ),
    "a joined batch": (
        ("h = self.all_gather(h)",),
        r"calls self\.trainer\.strategy\.all_gather\(\).*To join the samples of all processes, use piper\.gather_samples",
        ('\n        with piper.annotate("PP", 1): loss = loss + 0 * piper.gather_samples(h).mean()',),
    ),
    "a setting of the Trainer": (
        ("self.trainer.should_stop = True",),
        r"sets self\.trainer\.should_stop.*Do it in a hook, such as on_train_batch_end",
        ("pass", hook(END, "self.trainer.should_stop = True")),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fix_of_a_message_works(name: str) -> None:
    wrong, says, fixed = CASES[name]
    with pytest.raises(piper.PiperError, match=says):
        fit(wrong)
    fit(fixed)


BATCHES: dict[str, tuple[str, Any, str, str, Any]] = {
    "a list of samples": (
        "loss = loss * torch.tensor(more).mean()",
        [1.0] * 8,
        r"Make it a tensor in the collate function",
        "loss = loss * more.mean()",
        torch.ones(8),
    ),
    "a list for all samples": (
        "loss = loss * torch.tensor(more).mean()",
        [1.0] * 8,
        r"if its entries do not belong to samples, a dict",
        "loss = loss * torch.tensor(list(more.values())).mean()",
        {str(i): 1.0 for i in range(8)},
    ),
    "an array": (
        "loss = loss + more.mean()",
        batch()[0].numpy(),
        r"Convert the array first with torch\.as_tensor",
        "loss = loss + torch.as_tensor(more).mean()",
        batch()[0].numpy(),
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_the_fix_of_a_message_about_the_batch_works(name: str) -> None:
    wrong, given, says, fixed, converted = BATCHES[name]
    with pytest.raises(piper.PiperError, match=says):
        fit((wrong, MORE), given)
    fit((fixed, MORE), converted)
