"""Callbacks and options of the Trainer do over processes what they do on one device, or raise an error."""

from __future__ import annotations

import itertools
import re
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.groups import marked, on_demand
from tests.strategy.fitting import local, trainer
from tests.strategy.models import MLP, vectors
from tests.strategy.options import PROGRAMS, TRIALS, run_all, trace_all
from tests.strategy.requests import work

EACH = pytest.mark.parametrize("program", marked(PROGRAMS, ["ZeRO-3"]))
# What Lightning does only in the process of rank 0.
LEADS = {"summary": ("rows", "counts"), "throughput": ("samples", "factors")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each process has seen under a program."""

    def run(names):
        folder = tmp_path_factory.mktemp("options")
        seen = launch_trainings(2, work, folder / "run", names, folder, prepare=trace_all)
        return {name: [rank[name] for rank in seen] for name in names}

    return on_demand([[program] for program in PROGRAMS], run)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with torch.random.fork_rng():
        return run_all(None, tmp_path_factory.mktemp("plain"))


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The paths at which two nested outcomes differ by more than the rounding of float64."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [found for key in a for found in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [found for i in range(len(a)) for found in differences(a[i], b[i], f"{path}[{i}]")]
    if isinstance(a, torch.Tensor | float) and type(a) is type(b):
        x, y = torch.as_tensor(a).double(), torch.as_tensor(b).double()
        return (
            [] if x.shape == y.shape and torch.allclose(x, y, rtol=1e-9, atol=1e-12) else [f"{path}: {a} {b}"]
        )
    return [] if type(a) is type(b) and a == b else [f"{path}: {a} {b}"]


@pytest.mark.parametrize("name", [name for name in TRIALS if name != "gradient_norms"])
@EACH
def test_as_on_one_device(name, program, ranks, plain):
    for rank, found in enumerate(ranks(program)):
        expected, seen = dict(plain[name]), dict(found[name])
        for key in LEADS.get(name, ()):
            if rank > 0:
                del expected[key]
                seen.pop(key, None)
        if name == "throughput" and rank == 0:
            # What all devices do together: only there where data are divided, and of each replica once.
            assert (expected.pop("factors"), seen.pop("factors")) == ({0}, {0} if program == "PP2" else {2})
        assert differences(expected, seen) == []


@EACH
def test_gradient_norms_are_those_of_the_whole_module(program, ranks, plain):
    expected = plain["gradient_norms"]
    assert expected["refusals"] == set() and len(expected["norms"][0]) == 6
    for found in ranks(program):
        seen = found["gradient_norms"]
        assert differences({**expected, "refusals": None}, {**seen, "refusals": None}) == []
        (refusal,) = {said.split(": ", 2)[2] for said in seen["refusals"]}
        assert (
            refusal.startswith("this process does not have the whole gradient")
            and "lightning_piper.grad_norm" in refusal
        )


def test_what_one_device_does_depends_on_the_options(plain):
    """So that what is equal is not equal by chance."""
    several = [
        plain["early_stopping_within_an_epoch"],
        *plain["schedulers"].values(),
        plain["accumulation_schedule"],
        *(plain["limits"][key] for key in ("number", "part", "overfit", "fast", "some", "steps")),
        *(plain["switches"][key] for key in ("anomaly", "deterministic", "by value")),
    ]
    found = [seen["values"]["first.0.weight"] for seen in several]
    alike = [(i, k) for i in range(len(found)) for k in range(i) if torch.equal(found[i], found[k])]
    assert alike == []
    assert plain["throughput"]["samples"] and plain["device_stats"]["stats"] and plain["lr_finder"]["found"]
    assert plain["checkpoints"]["names"] != [] and plain["summary"]["counts"][:2] == [496, 480]


@EACH
def test_collectives_in_hooks(program, ranks):
    """Each replica counts once; the processes of one keep what they have."""
    for rank, found in enumerate(ranks(program)):
        mean, total = (rank + 1.0, rank + 1.0) if program == "PP2" else (1.5, 3.0)
        seen = found["collectives"]
        assert torch.equal(seen["all_gather"], torch.tensor([1.0, 2.0]))
        assert (float(seen["mean"]), float(seen["sum"]), float(seen["logged"])) == (mean, total, mean)
        assert (seen["broadcast"], seen["any"], seen["all"]) == ("from 0", True, False)


@EACH
@pytest.mark.parametrize("what, words", [
    ("batch sizes", "Choose batch_size yourself"),
    ("closure", "SAM (must|does not) update each .* it runs the closure more than once(?!.*shard_by)"),
    ("together", "Clipping updates a parameter differently if it has other parameters|Clipping does not "
                 "update each element"),
    ("penalty", "the values of '(first|second)[.0-9a-z]*' cannot be read or copied here"),
    ("optimizer again", "this SGD was used in an earlier fit, and has only the part of the parameters"),
    ("blank", "'second.2.bias' was changed in place on the meta device"),
    ("untouched", "nothing"),
    ("groups", "the optimizer's parameter groups have changed since the first batch"),
    ("replaced at the start", "nothing"),
    ("replaced later", "a callback or hook replaced strategy.optimizers after the first batch"),
    ("control", "nothing"),
    ("another optimizer", "the class of the optimizer is torch.optim.adam.Adam on rank 0, and "
                          "torch.optim.sgd.SGD on rank 1"),
    ("another group", r"\('second.0.weight' is in parameter group 0 on rank 0 and not on rank 1\)"),
    ("another betas", r"'betas' of the optimizer's parameter group 1 is \(0.8, 0.9\) on rank 0, and \(0.8, "
                      r"0.95\) on rank 1"),
    ("another rate", "'lr' is 0.1 on rank 0, and 0.2 on rank 1"),
    ("another later", "'lr' of the optimizer's parameter group 1 is 0.05 on rank 0, and 0.06 on rank 1"),
    ("another factor", "the factor with which backward multiplied the last loss is 2.0 on rank 0, and 3.0 "
                       "on rank 1"),
    ("another factor at the end", "the factor with which backward multiplied the last loss is 2.0 on rank "
                                  "0, and 3.0 on rank 1"),
    ("nothing else", "nothing"),
    ("norm of each", "got only some of the gradients that a process has"),
    ("norm of the module", "nothing"),
    ("norm of some", "got only some of the gradients that a process has"),
    ("norms of other groups", "clip_grad_norm_ or get_total_norm with gradients of different parameter groups"),
])  # fmt: skip
def test_refusals(program, what, words, ranks):
    if (program, what) == ("ZeRO-3", "groups"):
        words = "nothing"  # in replicas the step runs as it is
    for found in ranks(program):
        assert re.search(words, found["refusals"][what])


@EACH
@pytest.mark.parametrize("what", ["in place", "in place at the end"])
def test_parameters_in_pieces_changed_in_place(program, what, ranks):
    """A process that has a parameter whole may change it; pieces would not follow."""
    words = "^nothing$" if program == "PP2" else "parameter 'first.0.weight' was changed in place"
    for found in ranks(program):
        assert re.search(words, found["refusals"][what])


@EACH
def test_a_save_after_a_change_in_place(program, ranks):
    """The file would have the values before the change. The control: a process saves what it has whole."""
    words = "^RuntimeError: saved$" if program == "PP2" else "parameter 'first.0.weight' was changed in place"
    for found in ranks(program):
        assert re.search(words, found["refusals"]["in place, then saved"])


class Validated(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_start(self) -> None:
        self.at.append(self.global_step)


def test_nobody_but_lightning_asks_its_clocks():
    """With clocks that go on when they are asked, what is done by time is done after the same batches."""
    found = []
    for strategy in ("auto", local()):
        module, clocks = Validated(), [itertools.count(), itertools.count()]
        with (
            mock.patch("time.monotonic", side_effect=clocks[0]),
            mock.patch("time.perf_counter", side_effect=clocks[1]),
        ):
            options = {
                "val_check_interval": timedelta(seconds=3),
                "limit_val_batches": 1,
                "num_sanity_val_steps": 0,
            }
            trainer(strategy, max_steps=20, **options)[0].fit(module, vectors(), vectors())
        found.append((module.at, *map(next, clocks)))
    assert found[0] == found[1] and len(found[0][0]) > 2
