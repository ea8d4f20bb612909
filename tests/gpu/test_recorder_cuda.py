"""On CUDA, instructions are recorded when they run on their streams, not when they are issued."""

from __future__ import annotations

import time

import pytest
import torch

import lightning_piper as piper
from lightning_piper.plan.instructions import Run
from lightning_piper.profile.measured_trace import SECOND, Measured
from lightning_piper.profile.recorder import StepRecorder, now
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.simulate import figures
from tests.simulate.programs import WIDTH, Chain

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_chunks_take_the_time_that_they_take_on_their_stream() -> None:
    cuda = torch.device("cuda", 0)
    module = Chain(2).to(cuda)
    compiled = piper.compile(
        module, torch.zeros(1 << 20, WIDTH), piper.schedules.one_f_one_b(2, 2), device=cuda
    )
    transport, params = LocalTransport(compiled.plans), dict(module.named_parameters())
    executors = [
        Executor(plan, compiled.step, params, {}, transport, cuda) for plan in compiled.plans.values()
    ]
    batch = torch.randn(1 << 20, WIDTH, device=cuda)
    run_local(executors, [batch], seed=1)
    recorders = [StepRecorder(executor, cuda) for executor in executors]
    for recorder in recorders:
        recorder.attach()
    torch.cuda.synchronize()
    start = time.perf_counter()
    before = now()
    run_local(executors, [batch], seed=1)
    torch.cuda.synchronize()
    wall, after = time.perf_counter() - start, now()
    times = {
        executor.plan.device: recorder.take()()
        for executor, recorder in zip(executors, recorders, strict=True)
    }
    for device, plan in compiled.plans.items():
        for instruction, begin, end in zip(
            plan.instructions, times[device].start, times[device].end, strict=True
        ):
            if isinstance(instruction, Run):
                assert before - 1_000_000 < begin < end < after + 1_000_000
                assert end - begin > 10_000  # millions of elements are not done in less than ten microseconds
    measured = Measured(compiled.dag, compiled.plans, times, serial=False)
    result = figures(compiled.dag, compiled.plans, measured.trace)
    assert 0 < float(result.step_time) <= wall + 1_000_000 * SECOND
    for one in result.devices.values():
        assert float(one.busy + one.exposed + one.bubble) == pytest.approx(float(result.step_time), rel=0.01)
