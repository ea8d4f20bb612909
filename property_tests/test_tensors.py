"""Drawn modules, of which drawn programs divide drawn tensors: each equals one device, or is refused."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Place, Replicate, ShardWeights, Split
from lightning_piper.capture import capture
from lightning_piper.capture.eager.eager_reference import run_eagerly
from lightning_piper.errors import CaptureError, DirectiveError
from lightning_piper.ir.values import Slice
from lightning_piper.passes import run_pipeline
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.interpreter import interpret

DIM, LENGTH, SAMPLES, HEADS, WORDS = 8, 4, 8, 4, 16
KINDS = (
    "linear", "gelu", "norm", "rms", "attention", "few", "scores", "mlp", "gated", "skip", "mixed", "table",
    "pooled", "scaled",
    "summed", "turned",
)  # fmt: skip
LOSSES = ("words", "classes", "smoothed", "added", "squares")
BOUND = 1e-9  # relative; what float64 makes of some thousand operations is below 1e-12


class Part(nn.Module):
    """One step of a drawn module: [samples, 4, 8] -> the same."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        one = lambda a=DIM, b=DIM, bias=True: nn.Linear(a, b, bias)  # noqa: E731
        if kind in ("attention", "scores"):
            self.q, self.k, self.v, self.out = one(), one(bias=False), one(), one()
        elif kind == "few":
            self.q, self.kv, self.out = one(), one(DIM, DIM // 2), one()
        elif kind in ("mlp", "gated"):
            self.up, self.down, self.gate = one(DIM, 2 * DIM), one(2 * DIM, DIM), one(DIM, 2 * DIM, False)
        elif kind in ("linear", "skip", "mixed", "pooled"):
            self.weight = one()
        elif kind == "norm":
            self.norm: nn.Module = nn.LayerNorm(DIM)
        elif kind == "rms":
            self.norm = nn.RMSNorm(DIM)
        elif kind == "table":
            self.position = nn.Parameter(torch.randn(LENGTH, DIM))
        elif kind == "scaled":
            self.scale = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "linear":
                return self.weight(x)  # type: ignore[no-any-return]
            case "gelu":
                return F.gelu(x)
            case "norm" | "rms":
                return self.norm(x)  # type: ignore[no-any-return]
            case "attention" | "scores":
                q, k, v = (
                    part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
                )
                if self.kind == "attention":
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                else:
                    y = (q @ k.transpose(-1, -2) / 2).softmax(-1) @ v
                return x + self.out(y.transpose(1, 2).flatten(2))
            case "few":  # one head of keys, and pairs that see each other
                k, v = (part.unflatten(-1, (1, -1)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
                q, at = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2), torch.arange(LENGTH)
                y = F.scaled_dot_product_attention(q, k, v, (at[:, None] - at).abs() < 3, enable_gqa=True)
                return x + self.out(y.transpose(1, 2).flatten(2))
            case "summed":
                return x + x.flip(1).cumsum(1) / 4
            case "turned":
                return torch.cat([-x[..., DIM // 2 :], x[..., : DIM // 2]], -1) + x.squeeze(0)
            case "mlp":
                return x + self.down(F.gelu(self.up(x)))
            case "gated":
                return x + self.down(F.silu(self.gate(x)) * self.up(x))
            case "skip":
                return x + self.weight(x).tanh()
            case "mixed":
                return self.weight(x.transpose(1, 2).reshape(x.shape)).view(x.shape) / 2 + x
            case "table":
                return x + self.position
            case "pooled":
                return x * self.weight(x.mean(1, keepdim=True)).sigmoid()
        return x * self.scale


class Drawn(L.LightningModule):
    """Batch: words, or vectors, [samples, 4], and classes. `tied`: the scores are made of the table of the
    words.
    """

    def __init__(self, kinds: list[str], loss: str, tied: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, kinds))
        self.loss, classes = loss, WORDS if loss in ("words", "smoothed", "added") else 4
        self.embed = nn.Embedding(WORDS, DIM)
        self.head = nn.Linear(DIM, classes, bias=not tied)
        if tied and classes == WORDS:
            self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, target = batch
        with piper.annotate("PART", 0):
            x = self.embed(words)
        for i, part in enumerate(self.parts):
            with piper.annotate("PART", i):
                x = part(x)
        with piper.annotate("PART", len(self.parts)):
            logits = self.head(x)
            self.log("mean", logits.mean())
            self.log("right", (logits.argmax(-1) == target).double().mean())
            return self.loss_of(logits.flatten(0, 1), target.flatten())

    def loss_of(self, logits: Tensor, target: Tensor) -> Tensor:
        match self.loss:
            case "squares":
                return F.mse_loss(logits.sigmoid(), F.one_hot(target.clamp(0, 3), 4).to(logits))
            case "smoothed":
                return F.cross_entropy(logits, target, label_smoothing=0.1)
            case "added":
                return F.cross_entropy(logits, target, reduction="sum") / 8
        return F.cross_entropy(logits, target.clamp_max(3) if self.loss == "classes" else target)


def mesh(devices: Any, shape: tuple[int, ...]) -> Any:
    """A list as lists of lists."""
    for size in reversed(shape[1:]):
        devices = [devices[i : i + size] for i in range(0, len(devices), size)]
    return devices


@st.composite
def shards(draw: st.DrawFn, module: Drawn, axis: str, devices: Any, taken: dict[str, int]) -> ShardWeights:
    """Parameters, but for those that are taken, and values of any regions; of which some cannot be divided
    so.
    """
    weights = {name: x.ndim for name, x in module.named_parameters() if name not in taken}
    names = draw(st.lists(st.sampled_from(sorted(weights)), max_size=6, unique=True)) if weights else []
    labels = st.sampled_from(["*", *(f"PART={i}" for i in range(len(module.parts)))])
    values = draw(st.dictionaries(labels, st.integers(0, 2) | st.just((1, 2)), max_size=2))
    return ShardWeights(filter={}, devices=devices, axis=axis, stream=axis, values=values,
                 params={name: draw(st.integers(0, weights[name] - 1)) for name in names},
                 attention=draw(st.sampled_from([None, "keys", "heads", "ring"])))  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, module: Drawn) -> list[Any]:
    """Over one axis or two, replicas, one stage or two, in microbatches or not."""
    shape = draw(st.sampled_from([(1, 2, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2)]))
    size, last = math.prod(shape), len(module.parts)
    cut = draw(st.integers(0, last)) if size < 8 else last  # parts up to this one are the first stage
    groups = [list(range(size))] if cut == last else [list(range(size)), list(range(size, 2 * size))]
    of_stage: list[Any] = (
        [{}] if cut == last else [{"PART": list(range(cut + 1))}, {"PART": list(range(cut + 1, last + 1))}]
    )
    two = shape[2] > 1
    program: list[Any] = [
        Place(
            filter=chosen,
            devices=mesh(group, shape) if two else group,
            axes=["data", "tp", "cp"] if two else (),
        )
        for chosen, group in zip(of_stage, groups, strict=True)
    ]
    if draw(st.booleans()):
        program.append(Split(filter={}, dim_name="MB", num_microbatches=2))
    lines = [group[i : i + shape[1]] for group in groups for i in range(0, size, shape[1])]
    program.append(draw(shards(module, "tp", None if two else lines, {})))
    if two:
        program.append(draw(shards(module, "cp", None, program[-1].params)))
    if shape[0] > 1:
        level = draw(
            st.sampled_from([{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}])
        )
        program.append(Replicate(filter={}, devices=groups, **level))
    return program


REFUSED = (
    "cannot work on shards",
    "no region outputs",
    "cannot be sharded evenly",
    "matches",
    "would be sharded along",
    "Shard each dimension along one",
)
# where regions have parts of other runs, and microbatches as many samples as runs
OF_RUNS = "has a different structure"


def runs_of(program: list[Any]) -> set[int]:
    """In how many runs values are divided."""
    shards = [directive for directive in program if isinstance(directive, ShardWeights)]
    return {
        1 if isinstance(said, int) else said[1] for shard in shards for said in (shard.values or {}).values()
    }


@pytest.mark.filterwarnings("ignore:attention='ring'")
@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_it_equals_one_device_or_is_refused(data: Any) -> None:
    torch.manual_seed(0)
    kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    module = Drawn(kinds, data.draw(st.sampled_from(LOSSES)), data.draw(st.booleans())).double()
    program = data.draw(programs(module))
    target = torch.randint(0, WORDS, (SAMPLES, LENGTH))
    target[torch.rand(target.shape) < 0.2] = -100
    batch = torch.randint(0, WORDS, (SAMPLES, LENGTH)), target
    step = capture(module, batch)
    tensors = {name: x.detach() for name, x in module.named_parameters()}
    try:
        dag = run_pipeline(step, program, after=StaticCheck())
    except (CaptureError, DirectiveError) as error:
        event(f"refused: {str(error)[:60]}")
        assert any(
            text in str(error) for text in (*REFUSED, *([OF_RUNS] if len(runs_of(program)) > 1 else []))
        ), error
        return
    event("equal")
    found = interpret(dag, tensors, list(batch), seed=0)
    wanted = run_eagerly(step, tensors, list(batch), (Slice(0, SAMPLES),))
    assert found.grads.keys() == wanted.grads.keys()
    for name, grad in wanted.grads.items():
        assert torch.allclose(
            found.grads[name], grad, rtol=0, atol=BOUND * max(1.0, float(grad.abs().max()))
        ), name
    for name, value in wanted.metrics.items():
        assert found.metrics[name].item() == pytest.approx(value.item(), rel=BOUND), name
