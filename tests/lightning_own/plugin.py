"""A pytest plugin for Lightning's own tests: every Trainer of one CPU device that leaves its strategy to
Lightning gets a `PiperStrategy`, or, to compare with, keeps its own. Writes a line of JSON for each test.

Variables of the environment:
    OWN_STRATEGY: `piper` or `plain`.
    OWN_OUTCOMES: the file that is written.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors import accelerator_connector

import lightning_piper as piper

PIPER = os.environ.get("OWN_STRATEGY") == "piper"
ONE_DEVICE = [{"op": "place", "filter": {}, "devices": [0]}]
# About the test that runs: how often the strategy was set up, what each run of a Trainer has left, and what
# has failed.
now: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    _seed()  # some tests make their data when they are imported
    _give_strategies()
    _note(piper.PiperStrategy if PIPER else SingleDeviceStrategy)


def _leaves_it_to_lightning(given: dict[str, Any]) -> bool:
    one = type(given["devices"]) is not bool and given["devices"] in (1, "1", "auto")
    return bool(
        given["strategy"] == "auto"
        and one
        and given["num_nodes"] == 1
        and given["accelerator"] in ("cpu", "auto")
    )


def _give_strategies() -> None:
    connector = accelerator_connector._AcceleratorConnector
    make = connector.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def init(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if isinstance(bound.arguments["strategy"], str) and _leaves_it_to_lightning(bound.arguments):
            bound.arguments["accelerator"], bound.arguments["devices"] = "cpu", 1
            if PIPER:
                bound.arguments["strategy"] = piper.PiperStrategy(ONE_DEVICE, transport="local")
        make(*bound.args, **bound.kwargs)

    connector.__init__ = init  # type: ignore[method-assign]


def _note(kind: Any) -> None:
    setup, run = kind.setup, Trainer._run

    @functools.wraps(setup)
    def noted_setup(self: Any, trainer: Any) -> Any:
        now["setups"] += 1
        return setup(self, trainer)

    @functools.wraps(run)
    def noted_run(self: Trainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, model, *args, **kwargs)
        finally:
            metrics = {name: x.item() for name, x in self.callback_metrics.items() if x.numel() == 1}
            params = [float(p.detach().double().abs().sum()) for p in model.parameters()]
            now["runs"].append(
                [str(self.state.fn), str(self.state.status), self.global_step, metrics, params]
            )

    kind.setup, Trainer._run = noted_setup, noted_run  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    _seed()


def _seed() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def pytest_runtest_logstart(nodeid: str) -> None:
    now.update(id=nodeid, setups=0, runs=[], outcome="passed", said="")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed" and now["outcome"] != "failed":
        now.update(outcome=report.outcome, said=str(report.longrepr)[-1000:])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    done = yield
    with Path(os.environ["OWN_OUTCOMES"]).open("a") as file:
        file.write(json.dumps(now) + "\n")
    return done
