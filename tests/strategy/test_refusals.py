"""Requests that do not work are refused before any training, with a way to solve the problem."""

from __future__ import annotations

from datetime import timedelta

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import Precision

import lightning_piper as piper
from lightning_piper.strategy.checks import checked_backend
from tests.strategy.fitting import PROGRAM, Batches, local, trainer, values
from tests.strategy.models import MLP, make, vectors


@pytest.mark.parametrize("options, message", [
    ({"verify": "sometimes"}, "verify='sometimes'.*'static', 'first_batch', 'each', 'determinism', 'off'"),
    ({"transport": "pigeon"}, "transport='pigeon'.*'process', 'local'"),
    ({"timeout": "30"}, "timeout='30'.*number of seconds"),
    ({"timeout": timedelta(0)}, "positive"),
    ({"start_method": "spawn"}, "start_method='spawn'.*only 'popen'"),
    ({"start_method": "fork"}, "transport='local'"),
])  # fmt: skip
def test_arguments(options, message):
    with pytest.raises(piper.PiperError, match=message):
        piper.PiperStrategy(list(PROGRAM), **options)


def test_a_backend_without_messages_between_gpus(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name == "nccl")
    with pytest.raises(
        piper.PiperError, match=r"process_group_backend='gloo'.* exchange tensors by nccl.*Leave"
    ):
        checked_backend("gloo", cuda, 2)
    assert (
        checked_backend(None, cuda, 2)
        == checked_backend("nccl", cuda, 2)
        == checked_backend(None, cuda, 1)
        == "nccl"
    )
    assert checked_backend("cpu:gloo,cuda:nccl", cuda, 2) == "cpu:gloo,cuda:nccl"
    assert checked_backend(None, cpu, 2) == checked_backend("gloo", cpu, 2) == "gloo"
    with pytest.raises(
        piper.PiperError, match=r"xccl, but this torch was built without it.*transport='local'"
    ):
        checked_backend(None, torch.device("xpu", 0), 2)
    with pytest.raises(
        piper.PiperError, match=r"several processes cannot train on mps.*no backend.*transport='local'"
    ):
        checked_backend(None, torch.device("mps", 0), 2)
    assert checked_backend(None, torch.device("mps", 0), 1) == "gloo"


@pytest.mark.parametrize("program, message", [
    ([{"op": "plaice", "filter": {}}], "directive 0.*plaice"),
    ([{"op": "place", "filter": {}, "device": [0]}], "directive 0.*'device'"),
    ("no such file.json", "does not exist"),
    ({"op": "place"}, "a list"),
])  # fmt: skip
def test_malformed_directives_fail_at_construction(program, message):
    with pytest.raises(piper.DirectiveError, match=message):
        piper.PiperStrategy(program)


def test_no_directives_at_all(monkeypatch):
    monkeypatch.delenv("PIPER_DIRECTIVES", raising=False)
    fit, _ = trainer(piper.PiperStrategy(transport="local"))
    (module, loader), (plain, _), (other, _) = make("mlp"), make("mlp"), trainer("auto")
    fit.fit(module, loader)
    other.fit(plain, loader)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True)), (
        "on one device"
    )


def test_local_transport_takes_one_device():
    with pytest.raises(piper.PiperError, match=r"devices=2.*Use Trainer\(devices=1, num_nodes=1\)"):
        trainer(local(), devices=2)


def test_interactive_sessions(monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(piper.PiperError, match="transport='local'"):
        trainer(piper.PiperStrategy(list(PROGRAM)), devices=2)


def test_one_process_of_a_notebook(monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    (module, loader), (plain, _), (made, _), (other, _) = (
        make("mlp"),
        make("mlp"),
        trainer("piper"),
        trainer("auto"),
    )
    try:
        made.fit(module, loader)
    finally:
        torch.distributed.destroy_process_group()
    other.fit(plain, loader)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), plain.parameters(), strict=True))


class Manual(MLP):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Two(MLP):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.first.parameters()), torch.optim.SGD(self.second.parameters())]


class Iterating(MLP):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


class Meta(MLP):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.gain = torch.nn.Parameter(torch.empty(3))


class Normed(MLP):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)


class Grouped(MLP):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.SyncBatchNorm(4, process_group=object())


class Eighths(Precision):
    precision = "8-true"


class Finetuned(MLP):
    def __init__(self):
        super().__init__()
        self.backbone = self.first


@pytest.mark.parametrize(
    "module, options, message",
    [
        (Manual, {}, "manual optimization"),
        (Two, {}, "Lightning|optimizers"),
        (Iterating, {}, "dataloader_iter"),
        (Meta, {}, "'gain' is on the meta device, and Meta has no method reset_parameters"),
        (Grouped, {}, "norm is a SyncBatchNorm with its own process group"),
        (
            Normed,
            {"callbacks": [StochasticWeightAveraging(1e-2)], "max_epochs": 2},
            "StochasticWeightAveraging of a module with",
        ),
        (
            Meta,
            {"callbacks": [StochasticWeightAveraging(1e-2)], "max_epochs": 2},
            "StochasticWeightAveraging copies the module, which is on the meta device",
        ),
        (
            Finetuned,
            {"callbacks": [BackboneFinetuning(1)], "max_epochs": 2},
            "BackboneFinetuning, which unfreezes",
        ),
        (
            MLP,
            {"plugins": [Eighths()]},
            r"plugin Eighths\('8-true'\) is not supported. Give Trainer\(precision=...\) one of .*'bf16-mixed'",
        ),
    ],
)
def test_fits(module, options, message):
    fit, record = trainer(local(), options.pop("callbacks", ()), **options)
    with pytest.raises((piper.PiperError, RuntimeError), match=message):
        fit.fit(module(), vectors())
    assert not record.losses


def test_an_error_leaves_the_module_as_it_was():
    module, loader = make("mlp")
    before = values(module)
    fit, _ = trainer(local([*PROGRAM, piper.Order(filters=[{"PP": 7}, {"PP": 0}])]))
    with pytest.raises(piper.DirectiveError, match="directive 5"):
        fit.fit(module, loader)
    after = values(module)
    assert all(torch.equal(before[n], after[n]) for n in before)
    fit, record = trainer(local())
    fit.fit(module, loader)
    assert len(record.losses) == 5


class Moody(L.LightningModule):
    """Depending on the batch, uses one parameter in both regions, or does not use one layer at all."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        with piper.annotate("PP", 0):
            x = self.first(batch["x"])
        with piper.annotate("PP", 1):
            x = x if batch["mode"] == "never" else self.second(x)
            return (x @ self.first.weight if batch["mode"] == "twice" else x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_batches_in_which_regions_read_other_parameters_train_in_shards():
    program = [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_params=True),
    ]
    batches = Batches({"x": torch.randn(4, 4), "mode": mode} for mode in ("once", "never", "twice"))
    one, two = Moody(), Moody()
    two.load_state_dict(one.state_dict())
    for module, strategy in ((one, "auto"), (two, local(program))):
        fit, record = trainer(strategy, devices=1)
        fit.fit(module, batches)
        assert len(record.losses) == 5
    assert all(torch.allclose(values(one)[name], x, atol=1e-6) for name, x in values(two).items())


def test_a_parameter_that_is_frozen_after_the_capture():
    class Switching(MLP):
        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.first.requires_grad_(False)

    fit, record = trainer(local(), max_steps=-1, max_epochs=3)
    with pytest.raises(piper.PiperError, match="changed after Piper captured the step"):
        fit.fit(Switching(), vectors())
    assert len(record.losses) == 5


def test_lbfgs_runs_where_it_sees_all_parameters():
    class Whole(MLP):
        def configure_optimizers(self):
            return torch.optim.LBFGS([p for p in self.parameters() if p.requires_grad], lr=0.1, max_iter=3)

    results = []
    for strategy in ("auto", local()):
        torch.manual_seed(0)
        module = Whole()
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            strategy=strategy,
        ).fit(module, vectors())
        results.append(torch.nn.utils.parameters_to_vector(module.parameters()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
