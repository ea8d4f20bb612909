"""Two devices train an unmodified Hugging Face GPT-2 that is too large for one, with a program that a search
finds.

    python examples/auto.py              two processes
    python examples/auto.py --devices 1  one process, whose limit the model exceeds

Each process is limited to 2.2 GB of address space in addition to what it uses at its start.

Needs `transformers`. The model is built from its configuration with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import resource
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_piper  # noqa: F401  (makes strategy="piper" known)

LENGTH, SAMPLES = 32, 8
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8  # constants of malloc.h


class GPT2(L.LightningModule):
    """GPT-2 with 124 million parameters, which take 2 GB together with their gradients and Adam's states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def limit(megabytes: int) -> None:
    """Limit the address space of this process to what it uses now and `megabytes` MB more, like `ulimit
    -v`."""
    # Glibc: return freed memory to the system, and use few thread arenas.
    with contextlib.suppress(AttributeError):
        allocator = ctypes.CDLL(None)
        allocator.mallopt(M_MMAP_THRESHOLD, 2**20), allocator.mallopt(M_ARENA_MAX, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--memory", type=int, default=2200, help="MB for each process")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    limit(given.memory)
    tokens = torch.randint(0, 50257, (SAMPLES, LENGTH))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy="piper",
        max_steps=given.steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(GPT2(), DataLoader(TensorDataset(tokens), batch_size=2))
    print(
        f"rank {trainer.global_rank}: loss {trainer.callback_metrics['loss']:.4f} after "
        f"{trainer.global_step} steps",
        flush=True,
    )


if __name__ == "__main__":
    main()
