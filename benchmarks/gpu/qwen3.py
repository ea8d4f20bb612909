"""Tokens per second of the Qwen3-MoE model with 1B parameters in bfloat16, with batches of 8 sequences.

It compares plain Lightning, `torch.compile`, PiperStrategy on one device, and pipelines of two logical devices
on one GPU. All systems train with fused AdamW. The stages of torch's `Schedule1F1B` are on processes of their
own. So it runs here with the whole model as its only stage.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_gpu import MB, MICROBATCHES, WARM_UP, Clock, trained
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lightning_piper as piper
from examples.qwen3_moe.model import AUXILIARY, SIZES, Qwen3Moe
from lightning_piper import schedules

SEQUENCES = 8


class Scale(NamedTuple):
    """The sizes of a run: a key of `SIZES`, tokens of a sequence, and measured steps."""

    size: str
    length: int
    steps: int


SCALES = {"cpu": Scale("tiny", 16, 1), "cuda": Scale("1B", 512, 5)}  # by kind of device


class Trained(Qwen3Moe):
    """The model with weights that are the same for each system, and fused AdamW."""

    def __init__(self, size: str, stages: int, device: torch.device) -> None:
        torch.manual_seed(0)
        with device:  # random numbers of a GPU are fast
            super().__init__(size, stages)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Compiled(Trained):
    """The model with a forward pass that `torch.compile` has compiled."""

    def __init__(self, size: str, stages: int, device: torch.device) -> None:
        super().__init__(size, stages, device)
        # Inductor's C++ compiler takes minutes on a CPU.
        self.model.compile(backend="aot_eager" if device.type == "cpu" else "inductor")


class OneStage(nn.Module):
    """The whole model as a stage of torch's pipelining: tokens `[n, length]` -> logits, balancing loss."""

    def __init__(self, module: Trained) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        made = self.module.model(tokens, output_router_logits=True)
        balance = [self.module._balance(x, len(tokens)) for x in made.router_logits]
        return made.logits, torch.stack(balance).mean()


def batches(scale: Scale, steps: int) -> list[Tensor]:
    """Return token numbers `[SEQUENCES, length + 1]` for each step."""
    generator = torch.Generator().manual_seed(1)
    shape = (SEQUENCES, scale.length + 1)
    return [torch.randint(SIZES[scale.size].vocabulary, shape, generator=generator) for _ in range(steps)]


def fitted(
    module: Callable[..., Trained],
    stages: int,
    strategy: Callable[[], Any],
    scale: Scale,
    device: torch.device,
) -> Clock:
    """Train with a Trainer."""
    steps = batches(scale, scale.steps + WARM_UP)
    return trained(module(scale.size, stages, device), steps, strategy(), device, precision="bf16-true")


def of_torch(scale: Scale, device: torch.device) -> Clock:
    """Train with torch's `Schedule1F1B`."""

    def loss_of(made: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        logits, balance = made
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + AUXILIARY * balance

    clock = Clock(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = Trained(scale.size, 1, device).to(device, torch.bfloat16)
        schedule = Schedule1F1B(PipelineStage(OneStage(module), 0, 1, device), MICROBATCHES, loss_fn=loss_of)
        optimizer = module.configure_optimizers()
        for batch in batches(scale, scale.steps + WARM_UP):
            tokens, targets = (x.to(device).contiguous() for x in (batch[:, :-1], batch[:, 1:]))
            losses: list[Tensor] = []
            clock.on_train_batch_start()
            schedule.step(tokens, target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            clock.on_train_batch_end(None, None, {"loss": torch.stack(losses).detach().mean()})  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    return clock


def ours(directives: list[Any], **options: Any) -> Callable[[], Any]:
    return lambda: piper.PiperStrategy(list(directives), transport="local", **options)


COMPILED = "PiperStrategy, compiled"
WHOLE = [piper.Place(devices=[0])]
# The two systems that compile are last, because compiling takes longest.
SYSTEMS: dict[str, Callable[[Scale, torch.device], Clock]] = {
    "Lightning": partial(fitted, Trained, 1, lambda: "auto"),
    "PiperStrategy": partial(fitted, Trained, 1, ours(WHOLE)),
    f"PiperStrategy, 1F1B of 2 logical devices, {MICROBATCHES} microbatches": partial(
        fitted, Trained, 2, ours(schedules.one_f_one_b(2, MICROBATCHES))
    ),
    f"torch Schedule1F1B, {MICROBATCHES} microbatches": of_torch,
    "Lightning, torch.compile": partial(fitted, Compiled, 1, lambda: "auto"),
    COMPILED: partial(fitted, Trained, 1, ours(WHOLE, compile=True)),
}


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row for each system. A system that fails is a row with the outcome `failed`."""
    scale, losses = SCALES[device.type], list[float]()
    for name, run in SYSTEMS.items():
        if device.type == "cpu" and name == COMPILED:
            yield {"name": name, "outcome": "skipped", "said": "only on a GPU, because it takes minutes here"}
            continue
        gc.collect()  # a Trainer and its model refer to each other
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        try:
            clock = run(scale, device)
        except Exception as error:  # the other systems still run
            said = (str(error) or type(error).__name__).splitlines()[0]
            print(f"{name}: {said}", file=sys.stderr)
            yield {"name": name, "outcome": "failed", "said": said}
            continue
        losses = losses or clock.losses
        far = max(abs(a - b) / abs(b) for a, b in zip(clock.losses, losses, strict=True))
        seconds = statistics.median(clock.seconds[WARM_UP:])
        row = {
            "name": name,
            "tokens/s": SEQUENCES * scale.length / seconds,
            "ms": seconds * 1e3,
            "loss": far,
        }
        if device.type != "cpu":
            row["peak"] = torch.accelerator.max_memory_allocated(device) / MB
        yield row
