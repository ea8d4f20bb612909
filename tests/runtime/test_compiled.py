"""Chunks compiled by Inductor give what the captured code gives, within rounding. A chunk that Inductor
cannot compile runs the captured code.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture.cutting.chunk_compiler import ChunkCompiler
from lightning_piper.capture.torch_private import _torch_inductor
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.regions import Code
from lightning_piper.runtime import Executor, LocalTransport, StepResult
from tests.distributed.processes import PATIENCE
from tests.runtime.steps import CPU

_COMPILES = """
from tests.runtime.test_compiled import CPU, ChunkCompiler, step
compiler = ChunkCompiler({}, CPU)
step(compiler)
print(compiler.compiled, compiler.report)
"""
ROUNDING = 1e-14  # float64; 2e-16 measured


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = F.dropout(F.gelu(self.norm(self.first(x))), 0.3)
            return F.cross_entropy(self.last(h), y)


def single() -> tuple[Compiled, dict[str, Tensor], list[Tensor]]:
    torch.manual_seed(0)
    module = Net().double()
    batch = (torch.randn(6, 8, dtype=torch.float64), torch.randint(0, 4, (6,)))
    compiled = piper.compile(module, batch, [piper.Split(filter={}, dim_name="MB", num_microbatches=2)])
    return compiled, {name: x.detach() for name, x in module.named_parameters()}, list(batch)


def step(compiler: ChunkCompiler | None, seed: int = 3) -> StepResult:
    compiled, tensors, leaves = single()
    transport = LocalTransport(compiled.plans)
    return Executor(compiled.plans[0], compiled.step, tensors, {}, transport, CPU, compiler=compiler).step(
        leaves, seed
    )


def distance(a: StepResult, b: StepResult) -> float:
    assert a.grads.keys() == b.grads.keys()
    pairs = [(a.metrics, b.metrics), *((a.grads[name], b.grads[name]) for name in a.grads)]
    return max(float((x - y).abs().max()) for x, y in pairs)


def test_compiled_chunks_give_the_same_within_rounding() -> None:
    compiler = ChunkCompiler({}, CPU)
    found, plain = step(compiler), step(None)
    assert (compiler.compiled, compiler.report) == (2, None)  # F and B, each once for both microbatches
    assert distance(found, plain) < ROUNDING
    assert distance(found, step(None, seed=4)) > 1e-3  # other random masks


def test_compilers_of_builds_that_are_tested_automatically_take_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor is stricter where the environment variable CI is set; in a process of its own, for it asks
    once for an operation.
    """
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    found = subprocess.run(
        [sys.executable, "-c", _COMPILES], capture_output=True, text=True, timeout=PATIENCE.total_seconds()
    )
    assert (found.returncode, found.stdout.strip()) == (0, "2 None"), found.stderr


def test_what_cannot_be_compiled_runs_as_it_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("no kernel for this\nand more")

    monkeypatch.setattr(_torch_inductor, "through_inductor", refuse)
    compiler = ChunkCompiler({}, CPU)
    assert distance(step(compiler), step(None)) < ROUNDING  # products are added to sums nevertheless
    assert compiler.report == (
        "compile: 2 of 2 passes run uncompiled, because of an error of Inductor (RuntimeError: no kernel for this). "
        "The results are the same. Remove this cause, or leave compile= out [PIPER-W018]"
    )


def code() -> Code:
    """Return code without operations and without outputs."""
    made = (lambda args: (), torch.fx.Graph())
    return Code(lambda: made, ())


def test_the_report_names_the_reason_of_each_code() -> None:
    compiler, empty, uncaptured = ChunkCompiler({}, CPU), code(), code()
    uncaptured.graph.placeholder("x").meta[RUNS_KEY] = None
    assert compiler(empty) == empty.run and compiler.report is None
    compiler(uncaptured)
    assert compiler.report == (
        "compile: 1 of 1 pass runs uncompiled, because of uncaptured code of the step. The results are the same. "
        "Remove this cause, or leave compile= out [PIPER-W018]"
    )
    compiler.refused["an error of Inductor (E: no)"] += 2
    assert compiler.report == (
        "compile: 2 of 3 passes run uncompiled, because of an error of Inductor (E: no), and 1 for other reasons. The "
        "results are the same. Remove this cause, or leave compile= out [PIPER-W018]"
    )


@pytest.mark.parametrize("given, text", [
    (3, r"PiperStrategy\(compile=3\) is not usable. Give True, False, or a dict"),
    ({"max_autotun": True}, "Inductor has no option 'max_autotun'"),
])  # fmt: skip
def test_other_options_are_refused(given: Any, text: str) -> None:
    with pytest.raises(PiperError, match=text):
        piper.PiperStrategy([], compile=given)
