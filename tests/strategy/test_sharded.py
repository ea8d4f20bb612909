"""ZeRO under Lightning's Trainer: the results are those of one device, and are the same bit for bit over
processes and in one process.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.groups import marked
from tests.strategy import sharded
from tests.strategy.fitting import distance, same
from tests.strategy.scenarios import equal
from tests.strategy.sharded import Job, fit
from tests.strategy.sharded_jobs import (
    BY_PARAMETER,
    FACTORED,
    NORMS,
    OTHERS,
    PLAIN,
    QUICK,
    REFUSED,
    RESUMED,
    ROUNDED,
    ROUNDING,
    TEN,
)


@pytest.mark.parametrize("job", marked([*PLAIN, *OTHERS], QUICK), ids=lambda job: job.name)
def test_processes_give_what_one_process_gives(job, sharded_ranks, folder):
    local, one = fit(job, folder, "local"), fit(job, folder, None)
    for rank in sharded_ranks(job.name):
        assert "error" not in rank, rank
        assert equal(local["losses"], rank["losses"])
        assert same(local["values"], rank["values"])
        assert distance(one["values"], rank["values"]) < ROUNDING
        assert (
            distance({"loss": torch.stack(one["losses"])}, {"loss": torch.stack(rank["losses"])}) < ROUNDING
        )


def test_half_of_the_data_gives_something_else(sharded_ranks, folder):
    half = fit(PLAIN[0], folder, None, lambda batch: {name: x.chunk(2)[0] for name, x in batch.items()})
    for job in PLAIN:
        assert distance(half["values"], sharded_ranks(job.name)[0]["values"]) > 1e-3


@pytest.mark.parametrize("job", marked(NORMS, QUICK), ids=lambda job: job.name)
def test_clipping_counts_every_element_once(job, sharded_ranks, folder):
    """Over stages, shards, replicas and the tied parameter. With each replica's gradients counted, the norm
    would be sqrt(2) times as large.
    """
    for bound, good in ((0.05, True), (0.05 / 2**0.5, False)):
        one = fit(Job("", "", options={"gradient_clip_val": bound}, change=sharded.with_sgd), folder, None)
        for rank in sharded_ranks(job.name):
            assert (distance(one["values"], rank["values"]) < ROUNDING) == good


def test_clipping_by_value_matters(sharded_ranks, folder):
    free = fit(Job("", "", change=sharded.with_sgd), folder, None)
    assert distance(free["values"], sharded_ranks("by value")[0]["values"]) > 1e-2


def test_a_process_holds_its_part_between_steps(sharded_ranks):
    """Parameters and the two tensors of AdamW's state; buckets are padded."""
    held = {
        program: [rank["held"] for rank in sharded_ranks(program)]
        for program in ("dp2 zero0", "dp2 zero1", "dp2 zero2", "dp2 zero3")
    }
    (whole, _) = held["dp2 zero0"]
    for program, share in (("dp2 zero1", 2 / 3), ("dp2 zero2", 2 / 3), ("dp2 zero3", 1 / 2)):
        for found in held[program]:
            assert share <= found / whole + 0.03 and found / whole < share + 0.06, (program, found, whole)


def test_pieces_keep_their_groups_and_marks(sharded_ranks):
    whole = [group for group in sharded_ranks("dp2 zero0")[0]["groups"]]
    for program in ("dp2 zero1", "dp2 zero3"):
        for rank in sharded_ranks(program):
            assert len(rank["groups"]) == 2
            for i, group in enumerate(rank["groups"]):
                assert {decays for _, decays in group} == {i == 0}
                assert all(len(shape) == 1 for shape, _ in group)
        for i, group in enumerate(whole):
            total = sum(torch.Size(shape).numel() for shape, _ in group)
            assert sum(shape[0] for rank in sharded_ranks(program) for shape, _ in rank["groups"][i]) == total


def whole_of(local_shards):
    """The tensors that the shards of all processes make together, in their memory order, and how often each
    element occurred.
    """
    found, counts = {}, {}
    for shard in local_shards:
        assert shard.tensor.shape == (shard.stop - shard.start,) and shard.tensor.dtype == shard.dtype
        numel = torch.Size(shard.shape).numel()
        flat = found.setdefault(
            (shard.name, shard.key), torch.full((numel,), float("nan"), dtype=shard.dtype)
        )
        count = counts.setdefault((shard.name, shard.key), torch.zeros(numel, dtype=torch.int64))
        flat[shard.start : shard.stop] = shard.tensor
        count[shard.start : shard.stop] += 1
    return found, counts


@pytest.mark.parametrize("program", [job.program for job in PLAIN])
def test_shards_of_all_processes_are_every_element_once(program, sharded_ranks, folder):
    ranks = sharded_ranks(program)
    found, counts = whole_of(shard for rank in ranks for shard in rank["pieces"])
    assert all((count == 1).all() for count in counts.values())
    expected, _ = whole_of(fit(Job("", program), folder, "local")["pieces"])
    assert equal(expected, found)
    assert {key for _, key in found} == {"", "exp_avg", "exp_avg_sq"}
    values = ranks[0]["values"]
    assert {name for name, _ in found} | {"head.weight"} == values.keys()
    mix = found["mix", ""]
    assert torch.equal(mix, values["mix"].t().flatten()) and not torch.equal(
        mix, values["mix"].flatten()
    )  # in memory's order
    once = [(*key, value.item()) for rank in ranks for key, value in rank["once"].items()]
    trained = [name for name, key in found if key == "exp_avg"] + ["temperature"]
    assert sorted(x for x in once if x[1] == "step") == sorted((name, "step", 5.0) for name in trained)
    assert sorted(x[:2] for x in once if x[1] != "step") == [
        ("temperature", "exp_avg"),
        ("temperature", "exp_avg_sq"),
    ]


@pytest.mark.parametrize("job", marked(RESUMED, QUICK), ids=lambda job: job.name)
def test_checkpoints_between_one_device_and_shards(job, sharded_ranks, folder):
    whole = fit(Job("", "", options=TEN), folder, None)
    for rank in sharded_ranks(job.name):
        assert len(rank["losses"]) == 5
        assert distance(whole["values"], rank["values"]) < ROUNDING


@pytest.mark.parametrize("name", marked(["saved", "saved by four"], ["saved"]))
def test_checkpoints_of_shards_are_those_of_one_device(name, sharded_ranks, folder):
    whole = fit(Job("", "", options=TEN), folder, None)
    assert distance(whole["values"], sharded_ranks(name)[0]["values"]) < ROUNDING
    resumed = fit(Job("", "", options=TEN, resume=f"{name}, process, step=5.ckpt"), folder, None)
    assert len(resumed["losses"]) == 5
    assert distance(whole["values"], resumed["values"]) < ROUNDING
    found, expected = (
        torch.load(folder / file, weights_only=True)
        for file in (f"{name}, process, step=5.ckpt", "one, None, step=5.ckpt")
    )
    assert distance(expected["state_dict"], found["state_dict"]) < ROUNDING
    (found,), (expected,) = found["optimizer_states"], expected["optimizer_states"]
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert {k: x.shape for k, x in found["state"][number].items()} == {
            k: x.shape for k, x in state.items()
        }
        assert distance(state, found["state"][number]) < ROUNDING
    broken = torch.load(folder / f"{name}, process, step=5.ckpt", weights_only=True)
    broken["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    torch.save(broken, folder / "broken.ckpt")
    wrong = fit(Job("", "", options=TEN, resume="broken.ckpt"), folder, None)
    assert distance(whole["values"], wrong["values"]) > 1e-4


@pytest.mark.parametrize("job", marked(ROUNDED, QUICK), ids=lambda job: job.name)
def test_gathers_in_another_dtype_round_what_the_step_reads(job, sharded_ranks, folder):
    """The result is that of one device that rounds its parameters for each step. Checkpoints are not rounded."""
    local, plain = fit(job, folder, "local"), fit(Job("", "", options=TEN), folder, None)
    rounded = functools.partial(sharded.with_rounded_parameters, frozen="zero3" in job.name)
    one = fit(Job("", "", options=TEN, change=rounded), folder, None)
    for rank in sharded_ranks(job.name):
        assert same(local["values"], rank["values"]) and equal(local["losses"], rank["losses"])
        assert distance(one["values"], rank["values"]) < ROUNDING
        assert distance(plain["values"], rank["values"]) > 10 * ROUNDING
    saved = torch.load(folder / f"{job.name}, process, step=10.ckpt", weights_only=True)["state_dict"]
    assert same(saved, sharded_ranks(job.name)[0]["values"])
    assert all(not torch.equal(x, x.bfloat16().float()) for x in saved.values() if x.numel() > 1)


@pytest.mark.parametrize("what", marked(REFUSED, ["adafactor", "hook"]))
def test_refusals(what, sharded_ranks):
    job, words = REFUSED[what]
    for rank in sharded_ranks(job.name):
        assert words in rank["error"] if words else "error" not in rank


@pytest.mark.long
def test_whole_parameters_as_shards_give_the_same_bits(sharded_ranks):
    """What is added up is the same; and each process has whole parameters, about half of them."""
    cut, whole = (sharded_ranks(job.name) for job in BY_PARAMETER)
    for one, other in zip(cut, whole, strict=True):
        assert same(one["values"], other["values"])
        assert abs(other["held"] / one["held"] - 1) < 0.4  # shards are as long as the longest
    assert {len(shape) for rank in cut for group in rank["groups"] for shape, _ in group} == {1}
    shapes = [tuple(shape) for rank in whole for group in rank["groups"] for shape, _ in group]
    assert sorted(shapes) == sorted(
        tuple(x.shape) for n, x in whole[0]["values"].items() if n != "head.weight"
    )


@pytest.mark.long
def test_an_optimizer_of_whole_matrices_is_saved_and_resumed(sharded_ranks, folder):
    """Adafactor, whose state has a number for each row and column, from one division to another one."""
    whole = fit(Job("", "", options=TEN, change=sharded.with_adafactor), folder, None)
    for job in FACTORED.values():
        for rank in sharded_ranks(job.name):
            assert "error" not in rank, rank
            assert distance(whole["values"], rank["values"]) < ROUNDING
    assert len(sharded_ranks(FACTORED["resumed"].name)[0]["losses"]) == 5
    found = torch.load(folder / "adafactor saved, process, step=10.ckpt", weights_only=True)[
        "optimizer_states"
    ][0]["state"]
    expected = whole["optimizer"]["state"]
    assert {n: {k: x.shape for k, x in state.items()} for n, state in found.items()} == {
        n: {k: x.shape for k, x in state.items()} for n, state in expected.items()
    }


@pytest.mark.parametrize("change", [sharded.with_lamb, sharded.with_lbfgs, sharded.with_hook])
def test_one_process_with_whole_parameters_refuses_nothing(change, folder):
    job = Job(
        "", "dp2 zero3", model="tied", options={"max_steps": 1}, change=change
    )  # LBFGS amplifies what is rounded
    local, one = fit(job, folder, "local"), fit(job, folder, None)
    assert distance(one["values"], local["values"]) < 1e-4
