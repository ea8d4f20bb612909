"""Mistakes of optimizers, schedulers, clipping and checkpoints. docs/museum.md describes each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_piper as piper
from lightning_piper.checkpoint.tensor_ranges import SaveRanges
from lightning_piper.errors import CaptureError, PiperError
from lightning_piper.holdings.norms import GlobalNorms
from lightning_piper.processes.world import World
from lightning_piper.strategy.strategy import PiperStrategy
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET, distance, local, same, sharing_captures, trainer, values
from tests.strategy.models import MLP, make, vectors
from tests.strategy.sharded import dp2

Values = dict[str, Tensor]

# Resumed trainings


@sharing_captures
def trained(folder: Path, checkpoint: str, steps: int, ckpt_path: str | None = None) -> tuple[Values, str]:
    """Train under ZeRO-1 for some steps. Return the values, and the path of the last checkpoint."""
    module, loader = make("mlp")
    save = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    strategy = local(dp2(1), checkpoint=checkpoint)
    fit, _ = trainer(strategy, [save], max_steps=steps, enable_checkpointing=True)
    fit.fit(module, loader, ckpt_path=ckpt_path)
    return values(module), save.best_model_path


def step_count_lost() -> Any:
    """Begin the count of the optimizer's steps again, from which Adam corrects its averages."""
    original = torch.optim.Optimizer.load_state_dict

    def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        original(optimizer, state)
        for own in optimizer.state.values():
            own["step"].zero_()

    return mock.patch.object(torch.optim.Optimizer, "load_state_dict", load)


def saved_with_an_offset() -> Any:
    """Save of each tensor the elements that lie one place further on."""
    original = SaveRanges.resolve_data
    return mock.patch.object(SaveRanges, "resolve_data", lambda *args: original(*args).roll(-1))


def weights_not_reset() -> Any:
    """Let the optimizer continue from the weights of the constructor."""
    return mock.patch.object(PiperStrategy, "load_model_state_dict", lambda *args, **options: None)


def state_not_saved() -> Any:
    """Forget the optimizer's averages."""
    return mock.patch.object(torch.optim.Optimizer, "load_state_dict", lambda *args: None)


RESUMED: dict[str, tuple[Callable[[], Any], str]] = {
    "step_count_lost": (step_count_lost, "consolidated"),
    "saved_with_an_offset": (saved_with_an_offset, "sharded"),
    "weights_not_reset": (weights_not_reset, "consolidated"),
    "state_not_saved": (state_not_saved, "consolidated"),
}
CASES = RESUMED.keys()


@pytest.mark.parametrize("name", RESUMED)
def test_it_is_caught(name: str, tmp_path: Path) -> None:
    """A resumed training differs from a training without a stop, but not without the mistake."""
    seeded, checkpoint = RESUMED[name]
    whole, _ = trained(tmp_path / "whole", checkpoint, 4)
    _, path = trained(tmp_path / "half", checkpoint, 2)
    right, _ = trained(tmp_path / "right", checkpoint, 4, path)
    assert same(whole, right)
    with seeded():
        if checkpoint == "sharded":
            _, path = trained(tmp_path / "wrong half", checkpoint, 2)
        wrong, _ = trained(tmp_path / "wrong", checkpoint, 4, path)
    assert distance(whole, wrong) > 1e-4


def test_an_incomplete_checkpoint_is_an_error(tmp_path: Path) -> None:
    """The manifest, which a save writes last, is missing."""
    _, path = trained(tmp_path, "sharded", 1)
    assert trained(tmp_path / "right", "sharded", 2, path)
    (Path(path) / "manifest.json").unlink()
    with pytest.raises(PiperError, match=r"manifest\.json"):
        trained(tmp_path / "wrong", "sharded", 2, path)


# Schedulers


class Hasty(MLP):
    """Moves the scheduler with every batch, although some batches only accumulate."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        return result


@sharing_captures
def test_a_schedule_that_moves_with_each_batch() -> None:
    rates = []
    for strategy in ("auto", local()):
        run, _ = trainer(strategy, max_epochs=2, max_steps=-1, accumulate_grad_batches=2)
        run.fit(MLP(), vectors())
        rates.append(run.optimizers[0].param_groups[0]["lr"])
    assert (
        rates[0] == rates[1] == MLP.lr / 2**3
    )  # six steps of five batches twice, half the rate every two steps
    run, _ = trainer(local(), max_epochs=2, max_steps=-1, accumulate_grad_batches=2)
    with pytest.raises(
        CaptureError, match=r"self\.lr_schedulers\(\)\.step\(\).*A captured step would do this only once"
    ):
        run.fit(Hasty(), vectors())


class Replaced(MLP):
    """Its optimizer has the parameters of layers that the module no longer has."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(x.detach().clone().requires_grad_() for x in self.parameters())


def test_an_optimizer_of_replaced_parameters() -> None:
    module = Replaced()
    before = values(module)
    run, _ = trainer(max_steps=2)
    run.fit(module, vectors())
    assert same(before, values(module))  # a plain Trainer says nothing
    run, _ = trainer(local(), max_steps=2)
    with pytest.raises(PiperError, match="an optimizer over none of the module's parameters"):
        run.fit(Replaced(), vectors())


# Clipping


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            hidden = self.first(batch[0]).tanh()
        with piper.annotate("PP", 1):
            return (self.second(hidden) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_norm(world: World, x: Tensor) -> Tensor:
    """Leave out the other processes."""
    return x


def average_of_norms(norms: GlobalNorms, squares: Tensor, *args: Any) -> Tensor:
    """Average the norms of the processes, as if all had the same gradients."""
    return torch.linalg.vector_norm(squares) / norms._world.size**0.5


STAGES = [piper.Place(filter={"PP": i}, devices=[i]) for i in (0, 1)]
SHARDS = [piper.Place([0, 1]), piper.Replicate(zero=3)]
CLIPPED: dict[str, tuple[Any, Callable[[], Any]]] = {
    "each_stage_clips_alone": (STAGES, lambda: mock.patch.object(World, "sum", own_norm)),
    "norms_averaged": (SHARDS, lambda: mock.patch.object(GlobalNorms, "_total", average_of_norms)),
}


def clipped(part: int | None = None, **options: Any) -> Values:
    """Return how far one clipped step moves each parameter. `part` is the number of a replica."""
    module = Net()
    before = values(module)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    data: Any = TensorDataset(x, x.sum(1, keepdim=True))
    if part is not None:
        data = Subset(data, range(part, 8, 2))
    fit = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        gradient_clip_val=0.1,
        use_distributed_sampler=False,
        **QUIET,
        **options,
    )
    fit.fit(module, DataLoader(data, 8))
    return {name: x - before[name] for name, x in module.state_dict().items() if not x.is_meta}


def ranks(rank: int) -> dict[str, tuple[Values, Values]]:
    found = {}
    for name, (program, seeded) in CLIPPED.items():
        part = rank if program is SHARDS else None
        right = clipped(part, devices=2, strategy=piper.PiperStrategy(program))
        with seeded():
            wrong = clipped(part, devices=2, strategy=piper.PiperStrategy(program))
        found[name] = right, wrong
    return found


@functools.cache
def launched(folder: Path) -> list[dict[str, tuple[Values, Values]]]:
    return launch_trainings(2, ranks, folder)


def assert_clipping_differs(name: str, folder: Path) -> None:
    """Assert that two processes move as one device, and not with the mistake."""
    alone = clipped()
    for found in launched(folder):
        right, wrong = found[name]
        own = {key: alone[key] for key in right}
        assert distance(own, right) < 1e-5
        assert distance(own, wrong) > 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clipped")


def test_each_stage_clips_alone(folder: Path) -> None:
    assert_clipping_differs("each_stage_clips_alone", folder)


def test_norms_of_ranks_are_averaged(folder: Path) -> None:
    assert_clipping_differs("norms_averaged", folder)
