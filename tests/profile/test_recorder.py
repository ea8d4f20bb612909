"""The recorder on an executor, its schedule, and the files that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lightning_piper as piper
from lightning_piper.errors import PiperError
from lightning_piper.plan.instructions import Run
from lightning_piper.profile import Schedule
from lightning_piper.profile.files import read_json, write_json
from lightning_piper.profile.recorder import InstructionTimes, StepRecorder, now
from lightning_piper.runtime import Executor, LocalTransport, run_local
from tests.simulate.programs import Chain

CPU = torch.device("cpu")


def executors() -> list[Executor]:
    module = Chain(2)
    compiled = piper.compile(module, torch.zeros(4, 4), piper.schedules.one_f_one_b(2, 2))
    transport = LocalTransport(compiled.plans)
    params = dict(module.named_parameters())
    return [Executor(plan, compiled.step, params, {}, transport, CPU) for plan in compiled.plans.values()]


def recorded(found: list[Executor], labels: bool = False) -> list[InstructionTimes]:
    recorders = [StepRecorder(executor, CPU, labels) for executor in found]
    for recorder in recorders:
        recorder.attach()
    run_local(found, [torch.randn(4, 4)], seed=1)
    for recorder in recorders:
        recorder.detach()
    return [recorder.take()() for recorder in recorders]


def test_every_instruction_that_does_something_has_a_start_and_an_end() -> None:
    found = executors()
    before = now()
    times = recorded(found)
    after = now()
    for executor, time in zip(found, times, strict=True):
        done = [
            (i, s, e) for i, s, e in zip(executor.plan.instructions, time.start, time.end, strict=True) if s
        ]
        assert all(before < s <= e < after for _, s, e in done)
        starts = [s for _, s, _ in done]
        assert starts == sorted(starts)  # the order of the plan
        assert {i.node for i, *_ in done if isinstance(i, Run)} == {
            i.node for i in executor.plan.instructions if isinstance(i, Run)
        }


def test_recording_changes_no_result() -> None:
    torch.manual_seed(1)
    plain = run_local(executors(), [torch.ones(4, 4)], seed=1)
    torch.manual_seed(1)
    found = executors()
    for executor in found:
        StepRecorder(executor, CPU, labels=True).attach()
    observed = run_local(found, [torch.ones(4, 4)], seed=1)
    for a, b in zip(plain, observed, strict=True):
        assert a.grads.keys() == b.grads.keys() and all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)
        assert torch.equal(a.metrics, b.metrics)


def test_an_error_in_a_recorded_step_names_its_instruction() -> None:
    found = executors()
    for executor in found:
        StepRecorder(executor, CPU).attach()
    chunk = next(i for i in found[0].plan.instructions if isinstance(i, Run) and i.key[1] == "B")
    position = found[0]._source.index(found[0].plan.instructions.index(chunk))

    def fail() -> None:
        raise RuntimeError("on purpose")

    found[0]._variants[True][0][position] = fail
    with pytest.raises(
        piper.ExecutionError, match=rf"device 0: run %{chunk.node} B\[PP=0,MB=0\].*failed: on purpose"
    ):
        run_local(found, [torch.ones(4, 4)], seed=1)


def test_a_recorder_that_is_off_is_not_asked() -> None:
    found = executors()
    asked: list[int] = []

    def observer(code: list, source: list) -> list:
        asked.append(len(code))
        return list(code)

    found[0].observer = observer
    run_local(found, [torch.ones(4, 4)], seed=1)
    assert len(asked) == 1 and asked[0] > 0
    recorder = StepRecorder(found[0], CPU)
    recorder.attach()
    recorder.detach()
    assert found[0].observer is None
    run_local(found, [torch.ones(4, 4)], seed=1)
    assert len(asked) == 1


def test_torch_profiler_sees_the_nodes() -> None:
    found = executors()
    with torch.profiler.profile(acc_events=True) as profile:
        recorded(found, labels=True)
    chunk = next(i for i in found[1].plan.instructions if isinstance(i, Run))
    labeled = [event for event in profile.events() if event.name == f"%{chunk.node} run {chunk.label}"]
    assert len(labeled) == 1
    inside = {child.name for child in labeled[0].cpu_children}
    assert any(name.startswith("aten::") for name in inside)


def test_phases() -> None:
    schedule = Schedule(wait=2, warmup=1, active=2, repeat=2)
    assert [schedule.phase(i) for i in range(5)] == ["off", "off", "warmup", "active", "active"]
    assert [schedule.phase(i) for i in range(5, 10)] == [schedule.phase(i) for i in range(5)]
    assert {schedule.phase(i) for i in range(10, 30)} == {"off"}
    endless = Schedule(wait=0, warmup=0, active=1, repeat=0)
    assert {endless.phase(i) for i in range(30)} == {"active"}
    assert [i for i in range(20) if schedule.is_first_active(i)] == [3, 8]
    assert all(endless.is_first_active(i) for i in range(30))


@pytest.mark.parametrize(("field", "value"), [("wait", -1), ("active", 0), ("repeat", 1.5), ("warmup", True)])
def test_a_schedule_that_cannot_be_is_refused(field: str, value: object) -> None:
    with pytest.raises(
        PiperError, match=rf"Schedule\({field}={value!r}\) is not usable. Give an integer from"
    ):
        Schedule(**{field: value})  # type: ignore[arg-type]


def test_the_strategy_refuses_what_is_no_schedule() -> None:
    with pytest.raises(PiperError, match=r"profile='yes'.*Give True, or a piper.Schedule such as"):
        piper.PiperStrategy([], profile="yes")  # type: ignore[arg-type]


def test_files_are_replaced_whole_and_know_their_version(tmp_path: Path) -> None:
    path = tmp_path / "piper" / "step_1.json"
    write_json(path, {"version": 1, "a": [1, 2]})
    write_json(path, {"version": 1, "a": [3]})
    assert read_json(path)["a"] == [3]
    assert [p.name for p in path.parent.iterdir()] == ["step_1.json"]
    path.write_text(json.dumps({"version": 99}))
    with pytest.raises(PiperError, match="version 99, but this package reads version 1"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(PiperError, match="cannot be read as a recording"):
        read_json(path)
