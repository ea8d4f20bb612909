"""An operation that finds no memory raises an error of the right class, and Lightning recognizes it and tries
a smaller batch.
"""

from __future__ import annotations

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.runtime.local_transport import LocalEndpoint
from tests.strategy.fitting import PROGRAM, local, trainer
from tests.strategy.models import make

WHOLE = [piper.Place(filter={}, devices=[0])]


class Large(L.LightningModule):
    """From 32 samples on, the model asks for more memory than can exist: addresses have 47 bits."""

    def __init__(self):
        super().__init__()
        self.layer, self.batch_size = torch.nn.Linear(4, 1), 2

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return self.layer(x).square().mean() + x.new_zeros(2**49 * (len(x) // 32)).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(256, 4)), batch_size=self.batch_size)


def test_the_batch_size_is_scaled_to_the_memory():
    found = []
    for strategy in ("auto", local(WHOLE)):
        fit, _ = trainer(strategy, max_steps=2)
        found.append(Tuner(fit).scale_batch_size(Large(), mode="binsearch", steps_per_trial=1, init_val=8))
    assert found[0] == found[1] and 16 < found[1] < 32


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you "
                 "tried to allocate 8 bytes"),
    RuntimeError("something else"),
    ValueError("CUDA out of memory"),
])  # fmt: skip
def test_an_error_of_an_instruction_keeps_what_it_is_known_by(error, monkeypatch):
    def failing(self, instruction, slots):
        def fail():
            raise error

        return fail

    monkeypatch.setattr(LocalEndpoint, "send", failing)
    module, loader = make("tied")
    fit, _ = trainer(local(PROGRAM), max_steps=1)
    with pytest.raises(piper.ExecutionError, match="send") as raised:
        fit.fit(module, loader)
    assert raised.value.__cause__ is error and isinstance(raised.value, RuntimeError)
    assert isinstance(raised.value, torch.OutOfMemoryError) == isinstance(error, torch.OutOfMemoryError)
    assert is_oom_error(raised.value) == ("allocate" in str(error) or "out of memory" in str(error))
