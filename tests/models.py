"""The models that the tests capture. Each is small and has one thing that makes capturing it hard.

`CASES` names them; `captured(name)` captures each of them once in a test run, with its parameters and a
batch.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.annotate import annotate
from lightning_piper.capture import CapturedStep, capture


class MLP(L.LightningModule):
    """Two stages, one layer each. Batch: (input [n, 4], target [n, 2])."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"):
            h = torch.tanh(self.first(x))
        with annotate("PP"):
            loss = F.mse_loss(self.second(h), y)
        self.log("train_loss", loss)
        return loss


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        scores = (q @ k.transpose(-1, -2)) / k.shape[-1] ** 0.5
        y = scores.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attention, self.up, self.down = (
            nn.LayerNorm(dim), Attention(dim, 2), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        return x + self.down(F.gelu(self.up(x)))


class GPT(L.LightningModule):
    """Three stages: embeddings, a layer, and a layer with the head. The mask is made outside of the stages.
    Batch: tokens [n, 6].
    """

    def __init__(self, dim: int = 8, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, dim), nn.Parameter(torch.randn(5, dim))
        self.layers, self.head = (
            nn.ModuleList([Layer(dim), Layer(dim)]),
            nn.Linear(dim, vocabulary, bias=False),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, target = batch[:, :-1], batch[:, 1:]
        mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
        with annotate("PP", 0):
            x = self.embed(tokens) + self.position
        with annotate("PP", 1):
            x = self.layers[0](x, mask)
        with annotate("PP", 2):
            logits = self.head(self.layers[1](x, mask))
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        self.log("accuracy", (logits.argmax(-1) == target).float().mean())
        return {"loss": loss}


class TiedGPT(GPT):
    """A model whose embedding is also the head: one parameter with gradients from the first and the last
    stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class ConvNet(L.LightningModule):
    """A network with batch norm in both stages: every microbatch changes buffers. Batch: {image [n, 2, 4, 4],
    label [n]}.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.two = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )

    def training_step(self, batch: Any) -> Any:
        with annotate("PP", 0):
            x = self.one(batch["image"])
        with annotate("PP", 1):
            loss = F.cross_entropy(self.two(x), batch["label"])
        self.log("loss", loss, prog_bar=True)
        return loss


class Frozen(MLP):
    """A frozen weight in the first stage, a frozen bias of the first layer, and a parameter that nothing
    uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first.bias.requires_grad_(False)
        self.mixing = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.first(x @ self.mixing))
        with annotate("PP", 1):
            return F.mse_loss(self.second(h), y)


class UsedTwice(L.LightningModule):
    """One parameter that both stages use by the same name. The second stage transposes it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.a(x))
        with annotate("PP", 1):
            h = torch.tanh(F.linear(h, self.a.weight)) + h @ self.a.weight
            return F.mse_loss(self.b(h), y)


class UsedThrice(L.LightningModule):
    """Three stages that share a weight under two names. Autograd determines the order of the three gradient
    terms.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = self.a(x)
        with annotate("PP", 1):
            h = torch.tanh(self.b(h)) * 7
        with annotate("PP", 2):
            return F.mse_loss(self.c(self.a(h) + h), y)


class Residual(L.LightningModule):
    """Values skip a stage: the input's features reach the last stage without going through a stage without
    parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            skip = self.a(x)
        with annotate("PP", 1):
            h = torch.softmax(skip * skip, -1)
        with annotate("PP", 2):
            return F.mse_loss(self.b(torch.tanh(h) + skip), y)


class Losses(MLP):
    """A loss term from every stage. The terms are added outside of the stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.first(x))
            penalty = h.square().mean()
        with annotate("PP", 1):
            error = F.mse_loss(self.second(h), y)
        loss = error + 0.1 * penalty
        self.log_dict({"error": error, "penalty": penalty})
        return loss


class Terms(MLP):
    """A loss of three terms with weights of their own, from two stages: over the targets that count, over
    samples, and a sum.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.first(x))
            penalty = 0.01 * h.square().sum()
        with annotate("PP", 1):
            out, counts = self.second(h), y > -0.5
            error = ((out - y).square() * counts).sum() / counts.sum().clamp(min=1)
            self.log("error", error)
            self.log("counted", counts.sum().float())
        return error + penalty + 0.1 * out.square().mean()


class Logs(MLP):
    """A model that logs in every way: tensors, numbers, every reduction, several stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.first(x))
            self.log("h_max", h.max(), reduce_fx="max")
            self.log("h_min", h.min(), False, reduce_fx=torch.min)
        with annotate("PP", 1):
            error = F.mse_loss(self.second(h), y)
            self.log("count", torch.ones_like(y[:, 0]).sum(), reduce_fx=sum, prog_bar=True)
        self.log_dict({"error": error, "twice": error * 2}, on_epoch=True)
        self.log("alpha", 0.5)
        return error


class Glue(L.LightningModule):
    """Everything that can be outside of the regions: a mask, slices of the batch, a cast, the loss and a
    metric.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        both = batch["both"]
        x, y = both[:, :4], both[:, 4:] * self.scale
        keep = (x > 0).float()
        with annotate("PP", 0):
            h = torch.tanh(self.a(x)) * keep
        with annotate("PP", 1):
            out = self.b(h * keep)
        error = (out - y).abs()
        self.log("worst", error.max(), reduce_fx="max")
        return error.pow(2).mean()


class Experts(L.LightningModule):
    """Nested tags: two experts inside of the second of three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"):
            h = self.a(x)
        with annotate("PP"):
            weight = self.gate(h).softmax(-1)
            mixed = torch.zeros_like(h)
            for i, expert in enumerate(self.experts):
                with annotate("EP"):
                    mixed = mixed + weight[:, i : i + 1] * torch.tanh(expert(h))
            mixed = mixed + h
        with annotate("PP"):
            return F.mse_loss(self.b(mixed), y)


class Reentered(L.LightningModule):
    """The step enters stage 0 a second time after stage 1, and uses its parameter again: a U-shaped pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP", 0):
            h = torch.tanh(self.a(x))
        with annotate("PP", 1):
            h = torch.tanh(self.b(h))
        with annotate("PP", 0):
            return F.mse_loss(self.a(h)[:, :2], y)


class Extractor(MLP):
    """The first stage only extracts features, so it does not have a backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"), torch.no_grad():
            h = torch.tanh(self.first(x))
        with annotate("PP"):
            return F.mse_loss(self.second(h), y)


class Flat(L.LightningModule):
    """Between the stages, samples and positions share a dimension. Batch: tokens [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(11, 4), nn.Linear(4, 4), nn.Linear(4, 11)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP"):
            x = self.embed(batch).flatten(0, 1)
        with annotate("PP"):
            x = torch.tanh(self.inner(x))
        with annotate("PP"):
            return F.cross_entropy(self.head(x), batch.flatten())


class PositionsFirst(Flat):
    """Like `Flat`, but the first positions of all samples come first. So a part of the shared dimension is
    not a microbatch.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP"):
            x = self.embed(batch).transpose(0, 1).flatten(0, 1)
        with annotate("PP"):
            x = torch.tanh(self.inner(x) + self.embed(batch).mean(1).repeat(6, 1))
        with annotate("PP"):
            return F.cross_entropy(self.head(x), batch.t().flatten())


class Similar(L.LightningModule):
    """A model that compares every sample with every other sample between the stages: a value with two batch
    dimensions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        with annotate("PP"):
            h = self.a(x)
            similar = h @ h.t()
        with annotate("PP"):
            return (torch.tanh(similar) * self.b).diagonal().mean()


class Dropout(MLP):
    """Random masks in both stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"):
            h = F.dropout(torch.tanh(self.first(x)), 0.5)
        with annotate("PP"):
            return F.mse_loss(F.dropout(self.second(h), 0.25), y)


class OneDropout(MLP):
    """Random numbers in one region only, so that the eager reference can draw the same numbers."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        with annotate("PP"):
            h = F.dropout(torch.tanh(self.first(x)), 0.5)
        with annotate("PP"):
            return F.mse_loss(self.second(h), y)


class Exporting(MLP):
    """A model like Hugging Face's mask code: it reads tensor values, but not while torch exports."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mask = x > -10
        tracing = torch.compiler.is_exporting() and torch.compiler.is_compiling()
        if not tracing and bool(mask.all()):
            mask = torch.ones_like(mask)
        with annotate("PP"):
            h = torch.tanh(self.first(x * mask))
        with annotate("PP"):
            return F.mse_loss(self.second(h), y)


class Constants(MLP):
    """Tensors made from Python numbers, inside and outside of a region. The step also writes into its own
    batch.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        weight = torch.tensor([0.5, 2.0])
        x[x < 0] = -1.0
        x *= 0.5
        with annotate("PP"):
            h = torch.tanh(self.first(x)) * torch.tensor(0.3)
        with annotate("PP"):
            return (F.mse_loss(self.second(h), y, reduction="none") * weight).mean()


class Recurrent(L.LightningModule):
    """An RNN, which has a list of its weights and puts sequences first. Batch: tokens [n, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(11, 4), nn.GRU(4, 6), nn.Linear(6, 11)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP"):
            x, _ = self.rnn(self.embed(batch).transpose(0, 1))
        with annotate("PP"):
            return F.cross_entropy(self.head(x.transpose(0, 1)[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Counting(MLP):
    """Buffers that the step changes without any layer: a counter outside of the regions, and an average
    inside of a region.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.ones(6))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        self.steps += 1
        with annotate("PP"):
            h = torch.tanh(self.first(x)) / self.steps
        with annotate("PP"):
            scaled = h * self.average.clone()
            self.average.lerp_(h.detach().mean(0), 0.1)
            return F.mse_loss(self.second(scaled), y)


class Untagged(MLP):
    """A model without annotations: one region."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.mse_loss(self.second(torch.tanh(self.first(x))), y)


class ByKey(MLP):
    """A model that takes mappings and objects with `x`, `y` and options that are not tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        get = batch.__getitem__ if hasattr(batch, "keys") else functools.partial(getattr, batch)
        with annotate("PP"):
            h = torch.tanh(self.first(get("x") * get("scale")))
        with annotate("PP"):
            out = self.second(h)
        return F.mse_loss(out, get("y")) if get("mode") == "square" else F.l1_loss(out, get("y"))


class Point(NamedTuple):
    x: Any
    y: Any
    scale: Any = 0.5
    mode: str = "square"


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any
    scale: Any = 0.5
    mode: str = "square"

    def __post_init__(self) -> None:
        assert isinstance(self.x, Tensor), "a placeholder went through the constructor"


class Exact(L.LightningModule):
    """A model with exact arithmetic in float64 (integers, and a mean over 4 samples), so that reassociation
    does not change bits. It has tied weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randint(-3, 4, (4, 4)).double())
        self.b = nn.Parameter(torch.randint(-3, 4, (4, 4)).double())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP", 0):
            h = batch @ self.a
        with annotate("PP", 1):
            return ((h @ self.b) * (batch @ self.a)).sum() / batch.shape[0]


# Return batches of n samples.


def regression(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randn(n, 2)


def keyed(kind: Callable[..., Any]) -> Callable[[int], Any]:
    return lambda n: kind(**dict(zip("xy", regression(n), strict=True), scale=0.5, mode="square"))


def images(n: int) -> dict[str, Tensor]:
    return {"image": torch.randn(n, 2, 4, 4), "label": torch.randint(0, 3, (n,))}


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        make: Makes the module.
        batch: Gets a number of samples, and returns a batch.
        size: The number of samples of the batch with which the step is captured.
        context: Makes the context in which the step runs, such as autocast.
        reassociates: Whether plans with microbatches add terms in another order than one device, because a
            parameter has several regions or the loss has terms with different weights.
        random: Whether the step draws random numbers.
    """

    make: Callable[[], L.LightningModule]
    batch: Callable[[int], Any] = regression
    size: int = 4
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    reassociates: bool = False
    random: bool = False


CASES: dict[str, Case] = {
    "mlp": Case(MLP),
    "gpt": Case(GPT, lambda n: torch.randint(0, 11, (n, 6))),
    "tied": Case(TiedGPT, lambda n: torch.randint(0, 11, (n, 6)), reassociates=True),
    "conv": Case(ConvNet, images, size=8),
    "frozen": Case(Frozen),
    "used_twice": Case(UsedTwice, reassociates=True),
    "used_thrice": Case(UsedThrice, reassociates=True),
    "residual": Case(Residual),
    "losses": Case(Losses),
    "terms": Case(Terms, reassociates=True),
    "logs": Case(Logs),
    "glue": Case(Glue, lambda n: {"both": torch.randn(n, 6)}),
    "experts": Case(Experts),
    "reentered": Case(Reentered, reassociates=True),
    "exporting": Case(Exporting),
    "constants": Case(Constants),
    "recurrent": Case(Recurrent, lambda n: torch.randint(0, 11, (n, 5))),
    "counting": Case(Counting),
    "extractor": Case(Extractor),
    "flat": Case(Flat, lambda n: torch.randint(0, 11, (n, 6))),
    "positions_first": Case(PositionsFirst, lambda n: torch.randint(0, 11, (n, 6)), reassociates=True),
    "similar": Case(Similar),
    "untagged": Case(Untagged),
    "exact": Case(Exact, lambda n: torch.randint(-3, 4, (n, 4)).double()),
    "dict": Case(ByKey, keyed(dict)),
    "ordered_dict": Case(ByKey, keyed(OrderedDict)),
    "named_tuple": Case(ByKey, keyed(Point)),
    "dataclass": Case(ByKey, keyed(Record)),
    "autocast": Case(MLP, context=lambda: torch.autocast("cpu", torch.bfloat16)),
    # Eager autocast keeps the cast of a weight and adds the gradients of its uses in bfloat16. A captured
    # step casts at each use.
    "autocast_twice": Case(
        UsedTwice,
        context=lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
        reassociates=True,
    ),
    "bfloat16": Case(lambda: MLP().bfloat16(), lambda n: tuple(x.bfloat16() for x in regression(n))),
    "dropout": Case(Dropout, random=True),
    "one_dropout": Case(OneDropout, random=True),
}
DETERMINISTIC = [name for name, case in CASES.items() if not case.random]
# torch traces a recurrent layer as its decomposition. On some processors the decomposition rounds differently
# from the layer's own kernels.
DECOMPOSED = {"recurrent"}


@dataclass(frozen=True)
class Captured:
    """A case with its captured step, which tests share, so do not change the module.

    Attributes:
        tensors: Parameters and buffers by canonical name. They share memory with the module.
        leaves: The batch's tensors, in order.
    """

    case: Case
    module: L.LightningModule
    batch: Any
    step: CapturedStep
    tensors: dict[str, Tensor]
    leaves: list[Tensor]


def fresh(name: str, size: int | None = None, double: bool = False) -> tuple[L.LightningModule, Any]:
    """Return a new module and a new batch of a case, with the same values at every call. `size` is the number
    of samples (default: the case's). With `double`, the module is in float64, and so are the tensors of a
    batch that is a tuple.
    """
    case = CASES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, batch = case.make(), case.batch(case.size if size is None else size)
    if double:
        module = module.double()
        batch = tuple(x.double() for x in batch) if isinstance(batch, tuple) else batch
    return module, batch


@functools.cache
def captured(name: str, size: int | None = None, double: bool = False) -> Captured:
    module, batch = fresh(name, size, double)
    step = capture(module, batch, context=CASES[name].context)
    tensors = {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    return Captured(CASES[name], module, batch, step, tensors, leaves_of(batch))


def leaves_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch, in order. This does not use the package's own function."""
    if isinstance(batch, Tensor):
        return [batch]
    items = (
        batch.values()
        if isinstance(batch, dict)
        else vars(batch).values()
        if isinstance(batch, Record)
        else batch
    )
    return [
        leaf for item in items if isinstance(item, Tensor | dict | list | tuple) for leaf in leaves_of(item)
    ]
