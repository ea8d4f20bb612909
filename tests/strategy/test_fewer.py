"""A fit that loses processes and has no spare left continues with fewer replicas. It ends with the same bits as a fit
that resumes, with fewer replicas, from a checkpoint saved before the lost step."""

from __future__ import annotations

import random
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_piper.strategy.spares.written_files import WrittenFiles
from tests.distributed.processes import launch, run_ranks
from tests.strategy import fewer_series
from tests.strategy.fewer import EPOCHS, SAMPLES, train, train_on_more
from tests.strategy.scenarios import equal
from tests.strategy.spared import Loss, samples

LOST_IN = 7  # batches done before, in all epochs


def lost(folder: Path, kind: str, losses: Sequence[Loss]) -> list[dict[str, Any]]:
    """Return the results of the processes that finish a training of three processes and a spare."""
    ends = run_ranks(3 + 1, train, folder, folder, 3, kind, losses, joined=False)
    for end in ends:
        assert isinstance(end.result, dict) or end.exitcode == -signal.SIGKILL, end.said[-3000:]
    return [end.result for end in ends if isinstance(end.result, dict)]


def of(rank: int, after: int | None = None, moment: str = "update") -> Loss:
    return Loss(rank, moment, LOST_IN, 0, after)


@pytest.mark.parametrize("kind, losses, left", [
    ("0", [of(1), of(1)], 2), ("3", [of(1), of(1)], 2), ("3 averages", [of(1), of(2)], 2),
    ("uncaptured", [of(1), of(1)], 2), ("uncaptured", [of(1), of(2)], 2),
    ("2", [of(1), of(2, 0, "connecting")], 2), ("3 in order", [of(1), of(2, 0), of(1, 1)], 1),
    ("0 in order", [of(1), of(2, 0), of(1, 1)], 1), ("uncaptured in order", [of(1), of(2, 0), of(1, 1)], 1),
])  # fmt: skip
def test_fewer_replicas(kind, losses, left, tmp_path):
    """Two or three processes are lost, and a spare replaces one of them. On one process, a shuffled order would follow from
    random numbers that a checkpoint does not have."""
    undisturbed = fewer_series.undisturbed(tmp_path / "undisturbed", kind, 3)
    found = lost(tmp_path / "lost", kind, losses)
    wanted = fewer_series.resumed_as(tmp_path, kind, 3, found[0]["told"], undisturbed)
    assert len(found) == left
    for result in found:
        assert equal(result["values"], wanted["values"]) and result["steps"] == wanted["steps"]
        assert result["devices"] == left and result["random"][LOST_IN + 1] == 1
    x = samples(SAMPLES)[1]
    for epoch in found[0]["epochs"]:
        assert (epoch["count"], epoch["largest"]) == (SAMPLES, float(x.max()))
        assert abs(epoch["mean"] - float(x.mean())) < 1e-12
    # Until all processes have met, Lightning would end the run because of the lost process.
    assert found[0]["watched"] and all(found[0]["watched"])
    assert all("on 2 processes" in each or "on 1 process " in each for each in found[0]["told"][1:])


@pytest.mark.parametrize("kind, size", [("searched", 3), ("listed", 2)])
def test_a_program_that_may_need_all_processes(kind, size, tmp_path):
    """A search may choose stages, and a list of directives has stages. The run ends with its error."""
    given = size, kind, [of(1), of(1, 0)]
    ends = run_ranks(size + 1, train, tmp_path, tmp_path, *given, joined=False)
    killed = [end.exitcode == -signal.SIGKILL for end in ends]
    assert killed == [False, True] + [False] * (size - 2) + [True]
    assert "first process to fail was rank 1: it ended without an error" in ends[0].said


@pytest.mark.parametrize("kind, size", fewer_series.TRAININGS[:1])
def test_a_series_of_losses(kind, size, tmp_path):
    wanted = fewer_series.undisturbed(tmp_path / "undisturbed", kind, size)
    losses = fewer_series.draw(kind, size, 3, random.Random(1))
    assert fewer_series.suffer(tmp_path / "lost", kind, size, losses, wanted)[1] == []


@pytest.mark.parametrize("kind", ["3 without states", "uncaptured without lost"])
def test_without_a_part_of_the_copies_the_result_differs(kind, tmp_path):
    """The process that gets rank 1 had rank 2. Under ZeRO, it held none of the parameters that it now gets."""
    found = lost(tmp_path / "lost", kind, [of(1), of(1)])
    undisturbed = fewer_series.undisturbed(tmp_path / "undisturbed", kind, 3)
    wanted = fewer_series.resumed_as(tmp_path, kind, 3, found[0]["told"], undisturbed)
    counts = [epoch["count"] for epoch in found[0]["epochs"]]
    assert not equal(found[0]["values"], wanted["values"]) or counts != [SAMPLES] * EPOCHS


def test_a_later_trainer_has_more_processes(tmp_path):
    for said in launch(2, train_on_more, tmp_path, 2, joined=False):
        assert "the Trainer needs 3 processes, but earlier calls of this script have connected 2" in said


def test_removed_files_are_not_the_best(tmp_path):
    """The copies may name a file that a `ModelCheckpoint` removed after them for a better one."""
    for continues in (True, False):
        save = ModelCheckpoint(tmp_path, monitor="x", save_top_k=2)
        removed, kept = (str(tmp_path / name) for name in ("removed.ckpt", "kept.ckpt"))
        Path(kept).touch()
        save.best_k_models = {removed: torch.tensor(1.0), kept: torch.tensor(2.0)}
        save.best_model_path, save.best_model_score = removed, torch.tensor(1.0)
        trainer = L.Trainer(accelerator="cpu", logger=False, callbacks=[save])
        WrittenFiles().watch(trainer, continues)()
        assert save.best_model_path == (kept if continues else removed)
        assert save.best_model_score == (2.0 if continues else 1.0)
        assert save.best_k_models.keys() == ({kept} if continues else {removed, kept})
