"""Gathers of sharded parameters in another dtype: the program computes what one device computes with parameters that are
rounded to this dtype, bit for bit. The optimizer updates unrounded parameters.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import Outcome
from lightning_piper.compiler import compile_step
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ops.communication.gather import AllGather, Parameters, rounded_params
from lightning_piper.plan import compile_plans
from lightning_piper.plan.instructions import AllGatherInstruction
from lightning_piper.session.eager import conditions
from lightning_piper.testing.equivalence import run_plans
from lightning_piper.verify import equivalence
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from lightning_piper_cli.certificate.checker import Checker
from lightning_piper_cli.certificate.memory import Fault
from tests.certificate.families import certificate
from tests.directives.test_sharded_params import odd
from tests.models import Captured, captured
from tests.pages import Pair, samples
from tests.plan.programs import dag_of
from tests.sharded import (
    LEVELS,
    NAMES,
    finished,
    program,
    replicate,
    run,
    stages,
    trained_alone,
    trained_in_shards,
)

by_level = pytest.mark.parametrize("level", LEVELS, ids=NAMES)
ONE_BUCKET = {"bucket_size": 0.0002}


@functools.cache
def of(name: str, shape: str, stage: int, dtype: str = "bfloat16") -> tuple[Captured, TrainingDAG]:
    model = odd() if name == "odd" else captured(name)
    return model, finished(model, program(model.step, shape, LEVELS[stage], gather_dtype=dtype, **ONE_BUCKET))


def one_device(model: Captured, dag: TrainingDAG, dtype: torch.dtype) -> Outcome:
    """Return the outcome of the same program without rounding, on parameters that are rounded before."""
    rounded = rounded_params(dag)
    tensors = {n: x.to(dtype).to(x.dtype) if n in rounded else x for n, x in model.tensors.items()}
    return interpret(dag, tensors, model.leaves)


@pytest.mark.parametrize("stage", range(3), ids=NAMES)
@pytest.mark.parametrize(
    "name, shape", [("mlp", "PP2xDP2"), ("mlp", "split after"), ("tied", "PP2xDP2 unordered"), ("odd", "DP2")]
)
def test_interpreter_and_plans_round_as_one_device_does(name: str, shape: str, stage: int) -> None:
    model, dag = of(name, shape, stage)
    expected = one_device(model, dag, torch.bfloat16)
    assert rounded_params(dag).keys() == {
        n for n, x in model.tensors.items() if n in model.step.params and x.dtype.itemsize > 2
    } - ({"fixed"} if name == "odd" else set())
    for found in (run(model, dag), run_plans(model, dag)):  # type: ignore[arg-type]
        assert found.metrics.keys() == expected.metrics.keys()
        assert all(torch.equal(x, found.metrics[n]) for n, x in expected.metrics.items())
        assert all(
            torch.equal(x, found.grads[n]) and x.dtype == found.grads[n].dtype
            for n, x in expected.grads.items()
        )
    plain = finished(model, program(model.step, shape, LEVELS[stage], **ONE_BUCKET))
    whole = run(model, plain)
    same = all(torch.equal(x, whole.grads[n]) for n, x in expected.grads.items())
    assert same == (name == "odd"), "only the integers of `odd` are numbers of bfloat16"


@by_level
def test_the_optimizer_updates_unrounded_parameters(level: dict[str, Any]) -> None:
    model, dag = of("mlp", "PP2xDP2", LEVELS.index(level))
    expected, found = trained_alone(model, dag), trained_in_shards(model, dag.copy())
    for name, x in expected.items():
        assert torch.equal(x, found[name])
        assert not torch.equal(x, x.bfloat16().to(x.dtype))


@by_level
def test_shards_are_gathered_as_often_as_without_rounding(level: dict[str, Any]) -> None:
    """And travel with half of the bytes. The memory that ZeRO-1 and ZeRO-2 gather into is then new."""
    model, dag = of("mlp", "split after", LEVELS.index(level))
    plain = finished(model, program(model.step, "split after", level, **ONE_BUCKET))
    assert len(list(dag.of_type(AllGather))) == len(list(plain.of_type(AllGather)))
    assert not any(node.kept for node in dag.of_type(Parameters))

    def sent(of: TrainingDAG) -> int:
        plan = compile_plans(of)[0]
        return sum(x.nbytes for x in plan.instructions if isinstance(x, AllGatherInstruction))

    assert sent(plain) == 2 * sent(dag) > 0


def test_verify_compares_with_rounded_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    directives = [piper.Place([0, 1]), piper.Split(2), piper.Replicate(zero=3, gather_dtype="bfloat16")]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, batch = Pair(), samples()
    report = piper.verify(module, batch, directives)
    row = report.rows[-1]
    assert [each.contract for each in report.rows] == [
        "bitwise",
        "bitwise",
        "reassociated",
        "rounded",
        "bitwise",
    ]
    assert report.verdict == "verified except" and row.single.verdict != "differs"
    assert report.whole.verdict == "differs"
    assert report.conclusion.startswith(
        "verified except 4 parameters rounded to bfloat16 (gather_dtype): differs by"
    )
    summary = piper.compile(module, batch, directives).summary()
    assert "ZeRO-3, 4 parameters rounded to bfloat16 before use" in summary
    assert "not proved: the result with unrounded parameters" in summary
    monkeypatch.setattr(equivalence, "rounded_params", lambda dag: {})
    assert piper.verify(module, batch, directives).verdict == "NOT EQUIVALENT"


def test_parameters_with_few_bytes_are_gathered_as_they_are() -> None:
    module = Pair().bfloat16()
    directives = [piper.Place([0, 1]), piper.Replicate(zero=3, gather_dtype="bfloat16")]
    report = piper.verify(module, tuple(x.bfloat16() for x in samples()), directives)
    assert {row.contract for row in report.rows} <= {"bitwise", "reassociated"}


def test_the_check_finds_another_rounding() -> None:
    model = captured("tied")
    dag = finished(model, program(model.step, "PP2xDP2 unordered", LEVELS[2], gather_dtype="bfloat16"))
    gathers = list(dag.of_type(AllGather))
    value = gathers[0].outputs[0]
    object.__setattr__(value, "rounded", torch.float32)
    with pytest.raises(
        VerificationError, match=r"reads position rounded to bfloat16, but .* reads it rounded to float32"
    ):
        check(dag, final=True)
    object.__setattr__(value, "rounded", torch.float64)
    with pytest.raises(VerificationError, match=r"of torch.float32 to torch.float64, which does not round"):
        check(dag)
    kept = finished(model, program(model.step, "DP2", LEVELS[0]))
    gather = next(kept.of_type(AllGather))
    object.__setattr__(gather.outputs[0], "rounded", torch.bfloat16)
    with pytest.raises(VerificationError, match="the optimizer would update rounded parameters"):
        check(kept)


def test_regions_that_share_a_parameter_round_it_alike() -> None:
    model = captured("tied")
    groups = [[0, 2], [1, 3]]
    places = stages(model.step, groups)

    def rounding(*dtypes: str | None) -> list[dict[str, Any]]:
        return [
            replicate([place["devices"]], place["filter"], **LEVELS[2], gather_dtype=dtype)
            for place, dtype in zip(places, dtypes, strict=True)
        ]

    check(finished(model, [*places, *rounding(*["bfloat16"] * len(places))]), final=True)
    with pytest.raises(
        DirectiveError, match=r"another directive gathers .* in torch.bfloat16, but this one would"
    ):
        dag_of(model.step, [*places, *rounding(*["bfloat16"] * (len(places) - 1), None)])


class Branching(Pair):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) > 0 else -loss


def test_an_uncaptured_step_reads_no_rounded_parameters() -> None:
    directives = [piper.Place([0, 1]), piper.Replicate(zero=3)]
    assert piper.verify(Branching(), samples(), directives).verdict == "executed"
    directives[1] = piper.Replicate(zero=3, gather_dtype="bfloat16")
    with pytest.raises(piper.CaptureError):
        piper.verify(Branching(), samples(), directives)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_warning_of_an_uncaptured_evaluation_says_that_it_rounds_nothing(dtype: str | None) -> None:
    said: list[str] = []
    world: Any = SimpleNamespace(size=2, count=2, warn=said.append, decide=lambda stays, all: stays)
    settings = SimpleNamespace(program=(piper.Place([0, 1]), piper.Replicate(zero=3, gather_dtype=dtype)))
    parts = SimpleNamespace(later={})
    before: Any = SimpleNamespace(module=Pair(), world=world, settings=settings, known=parts)
    with patch.object(conditions, "lacks_memory", return_value=None):
        conditions.check_may_be(before, "validation_step", piper.CaptureError("a branch"), "auto")
    (text,) = said
    assert ("reads unrounded parameters" in text) == (dtype is not None)


@by_level
def test_an_evaluation_uses_the_rounded_parameters_of_the_training(level: dict[str, Any]) -> None:
    class Validated(Pair):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", self.training_step(batch, batch_idx))

    module, batch = Validated(), samples()
    directives = (piper.Place([0, 1]), piper.Replicate([0, 1], gather_dtype="bfloat16", **level))
    training = compile_step(capture(module, batch), directives).dag
    step = capture(module, batch, name="validation_step")
    every = dict.fromkeys(dict(module.named_parameters()), torch.bfloat16)
    assert (
        rounded_params(compile_step(step, directives, training=training).dag)
        == rounded_params(training)
        == every
    )
    alone = compile_step(step, directives).dag
    assert rounded_params(alone) == (every if "shard_params" in level else {})


class Norms(L.LightningModule):
    """Under autocast, the linear layer computes in bfloat16, and the norm in float32."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8) if norm else nn.Identity()
        self.layer = nn.Linear(8, 4, bias=False)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(self.norm(batch)).float().square().mean()


@pytest.mark.parametrize("norm", [False, True])
def test_with_autocast_only_operations_in_float32_see_the_rounding(norm: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, batch = Norms(norm), torch.randn(4, 8)
        if norm:
            nn.init.normal_(module.norm.weight)  # type: ignore[arg-type]
    step = capture(module, batch)
    tensors = {n: x.detach() for n, x in module.named_parameters()}
    found = {}
    for dtype in (None, "bfloat16"):
        directives = (piper.Place([0, 1]), piper.Replicate([0, 1], zero=3, gather_dtype=dtype))
        found[dtype] = interpret(compile_step(step, directives).dag, tensors, [batch]).grads["layer.weight"]
    assert torch.equal(found[None], found["bfloat16"]) == (not norm)


def test_the_certificate_says_which_parameters_are_rounded() -> None:
    checker = Checker(certificate("gathers in float32"))
    checker.check()
    (text,) = [text for text in checker.assumptions if "rounds" in text]
    assert text == "one device rounds this parameter to torch.float32 before it reads it"
    used = {name for name in checker.program["parameters"] if name in checker.rounded}
    assert checker.assumptions[text] == len(used) > 0
    wrong = certificate("gathers in float32")
    gather = next(x for x in wrong["devices"]["0"]["instructions"] if x["op"] == "all_gather")
    gather["rounded"] = None
    with pytest.raises(Fault, match="not all run the same"):
        Checker(wrong).check()
    for plan in wrong["devices"].values():
        next(x for x in plan["instructions"] if x["node"] == gather["node"])["rounded"] = None
    with pytest.raises(Fault, match=r"its type has"):
        Checker(wrong).check()
