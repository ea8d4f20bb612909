"""Validation, test and prediction on two or four processes. `train` runs all scenarios under the programs
that it is given, one after another in the same processes; `one_device` runs them with a plain Trainer on the
batches of all replicas together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchmetrics import MeanMetric

import lightning_piper as piper
from lightning_piper.directives import Directive, Replicate
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import QUIET, sharing_captures, trace, values

Program = list[Directive]
Outcome = dict[str, Any]
PROCESSES = 2
GROUPS = [[0, 2], [1, 3]]


def pp2_zero3() -> Program:
    places: Program = [piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(GROUPS)]
    schedule = piper.schedules.one_f_one_b(stages=2, microbatches=2)
    return [*places, *schedule[2:], Replicate(filter={}, devices=GROUPS, shard_params=True)]


def dp2_zero1() -> Program:
    place = piper.Place(filter={}, devices=[0, 1])
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
    return [place, split, Replicate(filter={}, devices=[0, 1], shard_optimizer=True)]


# The program, the number of replicas, and how many of the model's stages are on different devices.
PROGRAMS: dict[str, tuple[Program, int]] = {
    "pp2": (piper.schedules.one_f_one_b(stages=2, microbatches=2), 1),
    "dualpipe": (piper.schedules.dualpipe(stages=2, microbatches=4), 1),
    "dp2": (dp2_zero1(), 2),
    "pp2_zero3": (pp2_zero3(), 2),
}


class Net(L.LightningModule):
    """Two stages; logs in every way, returns something in every step, and has metrics in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0))
        self.second = nn.Sequential(nn.Dropout(0.0), nn.Linear(16, 4))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(16))
        self.mean_output, self.mean_target = MeanMetric(), MeanMetric()
        self.outputs: list[Any] = []
        self.rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = self.first(x) + self.shift
        with piper.annotate("PP", 1):
            return self.second(hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        with piper.annotate("PP", 1):
            return F.mse_loss(out, y)

    def on_validation_start(self) -> None:
        with torch.inference_mode(False):
            self.shift = self.shift + 2**-10  # another tensor, which the plans have to follow

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        x, y = batch
        out = self(x)
        with piper.annotate("PP", 1):
            loss = F.mse_loss(out, y)
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)
        self.log("by_step", loss * 2, on_step=True, on_epoch=True, sync_dist=True)
        self.log("root", loss.sqrt())
        self.log(
            "shared", out.abs().mean(), add_dataloader_idx=False, sync_dist=True
        ) if dataloader_idx == 0 else None
        self.log_dict({"largest": out.max(), "constant": 3.0}, reduce_fx="max", sync_dist=True)
        return {"out": out, "target": y, "number": dataloader_idx, "nothing": None}

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        assert outputs["number"] == dataloader_idx and outputs["nothing"] is None
        self.mean_output.update(outputs["out"])
        self.mean_target.update(outputs["target"])
        outputs["out"].add_(0.0)  # the hook may change it in place
        self.outputs.append(outputs["out"])

    def on_validation_epoch_end(self) -> None:
        self.log("mean_output", self.mean_output)
        self.log("mean_target", self.mean_target.compute())
        self.mean_target.reset()
        self.rates.append(
            self.trainer.optimizers[0].param_groups[-1]["lr"] if self.trainer.optimizers else 0.0
        )

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        with piper.annotate("PP", 0):  # only the first stage, and nothing is returned
            self.log("hidden", self.first(x).square().mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> tuple[Any, ...]:
        x, y, *names = batch
        return y, self(x), *names

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=0.05
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss/dataloader_idx_0"},
        }


def net(dropout: float = 0.0) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = Net().double()
    found.first[2].p = found.second[0].p = dropout
    return found


def data(samples: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(samples, n, generator=g, dtype=torch.float64) for n in (8, 4)))


class Named(Dataset[Any]):
    """Samples with a name."""

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = data(samples, seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return *self.samples[i], f"sample {i}"


def loaders(replicas: int, *sizes: int) -> list[DataLoader[Any]]:
    """Loaders with batches of 8 samples over all replicas together; the last batches are smaller."""
    return [DataLoader(data(n, seed), batch_size=8 // replicas) for seed, n in enumerate(sizes)]


class Recorded(L.Callback):
    """Records what can be seen at the end of every evaluation, sanity checks included."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.seen.append({k: v.clone() for k, v in trainer.callback_metrics.items()})


class Held(L.Callback):
    """Records what this process holds during a validation, and what a checkpoint would contain."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.saved: dict[str, Tensor] = {}

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.names = [name for name, x in module.named_parameters() if not x.is_meta]
        found = trainer.strategy.lightning_module_state_dict()
        self.saved = {
            name: x.clone() for name, x in found.items() if not x.is_meta
        }  # a stand-in cannot be written into a file


class Runs:
    """The scenarios, with a Trainer of one device or of several processes.

    Args:
        name: The name of the program; None for one device.
        replicas: The number of replicas whose batches are read.
        folder: The folder for checkpoints.
    """

    def __init__(self, name: str | None, replicas: int, folder: Path) -> None:
        self.program = None if name is None else PROGRAMS[name][0]
        self.name, self.replicas, self.folder = name, replicas, folder

    def trainer(
        self, callbacks: Sequence[L.Callback] = (), capture: Any = "auto", **options: Any
    ) -> L.Trainer:
        strategy: Any = "auto"
        if self.program is not None:
            kind: Any = "sharded" if self.name == "pp2_zero3" else "consolidated"
            strategy = piper.PiperStrategy(self.program, timeout=PATIENCE, checkpoint=kind, capture=capture)
        devices = 1 if self.program is None else PROCESSES
        options = {**QUIET, "accelerator": "cpu", "precision": "64-true", **options}
        return L.Trainer(strategy=strategy, devices=devices, callbacks=list(callbacks), **options)

    def training_data(self) -> DataLoader[Any]:
        found = data(32, seed=9)
        if self.program is None or self.replicas == 1:
            return DataLoader(found, batch_size=8)
        replica = int(os.environ["LOCAL_RANK"]) * 2 // PROCESSES
        sampler: DistributedSampler[Any] = DistributedSampler(
            found, num_replicas=2, rank=replica, shuffle=False
        )
        return DataLoader(found, batch_size=4, sampler=sampler)

    def fresh(self) -> Outcome:
        """Evaluate without a fit: several loaders whose last batches are smaller, and a module that was not
        trained.
        """
        module = net(dropout=0.5)
        trainer = self.trainer()
        found = trainer.validate(module, loaders(self.replicas, 22, 16), verbose=False)
        held = Held()
        self.trainer([held]).validate(module, loaders(self.replicas, 22), verbose=False)
        del module.outputs[5:]
        tested = trainer.test(module, loaders(self.replicas, 22), verbose=False)
        limited = self.trainer(limit_val_batches=1).validate(
            module, loaders(self.replicas, 22, 16), verbose=False
        )
        return {
            "validated": found,
            "tested": tested,
            "limited": limited,
            "outputs": module.outputs,
            "values": values(module),
            "held": held.names,
            "saved": held.saved,
        }

    def fitted(self) -> Outcome:
        """A fit with everything that depends on a monitored value, with several validations in an epoch, and
        with evaluations afterwards.
        """
        module, seen = net(), Recorded()
        monitored = "val_loss/dataloader_idx_0"
        save = ModelCheckpoint(self.folder, filename="{step}", monitor=monitored, save_top_k=1)
        stop = EarlyStopping(monitored, patience=5)
        trainer = self.trainer(
            [seen, save, stop],
            max_epochs=10,
            val_check_interval=2,
            num_sanity_val_steps=2,
            enable_checkpointing=True,
        )
        evaluation = loaders(self.replicas, 22, 16)
        trainer.fit(module, self.training_data(), evaluation)
        outcome = {
            "seen": seen.seen,
            "rates": list(module.rates),
            "stopped": trainer.global_step,
            "values": values(module),
        }
        outcome["best"] = Path(save.best_model_path).name
        outcome["after"] = trainer.validate(module, evaluation, verbose=False)
        outcome["of_best"] = trainer.validate(module, evaluation, ckpt_path="best", verbose=False)
        return outcome

    def predicted(self) -> Outcome:
        """Predict with replicas that have different numbers of samples and of batches."""
        module = net(dropout=0.5)
        trainer = self.trainer()
        found = trainer.predict(module, [DataLoader(Named(n, n), batch_size=4) for n in (21, 9)])
        small = trainer.predict(module, DataLoader(Named(2, 2), batch_size=4))
        return {"predictions": found, "small": small}

    def repeated(self) -> Outcome:
        """Evaluate 21 samples, of which a sampler over two replicas takes the first one twice."""
        evaluation = loaders(self.replicas, 21)
        if self.program is None:
            evaluation = [DataLoader(Subset(data(21, 0), [*range(21), 0]), batch_size=8)]
        return {"validated": self.trainer().validate(net(), evaluation, verbose=False)}

    def uneven(self) -> Outcome:
        """The last batches have 4 samples and 1: the step, which was captured at the first ones, runs as it
        is from there.
        """
        whole: dict[str, Any] = {"filter": {}, "devices": [0, 1]}
        self.program = self.program and [piper.Place(**whole), Replicate(**whole)]

        class Uneven(Net):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                out = self(batch[0])
                self.log("loss", F.mse_loss(out, batch[1]), sync_dist=True)
                self.log("largest", out.max(), reduce_fx="max", sync_dist=True)

            on_validation_batch_end = L.LightningModule.on_validation_batch_end

            def on_validation_epoch_end(self):
                pass

        torch.manual_seed(0)
        samples: Any = data(13, 0)
        if self.program is not None:
            samples = Subset(
                samples, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12]][int(os.environ["LOCAL_RANK"])]
            )
        loader = DataLoader(samples, batch_size=13 if self.program is None else 4)
        trainer = self.trainer(use_distributed_sampler=False)
        return {"validated": trainer.validate(Uneven().double(), loader, verbose=False)}

    def refused(self) -> Outcome:
        """Requests that raise the same error in all processes, and after which the processes can go on."""
        rank = int(os.environ.get("LOCAL_RANK", 0))

        class Metric(Net):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("mean", self.mean_output(batch[0]) if self.mean_output(batch[0]) > 0 else 0.0)

        class Unused(Net):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                found = super().validation_step(batch, batch_idx)
                with piper.annotate("PP", 1):
                    return {**found, "more": self.unused(found["out"][:, :3])}

        class Moved(Net):
            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                found = super().validation_step(batch, batch_idx)
                with piper.annotate("PP", 1):
                    return {**found, "more": self.first(batch[0])}

        class Scaled(Net):
            scale = 1.0

            def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
                self.scale = 1.0 + rank * batch_idx  # the first batch reads the same in all processes

            def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
                found = super().validation_step(batch, batch_idx)
                with piper.annotate("PP", 1):
                    return {**found, "more": self.scale * found["out"]}

        class Nothing(Net):
            def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.second(self.first(batch[0]))

        def error(work: Callable[[], Any]) -> str:
            try:
                work()
            except (piper.PiperError, AssertionError) as found:
                return f"{type(found).__name__}: {found}"
            return "no error"

        def validate(module: L.LightningModule, *given: DataLoader[Any], capture: str = "auto") -> str:
            return error(
                lambda: self.trainer(capture=capture).validate(module.double(), *given, verbose=False)
            )

        whole = loaders(self.replicas, 16)[0]
        return {
            "metric": validate(Metric(), whole, capture="always"),
            "unused alone": validate(Unused(), whole),
            "unused in a fit": error(lambda: self.trainer(max_steps=1).fit(Unused().double(), whole, whole)),
            "moved in a fit": error(lambda: self.trainer(max_steps=1).fit(Moved().double(), whole, whole)),
            "untagged": error(lambda: self.trainer(capture="always").predict(Nothing().double(), whole)),
            "values": validate(net(), DataLoader(data(16, seed=rank), batch_size=4)),
            "state": validate(Scaled(), whole),
            "length": validate(net(), loaders(self.replicas, 16 + 16 * rank)[0]),
            "nothing": validate(net(), whole),
        }


SCENARIOS = ("fresh", "fitted", "predicted", "repeated")
MORE = {"pp2": ["refused"], "dp2": ["uneven"]}  # scenarios that only one program runs


def one_device(folder: Path) -> dict[str, Outcome]:
    runs = Runs(None, 1, folder)
    return {name: getattr(runs, name)() for name in [*SCENARIOS, "uneven"] if name != "predicted"}


def trace_all(names: list[str], folder: Path, processes: int) -> None:
    """Trace most of the steps that the scenarios run, for batches and for their parts."""
    batch = data(8, 0)[:]
    trace(net(), batch, (8, 4, 2), "training_step", precision="64-true")
    for dropout in (0.0, 0.5):
        for loader in (0, 1, None):
            trace(net(dropout), batch, (8, 6, 4, 3), "validation_step", loader, precision="64-true")
    trace(net(0.5), batch, (8, 6, 4, 3), "test_step", None, precision="64-true")


@sharing_captures
def train(rank: int, names: list[str], folder: Path, processes: int) -> dict[str, dict[str, Outcome]]:
    """Run all scenarios of some programs in this process."""
    global PROCESSES
    PROCESSES = processes
    results: dict[str, dict[str, Outcome]] = {}
    for name in names:
        runs = Runs(name, PROGRAMS[name][1], folder / name)
        results[name] = {
            scenario: getattr(runs, scenario)() for scenario in [*SCENARIOS, *MORE.get(name, [])]
        }
    return results
