"""Measures the cost of batches of many lengths, in seconds of processor time.

It compares 20 training steps of a small GPT at one length and at 20 lengths. At the second length, one trace
covers all lengths. The table also has the median time of a step at each later length.

    python benchmarks/lengths.py [--steps 20]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from _gpt import Config, Module, batch

import lightning_piper as piper

CONFIG = Config(cut=(2, 2), d=64, vocab=256)
SHORTEST, SEQUENCES = 16, 8
PROGRAMS: dict[str, list[piper.Directive]] = {
    "one device": [],
    "2 stages, 2 microbatches": list(piper.schedules.one_f_one_b(stages=2, microbatches=2)),
    "2 stages, 8 microbatches": list(piper.schedules.one_f_one_b(stages=2, microbatches=8)),
}


class Timed(Module):
    """A module that records the end of each step."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.ends: list[float] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.process_time())


class Batches:
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Any:
        for step, length in enumerate(self.lengths):
            yield tuple(x[:, :length].contiguous() for x in batch(CONFIG, step, SEQUENCES))


def seconds(program: list[piper.Directive], lengths: Sequence[int]) -> list[float]:
    """Return the seconds of each step of a fit. The first step includes everything before it."""
    module, start = Timed(), time.process_time()
    trainer = L.Trainer(
        strategy=piper.PiperStrategy(program, transport="local"),
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, Batches(lengths))
    return [end - begin for begin, end in zip([start, *module.ends], module.ends, strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seconds([], [SHORTEST] * 2)  # warm up torch
    print("program                      one length s   many lengths s   ratio   second length s   later, ms")
    for name, program in PROGRAMS.items():
        constant = seconds(program, [SHORTEST + steps // 2] * steps)
        many = seconds(program, range(SHORTEST, SHORTEST + steps))
        ratio = sum(many) / sum(constant)
        later = statistics.median(many[2:]) * 1000
        print(
            f"{name:26} {sum(constant):14.2f} {sum(many):16.2f} {ratio:7.2f} {many[1]:17.2f} {later:11.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
