"""Trainings on batches that hold more than tensors of one size, compared with a plain Trainer on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture import flatten
from lightning_piper.compiler import compile
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import Batches, distance, local, trainer, values
from tests.strategy.graphs import (
    SEEDS,
    STAGES,
    Encoding,
    Messages,
    Table,
    make,
    named,
    tables,
    train,
    train_tables,
)
from tests.strategy.models import MLP

ONE = [piper.Place(filter={}, devices=[0])]


def fitted(strategy: Any, cls: type[L.LightningModule], batches: list[Any], **options: Any) -> dict[str, Any]:
    module = make(cls)
    fit, record = trainer(strategy, max_steps=len(batches), **options)
    fit.fit(module, Batches(batches))
    return {"values": values(module), "logged": record.logged, "module": module}


def agree(plain: dict[str, Any], ours: dict[str, Any]) -> None:
    assert distance(plain["values"], ours["values"]) < 1e-14
    assert len(plain["logged"]) == len(ours["logged"])
    for one, other in zip(plain["logged"], ours["logged"], strict=True):
        assert one.keys() == other.keys() and all(
            float(one[k]) == pytest.approx(float(other[k]), rel=1e-6) for k in one
        )


def test_graphs_train_as_on_one_device() -> None:
    batches = [named(seed) for seed in (1, 2, 3, 1)]
    plain = fitted("auto", Messages, batches)
    for program in (ONE, STAGES):
        agree(plain, fitted(local(program), Messages, batches))
    assert distance(plain["values"], fitted(local(ONE), Messages, batches[:3])["values"]) > 1e-4


def test_graphs_are_predicted_and_returned_with_what_they_carry() -> None:
    compiled = compile(make(), named(1), STAGES, step="predict_step")
    rebuild = compiled.step.at(compiled.step.size).rebuild
    assert rebuild is not None
    leaves, spec = flatten(named(2))
    carried = spec.contents(leaves)
    found: Any = rebuild([torch.ones(()), *leaves], lambda item: carried[item.index])
    assert (
        found["name"] == Path("graph2")
        and found["batch"].name == Path("graph2")
        and torch.equal(found["batch"].y, leaves[3])
    )


class Reads(MLP):
    """Reads a text of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step((batch["x"], batch["y"]), batch_idx)["loss"]
        return loss * (2 if batch["path"].suffix == ".b" else 1) * len(batch["texts"][0])


def text(seed: int, path: str, texts: list[str]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (8, 4))
    return {"x": x, "y": y, "path": Path(path), "texts": texts}


TEXTS = ["one", "a", "b", "c"]


def test_what_is_read_of_each_batch_is_that_of_each_batch() -> None:
    given = [("a.a", TEXTS), ("a.b", TEXTS), ("a.a", TEXTS), ("a.a", ["three", *TEXTS[1:]])]
    batches = [text(i, *more) for i, more in enumerate(given)]
    plain = fitted("auto", Reads, batches)
    agree(plain, fitted(local(ONE), Reads, batches))
    for other in ([("a.a", TEXTS)] * 4, [given[0]] * 3 + given[3:]):
        stale = [text(i, *more) for i, more in enumerate(other)]
        assert distance(plain["values"], fitted(local(ONE), Reads, stale)["values"]) > 1e-4


class Arrays(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(
            (torch.as_tensor(batch["x"]), torch.from_numpy(batch["y"]).to(torch.float64)), batch_idx
        )

    def done(self, loss: Any) -> Any:
        self.log("train_loss", loss, batch_size=4)  # Lightning does not find the batch size in arrays
        return loss

    def log_dict(self, *args: Any, **kwargs: Any) -> None:
        super().log_dict(*args, **kwargs, batch_size=4)


class Encoded(Arrays):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) is Encoding
        return MLP.training_step(self, (batch.x, batch["y"]), batch_idx)


@pytest.mark.parametrize("cls", [Arrays, Encoded])
def test_arrays_and_encodings_are_inputs_and_are_cut(cls: Any) -> None:
    def batches(seeds: list[int]) -> list[Any]:
        draw = [np.random.default_rng(seed) for seed in seeds]
        found = [{"x": d.normal(size=(4, 8)), "y": d.normal(size=(4, 4)).astype(np.float32)} for d in draw]
        if cls is Arrays:
            return found
        return [Encoding({key: torch.as_tensor(x).double() for key, x in batch.items()}) for batch in found]

    plain = fitted("auto", cls, batches([1, 2, 3]))
    split = [*ONE, piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
    ours = fitted(local(ONE), cls, batches([1, 2, 3]))
    agree(plain, ours)
    assert distance(plain["values"], fitted(local(split), cls, batches([1, 2, 3]))["values"]) < 1e-14
    assert distance(plain["values"], fitted(local(ONE), cls, batches([1, 2, 2]))["values"]) > 1e-4


def test_replicas_draw_graphs_of_their_own(tmp_path: Path) -> None:
    """Each replica counts alike, as under DDP."""
    ranks = launch_trainings(2, train, tmp_path)
    module: Any = make()
    optimizer, losses = module.configure_optimizers(), []
    module.log = lambda *args, **kwargs: None
    for pair in zip(*SEEDS, strict=True):
        each = [module.loss(named(seed)) for seed in pair]
        loss = sum(each) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        val = torch.stack([module.loss(named(seed)) for seeds in SEEDS for seed in seeds[:2]]).mean()
        alone = [[module.loss(named(seed)) for seed in seeds[:2]] for seeds in SEEDS]
    for rank, found in enumerate(ranks):
        assert distance(values(module), found["values"]) < 1e-14
        torch.testing.assert_close(found["losses"], losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(found["val"].double(), val, rtol=1e-6, atol=0)
        assert found["names"] == [f"graph{seed}" for seed in SEEDS[rank][:2]]
        torch.testing.assert_close(found["predicted"], alone[rank], rtol=1e-12, atol=0)
    assert float((alone[0][0] - alone[1][0]).abs()) > 1e-3


def test_replicas_of_which_only_one_can_cut_its_batch(tmp_path: Path) -> None:
    """They run uncaptured, as under DDP, because their programs would differ."""
    ranks = launch_trainings(2, train_tables, tmp_path)
    module: Any = make(Table)
    pairs = list(zip(tables(0), tables(1), strict=True))
    val = torch.stack([module.loss(batch) for pair in pairs for batch in pair]).mean()
    optimizer = module.configure_optimizers()
    for pair in pairs:
        optimizer.zero_grad()
        (sum(map(module.loss, pair)) / 2).backward()
        optimizer.step()
    for found in ranks:
        assert distance(values(module), found["values"]) < 1e-14
        assert found["val"] == pytest.approx(float(val.detach()), rel=1e-6)
    assert distance(values(make(Table)), ranks[0]["values"]) > 1e-3
