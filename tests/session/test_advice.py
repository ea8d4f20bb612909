"""What a warning or an error advises works when it is done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.compiler import Compiled, compile_step
from lightning_piper.directives import parse
from lightning_piper.processes.world import World
from lightning_piper.session.verification import _plain_to_see, warn_of_checkpointing


class Stages(L.LightningModule):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), norm, nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 0):
            h = self.norm(self.first(batch))
        with piper.annotate("PP", 1):
            return self.second(h).square().mean()


def compiled(norm: nn.Module, synced: bool = False, **degrees: int) -> Compiled:
    step = capture(Stages(norm), torch.randn(8, 8), whole_norms=synced)
    return compile_step(step, tuple(parse(piper.parallel(pp=2, **degrees))))


def warned(found: Compiled) -> list[str]:
    return [text for text in _plain_to_see(found) if "batch norm" in text]


@pytest.mark.long
def test_batch_norms_of_stages() -> None:
    (text,) = warned(compiled(nn.BatchNorm1d(8)))
    assert "Use one microbatch (microbatches=1), or norms without statistics of a batch (GroupNorm" in text
    with pytest.raises(
        piper.DirectiveError,
        match=r"one microbatch and nn.SyncBatchNorm \(Trainer\(sync_batchnorm",
    ):
        compiled(nn.BatchNorm1d(8), dp=2)
    with pytest.raises(
        piper.DirectiveError,
        match=r"Use one microbatch, or replace the batch norms by nn.GroupNorm",
    ):
        compiled(nn.BatchNorm1d(8), synced=True, dp=2)
    # the advice
    assert not warned(compiled(nn.BatchNorm1d(8), microbatches=1))
    assert not warned(compiled(nn.BatchNorm1d(8), synced=True, microbatches=1, dp=2))
    assert not warned(compiled(nn.GroupNorm(2, 8), dp=2))


def test_batch_norms_of_replicas_without_microbatches() -> None:
    norm = nn.BatchNorm1d(8, track_running_stats=False)
    (text,) = warned(compiled(norm, dp=2, microbatches=1))
    assert "over the samples of each replica" in text and "Use Trainer(sync_batchnorm=True), or norms" in text
    (text,) = warned(compiled(norm, dp=2, microbatches=2))
    assert "over microbatches" in text
    assert "one microbatch (microbatches=1) with Trainer(sync_batchnorm=True), or norms" in text
    assert not warned(compiled(norm, synced=True, dp=2, microbatches=1))


def test_batch_norms_of_microbatches_without_an_order() -> None:
    program = parse([piper.Place([0]), piper.Split(2)])
    step = capture(Stages(nn.BatchNorm1d(8)), torch.randn(8, 8))
    (text,) = warned(compile_step(step, tuple(program)))
    assert "Use Trainer(sync_batchnorm=True), or norms" in text
    step = capture(Stages(nn.BatchNorm1d(8)), torch.randn(8, 8), whole_norms=True)
    assert not warned(compile_step(step, tuple(program)))


def test_checkpointing_of_the_model_itself_is_warned_of() -> None:
    texts: list[str] = []
    world = cast(World, SimpleNamespace(warn=texts.append))
    module = Stages(nn.Identity())
    warn_of_checkpointing(compiled(nn.Identity()), module, world)
    assert not texts
    module.norm.gradient_checkpointing = True  # type: ignore[assignment]
    warn_of_checkpointing(compiled(nn.Identity()), module, world)
    assert not texts, "a module without the method that the warning names"
    module.norm.gradient_checkpointing_disable = print  # type: ignore[assignment]
    warn_of_checkpointing(compiled(nn.Identity()), module, world)
    assert len(texts) == 1 and texts[0].startswith(
        "norm has gradient checkpointing on, which saves no memory"
    )
    program = parse([piper.Place([0]), piper.Recompute(filter={})])
    warn_of_checkpointing(compile_step(capture(module, torch.randn(8, 8)), tuple(program)), module, world)
    assert len(texts) == 1
