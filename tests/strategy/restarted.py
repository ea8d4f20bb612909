"""A script for torchrun with two processes, whose training resumes from its last checkpoint. In the first
attempt one process fails.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.strategy.faults import NONE, Fault, train

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    fault = NONE if attempt else Fault(int(sys.argv[2]), sys.argv[3], "optimizer")
    rank = int(os.environ["RANK"])
    torch.save(
        {"attempt": attempt, **train(rank, folder, fault, fault.checkpoint, 2)}, folder / f"rank{rank}.pt"
    )
