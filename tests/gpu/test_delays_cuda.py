"""On CUDA, streams that are delayed at random places change no bit of a result. Also what a single GPU can
show: memory and compiled passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lightning_piper as piper
from lightning_piper.errors import OutOfMemoryError
from tests.distributed.processes import launch_trainings
from tests.gpu.steps import ON_TWO, PROGRAMS, farthest, fitted, gradients, slowed, train

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
ROUNDING = 1e-5  # of float32, after four steps of AdamW at 1e-3
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@needs_cuda
@pytest.mark.parametrize("program", PROGRAMS)
def test_late_streams_change_no_bit(program: str) -> None:
    def in_order(code, source):  # type: ignore[no-untyped-def]  # each instruction is done before the next one is issued
        return [lambda bound=bound: (bound(), torch.cuda.synchronize())[0] for bound in code]

    observers = [in_order, *(slowed(seed, torch.cuda._sleep) for seed in range(20))]
    first, *others = gradients(PROGRAMS[program], CUDA, observers, width=512)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@needs_cuda
def test_a_program_that_keeps_less_trains_where_another_one_has_no_room() -> None:
    whole = [piper.Place(filter={}, devices=[0])]
    program = [*whole, piper.Split(filter={}, dim_name="MB", num_microbatches=8), piper.Recompute(filter={})]
    size = {"width": 1024, "layers": 8, "rows": 1 << 16}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    gradients(program, CUDA, [None], **size)
    needed = torch.cuda.max_memory_reserved()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.1 * needed / total, 1.0))
    try:
        gradients(program, CUDA, [None], **size)
        torch.cuda.empty_cache()
        with pytest.raises(OutOfMemoryError):
            gradients(whole, CUDA, [None], **size)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@needs_cuda
def test_compiled_passes_are_equal_within_rounding() -> None:
    program = PROGRAMS["1F1B"]
    plain = fitted(piper.PiperStrategy(program, transport="local"), "cuda")
    compiled = fitted(piper.PiperStrategy(program, transport="local", compile=True), "cuda")
    assert 0 <= farthest(plain, compiled) < ROUNDING
    assert (
        farthest(plain, fitted(piper.PiperStrategy(program, transport="local"), "cuda", steps=3))
        > 10 * ROUNDING
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_programs_over_nccl(tmp_path: Path) -> None:
    for found in launch_trainings(2, train, tmp_path, "cuda", list(ON_TWO)):
        for name, program in ON_TWO.items():
            local = fitted(piper.PiperStrategy(program, transport="local"), "cuda")
            assert farthest(local, found[name]) < ROUNDING, name


def test_late_streams_run_here() -> None:
    """The same on a CPU, where nothing is late."""
    waited: list[int] = []
    first, other = gradients(PROGRAMS["ZeRO-3"], CPU, [None, slowed(0, waited.append)])
    assert waited and all(torch.equal(first[name], other[name]) for name in first)
    (small,) = gradients(PROGRAMS["ZeRO-3"], CPU, [None], rows=8)
    assert not torch.equal(first["metrics"], small["metrics"])


@pytest.mark.long
def test_programs_run_here(tmp_path: Path) -> None:
    """The same over gloo."""
    names = ["1F1B", "ZeRO-3"]
    for found in launch_trainings(2, train, tmp_path, "cpu", names):
        for name in names:
            local = fitted(piper.PiperStrategy(ON_TWO[name], transport="local"), "cpu")
            shorter = fitted(piper.PiperStrategy(ON_TWO[name], transport="local"), "cpu", steps=3)
            assert farthest(local, found[name]) < ROUNDING < 0.1 * farthest(shorter, found[name]), name
