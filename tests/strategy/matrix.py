"""Trains with everything that people do with a Trainer, under every kind of strategy. `train` runs all
scenarios of some rows, one after another in the same processes; `one_device` runs them with a plain Trainer
on the batches of all replicas together.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import lightning_piper as piper
from lightning_piper.directives import Directive
from tests.distributed.processes import PATIENCE
from tests.strategy import evaluated
from tests.strategy.fitting import QUIET, Record, sharing_captures, trace, values
from tests.strategy.matrix_nets import KINDS, Net, Optimizer, adamw, sgd
from tests.strategy.replicated import dp2
from tests.strategy.sharded import LEVELS, pp2_dp2

Outcome = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """The module, the directives and the number of processes of a row, and the number of replicas whose
    batches they read.
    """

    kind: str
    program: Callable[[], list[Directive]]
    processes: int
    replicas: int


def replicas(level: int) -> list[Directive]:
    """Directives for replicas of the whole step, without microbatches."""
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], **LEVELS[level]),
    ]


ROWS = {
    "PP2": Row("captured", lambda: piper.schedules.one_f_one_b(stages=2, microbatches=2), 2, 1),
    "DP2": Row("captured", dp2, 2, 2),
    **{
        f"PP2xDP2 ZeRO-{level}": Row("captured", lambda level=level: pp2_dp2(level, level), 4, 2)
        for level in (1, 2, 3)
    },  # type: ignore[misc]
    **{
        f"{kind}, DP2{f' ZeRO-{level}' if level else ''}": Row(
            kind, lambda level=level: replicas(level), 2, 2
        )  # type: ignore[misc]
        for kind in KINDS
        if not KINDS[kind].captured
        for level in LEVELS
    },
}
ONE_DEVICE = {kind: Row(kind, list, 1, 1) for kind in KINDS}
UNDIVIDED = Row(
    "captured", lambda: piper.schedules.one_f_one_b(stages=2, microbatches=2)[:2], 2, 1
)  # no microbatches


def net(kind: str, optimizer: Optimizer = sgd, seed: int = 0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return KINDS[kind].module(optimizer)


def data(samples: int, seed: int) -> Dataset[Any]:
    """A dataset with something to learn, and noise. It is in single precision; a Trainer in double precision
    converts it.
    """
    x, noise = (x.float() for x in evaluated.data(samples, seed).tensors)
    return TensorDataset(x, x[:, :4] + noise / 2)


class Norms(L.Callback):
    """Records the norm of all gradients together before they are clipped."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        self.norms.append(float(piper.grad_norm(module, 2)["grad_2.0_norm_total"]))


@dataclass(frozen=True)
class Run:
    """How a scenario runs, and its folder."""

    row: Row
    folder: Path

    @property
    def on_one_device(self) -> bool:
        return self.row.processes == 1

    def net(self, optimizer: Optimizer = sgd, seed: int = 0) -> Net:
        return net(self.row.kind, optimizer, seed)

    def trainer(self, callbacks: Sequence[L.Callback] = (), **options: Any) -> L.Trainer:
        how: Any = "auto" if self.on_one_device else piper.PiperStrategy(self.row.program(), timeout=PATIENCE)
        options = {**QUIET, "accelerator": "cpu", "precision": "64-true", **options}
        return L.Trainer(strategy=how, devices=self.row.processes, callbacks=list(callbacks), **options)

    def batches(self, found: Dataset[Any]) -> DataLoader[Any]:
        """Batches of 8 samples over all replicas. For validation, test and prediction, Lightning divides them
        among the replicas.
        """
        return DataLoader(found, batch_size=8 // self.row.replicas)

    def training_data(self, seed: int) -> DataLoader[Any]:
        """Three batches in an epoch, of which the last one is half as large. They come without a sampler of
        Lightning's, which would shuffle them.
        """
        found, row = data(20, seed), self.row
        if row.replicas == 1:
            return self.batches(found)
        replica = int(os.environ["LOCAL_RANK"]) * row.replicas // row.processes
        sampler: DistributedSampler[Any] = DistributedSampler(found, row.replicas, replica, shuffle=False)
        return DataLoader(found, batch_size=8 // row.replicas, sampler=sampler)

    def validation_data(self) -> DataLoader[Any]:
        return self.batches(data(14, seed=1))

    def fit(
        self,
        module: Net,
        callbacks: Sequence[L.Callback] = (),
        seed: int = 0,
        resumed: Path | None = None,
        **options: Any,
    ) -> Outcome:
        """Train with a validation after each epoch, and return everything that can be seen of it."""
        steps, validations = Record(), evaluated.Recorded()
        trainer = self.trainer(
            [steps, validations, *callbacks], num_sanity_val_steps=0, **{"max_epochs": 2, **options}
        )
        trainer.fit(module, self.training_data(seed), self.validation_data(), ckpt_path=resumed)
        return {
            "result": values(module),
            "losses": steps.losses,
            "logged": steps.logged,
            "epochs": steps.epochs,
            "validations": validations.seen,
            "steps": trainer.global_step,
        }


def fit_and_validate(
    run: Run, seed: int = 0, optimizer: Optimizer = adamw, precision: Any = "64-true", **options: Any
) -> Outcome:
    module = run.net(optimizer)
    found = run.fit(module, seed=seed, precision=precision, **options)
    dtypes = {x.dtype for x in module.outputs}
    again = run.trainer(precision=precision).validate(module, run.validation_data(), verbose=False)
    return {**found, "again": again, "dtypes": dtypes}


def bf16_mixed(run: Run, seed: int = 0, precision: Any = "bf16-mixed") -> Outcome:
    return fit_and_validate(run, seed, sgd, max_epochs=1, precision=precision)


def test(run: Run, seed: int = 2) -> Outcome:
    trainer = run.trainer()
    found = trainer.test(run.net(), run.batches(data(14, seed)), verbose=False)
    return {"result": found, "metrics": {k: x.clone() for k, x in trainer.callback_metrics.items()}}


def predict(run: Run, seed: int = 3) -> Outcome:
    """Predict with one replica that has more samples than the other."""
    found: Any = run.trainer().predict(run.net(), run.batches(data(13, seed)))
    return {"result": [torch.cat(parts) for parts in zip(*found, strict=True)]}


def resume(run: Run, forget: bool = False) -> Outcome:
    """Two epochs, and one more by another Trainer with another module; on one device, all at once, unless the
    optimizer is to `forget`.
    """
    if run.on_one_device and not forget:
        found = run.fit(run.net(adamw), max_epochs=3)
        found = {k: x[2 * len(x) // 3 :] if isinstance(x, list) else x for k, x in found.items()}
    else:
        save = ModelCheckpoint(run.folder)
        run.fit(run.net(adamw), [save], enable_checkpointing=True)
        path = Path(save.best_model_path)
        if forget:
            content = torch.load(path, weights_only=True)
            for state in content["optimizer_states"]:
                state["state"].clear()
            torch.save(content, path)
        # In single precision, loading would round the values.
        found = run.fit(run.net(adamw, seed=1).double(), max_epochs=3, resumed=path)
    # Values logged in the previous epoch are shown until new ones are logged, but a checkpoint does not keep
    # them.
    logged = [
        {k: x for k, x in seen.items() if k.startswith("train_") and k.endswith("_step")}
        for seen in found["logged"]
    ]
    validations = [
        {k: x for k, x in seen.items() if not k.startswith("train_")} for seen in found["validations"]
    ]
    return {**found, "logged": logged, "validations": validations}


LARGEST = 0.1  # maximum norm of the gradients


def clip(run: Run, largest: float | None = LARGEST) -> Outcome:
    norms = Norms()
    return {**run.fit(run.net(), [norms], max_epochs=1, gradient_clip_val=largest), "norms": norms.norms}


def accumulate(run: Run, batches: int = 2) -> Outcome:
    return run.fit(run.net(), accumulate_grad_batches=batches)


def early_stopping(run: Run, patience: int = 1) -> Outcome:
    stop = EarlyStopping("val_loss", patience=patience)
    found = run.fit(run.net(), [stop], max_epochs=8)
    return {**found, "stopped": stop.stopped_epoch, "best": float(stop.best_score), "waited": stop.wait_count}


SCENARIOS: dict[str, Callable[..., Outcome]] = {
    "fit+validate": fit_and_validate, "test": test, "predict": predict, "resume": resume, "clip": clip,
    "accumulate": accumulate, "bf16-mixed": bf16_mixed, "early stopping": early_stopping,
}  # fmt: skip
# Differences that must show: other data, and scenarios without the thing that they test.
CONTROLS: dict[str, dict[str, Any]] = {
    "fit+validate": {"seed": 7}, "test": {"seed": 7}, "predict": {"seed": 7}, "resume": {"forget": True},
    "clip": {"largest": None},
    "accumulate": {"batches": 1}, "bf16-mixed": {"seed": 7}, "early stopping": {"patience": 8},
}  # fmt: skip


def scenarios(kind: str) -> list[str]:
    return [name for name in SCENARIOS if name not in KINDS[kind].without]


def one_device(kind: str, folder: Path) -> dict[str, Outcome]:
    return {name: SCENARIOS[name](Run(ONE_DEVICE[kind], folder / name)) for name in scenarios(kind)}


def controls(kind: str, folder: Path) -> dict[str, Outcome]:
    return {
        name: SCENARIOS[name](Run(ONE_DEVICE[kind], folder / name), **CONTROLS[name])
        for name in scenarios(kind)
    }


def trace_all(names: list[str], folder: Path) -> None:
    """Trace every step that is captured, for batches and for their parts."""
    for kind in {ROWS[name].kind for name in names}:
        for precision in ("64-true", "bf16-mixed"):
            if KINDS[kind].captured:
                trace(net(kind), data(8, 0)[:], (8, 4, 2, 1), "training_step", precision=precision)
            for name in ("validation_step", "test_step", "predict_step")[
                : 3 if precision == "64-true" else 1
            ]:
                trace(net(kind), data(8, 0)[:], (8, 6, 4, 3), name, None, precision=precision)


@sharing_captures
def train(rank: int, names: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run all scenarios of some rows in this process. Also returns the messages about steps that run
    uncaptured.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        row = ROWS[name]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found[name] = {
                what: SCENARIOS[what](Run(row, folder / name / what)) for what in scenarios(row.kind)
            }
        found[name]["told"] = {str(w.message) for w in caught if "runs uncaptured" in str(w.message)}
    if "PP2" in found:
        found["PP2"]["undivided"] = bf16_mixed(Run(UNDIVIDED, folder / "undivided"))
    return found
