"""Real processes give bit for bit what the reference interpreter gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_piper.errors import ExecutionError
from lightning_piper.plan import compile_plans
from lightning_piper.runtime import DigestMismatch, Executor, ProcessTransport
from tests.distributed.processes import LIMIT, launch
from tests.distributed.training import CPU, Job, Trained, compile_all, plans_of, train, train_by_reference
from tests.groups import marked, on_demand
from tests.models import captured
from tests.plan.programs import pipeline

TWO = [
    *(
        Job(name)
        for name in (
            "mlp",
            "gpt",
            "tied",
            "conv",
            "frozen",
            "losses",
            "logs",
            "glue",
            "experts",
            "reentered",
            "untagged",
            "exact",
            "autocast",
            "dropout",
        )
    ),
    *(Job(name, microbatches=1) for name in ("gpt", "tied", "conv")),
    *(Job(name, microbatches=4, shape="1F1B") for name in ("mlp", "conv", "dropout")),
    *(Job(name, shape="one stage split") for name in ("mlp", "gpt")),
    Job("mlp", shape="crossing"),
]
SCHEDULES = [
    *(Job(f"chain{devices}", devices, 4 * devices, "zero_bubble", steps=3) for devices in (2, 4)),
    *(Job(f"chain{devices}", devices, 4 * devices, "dualpipe", steps=3) for devices in (2, 4)),
    *(
        Job(f"chain{2 * devices}", devices, 2 * devices, shape, steps=3)
        for devices in (2, 4)
        for shape in ("interleaved_one_f_one_b", "zbv", "dualpipev")
    ),
    *(
        Job("chain2", 4, 4, "dualpipe", steps=3, sharded=sharded)
        for sharded in ("", "optimizer", "grads", "params")
    ),
]
THREE = [
    Job("gpt", devices=3, microbatches=4, shape="1F1B"),
    Job("tied", devices=3),
    Job("residual", devices=3),
]
REPLICAS = [
    Job("mlp", microbatches=2, shape="PP2xDP2", devices=4),
    Job("dropout", microbatches=2, shape="PP2xDP2", devices=4),
    Job("gpt", microbatches=2, shape="PP2xDP2 unordered", devices=4),
    Job("tied", microbatches=2, shape="PP2xDP2 unordered", devices=4),
    *(
        Job(name, microbatches=2, shape="DP2")
        for name in ("mlp", "tied", "frozen", "losses", "logs", "dropout", "autocast")
    ),
    *(
        Job(name, microbatches=2, shape="DP2", sharded=sharded)
        for sharded in ("optimizer", "grads", "params")
        for name in ("gpt", "tied", "frozen", "dropout", "autocast")
    ),
    *(
        Job(name, microbatches=2, shape=shape, devices=4, sharded=sharded)
        for sharded in ("optimizer", "grads", "params")
        for name, shape in (("mlp", "PP2xDP2"), ("tied", "PP2xDP2 unordered"))
    ),
]
QUICK_SHARDED = {("DP2", "tied", "optimizer"), ("DP2", "frozen", "grads"), ("DP2", "dropout", "params"),
                 ("PP2xDP2 unordered", "tied", "params"), ("PP2xDP2", "mlp", "grads")}  # fmt: skip
WRONG = [
    Job("mlp", microbatches=2, shape="PP2xDP2", devices=4, fault="own sum"),
    Job("mlp", microbatches=4, fault="exchange"),
    Job("mlp", microbatches=4, fault="drop term"),
]


RIGHT = TWO + THREE + REPLICAS + SCHEDULES
# One or two programs of each kind, on different models.
QUICK = [
    *TWO[:4], *TWO[9:14:2], TWO[15], *TWO[18:20], TWO[-1], THREE[1], REPLICAS[1], REPLICAS[3],
    *REPLICAS[4:11:3],
    *(job for job in REPLICAS if (job.shape, job.name, job.sharded) in QUICK_SHARDED),
    *(job for job in SCHEDULES if (job.shape, job.devices) in {("zero_bubble", 2), ("dualpipe", 2),
        ("zbv", 4), ("dualpipev", 2)}),
    SCHEDULES[-1],
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], list[Trained]]:
    """Return the outcome of every rank after training a job."""

    def run(jobs: list[Job]) -> dict[Job, list[Trained]]:  # some of these jobs leave ranks without work
        by_rank = launch(4, train, tmp_path_factory.mktemp("processes"), jobs, prepare=compile_all)
        for result in by_rank:
            assert isinstance(result, list), result
        return {job: [result[i] for result in by_rank] for i, job in enumerate(jobs)}

    return on_demand([[*QUICK, *WRONG], [job for job in RIGHT if job not in QUICK]], run)


def differences(expected: Trained, ranks: list[Trained]) -> list[str]:
    found = []
    for rank, result in enumerate(ranks):
        for number, (a, b) in enumerate(zip(expected.metrics, result.metrics, strict=bool(result.metrics))):
            found += [f"rank {rank}: metrics of step {number}"] if not torch.equal(a, b) else []
        for name, x in result.tensors.items():
            held = (
                ~x.isnan() if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)
            )  # a rank may hold a part of the parameter
            found += (
                [f"rank {rank}: {name}"]
                if not (held.any() and torch.equal(x[held], expected.tensors[name][held]))
                else []
            )
    return found


@pytest.mark.parametrize("job", marked(RIGHT, QUICK), ids=str)
def test_training_is_bitwise_the_reference(job: Job, trained: Callable[[Job], list[Trained]]) -> None:
    expected = train_by_reference(job)
    assert differences(expected, trained(job)) == []
    # Together the ranks have all there is.
    assert {name for result in trained(job) for name in result.tensors} == set(expected.tensors)


@pytest.mark.parametrize("job", WRONG, ids=str)
def test_a_wrong_plan_is_not(job: Job, trained: Callable[[Job], list[Trained]]) -> None:
    assert differences(train_by_reference(job), trained(job)) != []


def fail_on_one(rank: int) -> Any:
    """Let rank 1 fail in its first backward pass, while rank 0 waits for its message."""
    model, plans = captured("mlp"), compile_plans(pipeline("mlp", 2, 2))
    transport = ProcessTransport(plans, [0, 1], CPU, timeout=LIMIT)
    executor = Executor(plans[rank], model.step, model.tensors, model.tensors, transport, CPU)
    if rank == 1:
        failing = next(
            i for i, x in enumerate(executor._source) if "B[PP=1,MB=0]" in plans[1].instructions[x].label
        )

        def fail() -> None:
            raise ValueError("seeded")

        executor._code[failing] = fail
    return executor.step(model.leaves, seed=0)


def test_a_rank_that_fails_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    first, second = launch(2, fail_on_one, tmp_path)
    assert isinstance(second, ExecutionError)
    assert "device 1: run %" in str(
        second
    ) and "made by directive 2, placed by directive 1 failed: seeded" in str(second)
    assert isinstance(first, ExecutionError)
    assert "device 0: wait %" in str(first)


NOTED = Job("mlp", microbatches=2, shape="DP2")


def bring_notes(rank: int) -> Any:
    """Run steps of two replicas with the same digest, with different digests, without a digest on rank 1, and
    with the same digest again. Returns the results.
    """
    model, plans = captured(NOTED.name), plans_of(NOTED)
    transport = ProcessTransport(plans, [0, 1], CPU, timeout=LIMIT)
    executor = Executor(plans[rank], model.step, model.tensors, model.tensors, transport, CPU)
    leaves = [x.chunk(2)[rank].contiguous() if x.ndim else x for x in model.leaves]
    assert executor.carries_digest

    def step(digest: int) -> Any:
        try:
            return executor.step(leaves, seed=0, digest=digest).metrics
        except DigestMismatch:
            return "void"

    return [step(7), step(7 + rank), executor.vote_abort() if rank else step(7), step(8)]


def test_a_step_is_void_where_notes_differ(tmp_path: Path) -> None:
    first, second = launch(2, bring_notes, tmp_path, prepare=partial(compile_all, [NOTED]))
    assert first[1:3] == ["void", "void"] and second[1:3] == ["void", None]
    assert torch.equal(first[0], first[3]) and torch.equal(first[0], second[0])


def use_unconnected(rank: int) -> Any:
    plans = compile_plans(pipeline("mlp", 2, 2))
    transport = ProcessTransport(compile_plans(pipeline("mlp", 1, 1)), [0, 1], CPU, timeout=LIMIT)
    return Executor(plans[rank], captured("mlp").step, captured("mlp").tensors, {}, transport, CPU)


def test_plans_that_were_not_connected_are_refused(tmp_path: Path) -> None:
    for result in launch(2, use_unconnected, tmp_path):
        assert isinstance(result, ExecutionError) and "(0, 1) is not connected. Call connect" in str(result)


def map_two_devices_to_one_rank(rank: int) -> Any:
    return ProcessTransport(compile_plans(pipeline("mlp", 2, 2)), [0, 0], CPU, timeout=LIMIT)


def test_two_devices_of_one_rank_are_refused(tmp_path: Path) -> None:
    for result in launch(2, map_two_devices_to_one_rank, tmp_path):
        assert isinstance(result, ExecutionError) and "two devices have the same rank" in str(result)
