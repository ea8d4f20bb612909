"""Fits on two real processes: bit for bit what one process with all devices computes, and what the
interpreter computes.
"""

from __future__ import annotations

import sys

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import by_hand, distance, same, sharing_captures, trainer, values
from tests.strategy.fitting import local as one_process
from tests.strategy.models import make, vectors
from tests.strategy.scenarios import SCENARIOS, Setting, dtypes, equal, launch_script, run, train

MODELS = ["mlp", "dropout", "tied", "conv"]
SEEN = ("values", "losses", "logged", "epochs")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {place: tmp_path_factory.mktemp(place) for place in ("processes", "local")}


@pytest.fixture(scope="module")
def ranks(folders):
    folder = folders["processes"]
    return launch_trainings(2, train, folder / "run", list(SCENARIOS), folder)


@pytest.fixture(scope="module")
def local(folders):
    names = [name for name in SCENARIOS if name not in ("refused", "unseeded_shuffle")]
    with torch.random.fork_rng():
        return sharing_captures(run)(names, folders["local"], local=True)


@pytest.mark.parametrize("name", [*MODELS, "clipped_by_value", "sizes", "stream", "checkpoints", "equipped"])
def test_processes_give_what_one_process_gives(name, ranks, local):
    for rank in ranks:
        for what in SEEN:
            assert equal(local[name][what], rank[name][what]), what
    if name in MODELS:
        assert not equal(local[name]["values"], local["clipped"]["values"])


@pytest.mark.parametrize("name", MODELS)
def test_processes_give_what_the_interpreter_gives(name, ranks):
    module, loader = make(name)
    losses = by_hand(module, list(loader), ranks[0][name]["seed"])
    for rank in ranks:
        assert equal(losses, rank[name]["losses"])
        assert same(values(module), rank[name]["values"])
    wrong, _ = make(name)
    by_hand(wrong, list(loader), ranks[0][name]["seed"], drop=True)
    assert not same(values(wrong), ranks[0][name]["values"])


def test_processes_agree_on_every_logged_value(ranks):
    first, second = ranks
    for name in SCENARIOS:
        for what in SEEN:
            if what in first[name]:
                assert equal(first[name][what], second[name][what])
    assert set(first["mlp"]["logged"][0]) == {
        "hidden",
        "largest",
        "constant",
        "train_loss",
        "train_loss_step",
    }


def test_metric_objects_count_every_batch_once(ranks):
    for rank in ranks:
        assert rank["equipped"]["totals"] == [40.0, 80.0]
        assert rank["equipped"]["best"] == rank["equipped"]["epochs"][-1]["train_loss_epoch"].item()


@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc shows")
def test_a_fit_leaves_no_communicators_behind(ranks):
    for rank in ranks:
        # A thread may take its time to end, so one count may be high; what leaks is missing in no later one.
        _, second, *later = rank["leaks"]["counts"]
        assert len(later) == 3
        for before, after in zip(second, zip(*later, strict=True), strict=True):
            assert min(after) <= before


def test_communicators_are_not_left_to_the_garbage_collector(ranks):
    """They have threads. A process that was forked since, such as a loader's worker, has not, and crashes if
    it collects them.
    """
    for rank in ranks:
        assert rank["communicators"]["made"] >= 4
        assert rank["communicators"]["left"] == 0


def test_clipping_measures_all_stages(ranks, local):
    """The norms of two processes are added in another order; a tied parameter counts once."""
    assert distance(local["clipped"]["values"], ranks[0]["clipped"]["values"]) < 1e-6
    module, loader = make("tied")
    fit, _ = trainer(gradient_clip_val=0.05, accumulate_grad_batches=2, max_steps=4)
    fit.fit(module, loader)
    assert distance(values(module), ranks[0]["clipped"]["values"]) < 1e-5
    module, loader = make("tied")
    fit, _ = trainer(accumulate_grad_batches=2, max_steps=4)
    fit.fit(module, loader)
    assert distance(values(module), ranks[0]["clipped"]["values"]) > 1e-3


def test_norms_are_in_the_widest_dtype_on_every_process(ranks, folders):
    """Gradients of a narrower one are rounded once more than those of others, as torch does it, and the norm
    is not.
    """
    alone = dtypes(Setting(local=True, folder=folders["local"]), "auto")
    for rank in ranks:
        found = rank["dtypes"]
        assert [x.dtype for x in found["norms"]] == [x.dtype for x in alone["norms"]]
        assert max(float(abs(x - y)) for x, y in zip(found["norms"], alone["norms"], strict=True)) < 1e-12
        far = {name: float((x - alone["values"][name]).abs().max()) for name, x in found["values"].items()}
        assert far.pop("scale") < 1e-2 and max(far.values()) < 1e-12, far


def test_each_process_holds_its_stage(ranks):
    first, second = ranks
    unused = ["unused.weight", "unused.bias"]  # by the step; hooks may use them
    assert first["mlp"]["held"] == ["first.0.weight", "first.0.bias", *unused]
    assert second["mlp"]["held"] == [
        "second.0.weight",
        "second.0.bias",
        "second.2.weight",
        "second.2.bias",
        *unused,
    ]
    assert first["mlp"]["optimized"] == [4, 0] and second["mlp"]["optimized"] == [2, 4]
    assert "embedding.weight" in first["tied"]["held"] and "embedding.weight" in second["tied"]["held"]
    assert "norm.running_mean" in first["conv"]["held"] and "norm.running_mean" not in second["conv"]["held"]


def test_processes_that_start_apart_train_as_the_lead(ranks):
    torch.manual_seed(100)
    module, _ = make("mlp")
    fit, record = trainer(one_process(), max_steps=-1, max_epochs=2)
    fit.fit(module, vectors(shuffle=True))
    for rank in ranks:
        assert equal(record.losses, rank["unseeded_shuffle"]["losses"])
        assert same(values(module), rank["unseeded_shuffle"]["values"])
    other, _ = make("mlp", seed=1)
    assert not same(values(other), values(module))


def test_checkpoints_of_processes(ranks, local, tmp_path_factory):
    for rank in ranks:
        assert same(local["checkpoints"]["resumed"], rank["checkpoints"]["resumed"])
    assert not same(local["checkpoints"]["resumed"], local["checkpoints"]["values"])


@pytest.mark.parametrize("file", ["step=5.ckpt", "after.ckpt"])
def test_checkpoint_files_are_those_of_one_process(file, ranks, local, folders):
    contents = [torch.load(folder / "checkpoints" / file, weights_only=True) for folder in folders.values()]
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        assert equal(contents[0][key], contents[1][key]), key
    module, _ = make("tied", seed=1)
    module.load_state_dict(contents[0]["state_dict"])
    assert same(values(module), ranks[0]["checkpoints"]["values"])


@pytest.mark.parametrize("what, words", [
    ("devices", "1 logical device, but the Trainer has 2 processes"),
    ("on exception", "every_n_train_steps"),
    ("lbfgs", "LBFGS"),
    ("sampler", "DistributedSampler splits the data over 2 replicas"),
    ("length", "have [5, 4] batches"),
    ("values", "drew different batches (different values) in training batch 0"),
    ("other shapes", "parameters or buffers of different names, shapes, dtypes"),
    ("other module", "'initial_lr' of the optimizer's parameter group 0 is 0.01 on rank 0, and absent on "
                     "rank 1"),
    ("repeated", "no error"),
    ("nothing", "no error"),
])  # fmt: skip
def test_processes_refuse_together(what, words, ranks):
    for rank in ranks:
        assert words in rank["refused"][what]


@pytest.mark.long
@pytest.mark.parametrize("torchrun", [False, True], ids=["lightning", "torchrun"])
def test_launchers(torchrun, tmp_path, local):
    for rank in launch_script(["mlp"], tmp_path, torchrun):
        assert equal(local["mlp"]["values"], rank["mlp"]["values"])
