"""Gradients of several dtypes are clipped by one norm, which is that of one device: in two stages and with
shards, on two processes.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET

STAGES = [piper.Place(filter={"PP": i}, devices=[i]) for i in (0, 1)]
PROGRAMS = {
    "stages": STAGES,
    "shards": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ],
}
KINDS: dict[str, tuple[torch.dtype, ...]] = {
    "bfloat16": (torch.bfloat16, torch.float64),
    "complex": (torch.complex128, torch.float32),
    "float32": (torch.float32,) * 2,
}
ROUNDING = {"bfloat16": 1e-12, "complex": 1e-7, "float32": 1e-6}


class Net(L.LightningModule):
    def __init__(self, kind: str, manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        few, many = KINDS[kind]
        self.scale = nn.Parameter(torch.ones(8, dtype=few))
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.first, self.second = nn.Linear(8, 16).to(many), nn.Linear(16, 1).to(many)
        self.kind, self.manual, self.norms = kind, manual, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        dtype = self.first.weight.dtype
        with piper.annotate("PP", 0):
            scale = self.scale.abs() if self.scale.is_complex() else self.scale
            h = torch.tanh(self.first(batch[0].to(dtype) * scale.to(dtype)))
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), batch[1].to(dtype))

    def configure_gradient_clipping(self, optimizer: Any, **kwargs: Any) -> None:
        if self.manual:
            params = list(self.parameters())
            for p in (1.0, 2.0, float("inf")):
                self.norms.append(torch.nn.utils.clip_grad_norm_(params, 1e3, p, error_if_nonfinite=True))
            self.norms.append(torch.nn.utils.clip_grad_norm_(params, 0.37))
        else:
            self.clip_gradients(optimizer, gradient_clip_val=0.37, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(kind: str, manual: bool, part: int | None = None, **options: Any) -> dict[str, Any]:
    module = Net(kind, manual)
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    data: Dataset[Any] = TensorDataset(x, x.sum(1, keepdim=True))
    if part is not None:
        data = Subset(data, range(part, 8, 2))
    loader = DataLoader(data, 8)
    trainer = L.Trainer(accelerator="cpu", max_steps=1, use_distributed_sampler=False, **QUIET, **options)
    trainer.fit(module, loader)
    moved = {name: x.detach() - before[name] for name, x in module.named_parameters()}
    return moved | {f"norm {i}": norm for i, norm in enumerate(module.norms)}


JOBS = [(kind, manual, program) for kind in KINDS for manual in (False, True) for program in PROGRAMS
        if kind == "bfloat16" or (program == "stages" and manual)]  # fmt: skip


def train(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for kind, manual, program in JOBS:
        part = rank if program == "shards" else None
        found[kind, manual, program] = fit(
            kind, manual, part, devices=2, strategy=piper.PiperStrategy(PROGRAMS[program])
        )
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return launch_trainings(2, train, tmp_path_factory.mktemp("norms"))


@pytest.mark.parametrize(("kind", "manual", "program"), JOBS)
def test_one_norm_clips_gradients_of_several_dtypes(kind, manual, program, ranks):
    one = fit(kind, manual, devices=1)
    for rank in ranks:
        found = rank[kind, manual, program]
        assert found.keys() == one.keys()
        for name, wanted in one.items():
            assert (
                found[name].dtype == wanted.dtype
                and (found[name] - wanted).abs().max() <= ROUNDING[kind] * wanted.abs().max()
            ), name


def test_a_norm_of_few_digits_would_show():
    norm = fit("bfloat16", True, devices=1)["norm 3"]
    assert abs(norm.bfloat16().double() - norm) > 1e-5 * norm
