"""Any routing of tokens to experts, also adversarial ones, gives the result of one device."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.compiler import compile_step
from lightning_piper.ir.values import Slice
from lightning_piper.runtime import Executor, LocalTransport, joined, run_local, shards_of
from lightning_piper.verify.interpreter import interpret

WIDTH, TOKENS = 3, 4  # features, and tokens of a sample
EPS = torch.finfo(torch.float64).eps


class Routed(L.LightningModule):
    """Experts that the batch chooses: `{"x": [N, TOKENS, WIDTH], "chosen": [N, TOKENS, k]}`. Two layers of
    them, one a stage.
    """

    def __init__(self, experts: int, even: bool) -> None:
        super().__init__()
        self.experts, self.even = experts, even
        self.router = nn.Linear(WIDTH, experts)
        self.layers = nn.ParameterList(nn.Parameter(torch.empty(experts, WIDTH, WIDTH)) for _ in range(2))
        self.bias = nn.Parameter(torch.empty(experts, WIDTH))
        self.double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, chosen = batch["x"], batch["chosen"]
        for stage, weight in enumerate(self.layers):
            with piper.annotate("PP", stage):
                weights = (
                    self.router(x.sign()).gather(-1, chosen)
                    if stage == 0
                    else torch.ones_like(chosen, dtype=x.dtype)
                )
                layer = self.boxes if self.even else self.rows
                x = x + layer(x, chosen, weights, weight)
        with piper.annotate("PP", 1):
            loss = (x * batch["y"]).sum((1, 2)).mean()
            self.log("loss", loss)
        return loss

    def rows(self, x: Tensor, chosen: Tensor, weights: Tensor, weight: Tensor) -> Tensor:
        flat, top = chosen.reshape(-1), chosen.shape[-1]
        order = flat.argsort(stable=True)
        counts = nn.functional.one_hot(flat, self.experts).sum(0)
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(x.reshape(-1, WIDTH)[order // top], counts)
            rows = torch.relu(piper.grouped_linear(rows, weight, sizes))
            shift = piper.grouped_linear(torch.ones_like(rows[:, :1]), self.bias.unsqueeze(-1), sizes)
            rows = piper.combine(rows + shift)
        mixed = torch.zeros_like(x.reshape(-1, WIDTH))
        return mixed.index_add(0, order // top, rows * weights.reshape(-1)[order].unsqueeze(1)).view_as(x)

    def boxes(self, x: Tensor, chosen: Tensor, weights: Tensor, weight: Tensor) -> Tensor:
        """As many places as a sample may ever need: nothing is dropped."""
        samples, tokens, top = chosen.shape
        seats = nn.functional.one_hot(chosen, self.experts).to(x.dtype)  # [N, TOKENS, k, experts]
        boxes = torch.einsum("stke,stw->estkw", seats, x).reshape(self.experts, -1, WIDTH)
        with piper.annotate("EP"):
            boxes = torch.relu(torch.bmm(piper.dispatch(boxes), weight.transpose(1, 2)))
            boxes = piper.combine(boxes + self.bias.unsqueeze(1))
        boxes = boxes.view(self.experts, samples, tokens, top, WIDTH)
        return torch.einsum("stke,estkw->stw", seats * weights.unsqueeze(-1), boxes)


@functools.cache
def captured(experts: int, even: bool, top: int) -> tuple[Routed, CapturedStep]:
    module = Routed(experts, even)
    return module, capture(module, make_batch(8, torch.zeros(8, TOKENS, top, dtype=torch.int64), True))


def make_batch(size: int, chosen: Tensor, exact: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (size, TOKENS, WIDTH)
    if exact:
        x, y = (torch.randint(-2, 3, shape, generator=generator).double() * 8 for _ in range(2))
    else:
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "chosen": chosen, "y": y}


def make_tensors(module: Routed, exact: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {name: x.shape for name, x in module.named_parameters()}
    if exact:
        return {
            name: torch.randint(-2, 3, shape, generator=generator).double() for name, shape in shapes.items()
        }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }


@st.composite
def routings(draw: Any, experts: int, top: int, size: int) -> Tensor:
    """Which experts each token goes to, all different: anything, all to the same few, or the samples of one
    replica to one side.
    """
    kind = draw(st.sampled_from(["any", "one", "halves"]))
    one = st.permutations(range(experts)).map(lambda p: list(p[:top]))
    if kind == "one":
        return torch.tensor(draw(one)).expand(size, TOKENS, top).contiguous()
    if kind == "halves":
        first, second = draw(one), draw(one)
        return torch.tensor([[first if n < size // 2 else second] * TOKENS for n in range(size)])
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(size, TOKENS, experts, generator=generator) ** draw(st.sampled_from([1, 8]))
    favor = torch.tensor(draw(st.lists(st.floats(0, 1), min_size=experts, max_size=experts)))
    return (scores * favor + torch.arange(experts) * 1e-6).topk(top).indices


@st.composite
def divisions(draw: Any, experts: int) -> tuple[list[piper.Directive], int]:
    """A program that divides the experts, and the number of its replicas."""
    degree = draw(st.sampled_from([n for n in (2, 3, 4) if experts % n == 0]))
    copies = draw(st.sampled_from([1, 2] if degree == 2 else [1]))
    replicas, stages = degree * copies, draw(st.sampled_from([1, 2]))
    places = draw(st.permutations(range(replicas)))
    groups = [[stage + r * stages for r in range(replicas)] for stage in range(stages)]
    owners = [
        [group[p] for p in places[i : i + degree]] for group in groups for i in range(0, replicas, degree)
    ]
    level = draw(
        st.sampled_from([{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}])
    )
    program: list[piper.Directive] = [
        piper.Split(filter={}, dim_name="MB", num_microbatches=draw(st.sampled_from([1, 2])))
    ]
    program += [
        piper.Place(filter={"PP": i} if stages == 2 else {}, devices=group) for i, group in enumerate(groups)
    ]
    sharing = [
        piper.ShardExperts(filter={"EP": "*"}, devices=owners),
        piper.Replicate(filter={}, devices=groups, bucket_size=1e-4, **level),
    ]
    return [*program, *draw(st.permutations(sharing))], replicas


@pytest.mark.long
@settings(max_examples=max(6, settings.default.max_examples // 4))  # most trace a model of their own
@given(data=st.data())
def test_any_routing_is_that_of_one_device(tally: Counter[str], data: Any) -> None:
    experts = data.draw(st.sampled_from([2, 4, 6, 8]), "experts")
    top = data.draw(st.integers(1, min(4, experts)), "top")
    even = data.draw(st.booleans(), "even")
    program, replicas = data.draw(divisions(experts))
    exact = replicas != 3 and data.draw(st.booleans(), "exact")  # a share of a third is not exact
    note(f"program: {program}")
    size = 2 * replicas * data.draw(st.sampled_from([1, 2] if replicas < 4 else [1]), "samples")
    chosen = data.draw(routings(experts, top, size), "chosen")
    module, step = captured(experts, even, top)
    batch, tensors = make_batch(size, chosen, exact), make_tensors(module, exact)
    step, leaves = step.resized(size), list(batch.values())
    compiled = compile_step(step, tuple(program))
    alone = run_eagerly(step, tensors, leaves, (Slice(0, size),))
    meant = interpret(compiled.dag, tensors, leaves)
    assert meant.grads.keys() == alone.grads.keys() == tensors.keys()
    for name, gradient in alone.grads.items():
        moved = float((meant.grads[name] - gradient).abs().max())
        # Measured: 5 eps of the largest element. An exact model's sums are the same in any order.
        allowed = 0.0 if exact else 64 * EPS * max(1.0, float(gradient.abs().max()))
        assert moved <= allowed, f"gradient of {name} is off by {moved:.3e}; rounding explains {allowed:.3e}"
    device = torch.device("cpu")
    plans = [compiled.plans[d] for d in sorted(compiled.plans)]
    transport = LocalTransport(compiled.plans)
    executors = [
        Executor(p, step, tensors, {}, transport, device, shards_of(p, tensors, device)) for p in plans
    ]
    found = joined(plans, run_local(executors, leaves, seed=0))
    assert all(torch.equal(found[name], meant.grads[name]) for name in tensors)
    tally["routings, each equal to one device"] += 1
