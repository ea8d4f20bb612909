"""Trainings on two processes that must have the same bits in replicas and under DistributedDataParallel."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET


class Net(L.LightningModule):
    """Learns at a rate that depends on the rank from some step on; None: at one rate."""

    def __init__(self, apart: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.apart = apart

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), 0.1 * (1 + self.global_rank) if self.apart == 0 else 0.1, momentum=0.9
        )

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == self.apart:
            self.optimizers().param_groups[0]["lr"] = 0.1 * (1 + self.global_rank)  # type: ignore[union-attr, index]


class Pruned(Net):
    """`rewound`: to the values before; they lie in the memory of the parameters from then on, and are
    trained, too.
    """

    def __init__(self, rewound: bool) -> None:
        super().__init__()
        self.rewound = rewound

    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=self.rewound)]


def replicas(**options: Any) -> list[Any]:
    return [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1], **options)]


WHOLE, ZERO3 = replicas(), replicas(shard_optimizer=True, shard_grads=True, shard_params=True)
ZERO1 = replicas(shard_optimizer=True)
BY_PARAMETER = replicas(shard_optimizer=True, shard_by="parameter")
# module, precision, arguments of the strategies
KINDS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "a rate of each rank": (lambda: Net(0), "32-true", [{"directives": WHOLE}]),
    "a rate of each rank, later": (lambda: Net(5), "32-true", [{"directives": WHOLE}]),
    "half precision": (Net, "16-true", [{"directives": WHOLE}, {"directives": ZERO3}]),
    "pruned": (lambda: Pruned(False), "64-true", [{"directives": ZERO3, "capture": "never"}]),
    "pruned and rewound": (
        lambda: Pruned(True),
        "32-true",
        [{"directives": each, "capture": "never"} for each in (ZERO3, BY_PARAMETER)],
    ),
}


def fit(module: L.LightningModule, strategy: Any, precision: Any) -> tuple[dict[str, Tensor], list[str]]:
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, precision=precision, **QUIET
    )  # fmt: skip
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        *(
            torch.randn(40, 4, generator=draw, dtype=torch.float64 if precision == "64-true" else None)
            for _ in range(2)
        )
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(data, batch_size=4))
    said = [str(each.message) for each in caught if "DistributedDataParallel" in str(each.message)]
    return {name: x.detach().clone() for name, x in module.named_parameters()}, said


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.trainer.seen.append(float(self.trainer.callback_metrics["val_loss"]))  # type: ignore[attr-defined]

    on_test_epoch_end = on_validation_epoch_end


class Stream(IterableDataset[Any]):
    """A stream that tells only at its end how many samples it has; the stream of the second rank has fewer."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def evaluate_unevenly(rank: int, streamed: bool, strategy: Any) -> tuple[list[float], list[str]]:
    """The values of two validations, a test and a prediction of which the ranks have 6 and 5 batches, and the
    warnings.
    """
    torch.manual_seed(0)
    module, samples = Validated(), [(torch.randn(4), torch.randn(4)) for _ in range(24)][: 24 - 4 * rank]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        **{**QUIET, "use_distributed_sampler": False},
    )
    loader = DataLoader[Any](Stream(samples) if streamed else samples, batch_size=4)  # type: ignore[arg-type]
    trainer.seen = seen = []  # type: ignore[attr-defined]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            module, DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 4)), batch_size=4), loader
        )
        trainer.test(module, loader, verbose=False)
        outputs: Any = trainer.predict(module, loader)
        seen += [len(outputs), *(float(output.sum()) for output in outputs)]
    return seen, [
        str(each.message) for each in caught if "numbers of batches that may differ" in str(each.message)
    ]


SIZES = [[4, 4, 4, 4, 4, 1], [4, 3, 4, 4, 2, 4]]  # sizes of the batches of each rank


class Unevenly(Net):
    """`over`: the loss is divided by the number of outputs that count, here all."""

    def __init__(self, over: bool = False) -> None:
        super().__init__()
        self.over = over
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        error = (self.net(batch[0]) - batch[1]).square()
        counts = torch.ones_like(error) * (batch[1] < 1e6)
        self.log("error", error.mean())
        return (error * counts).sum() / counts.sum() if self.over else error.mean()


def uneven_batches(rank: int) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(rank)
    return [
        [torch.randn(size, 4, generator=draw, dtype=torch.float64) for _ in range(2)] for size in SIZES[rank]
    ]


def train_unevenly(rank: int, folder: Path) -> dict[str, Any]:
    """Train under each strategy and with each number of accumulated batches. Returns the parameters and the
    warnings about sizes.
    """
    found: dict[str, Any] = {}
    made = {
        "ddp": DDPStrategy,
        "replicas": lambda: piper.PiperStrategy(WHOLE),
        "over": lambda: piper.PiperStrategy(WHOLE),
    }
    for accumulated in (1, 2):
        for kind, strategy in made.items():
            torch.manual_seed(0)
            module = Unevenly(kind == "over")
            options = {**QUIET, "accumulate_grad_batches": accumulated, "use_distributed_sampler": False}
            trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy(), max_epochs=2, **options)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                trainer.fit(module, DataLoader(uneven_batches(rank), batch_size=None))  # type: ignore[arg-type]
            said = [str(each.message) for each in caught if "the replicas drew" in str(each.message)]
            found[f"{kind} {accumulated}"] = (
                {name: x.detach().clone() for name, x in module.named_parameters()},
                said,
            )
    return found


def one_device(accumulated: int) -> dict[str, Tensor]:
    """The parameters that one device gets from the batches of all ranks, joined."""
    torch.manual_seed(0)
    joined = [
        [torch.cat(xs) for xs in zip(*each, strict=True)]
        for each in zip(*map(uneven_batches, range(2)), strict=True)
    ]
    options = {**QUIET, "accumulate_grad_batches": accumulated}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, **options)
    trainer.fit(module := Unevenly(), DataLoader(joined, batch_size=None))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def evaluate(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, streamed in (("streamed", True), ("sized", False)):
        strategies = (DDPStrategy(), piper.PiperStrategy(WHOLE), piper.PiperStrategy(ZERO1))
        found[kind] = [evaluate_unevenly(rank, streamed, each) for each in strategies]
    try:
        evaluate_unevenly(rank, False, piper.PiperStrategy(WHOLE, capture="always"))
    except piper.PiperError as error:
        found["refused"] = str(error)
    return found


def train(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, (module, precision, given) in KINDS.items():
        found[kind] = []
        for strategy in (DDPStrategy(), *(piper.PiperStrategy(**each) for each in given)):
            torch.manual_seed(0)
            found[kind].append(fit(module(), strategy, precision))
    return found
