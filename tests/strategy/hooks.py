"""Trainings in which every hook of the module and of a callback notes its call: under DDP, and under programs of directives."""

from __future__ import annotations

import contextlib
import functools
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, sharing_captures, trainer, values
from tests.strategy.models import MLP, vectors

OTHERS = [
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model", "configure_optimizers", "load_state_dict",
    "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "prepare_data", "setup", "state_dict", "teardown",
    "train_dataloader", "transfer_batch_to_device",
]  # fmt: skip


def hooks_of(cls: type) -> list[str]:
    return [name for name in dir(cls) if name != "on_gpu" and (name.startswith("on_") or name in OTHERS)]


def noting(cls: type, calls: list[str]) -> type:
    """`cls`, with hooks that note their calls."""

    def noted(name: str) -> Any:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{cls.__name__}.{name}")
            return original(self, *args, **kwargs)

        del call.__wrapped__  # by which Lightning would see that nothing is overridden
        return call

    return type(cls.__name__, (cls,), {name: noted(name) for name in hooks_of(cls)})


class Module(MLP):
    """Its own data, too. Fails in batch `fails`."""

    fails: int | None = None

    def train_dataloader(self) -> Any:
        return vectors()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails:
            raise ZeroDivisionError


class Callback(L.Callback):
    pass


STRATEGIES: dict[str, Any] = {
    "ddp": None,
    "PP2": list(PROGRAM),
    "DP2": [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])],
    "ZeRO-3": [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1], shard_params=True)],
    "example": list(PROGRAM),  # with an `example_batch`
}


def fit(name: str, folder: Path, fails: int | None = None, resume: bool = False) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Two epochs of five batches, or the third one from the checkpoint of the second; the calls, and the module's values."""
    calls: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = noting(Module, calls)()
    module.fails = fails
    strategy: Any = "ddp_find_unused_parameters_true"
    if STRATEGIES[name] is not None:
        example = next(iter(vectors())) if name == "example" else None
        strategy = piper.PiperStrategy(STRATEGIES[name], example_batch=example, timeout=timedelta(seconds=60))
    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trained, _ = trainer(
        strategy, [noting(Callback, calls)(), save], devices=2, max_steps=-1, max_epochs=3 if resume else 2, precision="64-true",
        accumulate_grad_batches=2, gradient_clip_val=0.05, enable_checkpointing=True, use_distributed_sampler=False,
    )  # fmt: skip
    with contextlib.suppress(ZeroDivisionError):
        trained.fit(module, ckpt_path=str(folder / "epoch=1.ckpt") if resume else None)
    return calls, values(module)


@sharing_captures
def record(rank: int, folder: Path) -> dict[str, Any]:
    assert int(os.environ["LOCAL_RANK"]) == rank
    found = {}
    for name in STRATEGIES:
        place = folder / name
        found[name] = {"fit": fit(name, place), "resumed": fit(name, place, resume=True)}
    for name in ("ddp", "PP2"):
        found[name]["failed"] = fit(name, folder / "failed", fails=3)[0], {}
    return found
