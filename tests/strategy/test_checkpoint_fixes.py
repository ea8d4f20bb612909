"""Messages about checkpoints and gradients, each with a fit that triggers it and the fix that it names."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest

import lightning_piper as piper
from lightning_piper.strategy import consolidate
from lightning_piper.strategy.checks import check_runs_once
from tests.errors.case import GROUPS, PLACES, REPLICATE, SPLIT, batch, net
from tests.strategy.fitting import Batches, local, trainer
from tests.strategy.test_step_fixes import hook


class Own:
    """An object that a checkpoint has, and that `weights_only` does not load."""


class Keeps(L.Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        checkpoint["own"] = Own()


class Saves(L.Callback):
    """Saves in one of its hooks."""

    def __init__(self, name: str) -> None:
        setattr(self, name, lambda trainer, *given: trainer.save_checkpoint("b.ckpt"))


def fit(
    module: Any = None, path: str | None = None, *callbacks: L.Callback, program: Any = PLACES, **options: Any
) -> L.Trainer:
    how = {key: options.pop(key) for key in ("weights_only",) if key in options}
    made, _ = trainer(local(program, checkpoint="sharded"), callbacks, **{"max_steps": 2, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module or net("pass", MOMENTUM), Batches([batch()] * 2), ckpt_path=path, **how)
    return made


def saved(*callbacks: L.Callback) -> str:
    fit(None, None, *callbacks, max_steps=1).save_checkpoint("a.ckpt")
    return "a.ckpt"


def multiplied(line: str, factor: str, **options: Any) -> L.Trainer:
    return fit(net(line, hook("backward(self, loss)", f"(loss * ({factor})).backward()")), **options)


def folder(name: str) -> str:
    Path(name).mkdir(exist_ok=True)
    (Path(name) / "notes.txt").touch()
    return name


MOMENTUM = ("lr=0.1)", "lr=0.1, momentum=0.9)")
CLAMP = "loss.register_hook(lambda grad: grad.clamp(max=0.3))"
INDEX = "1 + self.trainer.fit_loop.epoch_loop.batch_idx"
REPLICAS: dict[str, Any] = {"program": (*GROUPS, SPLIT, REPLICATE), "accumulate_grad_batches": 2}
CASES: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "an object": (
        lambda: fit(None, saved(Keeps())),
        r"Own, which weights_only=True does not load\. If you trust the checkpoint, pass weights_only=False to the call "
        r"that loads it, such as trainer\.fit",
        lambda: fit(None, "a.ckpt", weights_only=False),
    ),
    "a folder": (
        lambda: fit().save_checkpoint(folder("runs")),
        r"Give the name of a file, such as '.*/runs/last\.ckpt'",
        lambda: fit().save_checkpoint("runs/last.ckpt"),
    ),
    "a folder for the converted file": (
        lambda: consolidate(saved(), folder("runs")),
        r"Give the name of a file that does not exist yet, such as 'plain\.ckpt'",
        lambda: consolidate("a.ckpt", "plain.ckpt"),
    ),
    "an early save": (
        lambda: fit(None, saved(), Saves("on_train_start")),
        r"cannot be saved before\. Save after the first step",
        lambda: fit(None, "a.ckpt", Saves("on_train_batch_end")),
    ),
    "factors of an accumulation": (
        lambda: multiplied("pass", INDEX, **REPLICAS),
        r"Use one factor for all batches of an accumulation",
        lambda: multiplied("pass", "2", **REPLICAS),
    ),
    "a factor": (
        lambda: multiplied(CLAMP, "0.5"),
        r"Multiply the loss in training_step instead",
        lambda: multiplied(f"loss = loss * 0.5; {CLAMP}", "1"),
    ),
    "a second run of the closure": (
        lambda: check_runs_once(False),
        r"this process has only some of the parameters\. Use an optimizer that runs the closure once",
        lambda: check_runs_once(True),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fix_of_a_message_works(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong, says, fixed = CASES[name]
    with pytest.raises(piper.PiperError, match=says):
        wrong()
    fixed()
