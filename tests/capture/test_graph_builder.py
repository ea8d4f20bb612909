"""The graph made from the operations of a tracing run equals the graph of a trace, or a trace makes the
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_piper as piper
from lightning_piper import cache
from lightning_piper.capture import capture
from lightning_piper.capture.graph_cache import cached_graphs
from lightning_piper.capture.steps.settled_trace import TraceArguments
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.tracing.step_trace import TracedStep
from tests.capture.test_cached_graphs import Scaled, described


class Net(L.LightningModule):
    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight, self.between = self.first.weight, between
        self.third.bias.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("spread", torch.ones(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = torch.relu(self.first(batch))
        with piper.annotate("PP", 1):
            y = self.third(self.between(self, self.second(x) + self.scale))
            loss = F.cross_entropy(y, batch.argmax(-1)) + y.detach().square().mean()
        self.log("largest", y.max())
        return loss

    validation_step = training_step


def masked(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(4, 4, dtype=torch.bool).triu(1)
    return x.masked_fill(mask, 0.0) + torch.zeros_like(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])


def changed_in_place(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    x += 1.0
    made = torch.zeros(4)
    made += 3.0
    return (x * made).mul_(0.5)


def drawn(net: Net, x: Tensor) -> Tensor:
    return F.dropout(x, 0.3) + torch.randn_like(x) * torch.rand(4)


def halves(net: Net, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.rms_norm(torch.cat([b, a], -1), (4,)) + F.layer_norm(x, (4,))


def attending(net: Net, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True)[0, 0]


def checkpointed(net: Net, x: Tensor) -> Tensor:
    return checkpoint(lambda y: torch.sin(net.second(y)), x, use_reentrant=False)  # type: ignore[no-any-return]


def penalized(net: Net, x: Tensor) -> Tensor:
    return x + torch.autograd.grad(net.second(x).square().sum(), x, create_graph=True)[0]


def attacked(net: Net, x: Tensor) -> Tensor:
    given = x.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net.second(given).square().sum(), given)
    return net.second((given + 0.1 * gradient.sign()).detach()) + x


def hooked(net: Net, x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y + x


def of_each_sample(net: Net, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x) + x


PLAIN: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "masks": masked,
    "in place": changed_in_place,
    "random numbers": drawn,
    "checks without a result": lambda net, x: x * F.one_hot(x.argmax(-1), 4),
    "several results": halves,
    "attention": attending,
    "a checkpoint": checkpointed,
    "functions of samples": of_each_sample,
    "a function of its own": lambda net, x: Scaled.apply(x),
    "without gradients": lambda net, x: x.detach() + x,
    "autocast": lambda net, x: torch.autocast("cpu", torch.bfloat16).__call__(net.third)(x).float(),
}


DIFFERENTIABLE = {"a gradient in the loss": penalized, "a gradient inside": attacked, "a hook": hooked}


def changed_view(net: Net, x: Tensor) -> Tensor:
    x = x * 1.0
    x[:, 0] = 1.0
    return x


def changed_below_a_view(net: Net, x: Tensor) -> Tensor:
    x = x * 1.0
    view = x.view(-1)
    x.mul_(2.0)
    return view.view(-1, 4)


def kept_in_place(net: Net, x: Tensor) -> Tensor:
    return F.relu(x * 2, inplace=True)


def changed_buffer(net: Net, x: Tensor) -> Tensor:
    net.scale.mul_(0.5)
    return x + net.scale


def average(net: Net, x: Tensor) -> Tensor:
    net.scale.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    net.scale.copy_(net.scale.detach() * 2)
    return x * net.scale


def changed_rows(net: Net, x: Tensor) -> Tensor:
    net.scale[1] = 3.0
    net.scale[2:] = x.detach()[0, 2:]
    net.spread.index_copy_(0, torch.tensor([1]), x.detach()[0, :1])
    return x * net.scale + net.spread


def shifted(net: Net, x: Tensor) -> Tensor:
    y = x.detach().new_zeros(x.shape)
    y[:, 1:] = x.detach()[:, :-1].clone()
    y[:, 0] = 3.0
    return y + x


def residual(net: Net, x: Tensor) -> Tensor:
    y = F.conv2d(x[:, None, None], net.third.weight[:, :1, None, None])
    y = F.batch_norm(y, net.scale, net.spread, training=True).mean((2, 3))
    y += x
    return F.relu(y, inplace=True)


def drawn_in_place(net: Net, x: Tensor) -> Tensor:
    x = F.leaky_relu(F.dropout(x * 1, 0.1, training=True, inplace=True), 0.1, inplace=True)
    return x + torch.empty_like(x).normal_() * torch.empty_like(x).uniform_(0, 1)


def annotated_views(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    x += 1.0
    with piper.annotate("PP", 1):
        y, z = x.view(-1), x.detach()
        x.mul_(0.5)
    with piper.annotate("PP", 2):
        return y.view(4, 4) * 3.0 + z


def changed_data(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    x.data.mul_(3.0)
    return x


def changed_chunks(net: Net, x: Tensor) -> Tensor:
    x = x * 2
    x += 1.0
    a, b = x.chunk(2, -1)
    return torch.cat([b, a], -1)


def changed_shape(net: Net, x: Tensor) -> Tensor:
    y = x.detach()[:2]
    y.unsqueeze_(0)
    return x + y.sum()


CHANGING: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "what has a view is changed": changed_below_a_view,
    "a buffer is changed": changed_buffer,
    "a buffer is changed twice": average,
    "rows of buffers are changed": changed_rows,
    "what is kept is made in place": kept_in_place,
    "numbers are shifted": shifted,
    "numbers are drawn in place": drawn_in_place,
    "batch norm": residual,
    "batch norm in evaluation": lambda net, x: F.batch_norm(x, net.scale, net.spread),
    "views in other regions": annotated_views,
}

OTHERS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "a view with a gradient is changed": changed_view,
    "a view of a view is changed": changed_data,
    "what is cut into several views was changed": changed_chunks,
    "the shape of a view is changed": changed_shape,
}


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, "/dev/null")
    cached_graphs.forget()


def graphs(
    module: L.LightningModule, batch: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], list[str], int]:
    """Return a step's graph from a trace, its graph from a tracing run, and the number of traces in this run."""
    found, traces, own = [], 0, _torch.functional_graph

    def counted(*args: Any) -> torch.fx.Graph:
        nonlocal traces
        traces += 1
        return own(*args)

    for has_tracing_run in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(TracedStep, "has_tracing_run", has_tracing_run)
            if has_tracing_run:
                patch.setattr(_torch, "functional_graph", counted)
            step = capture(module, batch, name=name)
            graph = step._trace(TraceArguments(step.size))[0].graph
        for node in graph.nodes:
            kept = {
                key: x for key, x in node.meta.get("custom", {}).items() if not key.startswith("_torchdynamo")
            }
            node.meta["custom"] = kept  # a trace marks operations that must not be traced again
            if node.op == "output" or name != "training_step":
                # the number says to which operation a backward pass belongs
                node.meta["seq_nr"] = None
        found.append(described(graph))
    return found[0], found[1], traces


@pytest.mark.parametrize(("kind", "name"), [
    *((kind, "training_step") for kind in PLAIN | DIFFERENTIABLE | CHANGING),
    *((kind, "validation_step") for kind in PLAIN | CHANGING),
])  # fmt: skip
def test_graph_of_a_tracing_run_is_that_of_a_trace(kind, name, monkeypatch):
    net = Net((PLAIN | DIFFERENTIABLE | CHANGING)[kind])
    traced, made, traces = graphs(net, torch.zeros(4, 4), name, monkeypatch)
    assert made == traced
    assert traces == 0


@pytest.mark.parametrize("kind", OTHERS)
def test_other_changes_are_traced(kind, monkeypatch):
    traced, made, traces = graphs(Net(OTHERS[kind]), torch.zeros(4, 4), "training_step", monkeypatch)
    assert made == traced
    assert traces == 1


def test_other_steps_have_other_graphs(monkeypatch):
    """What is compared can differ."""
    found = [
        graphs(Net(PLAIN[kind]), torch.zeros(4, 4), "training_step", monkeypatch)[1]
        for kind in ("masks", "attention")
    ]
    assert found[0] != found[1]
