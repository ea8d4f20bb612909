"""bf16-mixed and linear layers in float8, under plain Lightning and under programs of PiperStrategy.

A product of float8 (e4m3) matrices has relative rounding errors of at most 2**-4 in each factor. So each of
its terms is off by at most `TERM`, and losses must differ from float32 by at most as much. Gradients of a
float8 layer are products in bfloat16. The factor of a matrix depends on its largest value, so each microbatch
has a factor of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from one_gpu import MICROBATCHES, WARM_UP, Clock, trained
from torch import Tensor, nn

import lightning_piper as piper

# Kind of device -> width and layers of the model, rows of a batch, and steps.
SIZES = {"cpu": (32, 4, 32, 3), "cuda": (4096, 8, 8192, 10)}
TERM = (1 + 2**-4) ** 2 - 1
BF16 = 2e-2  # largest relative difference of a loss
LARGEST = 448.0  # of float8_e4m3fn


class _Product(torch.autograd.Function):
    """`x @ weight.T` in float8. x `[rows, in]`, weight `[out, in]`, both in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        scales = [each.detach().abs().amax().float().clamp(min=1e-12) / LARGEST for each in (x, weight)]
        a, b = (
            (each / scale.to(each.dtype)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
            for each, scale in zip((x, weight), scales, strict=True)
        )
        return torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Float8Linear(nn.Linear):
    """A linear layer without a bias, whose forward product is in float8."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x.bfloat16(), self.weight.bfloat16()).to(x.dtype)  # type: ignore[no-any-return,no-untyped-call]


class Layers(L.LightningModule):
    """Residual layers in two stages. Batch: `[rows, width]`. The target of a row is its half."""

    def __init__(self, width: int, layers: int, kind: type[nn.Linear]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(width, width, bias=False) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, half = batch, len(self.layers) // 2
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP", int(i >= half)):
                x = x + torch.tanh(layer(x))
        with piper.annotate("PP", 1):
            return F.mse_loss(x.float(), batch / 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def ours(directives: list[Any]) -> Callable[[], Any]:
    return lambda: piper.PiperStrategy(list(directives), transport="local")


STRATEGIES: dict[str, Callable[[], Any]] = {
    "Lightning": lambda: "auto",
    "PiperStrategy": ours([piper.Place(devices=[0])]),
    "PiperStrategy, 1F1B of 2 logical devices": ours(piper.schedules.one_f_one_b(2, MICROBATCHES)),
}


def fitted(kind: type[nn.Linear], strategy: Any, precision: str, device: torch.device) -> Clock:
    width, layers, rows, steps = SIZES[device.type]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(rows, width, generator=generator) for _ in range(steps + WARM_UP)]
    return trained(Layers(width, layers, kind), batches, strategy, device, precision=precision)


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row for each precision and strategy. It fails if a loss differs more than its bound from the
    losses of plain Lightning in float32."""
    exact = fitted(nn.Linear, "auto", "32-true", device).losses
    kinds: dict[str, tuple[type[nn.Linear], str, float]] = {"bf16-mixed": (nn.Linear, "bf16-mixed", BF16)}
    if hasattr(torch, "_scaled_mm"):
        kinds["float8 layers"] = (Float8Linear, "32-true", TERM)
    else:
        yield {"name": "float8 layers", "outcome": "skipped", "said": "this torch has no _scaled_mm"}
    for name, (kind, precision, bound) in kinds.items():
        plain: list[float] = []
        for strategy, make in STRATEGIES.items():
            row: dict[str, object] = {"name": f"{name}, {strategy}"}
            try:
                clock = fitted(kind, make(), precision, device)
            except Exception as error:  # the other precisions still run
                said = (str(error) or type(error).__name__).splitlines()[0]
                yield {**row, "outcome": "failed", "said": said}
                continue
            plain = plain or clock.losses
            far, apart = (
                max(abs(a - b) / abs(b) for a, b in zip(clock.losses, of, strict=True))
                for of in (exact, plain)
            )
            row |= {
                "ms": statistics.median(clock.seconds[WARM_UP:]) * 1e3,
                "difference from float32": far,
                "bound": bound,
                "difference from Lightning": apart,
            }
            if not far <= bound:
                row |= {"outcome": "failed", "said": "differs more than its bound from float32"}
            yield row
