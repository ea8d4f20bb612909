"""Sharded parameters of every kind: dtypes, strides and sizes, the dtype of the sums of their gradients, and
training of their shards.
"""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.directives import Place, Replicate
from lightning_piper.directives.rewrites.sharding import buckets_between_steps, keeps_shards_of
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.ops.reference import Reference
from lightning_piper.testing.equivalence import run_plans
from tests.models import Captured, captured
from tests.pages import Pair, samples
from tests.plan.programs import dag_of, split
from tests.sharded import (
    LEVELS,
    NAMES,
    distance,
    finished,
    program,
    replicate,
    run,
    trained_alone,
    trained_in_shards,
)

by_level = pytest.mark.parametrize("level", LEVELS, ids=NAMES)


class Odd(L.LightningModule):
    """Transposed, sparse, tiny and scalar parameters in three dtypes. All numbers are integers, and the mean
    is over a power of two. So sums are exact in every dtype, also in bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randint(-2, 3, (5, 3)).double().t())
        self.row = nn.Parameter(torch.tensor([[1.0], [-2.0], [1.0], [0.0], [2.0]], dtype=torch.float64).t())
        self.sparse = nn.Parameter(torch.randint(-1, 2, (5, 8)).float()[:, ::2])
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.low = nn.Parameter(torch.randint(-2, 3, (4,)).bfloat16())
        self.fixed = nn.Parameter(torch.eye(4).bfloat16(), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP"):
            h = batch @ self.turned + self.row
        with annotate("PP"):
            h = h.float() @ self.sparse * self.scalar
        with annotate("PP"):
            return (h.bfloat16() @ self.fixed + self.low * batch[:, :1].bfloat16()).sum(1).mean()


@functools.cache
def odd() -> Captured:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module, batch = Odd(), torch.randint(-1, 3, (8, 3)).double()
    tensors = {n: x.detach() for n, x in module.named_parameters()}
    return Captured(None, module, batch, capture(module, batch), tensors, [batch])  # type: ignore[arg-type]


@by_level
@pytest.mark.parametrize("shape", ["DP2", "split before", "split after", "PP2xDP2 unordered"])
def test_dtypes_strides_and_sizes(shape: str, level: dict[str, Any]) -> None:
    model = odd()
    assert not model.tensors["turned"].is_contiguous() and model.tensors["row"].stride() == (1, 1)
    alone = run(model, dag_of(model.step, []))
    dag = finished(model, program(model.step, shape, level))
    found = run(model, dag)
    assert distance(alone, found) == 0 and len(alone.grads) == 5
    executed = run_plans(model, dag)  # type: ignore[arg-type]
    for name, grad in alone.grads.items():
        assert grad.abs().max() > 0 and grad.dtype == executed.grads[name].dtype == found.grads[name].dtype
        assert torch.equal(grad, executed.grads[name]), name
    for node in dag.of_type(Parameters):  # a bucket is of one dtype
        bucket = node.outputs[0].bucket
        assert bucket is not None and {spec.dtype for spec in bucket.tensors} == {bucket.dtype}


class Canceling(L.LightningModule):
    """The gradients of four samples are 64, 0.25, 0.25 and -64: their sum is 0.5 in float32, but not in
    bfloat16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP"):
            return (batch * self.weight[:1]).sum(1).mean()


@pytest.mark.parametrize("level", [{}, *LEVELS], ids=["none", *NAMES])
def test_reduce_dtype(level: dict[str, Any]) -> None:
    module, batch = Canceling(), torch.tensor([[256.0], [1.0], [1.0], [-256.0]], dtype=torch.bfloat16)
    step = capture(module, batch)
    model = Captured(None, module, batch, step, {"weight": module.weight.detach()}, [batch])  # type: ignore[arg-type]
    sums = {}
    for dtype in (None, "bfloat16", "float32", "float64"):
        more = {} if dtype is None else {"reduce_dtype": dtype}
        dag = finished(
            model,
            [{"op": "place", "filter": {}, "devices": [0, 1]}, *split(2), replicate([0, 1], **level, **more)],
        )
        grad = run(model, dag).grads["weight"]
        assert grad.dtype == torch.bfloat16, "the optimizer takes gradients in the parameters' dtype"
        assert torch.equal(grad, run_plans(model, dag).grads["weight"])  # type: ignore[arg-type]
        sums[dtype] = float(grad[0])
    assert sums["float32"] == sums["float64"] == 0.5
    assert sums[None] == sums["bfloat16"] != 0.5


def test_sums_in_a_dtype_that_rounds_more_are_within_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(dtype: str, *more: piper.Split, zero: int = 0) -> Any:
        program = [piper.Place([0, 1]), *more, piper.Replicate(reduce_dtype=dtype, zero=zero)]
        return piper.verify(Pair(), samples(), program)

    torch.manual_seed(0)
    for dtype in ("bfloat16", "float16"):
        for more in ((), (piper.Split(4),)):
            found = report(dtype, *more, zero=3 if more else 0)
            assert found.conclusion.startswith(f"verified except sums of gradients in {dtype}: ")
            assert next(row.contract for row in found.rows if row.name == "replicate") == "bounded"
    wider = report("float64")
    assert wider.verdict == "verified" and "bounded" not in {row.contract for row in wider.rows}
    monkeypatch.setattr(Reference, "loosen", lambda *given: None)
    assert report("bfloat16").verdict == "NOT EQUIVALENT"


@by_level
@pytest.mark.parametrize(
    "name, shape",
    [
        ("mlp", "PP2xDP2"),
        ("mlp", "split after"),
        ("tied", "split before"),
        ("tied", "PP2xDP2 unordered"),
        ("frozen", "DP2"),
        ("odd", "split before"),
        ("odd", "PP2xDP2 unordered"),
    ],
)
def test_training_in_shards_is_training_of_the_whole(name: str, shape: str, level: dict[str, Any]) -> None:
    """Adam on shards, step after step: what is gathered is what the optimizer has left, and Adam is
    elementwise.
    """
    model = odd() if name == "odd" else captured(name)
    dag = finished(model, program(model.step, shape, level, bucket_size=0.0002))
    expected, found = trained_alone(model, dag), trained_in_shards(model, dag)
    assert expected.keys() == found.keys()
    for name_, x in expected.items():
        assert torch.equal(x, found[name_]), name_
        assert not torch.equal(x, model.tensors[name_]) or not model.step.params[name_].requires_grad


class Detaches(L.LightningModule):
    """Two layers in one bucket. The later layout trains only the second layer."""

    later = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.first(batch)
        return self.second(h.detach() if self.later else h).square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_later_layout_trains_a_part_of_a_bucket_and_reads_the_rest(stage: int) -> None:
    module, directives = Detaches(), (Place([0, 1]), Replicate([0, 1], zero=stage))
    first = compile_step(capture(module, torch.ones(4, 3)), directives)
    module.later = True
    later = compile_step(capture(module, torch.ones(4, 3)), directives, training=first.dag)
    assert keeps_shards_of(later.dag, first.dag)
    assert all(len(list(each.dag.of_type(Parameters))) == 1 for each in (first, later))
    assert buckets_between_steps(later.dag).keys() == dict(module.named_parameters()).keys()
