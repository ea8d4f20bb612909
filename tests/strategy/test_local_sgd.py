"""Local SGD under Lightning's Trainer: in float64, the results are those of the algorithm in plain PyTorch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_piper import Schedule
from lightning_piper.profile.files import EXCHANGE
from tests.distributed.processes import launch_trainings
from tests.profile.page import judged
from tests.strategy import local_sgd
from tests.strategy.fitting import distance, same
from tests.strategy.local_sgd import (
    AVERAGE,
    BUGS,
    CLIPPED,
    MASK,
    MEAN,
    Job,
    Reference,
    Streaming,
    changed,
    local,
    reference,
)
from tests.test_pages import COMMON, blocks

ROUNDING = 1e-12  # of the largest element of a tensor

WHOLE = Job("whole", local(), save=5, loader=True)
TWO = [
    WHOLE,
    Job("every update", local(every=1), model={"optimizer": "sgd"}),
    Job("every two", local(every=2, nesterov=False)),
    Job("norms", local(every=3, lr=0.5), batches=4, model={"norm": True}),
    Job("clipped", local(every=2, momentum=0.5), options=CLIPPED),
    Job("averaged", local(every=1, **AVERAGE), model={"optimizer": "sgd"}),
]
RESUMED = Job("resumed", local(), resume="whole", loader=True)
EPOCHS = {"max_epochs": 2}
AGAIN = Job("again", local(), options=EPOCHS, resume="whole, end", loader=True)
TWICE = Job("twice", local(), options=EPOCHS, loader=True)
FIVE: Any = {"options": {"max_steps": 5}, "save": 5, "loader": True}  # within the second round
STOPPED = [
    Job("stopped", local(), **FIVE),
    Job("stopped, changed", local(), **FIVE, change=True),
    Job(MEAN, local(), **FIVE, bug=MEAN),
]
AFTER = ["", ", end", ", validated"]  # the save by ModelCheckpoint, after the fit, and after an evaluation
CONTINUED = [
    Job(f"after {job.name}{when}", local(), resume=f"{job.name}{when}", options=steps, loader=True)
    for job in STOPPED
    for when in AFTER
    for steps in [{"max_epochs": -1, "max_steps": 7}]
]
DONE = [
    Job(f"done{when}", local(), resume=f"stopped{when}", options={"max_steps": 5}, loader=True)
    for when in AFTER
]
MANUAL = Job("manual", local(), model={"manual": True})
TOO_MANY = Job("too many", local(), degrees={"dp": 1, "microbatches": 99})
AS_NAMED = Job("as named", local(), degrees={"dp": 1, "microbatches": local_sgd.BATCH // 2})
SILENT = Job("silent", local(), net=local_sgd.Silent)
ALONE: dict[str, Any] = {"limit_val_batches": 0}  # replicas do not communicate, except in exchanges
UNEVEN = [
    Job("ends early", local(), net=local_sgd.Silent, options=ALONE, fewer=2),
    Job("later epochs", local(), net=local_sgd.Silent, options={**ALONE, **EPOCHS}, fewer=1),
    Job("even", local(), net=local_sgd.Silent, options={**ALONE, **EPOCHS}, fewer=0),
]
FROZEN = Job("frozen", local(), frozen="second.3.weight")
WIDER = Job("wider", local(), batches=3, wider=True)
FROZEN_IN_ALL = Job("frozen in all", local(), frozen="second.1.bias")  # as the model itself does
DDP = Job("ddp", None, model={"optimizer": "sgd"}, degrees={"dp": 2})
DROPPED = [
    Job("dropout", local(every=9), batches=1, model={"dropout": 0.5}, alike=True),
    Job("no dropout", local(every=9), batches=1, alike=True),
]
FAULTY = [
    Job(bug, local(), bug=bug, resume="whole" if "resume" in bug or "checkpoint" in bug else "", loader=True)
    for bug in BUGS
    if bug != MEAN
]


OTHER = "other replicas"
PP2, ZERO3 = {"pp": 2, "microbatches": 2, "dp": 1}, {"dp": 2, "zero": 3}
FOUR = [
    Job("four replicas", local(4, every=2), options=CLIPPED, save=2),
    *(
        job
        for name, degrees in (("stages", PP2), ("shards", ZERO3))
        for job in (
            Job(name, local(), degrees=degrees, save=5, loader=True),
            Job(f"{name}, resumed", local(), degrees=degrees, resume=name, loader=True),
            Job(
                f"{name}, again",
                local(),
                7,
                degrees,
                options=EPOCHS,
                resume=f"{name}, validated",
                loader=True,
            ),
            Job(f"{name}, clipped", local(every=1, momentum=0.5), degrees=degrees, options=CLIPPED),
        )
    ),
    Job("parts of stages", local(every=4, parts=2), degrees=PP2, batches=9, model={"optimizer": "sgd"}),
    Job("verified", local(), degrees=PP2, strategy={"verify": "each"}),
    Job("recorded", local(), degrees=PP2, strategy={"profile": Schedule(wait=1, warmup=1, active=2)}),
    Job(OTHER, local(2), degrees={"dp": 2}, resume="four replicas"),
    Job("parts", local(4, every=4, parts=2), batches=9, model={"optimizer": "sgd"}),
]
HALVES = (
    ["first.0.weight", "first.0.bias"],
    ["second.1.weight", "second.3.weight", "second.3.bias"],
)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the four processes."""
    return tmp_path_factory.mktemp("four")


@pytest.fixture(scope="module")
def four(logs: Path) -> list[dict[Any, Any]]:
    """What four processes have seen, by the name of the job."""
    return launch_trainings(4, local_sgd.train, logs / "ranks", 4, FOUR, logs)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What two processes have seen, by the name of the job."""
    folder = tmp_path_factory.mktemp("two")
    refused = [MANUAL, TOO_MANY, AS_NAMED, SILENT, FROZEN, WIDER, FROZEN_IN_ALL, *UNEVEN]
    resumed = [RESUMED, AGAIN, TWICE, *STOPPED, *CONTINUED, *DONE]
    jobs = [*TWO, *resumed, DDP, *DROPPED, *FAULTY, *refused]
    return launch_trainings(2, local_sgd.train, folder / "ranks", 2, jobs, folder)


@pytest.mark.parametrize("job", TWO, ids=lambda job: job.name)
def test_replicas_train_as_the_reference(job, two):
    expected = reference(job)
    for rank in two:
        assert distance(expected.values, rank[job.name]["values"]) < ROUNDING


def test_replicas_end_with_one_model(two):
    for job in TWO:
        assert same(two[0][job.name]["values"], two[1][job.name]["values"])


def test_each_replica_draws_its_samples(two):
    assert [rank["whole"]["drawn"] for rank in two] == [
        {"num_replicas": 2, "rank": 0},
        {"num_replicas": 2, "rank": 1},
    ]


def test_constant_buffers_keep_their_bits(two):
    assert all(torch.equal(rank["norms"]["mask"], MASK.double()) for rank in two)


def test_replicas_differ_within_a_round(two):
    first, second = (rank["whole"]["params"] for rank in two)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [
        False, False, True, False, False, True, False,
    ]  # fmt: skip


def test_a_training_resumes_within_a_round_with_the_same_bits(two):
    for rank in two:
        assert same(rank["whole"]["values"], rank["resumed"]["values"])
        assert len(rank["resumed"]["params"]) == 2
        for a, b in zip(rank["whole"]["params"][5:], rank["resumed"]["params"], strict=True):
            assert torch.equal(a, b)


def test_averaging_after_every_update_of_sgd_is_ddp(two):
    assert distance(two[0]["ddp"]["values"], two[0]["averaged"]["values"]) < ROUNDING


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != MEAN])
def test_a_fault_shows(bug, two):
    assert distance(reference(WHOLE).values, two[0][bug]["values"]) > 1e-4


def test_replicas_draw_different_random_numbers(two):
    (a, b), (c, d) = ([rank[name]["logged"][0]["own"] for rank in two] for name in ("dropout", "no dropout"))
    assert a != b and c == d


def test_logged_values(two):
    """A value of a step is the replica's own, unless `sync_dist` asks for the mean. A value of an epoch is the
    mean of the replicas."""
    losses = reference(WHOLE).losses
    for rank, found in enumerate(two):
        logged = found["whole"]["logged"]
        assert [each["own"] for each in logged] == pytest.approx([each[rank] for each in losses], rel=1e-5)
        means = [sum(each) / 2 for each in losses]
        assert [each["mean"] for each in logged] == pytest.approx(means, rel=1e-5)
        assert found["whole"]["end"]["epoch"] == pytest.approx(sum(means) / len(means), rel=1e-5)
    ends = [found["whole"]["end"] for found in two]
    assert ends[0]["val_loss"] == ends[1]["val_loss"] and ends[0]["metric"] == ends[1]["metric"]
    assert ends[0]["val_loss"] == pytest.approx(ends[0]["metric"], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    "job", [job for job in FOUR if job.settings.parts == 1 and job.name != OTHER], ids=lambda job: job.name
)
def test_replicas_of_several_processes_train_as_the_reference(job, four):
    expected = Reference(job).run(epochs=job.options.get("max_epochs", 1))
    for rank in four:
        assert distance(expected, rank[job.name]["values"]) < ROUNDING
        assert same(four[0][job.name]["values"], rank[job.name]["values"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["stages", "shards"])
def test_replicas_of_several_processes_resume_with_the_same_bits(name, four):
    for rank in four:
        assert same(rank[name]["values"], rank[f"{name}, resumed"]["values"])


@pytest.mark.long
def test_a_recording_has_the_exchange_after_a_step(four, logs, tmp_path):
    """The third step ends a round. The fourth step does not."""
    (plan,) = logs.rglob("piper/plan.json")
    found, texts = json.loads(plan.read_text()), []
    assert found["rows"][-2:] == [[0, "replicas"], [1, "replicas"]]
    for number, count in ((2, 2), (3, 0)):
        texts.append((plan.with_name(f"step_{number}.json").read_text(), plan.read_text()))
        step = json.loads(texts[-1][0])
        boxes = [box for box in step["step"]["boxes"] if box[4] == "exchange"]
        assert [found["rows"][box[0]] for box in boxes] == found["rows"][-2:][:count]
        others = max(box[2] for box in step["step"]["boxes"] if box[4] != "exchange")
        assert all(others <= start < end < step["batch_time"] for _, start, end, _, _ in boxes)
        trace = json.loads(plan.with_name(f"trace_{number}.json").read_text())["traceEvents"]
        assert len([event for event in trace if event.get("cat") == "exchange"]) == count
    exchanged = found["nodes"][str(EXCHANGE)]
    assert exchanged["bytes"] == 8 * (6 * 9 + 9 + 3)  # the first stage and the mask
    assert found["colors"]["exchange"]
    assert judged(texts, tmp_path) == ["drawn", "drawn"]


@pytest.mark.long
@pytest.mark.parametrize("job", [job for job in FOUR if job.settings.parts > 1], ids=lambda job: job.name)
def test_parts_are_exchanged_in_turn(job, four):
    """The parts do not depend on how the processes of a replica divide the module."""

    class Halves(Streaming):
        halves = HALVES

    expected = reference(job, Halves)
    for rank in four:
        assert distance(expected.values, rank[job.name]["values"]) < ROUNDING
    assert distance(reference(job).values, four[0][job.name]["values"]) > 1e-4


def test_a_step_that_cannot_be_captured_is_an_error(two):
    assert all("trains only captured steps" in rank["manual"]["error"] for rank in two)


def test_an_error_of_the_program_keeps_its_text(two):
    for rank in two:
        said = rank["too many"]["error"]
        assert "PIPER-S002" not in said and f"Give at most {local_sgd.BATCH // 2} microbatches" in said
        assert "error" not in rank["as named"]


def test_a_parameter_that_one_replica_freezes_is_an_error(two):
    said = (
        "'second.3.weight' is trained (3, 5) in replica 0, but frozen (3, 5) in replica 1. Build the module"
    )
    assert all(said in rank["frozen"]["error"] for rank in two)
    assert all("error" not in rank["frozen in all"] for rank in two)


def test_a_buffer_of_another_shape_in_one_replica_is_an_error(two):
    """Before the replicas share it."""
    said = (
        "'scales' is torch.float64 (4,) in replica 0, but torch.float64 (5,) in replica 1. Build the module"
    )
    assert all(said in rank["wider"]["error"] for rank in two)


def test_replicas_with_other_numbers_of_batches_are_an_error(two):
    """On both processes, at the first exchange at which the batches differ. Then neither waits for the other."""
    said = {
        "ends early": "replica 0 is at batch 5 of epoch 0 (6 updates), replica 1 has ended its fit after batch 4 of epoch 0 "
        "(5 updates). Give all replicas the same number of batches",
        "later epochs": "replica 0 is at batch 1 of epoch 1 (9 updates), replica 1 is at batch 2 of epoch 1 (9 updates)",
    }
    for rank in two:
        assert all(text in rank[name]["error"] for name, text in said.items())
        assert "error" not in rank["even"]


@pytest.mark.long
def test_a_checkpoint_of_another_number_of_replicas_is_an_error(four):
    assert all("has the states of 4 local replicas" in rank[OTHER]["error"] for rank in four)


@pytest.mark.long
def test_replicas_of_several_processes_log_the_same_values(four):
    for name in ("stages", "shards"):
        assert len({rank[name]["end"]["metric"] for rank in four}) == 1
        for rank in four:
            end = rank[name]["end"]
            assert end["val_loss"] == pytest.approx(end["metric"], rel=1e-5)


@pytest.mark.long
def test_the_blocks_of_the_page_run(tmp_path):
    codes = [code for _, code, _ in blocks("docs/howto/local_sgd.md")]
    ranks = launch_trainings(4, local_sgd.follow, tmp_path, COMMON, codes)
    assert len(codes) == 5 and [rank["fits"] for rank in ranks] == [2] * 4
    assert all(same(ranks[0]["values"], rank["values"]) for rank in ranks)


def test_replicas_do_not_communicate_within_a_round(two):
    """Each replica is one process here, so every call would be between replicas."""
    for rank in two:
        calls = rank["silent"]["calls"]
        made = [after > before for before, after in itertools.pairwise(calls)]
        # The exchange is in a batch, and rank 0 announces a signal at the start of the next batch.
        assert made == [False, True, True, False, True, True]


@pytest.mark.long
def test_a_pretrained_model_is_saved_by_one_replica(tmp_path):
    transformers = pytest.importorskip("transformers")
    ranks = launch_trainings(4, local_sgd.save_models, tmp_path / "ranks", tmp_path)
    saved = [transformers.GPT2LMHeadModel.from_pretrained(tmp_path / name) for name in ("0", "1", "2", "end")]
    values = [model.state_dict() for model in saved]
    assert all(same(values[-1], rank) for rank in ranks)
    assert all(distance(values[i], values[i + 1]) > 1e-6 for i in range(3))


@pytest.mark.parametrize("when", AFTER)
def test_a_fit_that_ended_within_a_round_continues_with_the_same_bits(when, two):
    """As an uninterrupted training. And the control: a round does not continue from the mean of the replicas."""
    for rank in two:
        assert same(rank["whole"]["values"], rank[f"after stopped{when}"]["values"])
    kept = same(two[0]["whole"]["values"], two[0][f"after {MEAN}{when}"]["values"])
    assert kept == (when == "")


@pytest.mark.parametrize("when", AFTER)
def test_a_fit_that_resumes_without_an_update_ends_with_the_mean(when, two):
    """And the control: at the checkpoint within the fit, the replicas differ."""
    assert not torch.equal(*(rank["stopped"]["params"][-1] for rank in two))
    for rank in two:
        assert not rank[f"done{when}"]["params"]
        assert same(rank["stopped"]["values"], rank[f"done{when}"]["values"])


def test_a_fit_continues_from_values_that_changed_after_its_end(two):
    """A round begins with them, and the outer momentum stays."""
    expected = Reference(WHOLE).stopped(5, changed)
    for rank in two:
        assert distance(expected, rank["after stopped, changed, validated"]["values"]) < ROUNDING
        assert same(rank["whole"]["values"], rank["after stopped, changed, end"]["values"])


def test_a_training_continues_after_its_end(two):
    """It ended within a round, with the mean of the replicas. The second fit continues the round."""
    expected = reference(WHOLE)
    values = Reference(WHOLE).run(epochs=2)
    for rank in two:
        assert same(rank["twice"]["values"], rank["again"]["values"])
        assert distance(values, rank["again"]["values"]) < ROUNDING
        assert distance(expected.values, rank["whole"]["values"]) < ROUNDING
        assert rank["whole"]["after"] == two[0]["whole"]["after"]
    losses = [float(expected.modules[0].loss(*batch)) for r in range(2) for batch in expected.drawn(r)]
    assert two[0]["whole"]["after"]["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
