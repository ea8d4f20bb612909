"""On CUDA, passes that are CUDA graphs give the bits of passes without graphs, also if streams are late."""

from __future__ import annotations

import os

import pytest
import torch

import lightning_piper as piper
from lightning_piper.runtime.chunk_graphs import ChunkGraphs
from lightning_piper.testing.simulated import differences
from tests.gpu import equality
from tests.gpu.steps import PROGRAMS, farthest, fitted, slowed
from tests.gpu.test_delays_cuda import ROUNDING

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.mark.parametrize(
    "name", ["1F1B, 2 stages", "ZeRO-1", "ZeRO-3", "second passes", "accumulated over sizes"]
)
def test_graphs_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    batches, held = equality.PROGRAMS[name](CUDA)
    batches, graphs = [*batches, *batches], list[ChunkGraphs]()
    plain = equality.outcomes(batches, held, CUDA)
    for seed in range(5):
        late = slowed(seed, torch.cuda._sleep)
        found = equality.outcomes(batches, held, CUDA, late, cuda_graphs=True, graphs=graphs)
        assert differences(plain, found) == []
    assert sum(each.captured for each in graphs) > 0
    assert differences(plain, equality.outcomes(batches[::-1], held, CUDA)) != []


def test_compiled_passes_become_graphs() -> None:
    program = PROGRAMS["1F1B"]
    plain = fitted(piper.PiperStrategy(program, transport="local"), "cuda")
    strategy = piper.PiperStrategy(program, transport="local", compile=True, cuda_graphs=True)
    assert farthest(plain, fitted(strategy, "cuda")) < ROUNDING
