"""Modules that a user has compiled with `torch.compile` train like modules that are not compiled, and as
under DistributedDataParallel.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch

import lightning_piper as piper
from tests.distributed.processes import launch_trainings
from tests.strategy.compiled import KINDS, STRATEGIES, train
from tests.strategy.fitting import QUIET, distance


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    return launch_trainings(2, train, folder / "run", folder)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_under_ddp(kind, ranks):
    for found in ranks:
        wanted = found[kind, "DDP"]
        for name in [name for name in STRATEGIES if (kind, name) in found]:
            values = found[kind, name]
            assert list(values) == list(wanted)  # also where DDP has `_orig_mod` in them
            plain = dict(zip(values, found["nothing", name].values(), strict=True))
            assert all(torch.equal(values[key], plain[key]) for key in values)
            if name != "stages":  # their batches are others
                assert distance(values, wanted) < 1e-14


def module_of(package: Any) -> Any:
    class Net(package.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("seen", self.net(batch).mean())

        test_step = validation_step

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(
    "package", [lightning.pytorch, pytorch_lightning], ids=lambda package: package.__name__
)
def test_a_compiled_module_is_taken_apart_with_a_warning(package):
    module, plain = module_of(package), module_of(package)
    data = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)
    strategy = piper.PiperStrategy([piper.Place(filter={}, devices=[0])], transport="local")
    trainer = package.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.warns(match=r"ignores torch\.compile\(module\).*PiperStrategy\(compile=True\)"):
            found = run(torch.compile(module, backend="eager"), data)
        assert module._compiler_ctx is None
    assert torch.equal(torch.cat(found), module.net(torch.cat(list(data))))
    package.Trainer(accelerator="cpu", devices=1, max_epochs=1, **QUIET).fit(plain, data)
    assert distance(module.state_dict(), plain.state_dict()) < 1e-6
