"""Measures how long a training stops when it loses a process or a node and torchrun restarts it.

The training is ZeRO-1 of a GPT on two processes, with a checkpoint after every ten steps. Process 1 is lost
after step 25.

    python benchmarks/resuming.py [--kinds process node] [--layers 8]

A lost node is a torchrun agent with all processes that it started. A new agent replaces it at once. The
benchmark prints the seconds from the loss until the processes run again (with torch and Lightning imported),
until the checkpoint is read, and until the first step is done. It also prints how many steps ran twice.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from _gpt import Config, Module, batch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper

EVERY, LOST_AT, STEPS = 10, 25, 40
BOTH: dict[str, Any] = {"filter": {}, "devices": [0, 1]}
PATIENCE = 300


class Net(L.LightningModule):
    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Module(Config(cut=(layers,)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Telling(L.Callback):
    """A callback that logs the time of events, and kills its process (or node) once."""

    def __init__(self, log: Path, kind: str) -> None:
        self.told, self.kind, self.rank = log, kind, int(os.environ["RANK"])

    def tell(self, what: str, step: int = 0) -> None:
        with self.told.open("a") as file:
            file.write(json.dumps([time.time(), what, self.rank, step]) + "\n")

    def on_load_checkpoint(self, *args: Any) -> None:
        self.tell("read")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.tell("step", trainer.global_step)
        lost = self.told.with_suffix(".lost")
        if self.rank == 1 and trainer.global_step == LOST_AT and not lost.exists():
            lost.touch()
            self.tell("lost")
            if self.kind == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, kind: str, layers: int) -> None:
    torch.set_num_threads(1)
    telling = Telling(folder / "log", kind)
    telling.tell("runs")
    save = ModelCheckpoint(folder / "saved", save_last=True, every_n_train_steps=EVERY, save_top_k=0)
    program = [piper.Place(**BOTH), piper.Replicate(**BOTH, shard_optimizer=True)]
    strategy = piper.PiperStrategy(program, checkpoint="sharded")
    data = DataLoader(TensorDataset(*batch(Config(), 0, 4 * STEPS)), batch_size=2)
    nodes = 2 if kind == "node" else 1
    L.Trainer(
        accelerator="cpu",
        devices=2 // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[save, telling],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Net(layers), data, ckpt_path="last")


def measured(kind: str, layers: int) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        where = [
            f"--nnodes={1 + (kind == 'node')}",
            f"--nproc-per-node={2 - (kind == 'node')}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--max-restarts=1",
            "--monitor-interval=0.1",
        ]
        own = ["--folder", folder, "--kinds", kind, "--layers", str(layers)]
        command = [sys.executable, "-m", "torch.distributed.run", *where, __file__, *own]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )

        agents = [start()]
        if kind == "node":
            agents.append(start())
        ends = time.monotonic() + PATIENCE
        while any(agent.poll() is None for agent in agents) and time.monotonic() < ends:
            lost = [agent for agent in agents if agent.poll() == -signal.SIGKILL]
            for agent in lost:
                agents[agents.index(agent)] = start()
            time.sleep(0.05)
        for agent in agents:
            agent.kill()
        return told(kind, [json.loads(line) for line in Path(folder, "log").read_text().splitlines()])


def told(kind: str, log: list[tuple[float, str, int, int]]) -> str:
    lost = next(at for at, what, *_ in log if what == "lost")
    runs, read = (max(at for at, what, *_ in log if what == wanted) - lost for wanted in ("runs", "read"))
    again = [(at, step) for at, what, rank, step in log if what == "step" and rank == 0 and at > lost + 0.5]
    first, step = again[0]
    return (
        f"{kind:8} runs again after {runs:.1f} s, checkpoint read after {read:.1f} s, first step done after "
        f"{first - lost:.1f} s; {LOST_AT - step + 1} steps done twice, {again[-1][1]} in all"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["process", "node"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder:
        train(Path(given.folder), given.kinds[0], given.layers)
        return
    for kind in given.kinds:
        print(measured(kind, given.layers), flush=True)


if __name__ == "__main__":
    main()
