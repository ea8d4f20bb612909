"""Errors in arguments of the strategy or the Trainer, and errors of processes."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.plugins.precision import Precision
from torch.optim import LBFGS

import lightning_piper as piper
from lightning_piper.holdings.materialization import Known
from lightning_piper.processes.launcher_checks import check_address
from lightning_piper.processes.spares import SPARES
from lightning_piper.profile import Schedule
from lightning_piper.session.eager.conditions import check_may_be
from lightning_piper.strategy.checks import check_fit, check_local_fit, uncapturable
from lightning_piper.strategy.spares.checks import check_spares
from tests.errors.case import PLACES, Case, Cases, Elsewhere, fit, net, written
from tests.strategy.fitting import local, trainer

TITLE = "The strategy, the Trainer, processes"
INTRO = """All processes raise these errors before the first step: when you make the strategy or the Trainer, at the start of \
`fit`, or at its first batch."""

PROCESSES = "tests/strategy/test_fit_processes.py::test_processes_refuse_together"
OPTIONS = "tests/strategy/test_options.py::test_refusals"
AVERAGES = "tests/strategy/test_averages.py::test_averages_by_hand"
SPARES_OF = "tests/strategy/test_spares.py::test_refusals"
LOCAL_SGD = "tests/strategy/test_local_sgd.py::"
SHARDS = "tests/strategy/test_sharded.py::test_refusals"


def strategy(what: str, **options: Any) -> Case:
    return Case(what, lambda: piper.PiperStrategy(PLACES, **options))


def spares(environment: Any = None, processes: int = 2, nodes: int = 1, device: str = "cpu") -> None:
    with mock.patch.dict(os.environ, {SPARES: "1"}):
        check_spares(environment or LightningEnvironment(), processes, nodes, torch.device(device))


TWO_REPLICAS = piper.LocalSGD(replicas=2, every=8)


class Scaled(Precision):
    precision = "16-mixed"  # type: ignore[assignment]
    scaler = object()


def plain(*callbacks: Callback) -> tuple[Any, Precision]:
    return trainer(local(), callbacks)[0], Precision()


class Eighths(Precision):
    precision = "8-true"  # type: ignore[assignment]


def refused(what: str, line: str = "pass", *changes: tuple[str, str], **options: Any) -> Case:
    return Case(what, lambda: fit(net(line, *changes), **options))


def from_environment(path: str) -> None:
    os.environ["PIPER_DIRECTIVES"] = path
    piper.PiperStrategy()


def from_module(found: Any) -> None:
    os.environ.pop("PIPER_DIRECTIVES", None)
    module = net()
    module.piper_directives = found
    fit(module, strategy=piper.PiperStrategy(transport="local"))


def on_meta(reset: Any = None, **options: Any) -> None:
    module = net()
    module.gain = torch.nn.Module()
    module.gain.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    if reset is not None:
        module.gain.reset_parameters = reset
    fit(module, **options)


def averaged() -> None:
    module = net()
    module.norm = torch.nn.BatchNorm1d(4)
    fit(module, callbacks=[StochasticWeightAveraging(0.1)], max_steps=-1, max_epochs=2)


class Layers(LayerSync):
    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


def over_a_group() -> None:
    module = net()
    module.norm = torch.nn.SyncBatchNorm(4, process_group=object())
    fit(module)


def fine_tuned() -> None:
    module = net()
    module.backbone = module.first
    fit(module, callbacks=[BackboneFinetuning(2)], max_steps=-1, max_epochs=5)


def over_processes(callback: Callback) -> None:
    """Run the checks that apply to several processes."""
    made, _ = trainer(local(), [callback], enable_checkpointing=True)
    check_fit(made, net(), 2, layer_sync=None, known=Known())


def of_all_parameters() -> None:
    module = net()
    found = uncapturable(module, [LBFGS(module.parameters())], processes=2, capture="always")
    assert found is not None
    check_may_be(None, "training_step", found, "always")  # type: ignore[arg-type]


def interactive() -> None:
    sys.ps1 = ">>> "
    try:
        trainer(piper.PiperStrategy(PLACES), devices=2)
    finally:
        del sys.ps1


def of_loopback() -> None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    with mock.patch("socket.gethostname", lambda: "localhost"), mock.patch("socket.getaddrinfo", answer):
        check_address("node-1")


def answer(name: str, *args: Any, **options: Any) -> Any:
    return [(None, None, None, "", ("10.0.0.1" if name == "node-1" else "127.0.0.1", 0))]


def without_a_script() -> None:
    with mock.patch.object(sys, "argv", ["-c"]), mock.patch.object(sys.modules["__main__"], "__spec__", None):
        trainer(piper.PiperStrategy(PLACES), devices=2)


def other_devices() -> None:
    """Fit one process with a program for several. Lightning makes a process group, which is destroyed here."""
    try:
        fit(strategy=piper.PiperStrategy(PLACES))
    finally:
        torch.distributed.destroy_process_group()


MANUAL = ("super().__init__()", "super().__init__(); self.automatic_optimization = False")

CASES: Cases = [
    strategy("`verify` has a value that it cannot have", verify="sometimes"),
    strategy("`transport` has a value that it cannot have", transport="pigeon"),
    strategy("`checkpoint` has a value that it cannot have", checkpoint="parted"),
    strategy("a `timeout` as text", timeout="30"),
    Case("`LocalSGD` with a number that it cannot have", lambda: piper.LocalSGD(replicas=2, every=0)),
    Case("`LocalSGD` with more parts than updates", lambda: piper.LocalSGD(replicas=2, every=2, parts=4)),
    strategy("`local_sgd` is not a `LocalSGD`", local_sgd=2),
    strategy("local SGD in one process", local_sgd=TWO_REPLICAS, transport="local"),
    strategy("`spares` is not a number", spares="1"),
    strategy("spares in one process", spares=1, transport="local"),
    Case("spares of processes that torchrun starts", lambda: spares(environment=TorchElasticEnvironment())),
    Case("spares of several machines", lambda: spares(nodes=2)),
    Case("spares of one process", lambda: spares(processes=1)),
    Case("spares of devices other than a CPU", lambda: spares(device="meta")),
    Elsewhere("spares of an uncaptured step under ZeRO", "state of an uncaptured step is sharded", "PiperError", SPARES_OF),
    Elsewhere("spares, but the first call is not `fit`", "which must be fit, but it is validate", "PiperError", SPARES_OF),
    Elsewhere("a Trainer has more processes than the script, perhaps after losses", "earlier calls of this script have",
              "PiperError", "tests/strategy/test_fewer.py::test_a_later_trainer_has_more_processes"),
    Case("local SGD with a search", lambda: piper.PiperStrategy("auto", local_sgd=TWO_REPLICAS)),
    Case("a search with degrees", lambda: piper.PiperStrategy("auto", dp=(2, 4), zero=3)),
    Case("local SGD with a number of processes that its replicas do not divide", lambda: TWO_REPLICAS.processes(3)),
    Case("local SGD with a module that asks for a search", lambda: check_local_fit(*plain(), searched=True)),
    Case("local SGD with a loss scale", lambda: check_local_fit(plain()[0], Scaled(), searched=False)),
    Case("local SGD with an average of the weights",
         lambda: check_local_fit(*plain(EMAWeightAveraging()), searched=False)),
    Case("machines whose own name is that of loopback", of_loopback),
    strategy("a `timeout` of zero", timeout=timedelta(0)),
    strategy("launching by `spawn` or `fork`", start_method="spawn"),
    strategy("`profile` is a text", profile="yes"),
    Case("a recording of 0 steps", lambda: Schedule(active=0)),
    Case("`PIPER_DIRECTIVES` names a file that does not exist", lambda: from_environment("program.json")),
    Case("`PIPER_DIRECTIVES` names a file that does not contain "
         "JSON", lambda: from_environment(written("program.json", "[{]"))),
    Case("the module's `piper_directives` are wrong", lambda: from_module([{"op": "plaice"}])),
    refused('`transport="local"` with several devices', devices=2),
    refused("manual optimization", "pass", MANUAL),
    refused("the step draws its own batches", "pass", ("self, batch, batch_idx", "self, dataloader_iter"),
            ("x, y = batch", "(x, y), _, _ = next(dataloader_iter)")),
    refused("a plugin that replaces layers of the module", plugins=[Layers()]),
    Case("`SyncBatchNorm` with its own process group", over_a_group),
    Case("a submodule on the meta device without `reset_parameters()`", on_meta),
    Case("a `reset_parameters()` that leaves a tensor out", lambda: on_meta(lambda: None)),
    Case("a `reset_parameters()` that fails", lambda: on_meta(lambda: torch.ones(2) + torch.ones(3))),
    Case("weight averaging of a module on the meta device",
         lambda: on_meta(lambda: None, callbacks=[StochasticWeightAveraging(0.1)])),
    Case("`EMAWeightAveraging` of a module on the meta device",
         lambda: on_meta(lambda: None, callbacks=[EMAWeightAveraging()])),
    Case("`StochasticWeightAveraging` of a module with batch norms", averaged),
    Case("`BackboneFinetuning` that unfreezes in the middle of a fit", fine_tuned),
    Case("your own precision plugin (`plugins=[...]`)", lambda: fit(net(), plugins=[Eighths()])),
    Case("`transport=\"process\"` in a notebook", interactive),
    Case("`transport=\"process\"` in a program that is not a file (`python -c`, a pipe, a zip "
         "archive)", without_a_script),
    Case("the program and the Trainer have different numbers of devices", other_devices),
    Case("`save_on_exception` over processes",
        lambda: over_processes(ModelCheckpoint("checkpoints", save_on_exception=True))),
    Case("`BatchSizeFinder` over processes", lambda: over_processes(BatchSizeFinder())),
    Case("an optimizer that needs all parameters, over processes", of_all_parameters),
    Elsewhere("a sampler that divides the data between stages", "DistributedSampler splits the data over 2 "
                                                                "replicas", "PiperError",
              PROCESSES),
    Elsewhere("training data of different lengths", "have [5, 4] batches", "PiperError", PROCESSES),
    Elsewhere("one process has a different module", "parameters or buffers of different names, shapes, dtypes", "PiperError",
        PROCESSES),
    Elsewhere("a weight-averaging function reads all parameters, which are on several processes",
              "WeightAveraging must average each element of the parameters "
              "independently", "PiperError", AVERAGES),
    Elsewhere("a hook that reads sharded parameters, or parameters of another stage, such as for its own "
              "average of weights",
              "cannot be read or copied here, because this process does not have all of "
              "them", "PiperError", AVERAGES),
    Elsewhere("an optimizer that needs whole parameters, but they are sharded",
              "Lamb does not update each element of a parameter independently", "PiperError", SHARDS),
    Elsewhere("an optimizer that needs all parameters together, but they are on several processes",
              "Clipping updates a parameter differently if it has other parameters as "
              "well", "PiperError", OPTIONS),
    Elsewhere("an optimizer that Piper cannot try on a copy", "it runs the closure more than once",
        "PiperError", OPTIONS),
    Elsewhere("one process has different parameter groups", "is in parameter group 0 on rank 0 and not on "
                                                            "rank 1", "PiperError",
              OPTIONS),
    Elsewhere("one process has a different learning rate", "'lr' is 0.1 on rank 0, and 0.2 on rank 1",
        "PiperError", OPTIONS),
    Elsewhere("a gradient hook on a parameter that is "
              "sharded", "'inner.weight' has a gradient hook", "PiperError", SHARDS),
    Elsewhere("an optimizer that has been in a fit before, over processes",
              "this SGD was used in an earlier fit, and has only the part of the parameters", "PiperError", OPTIONS),
    Elsewhere("a hook changes a parameter on the meta device before the first step",
              "'second.2.bias' was changed in place on the meta device", "PiperError", OPTIONS),
    Elsewhere("local SGD of a step that cannot be captured", "trains only captured steps", "PiperError",
              LOCAL_SGD + "test_a_step_that_cannot_be_captured_is_an_error"),
    Elsewhere("local SGD with other numbers of batches in its replicas", "has ended its fit after batch 4 of epoch 0",
              "PiperError", "tests/strategy/test_local_sgd.py::test_replicas_with_other_numbers_of_batches_are_an_error"),
    Elsewhere("local SGD resumes with another number of replicas", "has the states of 4 local replicas", "PiperError",
              LOCAL_SGD + "test_a_checkpoint_of_another_number_of_replicas_is_an_error"),
    Elsewhere("`16-mixed` with a fused optimizer, over processes", "Remove fused=True", "PiperError", SHARDS),
]  # fmt: skip
