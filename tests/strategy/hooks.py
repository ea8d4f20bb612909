"""Trainings in which every hook of the module and of a callback records its call, under DDP and under
programs of directives.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import PROGRAM, sharing_captures, trace, trainer, values
from tests.strategy.models import MLP, vectors

OTHERS = [
    "backward", "configure_callbacks", "configure_gradient_clipping", "configure_model",
    "configure_optimizers", "load_state_dict",
    "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad", "prepare_data", "setup", "state_dict",
    "teardown",
    "predict_dataloader", "test_dataloader", "train_dataloader", "transfer_batch_to_device", "val_dataloader",
]  # fmt: skip


def hooks_of(cls: type) -> list[str]:
    return [name for name in dir(cls) if name != "on_gpu" and (name.startswith("on_") or name in OTHERS)]


def noting(cls: type, calls: list[str]) -> type:
    """A subclass of `cls` whose hooks record their calls in `calls`."""

    def noted(name: str) -> Any:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{cls.__name__}.{name}")
            return original(self, *args, **kwargs)

        del call.__wrapped__  # this attribute would tell Lightning that nothing is overridden
        return call

    return type(cls.__name__, (cls,), {name: noted(name) for name in hooks_of(cls)})


class Module(MLP):
    """Its own data, too. Adds a parameter to its optimizer before the sanity check, and changes all after it.
    Fails in batch `fails`.
    """

    fails: int | None = None

    def train_dataloader(self) -> Any:
        return vectors()

    def val_dataloader(self) -> Any:
        return vectors(seed=1)

    test_dataloader = predict_dataloader = val_dataloader

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP"):
            hidden = self.first(batch[0])
        with piper.annotate("PP"):
            return self.second(hidden)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mean", self.predict_step(batch, batch_idx).mean())

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["optimizer"].param_groups[1]["params"].pop()  # removes the bias of the last layer
        return found

    def on_fit_start(self) -> None:
        self.trainer.optimizers[0].add_param_group({"params": [self.second[2].bias], "lr": 0.05})

    def on_train_start(self) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(1.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.fails:
            raise ZeroDivisionError


class Callback(L.Callback):
    pass


STRATEGIES: dict[str, Any] = {
    "ddp": None,
    "PP2": list(PROGRAM),
    "DP2": [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])],
    "ZeRO-3": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ],
}


def made(name: str, callbacks: list[L.Callback], **options: Any) -> tuple[L.Trainer, Module, list[str]]:
    """A Trainer, a module, and the list in which they record their calls."""
    calls: list[str] = []
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = noting(Module, calls)()
    strategy: Any = "ddp_find_unused_parameters_true"
    if STRATEGIES[name] is not None:
        strategy = piper.PiperStrategy(STRATEGIES[name], timeout=PATIENCE)
    options = {"devices": 2, "precision": "64-true", "use_distributed_sampler": False, **options}
    return trainer(strategy, [noting(Callback, calls)(), *callbacks], **options)[0], module, calls


def fit(
    name: str, folder: Path, fails: int | None = None, resume: bool = False
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Train two epochs of five batches, or the third epoch from the checkpoint of the second one. Returns the
    calls, and the values of the module and of the optimizer.
    """
    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    trained, module, calls = made(
        name,
        [save],
        max_steps=-1,
        max_epochs=3 if resume else 2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.05,
        enable_checkpointing=True,
        val_check_interval=3,
    )
    module.fails = fails
    with contextlib.suppress(ZeroDivisionError):
        trained.fit(module, ckpt_path=str(folder / "epoch=1.ckpt") if resume else None)
    found, seen = values(module), list(calls)
    if fails is None:  # the optimizer is unchanged, also after an evaluation
        trained.validate(module, verbose=False)
        trained.save_checkpoint(folder / "validated.ckpt")
        (saved,) = torch.load(folder / "validated.ckpt", weights_only=True)["optimizer_states"]
        found |= {f"{i}.{key}": x for i, state in saved["state"].items() for key, x in state.items()}
    return seen, found


def evaluate(name: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Evaluate without a fit. Returns the calls and the predictions."""
    run, module, calls = made(name, [])
    run.validate(module, verbose=False)
    run.test(module, verbose=False)
    predictions = run.predict(module)
    assert predictions is not None
    return calls, {str(i): x for i, x in enumerate(predictions)}


def trace_all(folder: Path) -> None:
    trace(Module(), next(iter(vectors())), (8, 4, 2), "training_step", precision="64-true")
    for kind in ("validation_step", "test_step", "predict_step"):
        trace(Module(), next(iter(vectors())), (8, 4, 2), kind, None, precision="64-true")


@sharing_captures
def record(rank: int, folder: Path) -> dict[str, Any]:
    assert int(os.environ["LOCAL_RANK"]) == rank
    found = {}
    for name in STRATEGIES:
        place = folder / name
        found[name] = {
            "fit": fit(name, place),
            "resumed": fit(name, place, resume=True),
            "evaluated": evaluate(name),
        }
    for name in ("ddp", "PP2"):
        found[name]["failed"] = fit(name, folder / "failed", fails=3)[0], {}
    return found
