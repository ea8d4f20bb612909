"""Compares plain Lightning, PiperStrategy and torch's Schedule1F1B with a GPT on one GPU.

It prints milliseconds and peak memory of a step, and the difference of losses from Lightning's.

    python benchmarks/one_gpu.py [--steps 20] [--device cuda] [--json]      # --device cpu: small, as a smoke
    test
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from _gpt import Config, Module, batch, loss_of, stages
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.accelerators import synchronize

MICROBATCHES, WARM_UP, MB = 4, 3, 1e6
LARGE = Config(cut=(4, 4), d=1024, heads=16, seq=512, vocab=32768)
SMALL = Config(cut=(1, 1), d=32, heads=2, seq=16, vocab=64)
SEQUENCES = 8


class Clock(L.Callback):
    """A callback that records seconds and loss of every batch, including the optimizer's step."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self.losses = device, list[float](), list[float]()

    def on_train_batch_start(self, *args: Any) -> None:
        synchronize(self.device)
        if len(self.seconds) == WARM_UP and self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self.device)
        self.start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *args: Any
    ) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.start)
        self.losses.append(float(outputs["loss"]))


class Trained(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def trained(
    module: L.LightningModule, batches: list[Any], strategy: Any, device: torch.device, **options: Any
) -> Clock:
    """Fit a module, one step for each batch. `options` are further arguments of the Trainer."""
    clock = Clock(device)
    trainer = L.Trainer(
        accelerator=device.type,
        devices=1,
        strategy=strategy,
        max_steps=len(batches),
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return clock


def under(strategy: Callable[[], Any]) -> Callable[[Config, int, torch.device], Clock]:
    """Return a function that runs a fit with this strategy."""

    def fit(c: Config, steps: int, device: torch.device) -> Clock:
        return trained(Trained(c), [batch(c, i, SEQUENCES) for i in range(steps)], strategy(), device)

    return fit


def torchs(c: Config, steps: int, device: torch.device) -> Clock:
    """Run torch's schedule with the whole model as its only stage."""
    clock = Clock(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(*stages(c)).to(device)
        schedule = Schedule1F1B(PipelineStage(model, 0, 1, device), MICROBATCHES, loss_fn=loss_of)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for i in range(steps):
            tokens, targets = (x.to(device) for x in batch(c, i, SEQUENCES))
            losses: list[Tensor] = []
            clock.on_train_batch_start()
            schedule.step(tokens, target=targets, losses=losses, return_outputs=False)
            optimizer.step()
            optimizer.zero_grad()
            clock.on_train_batch_end(None, None, {"loss": torch.stack(losses).detach().mean()})  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()
    return clock


def ours(program: list[Any], **options: Any) -> Callable[[Config, int, torch.device], Clock]:
    return under(lambda: piper.PiperStrategy(list(program), transport="local", **options))


WHOLE = [piper.Place(filter={}, devices=[0])]
CUT = [*WHOLE, piper.Split(filter={}, dim_name="MB", num_microbatches=MICROBATCHES)]
SYSTEMS: dict[str, Callable[[Config, int, torch.device], Clock]] = {
    "Lightning": under(lambda: "auto"),
    "PiperStrategy": ours(WHOLE),
    f"torch Schedule1F1B, {MICROBATCHES} microbatches": torchs,
    f"PiperStrategy, {MICROBATCHES} microbatches": ours(CUT),
    f"PiperStrategy, 1F1B of 2 stages, {MICROBATCHES} microbatches": ours(
        piper.schedules.one_f_one_b(2, MICROBATCHES)
    ),
    "PiperStrategy, compiled": ours(WHOLE, compile=True),  # late, because compiling takes longest
}
# These need a CUDA device.
SYSTEMS_WITH_GRAPHS: dict[str, Callable[[Config, int, torch.device], Clock]] = {
    "PiperStrategy, CUDA graphs": ours(WHOLE, cuda_graphs=True),
    "PiperStrategy, compiled, CUDA graphs": ours(WHOLE, compile=True, cuda_graphs=True),
}


def measured(steps: int, device: torch.device, systems: str = "") -> Iterator[dict[str, Any]]:
    """Yield the measurements of each system whose name matches the pattern `systems`, and of plain Lightning.

    A captured step is traced again at batches 1, 2, 4, 8 ..., which the median of twenty steps does not show.
    """
    losses: list[float] = []
    with_graphs = SYSTEMS_WITH_GRAPHS if device.type == "cuda" else {}
    for name, run in {**SYSTEMS, **with_graphs}.items():
        if losses and not re.search(systems, name):
            continue
        if device.type != "cpu":
            torch.accelerator.empty_cache()
        clock = run(SMALL if device.type == "cpu" else LARGE, steps + WARM_UP, device)
        losses = losses or clock.losses
        far = max(abs(a - b) / abs(b) for a, b in zip(clock.losses, losses, strict=True))
        found = {"name": name, "ms": statistics.median(clock.seconds[WARM_UP:]) * 1e3, "loss": far}
        if device.type != "cpu":
            found["peak"] = torch.accelerator.max_memory_allocated(device) / MB
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="")
    parser.add_argument(
        "--json", action="store_true", help="an object a line on the standard output, and nothing else"
    )
    parser.add_argument("--systems", default="", help="a pattern of the first column (default: all systems)")
    options = parser.parse_args()
    if not options.device and not torch.accelerator.is_available():
        print(f"skipped: torch {torch.__version__} finds no accelerator here", file=sys.stderr)
        return
    kind = options.device or torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    device = torch.device(kind, None if kind == "cpu" else 0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if not options.json:
        print(f"{'':46} {'ms':>9} {'peak MB':>9} {'loss':>9}")
    for row in measured(options.steps, device, options.systems):
        shown = f"{row['name']:46} {row['ms']:9.1f} {row.get('peak', float('nan')):9.1f} {row['loss']:9.1e}"
        print(json.dumps(row) if options.json else shown, flush=True)


if __name__ == "__main__":
    main()
