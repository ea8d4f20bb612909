"""Train a small GPT in two pipeline stages on two processes, then on one device, and compare the losses.

Three steps on two processes are recorded for TensorBoard's PIPER tab.

Lightning starts the second process by running this file again. So only the first process must verify the plan
(`rank_zero_only.rank == 0`), and only this process trains on one device and compares the losses
(`trainer.is_global_zero`).
"""

from __future__ import annotations

import sys
import time
import warnings

import lightning as L
import torch
from gpt import CharDataset, CharGPT
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, Subset

import lightning_piper as piper

SEED = 1
STEPS = 80
BATCH_SIZE = 32
CONTEXT = 128
STAGES = 2
MICROBATCHES = 8
LOGS = "demo_logs"  # below the current directory
TOLERANCE = 1e-5  # largest relative difference of the losses, over all steps


class LossCurve(Callback):
    """A callback that keeps the logged loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())


def make_module() -> CharGPT:
    """Return a model with the same initial weights at every call and in every process."""
    L.seed_everything(SEED, verbose=False)
    return CharGPT(layers=4, stages=STAGES, dim=128, heads=4, context=CONTEXT)


def make_loader() -> DataLoader:
    """Return a loader that gives the same batches in the same order, at every call and in every process."""
    dataset = CharDataset(context=CONTEXT)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED))
    return DataLoader(Subset(dataset, order.tolist()), batch_size=BATCH_SIZE)


def make_logger(folder: str) -> Logger:
    """Return a TensorBoard logger. `PiperStrategy(profile=...)` writes its recording into the logger's
    folder."""
    return TensorBoardLogger(folder, name=f"{STAGES}_stages")


def train(logger: Logger | bool = False, **trainer_options: object) -> tuple[L.Trainer, list[float]]:
    """Train a new model for STEPS steps. Returns the trainer and the loss of each step on this process."""
    curve = LossCurve()
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        callbacks=[curve, TQDMProgressBar(refresh_rate=10)],
        # Every process reads the same batches, because the processes are stages, not replicas.
        use_distributed_sampler=False,
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
        **trainer_options,
    )
    start = time.perf_counter()
    trainer.fit(make_module(), make_loader())
    if trainer.is_global_zero:
        print(f"{STEPS} steps in {time.perf_counter() - start:.1f} s, starting included")
    return trainer, curve.losses


def compare(pipeline: list[float], single: list[float]) -> bool:
    """Print both curves and their largest relative difference. Returns whether it is within TOLERANCE."""
    if not len(pipeline) == len(single) == STEPS:
        raise RuntimeError(
            f"expected {STEPS} losses, got {len(pipeline)} from two processes, {len(single)} from one"
        )
    differences = [abs(a - b) / abs(b) for a, b in zip(pipeline, single, strict=True)]
    print(f"{'step':>4}  {'2 processes':>12}  {'1 device':>12}  {'difference':>10}")
    for step in [*range(0, STEPS, 10), STEPS - 1]:
        print(f"{step:>4}  {pipeline[step]:>12.7f}  {single[step]:>12.7f}  {differences[step]:>10.1e}")
    agree = all(difference <= TOLERANCE for difference in differences)  # false for NaN, which max() may skip
    print(
        f"\nlargest relative difference over {STEPS} steps: {max(differences):.1e}, allowed: {TOLERANCE:.0e}"
    )
    print("The curves agree." if agree else "The curves DIFFER.")
    return agree


def main() -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    program = piper.schedules.one_f_one_b(stages=STAGES, microbatches=MICROBATCHES)

    if rank_zero_only.rank == 0:
        print(f"\n1. Verify the plan: {STAGES} stages, {MICROBATCHES} microbatches, 1F1B\n")
        report = piper.verify(make_module(), next(iter(make_loader())), program)
        print(report)
        if not report.ok:
            print("The plan does not compute what one device computes.")
            return 1
        print(f"\n2. Train {STEPS} steps on two processes, one for each stage\n")

    strategy = piper.PiperStrategy(directives=program, profile=piper.Schedule(wait=10, warmup=1, active=3))
    trainer, pipeline = train(devices=STAGES, strategy=strategy, logger=make_logger(LOGS))
    if not trainer.is_global_zero:
        return 0
    print(f"What steps 11 to 13 really did: tensorboard --logdir {LOGS}, tab PIPER")

    print(f"\n3. Train the same {STEPS} steps on one device, with plain Lightning\n")
    _, single = train(devices=1)

    print("\n4. Compare the losses\n")
    return 0 if compare(pipeline, single) else 1


if __name__ == "__main__":
    sys.exit(main())
