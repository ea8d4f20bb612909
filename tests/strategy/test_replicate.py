"""Replicas under Lightning's Trainer give what one device gives for the concatenated batches, and on
processes bit for bit what they give in one process.
"""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_piper.directives import replicate
from lightning_piper.errors import DirectiveError
from lightning_piper.passes import pipeline
from lightning_piper.passes.batch_weights import weigh
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.strategy.fitting import Batches, distance, local, same, sharing_captures, trainer, values
from tests.strategy.models import make, texts, vectors
from tests.strategy.replicated import PROGRAMS, SCENARIOS, dp2, joined, pp2_dp2, train, with_sgd, with_sharp
from tests.strategy.scenarios import equal

FOUR = pytest.param(4, marks=pytest.mark.long)
BOTH = pytest.mark.parametrize("processes", [2, FOUR])
BITWISE = ["mlp", "dropout", "tied", "accumulated", "long", "last_smaller"]
OPTIONS = {
    "mlp": {"max_steps": 7, "max_epochs": -1},
    "accumulated": {"accumulate_grad_batches": 2, "max_steps": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "long": {"max_steps": 20},
    "last_smaller": {"max_steps": 6},
}
# On this number of processes only; all others run on both numbers.
ONLY = {"ddp": 2, "twice": 2, "clipped": 4}
MODEL = {"accumulated": "mlp", "long": "mlp", "last_smaller": "mlp", "clipped": "tied", "ddp": "mlp"}


def one_device(folder):
    """A checkpoint of a plain training, from which the processes resume."""
    module, loader = make("tied")
    save = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit, _ = trainer(callbacks=[save], max_steps=5, enable_checkpointing=True)
    fit.fit(module, loader)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the processes have seen, for each number of processes; they run when they are first asked for."""
    found = {}

    def get(processes):
        if processes not in found:
            folder = tmp_path_factory.mktemp(f"replicas{processes}")
            with torch.random.fork_rng():
                one_device(folder / "one")
            names = [name for name in SCENARIOS if ONLY.get(name, processes) == processes]
            found[processes] = launch_trainings(processes, train, folder / "run", names, folder, processes)
        return found[processes]

    return get


def by_replica(ranks, name):
    """The outcome of one process of each replica: in no program here are the processes of one replica apart."""
    return [ranks[0][name], ranks[len(ranks) // 2][name]]


def global_batches(ranks, name):
    return [joined(parts) for parts in zip(*(r["batches"] for r in by_replica(ranks, name)), strict=True)]


@sharing_captures
def in_one_process(name, batches, program):
    module, _ = make(MODEL.get(name, name))
    fit, record = trainer(local(program), **{"max_steps": 5, **OPTIONS.get(name, {})})
    torch.manual_seed(9)
    fit.fit(module, Batches(batches))
    return module, record


@BOTH
@pytest.mark.parametrize("name", BITWISE)
def test_processes_give_what_one_process_gives(name, processes, ranks):
    found = ranks(processes)
    batches = global_batches(found, name)
    module, record = in_one_process(name, batches, PROGRAMS[processes]())
    for rank in found:
        assert equal(record.losses, rank[name]["losses"])
        assert same(values(module), rank[name]["values"])
        for a, b in zip(rank[name]["logged"], record.logged, strict=True):
            steps = b.keys() - {"train_loss", "train_loss_epoch"}  # of epochs, which end elsewhere here
            assert all(torch.equal(a[k], b[k]) for k in steps) and "train_loss_step" in steps
    assert all(equal(found[0][name]["logged"], rank[name]["logged"]) for rank in found)
    # Negative control: the replicas' samples the other way round are other sums, and other dropout masks.
    module, _ = in_one_process(
        name, [joined([b, b]) for b in found[0][name]["batches"]], PROGRAMS[processes]()
    )
    assert not same(values(module), found[0][name]["values"])


@BOTH
def test_a_missing_sum_shows(processes, ranks):
    found = ranks(processes)
    module, record = in_one_process("mlp", global_batches(found, "without_sum"), PROGRAMS[processes]())
    assert equal(record.losses[0], found[0]["without_sum"]["losses"][0])
    assert not equal(record.losses[1:], found[0]["without_sum"]["losses"][1:])
    assert distance(values(module), found[0]["without_sum"]["values"]) > 1e-3


@BOTH
def test_every_replica_has_its_own_samples(processes, ranks):
    found = ranks(processes)
    stages = processes // 2
    for first in range(stages):
        assert equal(found[0]["mlp"]["batches"], found[first]["mlp"]["batches"])
        assert equal(found[stages]["mlp"]["batches"], found[stages + first]["mlp"]["batches"])
    data = vectors(samples=44).dataset.tensors[0]
    seen = torch.cat([b[0] for r in by_replica(found, "mlp") for b in r["batches"][:6]])  # an epoch
    assert torch.equal(seen.unique(dim=0), data.unique(dim=0)) and len(seen) == len(data)


@BOTH
def test_equals_lightnings_ddp(processes, ranks):
    """20 steps of two processes; their losses are of their own samples."""
    ours, theirs = ranks(processes), ranks(2)
    for a, b in zip(by_replica(ours, "long"), theirs, strict=True):
        assert equal(a["batches"], b["ddp"]["batches"])
    losses = torch.stack([torch.stack(r["ddp"]["losses"]) for r in theirs]).mean(0)
    torch.testing.assert_close(torch.stack(ours[0]["long"]["losses"]), losses, rtol=1e-5, atol=1e-6)
    assert distance(theirs[0]["ddp"]["values"], ours[0]["long"]["values"]) < 1e-5
    assert not torch.allclose(losses, torch.stack(theirs[0]["ddp"]["losses"]), rtol=1e-3)


@pytest.mark.long
def test_clipping_counts_every_parameter_once(ranks):
    """Also one that two stages use."""
    found = ranks(4)
    batches = global_batches(found, "clipped")
    # With every replica's gradients counted, the norm would be sqrt(2) times as large.
    for bound, good in ((0.05, True), (0.05 / 2**0.5, False)):
        module, _ = make("tied")
        with_sgd(module)
        fit, _ = trainer(gradient_clip_val=bound)
        fit.fit(module, Batches(batches))
        assert (distance(values(module), found[0]["clipped"]["values"]) < 1e-5) == good


def test_an_optimizer_may_run_the_step_twice(ranks):
    """On replicas of the whole step each process has all parameters."""
    found = ranks(2)
    for change in (with_sharp, with_sgd):
        module, _ = make("mlp")
        change(module)
        fit, record = trainer(max_steps=5)
        fit.fit(module, Batches(global_batches(found, "twice")))
        assert (distance(values(module), found[0]["twice"]["values"]) < 1e-5) == (change is with_sharp)
        if change is with_sharp:
            torch.testing.assert_close(
                torch.stack(found[1]["twice"]["losses"]), torch.stack(record.losses), rtol=1e-5, atol=1e-6
            )


@BOTH
def test_last_batch_is_smaller(processes, ranks):
    sizes = [len(batch[0]) for batch in ranks(processes)[0]["last_smaller"]["batches"]]
    assert sizes == [4, 4, 2, 4, 4, 2]


@BOTH
def test_hooks_count_every_replica_once(processes, ranks):
    found = ranks(processes)
    parts = torch.stack(
        [torch.stack([b[0].sum() for b in r["batches"]]) for r in by_replica(found, "counting")]
    )
    for rank in found:
        logged = rank["counting"]["logged"]
        for how, wanted in (("mean", parts.mean(0)), ("sum", parts.sum(0)), ("max", parts.amax(0))):
            torch.testing.assert_close(torch.stack([x[how] for x in logged]), wanted)
        assert rank["counting"]["totals"] == pytest.approx([float(parts.sum())], rel=1e-5)


@BOTH
def test_checkpoints(processes, ranks, tmp_path, tmp_path_factory):
    """From replicas to replicas, bitwise; to one device, and from one device."""
    found = ranks(processes)
    (folder,) = tmp_path_factory.getbasetemp().glob(f"replicas{processes}0")
    whole = found[0]["checkpoints"]["values"]
    for rank in found:
        assert same(whole, rank["checkpoints"]["values"])
        assert same(whole, rank["checkpoints"]["resumed"])
    path = folder / "checkpoints" / "step=5.ckpt"
    content = torch.load(path, weights_only=True)
    assert len(content["optimizer_states"][0]["state"]) == len(list(make("tied")[0].parameters()))
    for strategy in ("auto", local(pp2_dp2())):
        module, _ = make("tied", seed=1)
        fit, record = trainer(strategy, max_steps=10)
        fit.fit(module, Batches(global_batches(found, "checkpoints")[5:]), ckpt_path=path)
        assert len(record.losses) == 5
        assert distance(whole, values(module)) < 1e-5

    module, _ = make("tied", seed=1)
    fit, _ = trainer(max_steps=10)
    fit.fit(module, texts(), ckpt_path=folder / "one" / "step=5.ckpt")
    assert distance(values(module), found[0]["checkpoints"]["from_one"]) < 1e-5
    assert distance(whole, found[0]["checkpoints"]["from_one"]) > 1e-3


REFUSED = [
    (2, "sampler", "gives process 0 part 1 of 2, but this process belongs to replica 0 of 2"),
    (4, "sampler", "gives process 0 part 1 of 2, but this process belongs to replica 0 of 2"),
    (2, "length", "have [2, 1] batches, by rank, but every replica needs the same number"),
    (4, "length", "have [2, 2, 1, 1] batches, by rank, but every replica needs the same number"),
    (2, "limited", "no error, []"),  # as many as there are in the data
    (2, "size", "no error, []"),  # microbatches of 4 and 2 samples
    (2, "devices", "4 logical devices, but the Trainer has 2 processes"),
    (4, "devices", "2 logical devices, but the Trainer has 4 processes"),
    (2, "own", "no error, []"),
    (4, "own", "no error, []"),
    (2, "named", "no error, []"),
    (4, "named", "no error, []"),
    (2, "numbers", "do not fit together in training batch 0 of this fit (batch[2]['k']: 0 and 1)"),
    (
        2,
        "shapes",
        "do not fit together in training batch 0 of this fit (batch[0]: float32[8,8] and float32[4,8]). Give",
    ),
    (4, "apart", "the processes of replica 1 drew different batches (different values) in training batch 2"),
]


@pytest.mark.parametrize(
    "processes, what, words", marked(REFUSED, [case for case in REFUSED if case[0] == 2])
)
def test_refusals(processes, what, words, ranks):
    first, *others = ranks(processes)
    assert words in first["refused"][what]
    kind = first["refused"][what].partition(":")[0]
    assert all(rank["refused"][what].startswith(kind) for rank in others)


@BOTH
def test_the_same_data_everywhere_are_noticed(processes, ranks):
    assert (
        "all 2 replicas drew the same samples in training batch 0" in ranks(processes)[0]["refused"]["same"]
    )


@pytest.mark.parametrize("program", [dp2(4), pp2_dp2()], ids=["dp2 of four microbatches", "pp2 x dp2"])
@pytest.mark.parametrize("name", ["mlp", "tied"])
@sharing_captures
def test_one_process_agrees_with_plain_lightning(name, program, monkeypatch):
    for precision, bound in (("32-true", 1e-5), ("64-true", 1e-12)):
        results = []
        for strategy in ("auto", local(program, verify="first_batch")):
            module, loader = make(name)
            fit, record = trainer(strategy, precision=precision)
            fit.fit(module, loader)
            results.append((values(module), record.logged))
        (plain, logged), (found, ours) = results
        assert distance(plain, found) < bound
        assert all(distance(a, b) < bound for a, b in zip(logged, ours, strict=True))
    monkeypatch.setattr(replicate, "reduce_gradients", lambda *_: [])
    monkeypatch.setattr(pipeline, "complete", weigh)  # which would refuse it
    module, loader = make(name)
    fit, _ = trainer(local(program, verify="off"))
    fit.fit(module, loader)
    assert distance(plain, values(module)) > 1e-4


def test_one_process_refuses_what_replicas_cannot_divide():
    module, _ = make("mlp")
    fit, _ = trainer(local(dp2()))
    with pytest.raises(
        DirectiveError, match=r"directive 2 \(replicate\).*cannot be divided evenly over 2 replicas"
    ) as caught:
        fit.fit(module, vectors(batch_size=5))
    notes = getattr(caught.value, "__notes__", [])  # nothing about uncaptured steps
    assert all("was built at" in note for note in notes)


@sharing_captures
def test_replicas_and_microbatches_divide_a_smaller_last_batch():
    """Batches of 8 samples, and a last one of 6: its microbatches have two samples and one sample of each replica."""
    results = []
    for strategy in ("auto", local(pp2_dp2())):
        module, _ = make("mlp")
        fit, record = trainer(strategy, precision="64-true")
        fit.fit(module, vectors(samples=22))
        results.append((values(module), record.logged))
    (plain, logged), (found, ours) = results
    assert len(logged) == 5 and distance(plain, found) < 1e-12
    assert all(distance(a, b) < 1e-12 for a, b in zip(logged, ours, strict=True))
