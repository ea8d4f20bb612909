"""Measures the host memory that each of four processes needs to start a fit with ZeRO-3.

It compares a model that every process builds whole with the same model on the meta device, of which each
process fills its part. The peak is the kernel's (`VmHWM`) minus the memory before the process built the
model. The training is on the CPU, so the peak includes the parameters that the process keeps.

    python benchmarks/startup.py [--layers 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from _gpt import Block, Config
from _launch import is_rank, launch
from torch import Tensor, nn

import lightning_piper as piper

RANKS = 4
WIDTH = 1024
CONFIG = Config(d=WIDTH, heads=16, seq=16)


class Layers(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(CONFIG) for _ in range(layers))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            with piper.annotate("L"):
                x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Record the memory when the fit has started: the first step is compiled and the module distributed,
        but nothing has run.
        """
        self.peak, self.until = status("VmHWM"), time.perf_counter()
        self.held = sum(
            p.numel() * p.element_size()
            for p in self.trainer.strategy.phase.fit.ownership.owned_params.values()
        )  # type: ignore[attr-defined]
        super().optimizer_step(*args, **kwargs)


def status(key: str) -> int:
    """Return a value of this process's status, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def start(kind: str, layers: int, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # so that Lightning does not start processes
    rank = int(os.environ["RANK"])
    before, began = status("VmRSS"), time.perf_counter()
    with torch.device("meta") if kind == "meta" else contextlib.nullcontext():
        module = Layers(layers)
    program = [
        piper.Place(filter={}, devices=list(range(RANKS))),
        piper.Replicate(filter={}, devices=list(range(RANKS)), shard_params=True),
    ]
    trainer = L.Trainer(
        strategy=piper.PiperStrategy(program), accelerator="cpu", devices=RANKS, max_steps=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    x = torch.zeros(4, CONFIG.seq, WIDTH)
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=1))
    whole = sum(p.numel() * p.element_size() for p in module.parameters())
    largest = max(
        sum(p.numel() * p.element_size() for p in m.parameters(recurse=False)) for m in module.modules()
    )
    found = {
        "rank": rank,
        "whole": whole,
        "held": module.held,
        "largest": largest,
        "peak": module.peak - before,
        "seconds": module.until - began,
    }
    (out / f"{kind}-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of 50 MB each")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if is_rank():
        start(args.kind, args.layers, args.out)
        return
    print("| built | rank | whole model | held | largest submodule | peak over what was before | seconds |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("whole", "meta"):
            launch(RANKS, "--kind", kind, "--layers", str(args.layers), "--out", folder)
            for rank in range(RANKS):
                found = json.loads(Path(folder, f"{kind}-{rank}.json").read_text())
                sizes = " | ".join(
                    f"{found[key] / 2**20:.0f} MiB" for key in ("whole", "held", "largest", "peak")
                )
                print(f"| {kind} | {rank} | {sizes} | {found['seconds']:.1f} |")


if __name__ == "__main__":
    main()
