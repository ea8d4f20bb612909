"""Adapters train on frozen weights that are int8 buffers with a scale, as with plain Lightning."""

from __future__ import annotations

import functools

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_piper as piper
from tests.strategy.fitting import Batches, trainer

PROGRAMS = {
    "zero3": {"dp": 2, "zero": 3},
    "stages": {"pp": 2, "microbatches": 4},
    "tensor parallel": {"tp": 2},
    "stages and zero3": {"pp": 2, "dp": 2, "zero": 3, "microbatches": 2},
    "stages and tensor parallel": {"pp": 2, "tp": 2, "microbatches": 2},
}
ROUNDING = 1e-12  # seen: 5e-14


class Quantized(nn.Module):
    """A linear layer whose weight is rounded to int8, with a LoRA adapter.

    Args:
        bits: The bits of a weight. Less than 8: another rounding.
    """

    def __init__(self, inputs: int, outputs: int, bits: int) -> None:
        super().__init__()
        weight = torch.randn(outputs, inputs) / inputs**0.5
        scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.a = nn.Parameter(torch.randn(4, inputs) / inputs**0.5)
        self.b = nn.Parameter(torch.zeros(outputs, 4))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale) + x @ self.a.T @ self.b.T


class Net(L.LightningModule):
    def __init__(self, bits: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(
            nn.Sequential(Quantized(8, 16, bits), nn.GELU(), Quantized(16, 8, bits)) for _ in range(4)
        )
        self.double()

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(x, y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.03)


def trained(strategy, bits=8):
    draw = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(8, 3, 8, generator=draw).double() for _ in range(2)) for _ in range(5)]
    module = Net(bits)
    trainer(strategy)[0].fit(module, Batches(batches))
    return module.state_dict()


@functools.cache
def by_plain_lightning(bits):
    return trained("auto", bits)


def distance(found, expected):
    return max((found[name] - x).abs().max().item() for name, x in expected.items() if x.is_floating_point())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.long if "and" in x else ()) for x in PROGRAMS]
)
def test_frozen_int8_weights_train_as_with_plain_lightning(name):
    found = trained(piper.PiperStrategy(**PROGRAMS[name], transport="local"))
    assert all(
        torch.equal(found[name], x) for name, x in by_plain_lightning(8).items() if x.dtype == torch.int8
    )
    assert distance(found, by_plain_lightning(8)) <= ROUNDING
    assert distance(found, by_plain_lightning(7)) > 1e-4
