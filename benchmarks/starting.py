"""Measures the start of a fit in CPU seconds of each process, until the first and until the third step has
run.

It runs with DDP, without a cache of graphs (each process traces), with an empty cache (one process traces for
all), and again with the filled cache. The ratios compare rank 0 with DDP's rank 0.

    python benchmarks/starting.py [--processes 2 4] [--models gpt gpt2 resnet] [--layers 12]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from _gpt import Config, Module, batch
from _launch import is_rank, launch
from _models import resnet
from torch import Tensor

import lightning_piper as piper
from lightning_piper import PiperStrategy  # imports all that a fit needs

IMPORTED = time.process_time()


class GPT2(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=64, n_head=4, vocab_size=512))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[1]).loss
        return loss


class Watched(L.Callback):
    """A callback that records CPU seconds after each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.process_time() - IMPORTED)


def made(model: str, layers: int, samples: int) -> tuple[L.LightningModule, tuple[Tensor, ...]]:
    """Return a model and its data."""
    if model == "resnet":
        module, (images, classes) = resnet()
        return module, (images[:1].repeat(samples, 1, 1, 1), classes[:1].repeat(samples))
    c = Config(cut=(layers // 2, layers - layers // 2), d=64, seq=32, vocab=512)
    return Module(c) if model == "gpt" else GPT2(layers), batch(c, 0, samples)


def start(model: str, layers: int, kept: str, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = os.environ["RANK"]  # so that Lightning does not start processes
    size = int(os.environ["WORLD_SIZE"])
    module, data = made(model, layers, 3 * 2 * size)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    devices = list(range(size))
    program = [
        piper.Place(filter={}, devices=devices),
        piper.Replicate(filter={}, devices=devices, shard_params=True),
    ]
    watched = Watched()
    trainer = L.Trainer(
        strategy="ddp" if kept == "DDP" else PiperStrategy(program),
        accelerator="cpu",
        devices=size,
        max_steps=3,
        logger=False,
        callbacks=[watched],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=2)
    before = time.process_time()
    trainer.fit(module, loader)
    built = before - IMPORTED
    found = [IMPORTED, built, watched.seconds[0] - built, watched.seconds[2] - built]
    (out / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--models", nargs="*", default=["gpt", "gpt2", "resnet"])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--cache", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if is_rank():
        start(args.models[0], args.layers, args.cache, args.out)
        return
    print(
        "| model | processes | cache | imports | to the first step, each | / DDP's | to the third step, each | "
        "/ DDP's |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for model in args.models:
        for size in args.processes:
            with tempfile.TemporaryDirectory() as folder:
                peer: list[float] = []
                for kept in ("DDP", "none", "empty", "full"):
                    os.environ["XDG_CACHE_HOME"] = os.devnull if kept == "none" else folder
                    own = "--models", model, "--layers", str(args.layers), "--cache", kept, "--out", folder
                    launch(size, *own)
                    ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]
                    imports, _, *steps = zip(*ranks, strict=True)
                    peer = peer or [found[0] for found in steps]
                    cells = [
                        " ".join(f"{x:.2f}" for x in found) + f" | {found[0] / ddp:.2f}"
                        for found, ddp in zip(steps, peer, strict=True)
                    ]
                    print(
                        f"| {model} | {size} | {kept} | {sum(imports):.1f} | {cells[0]} | {cells[1]} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
