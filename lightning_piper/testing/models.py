"""Annotated test models for directives: small, of every kind that matters to a rewrite, and described by
plain data.

A `Spec` is hashable, so that each spec is captured once and all examples that draw it share the capture.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.annotate import annotate
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.sample_gathering import gather_samples
from lightning_piper.testing.experts import WIDTH, RoutedBlock

LARGEST = 2**20  # maximum number of samples, or seed
STEPS = 3  # positions: samples have shape [STEPS, WIDTH]

# Kind of block -> what a model with this block tests.
BLOCKS = {
    "linear": "a weight, a bias and a ReLU",
    "residual": "the input is used twice",
    "branch": "two branches that rejoin in a product",
    "tied": "one weight shared by all tied blocks, wherever they run",
    "frozen": "a weight that takes no gradient",
    "skip": "reads the model's input again, across the regions between",
    "auxiliary": "adds a term of its own to the loss and logs it",
    "scored": "a metric object gets its output, the batch's targets and a mean",
    "nested": "a part of the block carries a second tag, EP",
    "bare": "no parameters at all",
    "attention": "softmax over positions",
    "norm": "layer normalization",
    "batchnorm": "statistics over the batch, and buffers that the step changes",
    "synced": "statistics over the whole batch, of all its microbatches and replicas",
    "gathered": "adds a term to the loss that compares all samples of the batch, and logs it",
    "conv": "a convolution over positions",
    "dropout": "random numbers",
    "experts": "a router and four experts, two for each token, which a shard divides",
    "crowded": "all tokens to one of four experts; the others get none",
    "places": "experts with one place for each sample; what finds none goes without",
}
# Blocks whose sums are exact in float64 on integer data, so that reassociation changes no bit.
EXACT_BLOCKS = ("linear", "residual", "branch", "tied", "frozen", "skip", "auxiliary", "scored", "nested",
                "bare", "experts", "crowded", "places")  # fmt: skip
ROUTED_BLOCKS = ("experts", "crowded", "places")
RANDOM_BLOCKS = ("dropout",)
# Kind of loss -> how it weights its terms.
LOSSES = {
    "samples": "a mean over samples",
    "tokens": "a mean over the positions that count, of which a microbatch may have none",
    "sum": "a sum",
    "terms": "tokens, a mean over samples and a sum, each with its own weights",
}
EXACT_LOSSES = ("samples", "sum")
# Blocks whose results for a microbatch depend on its other samples.
COUPLING_BLOCKS = ("batchnorm",)
# Blocks that need all microbatches at once. Most orders of microbatches contradict this, so `specs` draws the
# blocks only on request.
WHOLE_BLOCKS = ("synced",)


@dataclass(frozen=True)
class Spec:
    """A model and its annotations.

    Attributes:
        blocks: Kinds of blocks, from `BLOCKS`, in order.
        stages: For each block, the index of its tag `PP`. An index may be smaller than the index before it.
            The loss belongs to the stage of the last block.
        exact: Whether weights and data are integers, and the float64 value and gradients of the loss are
            exact for up to 8 samples.
        loss: The kind of loss, from `LOSSES`.
    """

    blocks: tuple[str, ...]
    stages: tuple[int, ...]
    exact: bool = False
    loss: str = "samples"

    def __post_init__(self) -> None:
        for field, kind in (("blocks", str), ("stages", int)):
            values = getattr(self, field)
            if not isinstance(values, tuple) or not all(type(value) is kind for value in values):
                raise PiperError(
                    f"Spec({field}={shown(values)}) is not usable. Give a tuple of {kind.__name__} [PIPER-A001]"
                )
        if not isinstance(self.exact, bool):
            raise PiperError(
                f"Spec(exact={shown(self.exact)}) is not usable. Give True or False [PIPER-A001]"
            )
        if len(self.blocks) != len(self.stages) or not self.blocks:
            raise PiperError(
                f"Spec: {counted(len(self.blocks), 'block')} with {counted(len(self.stages), 'stage')}. Give one stage for "
                "each block, and at least one block [PIPER-A001]"
            )
        for block in self.blocks:
            if block not in (EXACT_BLOCKS if self.exact else BLOCKS):
                known = EXACT_BLOCKS if self.exact else tuple(BLOCKS)
                raise PiperError(
                    f"Spec(blocks=...): block {shown(block)} is not "
                    f"known{' in exact models' if self.exact else ''}. Give one of {', '.join(known)} "
                    "[PIPER-A001]"
                )

        if self.loss not in (EXACT_LOSSES if self.exact else LOSSES):
            known = EXACT_LOSSES if self.exact else tuple(LOSSES)
            raise PiperError(
                f"Spec(loss={shown(self.loss)}) is not known{' in exact models' if self.exact else ''}. Give one of "
                f"{', '.join(known)} [PIPER-A001]"
            )

    @property
    def mixed(self) -> bool:
        """Whether the loss is a sum of terms with different weights. Then no factor on a microbatch's loss
        gives the right gradients.
        """
        return self.loss == "terms" or (self.loss != "samples" and "auxiliary" in self.blocks)

    @property
    def random(self) -> bool:
        return any(block in RANDOM_BLOCKS for block in self.blocks)

    @property
    def coupled(self) -> bool:
        """Whether the loss of microbatches differs from the loss of the batch."""
        return any(block in COUPLING_BLOCKS for block in self.blocks)


class Model(L.LightningModule):
    """The module of a spec, in float64. A batch is `{"x": [N, STEPS, WIDTH], "y": [N, STEPS, WIDTH]}`."""

    def __init__(self, spec: Spec, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([_block(kind, self.shared) for kind in spec.blocks])
        self.scores = nn.ModuleList([_Score() for kind in spec.blocks if kind == "scored"])
        if "gathered" in spec.blocks:
            self.sharpness = nn.Parameter(torch.zeros(()))
        self.double()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if spec.exact:
                drawn = torch.randint(-1, 2, parameter.shape, generator=generator).double()
            else:
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
            parameter.data.copy_(drawn)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run each block in its stage. Return the loss, the sum of the spec's loss and of the terms that some
        blocks add, and log it and these terms."""
        x, terms, scores = batch["x"], [], iter(self.scores)
        for i, (block, stage) in enumerate(zip(self.blocks, self.spec.stages, strict=True)):
            with annotate("PP", stage):
                if self.spec.blocks[i] == "skip":
                    x = block(x + batch["x"])
                elif self.spec.blocks[i] == "nested":
                    with annotate("EP", 0):
                        inner = block(x)
                    x = x + inner
                elif self.spec.blocks[i] in ROUTED_BLOCKS:
                    x = block(x, self.spec.exact)
                else:
                    x = block(x)
                if self.spec.blocks[i] == "auxiliary":
                    terms.append(x.sum((1, 2)).mean())
                    self.log(f"auxiliary_{i}", terms[-1])
                if self.spec.blocks[i] == "gathered":
                    terms.append(self._comparison_loss(x, batch["y"]))
                    self.log(f"gathered_{i}", terms[-1])
                if self.spec.blocks[i] == "scored":
                    score: Any = next(scores)
                    score.update(x, batch["y"], x.sum((1, 2)).mean())
                if i == len(self.blocks) - 1:
                    loss = sum(terms, self._loss(x, batch["y"]))
                    self.log("loss", loss)
                    self.log("largest", x.detach().max(), reduce_fx="max")
        return loss

    def _comparison_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a loss that compares each sample with all other samples. The loss is lower if samples whose
        targets have the same sign are near each other.
        """
        rows = F.normalize(gather_samples(x.flatten(1)))
        alike = (y[:, 0, 0] > 0) == (y[:, 0, 0] > 0)[:, None]
        near = 2 * self.sharpness.exp() * rows @ rows.T - 100 * torch.eye(
            len(rows), dtype=rows.dtype, device=rows.device
        )
        return near.logsumexp(1).mean() - (near * alike).sum() / len(y) ** 2

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss that the spec names."""
        # Linear in the output, because a square would exceed exact integers.
        each = (x * y).sum(2) if self.spec.exact else (x * y + (x - y).pow(2)).sum(2)
        counts = y[..., 0] > 0
        match self.spec.loss:
            case "sum":
                return each.sum()
            case "tokens":
                return (each * counts).sum() / counts.sum().clamp(min=1)
            case "terms":
                return (
                    (each * counts).sum() / counts.sum().clamp(min=1)
                    + 0.5 * each.sum(1).mean()
                    - x.square().sum() / 8
                )
        return each.sum(1).mean()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Run the training step without a backward pass, in the module's current train or eval mode."""
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _block(kind: str, shared: nn.Linear) -> nn.Module:
    """Return a block of this kind. A tied block uses `shared`."""
    match kind:
        case "tied":
            return _Tied(shared)
        case "bare":
            return nn.ReLU()
        case "branch":
            return _Branch()
        case "residual":
            return _Residual(
                nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
            )
        case "attention":
            return _Residual(_Attention())
        case "norm":
            return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        case "batchnorm":
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), _OverFeatures(nn.BatchNorm1d(WIDTH)))
        case "synced":
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), _OverFeatures(nn.SyncBatchNorm(WIDTH)))
        case "conv":
            return _OverFeatures(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))
        case "experts" | "crowded" | "places":
            return RoutedBlock(kind)
        case "dropout":
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25))
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return layer.requires_grad_(kind != "frozen")


class _Score(nn.Module):
    """A metric object that never runs."""

    def update(self, output: Tensor, target: Tensor, mean: Tensor) -> None:
        raise NotImplementedError

    def compute(self) -> Tensor:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError


class _Tied(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.inner = shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x))


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.left(x)) * self.right(x).sign() + x
        return found


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.inner(x)
        return found


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class _OverFeatures(nn.Module):
    """A wrapper for a module that needs features in dimension 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x.transpose(1, 2)).transpose(1, 2)
        return found


def make_batch(spec: Spec, size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return a batch of `size` random samples in float64: `{"x": ..., "y": ...}`, both [size, STEPS, WIDTH].

    In exact models, inputs and targets are multiples of 840, the least common multiple of 1 to 8. So a mean
    over up to 8 samples is exact.
    """
    _check("make_batch", spec, size=size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (size, STEPS, WIDTH)
    if spec.exact:
        x, y = (torch.randint(-2, 3, shape, generator=generator).double() * 840 for _ in range(2))
        return {"x": x, "y": y}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name in ("x", "y")}


@dataclass(frozen=True, repr=False)
class Case:
    """A captured model with a batch.

    Attributes:
        spec: The description of the model.
        module: The model. All cases of a spec share it, so do not change it.
        batch: The batch of `make_batch`.
        step: The captured step. Its size is the size of the batch.
        tensors: Parameters and buffers by canonical name. They share memory with the module.
    """

    spec: Spec
    module: Model
    batch: dict[str, Tensor]
    step: CapturedStep
    tensors: dict[str, Tensor]

    def __repr__(self) -> str:
        return f"Case({self.spec}, size={self.size})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # used by hypothesis to print an example
        printer.text(repr(self))

    @property
    def size(self) -> int:
        return self.step.size

    @property
    def leaves(self) -> list[Tensor]:
        return list(self.batch.values())


@functools.lru_cache(maxsize=256)
def _captured(spec: Spec) -> tuple[Model, CapturedStep]:
    module = Model(spec)
    return module, capture(module, make_batch(spec, 8))


def _check(name: str, spec: object, **numbers: object) -> None:
    """Check the arguments of the public function `name`.

    Raises:
        PiperError: The spec is not a `Spec`, or a number is out of range.
    """
    if not isinstance(spec, Spec):
        raise PiperError(
            f"{name}: {shown(spec)} is not a Spec. Give a lightning_piper.testing.Spec [PIPER-A001]"
        )
    for what, number in numbers.items():
        if type(number) is not int or not 0 <= number <= LARGEST:
            raise PiperError(
                f"{name}({what}={shown(number)}) is not usable. Give an integer from 0 to {LARGEST} [PIPER-A001]"
            )


def case(spec: Spec, size: int) -> Case:
    """Return the case of a spec and a batch size. The model is captured once for all sizes.

    Raises:
        PiperError: `spec` is not a Spec, or `size` is invalid.
    """
    _check("case", spec, size=size)
    return _case(spec, size)


@functools.lru_cache(maxsize=1024)
def _case(spec: Spec, size: int) -> Case:
    module, step = _captured(spec)
    named: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    tensors = {step.canonical[name]: x.detach() for name, x in named}
    return Case(spec, module, make_batch(spec, size), step.resized(size), tensors)
