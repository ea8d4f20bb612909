"""Train the tiny Qwen3-MoE on eight processes (PP2 x EP2 x DP2), then on one device, and compare the losses.

    python -m examples.qwen3_moe.train [--schedule DualPipeV] [--zero 3] [--steps 8]

Run it in the root of a checkout. There are two pipeline ranks with four processes each. Two of the four divide
the experts, and the other two hold the same experts. Lightning starts the other processes by running this
module again.

Parameters are float64, but the model of `transformers` computes norms and routing in float32. So the losses
agree within rounding of float32.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler

import lightning_piper as piper
from examples.qwen3_moe.model import SIZES, Qwen3Moe
from examples.qwen3_moe.programs import SCHEDULES, program

VOCABULARY = SIZES["tiny"].vocabulary
PIPELINE, REPLICAS, EXPERTS = 2, 4, 2  # ranks, devices of a rank, devices that divide the experts
GROUPS = [[4 * rank + i for i in range(REPLICAS)] for rank in range(PIPELINE)]
MICROBATCHES, BATCH, LENGTH = 4, 16, 16
TOLERANCE = 1e-6  # largest relative difference of the losses, over all steps


class Losses(Callback):
    """A callback that keeps the logged losses of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.losses += [trainer.callback_metrics[f"{name}_loss"].item() for name in ("train", "balance")]


class Tokens(L.LightningDataModule):
    """A data module with `steps` batches, whose loader gives each replica its part of each batch. Each token
    follows from the one before, with some noise.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        found = [torch.randint(VOCABULARY, (steps * BATCH,), generator=generator)]
        for _ in range(LENGTH):
            noise = torch.randint(3, found[-1].shape, generator=generator)
            found.append((5 * found[-1] + noise) % VOCABULARY)
        self.tokens = torch.stack(found, 1)

    def train_dataloader(self) -> DataLoader:
        replica = getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0})
        # Without a sampler, Lightning would divide the data in random order.
        sampler = DistributedSampler(self.tokens, shuffle=False, **replica)
        return DataLoader(self.tokens, batch_size=BATCH // replica["num_replicas"], sampler=sampler)


def train(steps: int, stages: int, **trainer_options: Any) -> list[float]:
    """Train a new model. Returns the logged losses of all steps."""
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **trainer_options,
    )
    trainer.fit(Qwen3Moe("tiny", stages), Tokens(steps))
    return losses.losses


def agree(found: list[float], single: list[float]) -> bool:
    """Print the losses and their largest relative difference. Returns whether it is within TOLERANCE."""
    pairs = list(zip(found, single, strict=True))
    for step, (loss, one) in enumerate(pairs[::2]):
        print(f"step {step}: loss {loss:.9f}, one device {one:.9f}")
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    print(f"largest relative difference {max(differences):.1e}, allowed: {TOLERANCE:.0e}")
    return all(x <= TOLERANCE for x in differences)  # false for a NaN


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="DualPipeV")
    parser.add_argument("--zero", type=int, choices=range(4), default=3)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    directives = program(args.schedule, GROUPS, MICROBATCHES, args.zero, EXPERTS)
    found = train(
        args.steps,
        SCHEDULES[args.schedule][1] * PIPELINE,
        devices=PIPELINE * REPLICAS,
        strategy=piper.PiperStrategy(directives),
    )
    if rank_zero_only.rank != 0:
        return 0
    return 0 if agree(found, train(args.steps, 1, devices=1)) else 1


if __name__ == "__main__":
    sys.exit(main())
