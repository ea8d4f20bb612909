"""An S3 server for tests, and trainings that save into it. `start` starts the server in this process; `use`
lets fsspec find it.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.config import conf
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import lightning_piper as piper
from lightning_piper.checkpoint.remote import RemoteFolder
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import Batches, sharing_captures, trainer, values
from tests.strategy.models import make
from tests.strategy.resumed import BATCHES, HOW, part

BUCKET = "bucket"
KEYS = {"key": "test", "secret": "test"}


@contextmanager
def start() -> Iterator[str]:
    """Return a context with an S3 server that has one empty bucket; its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        use(f"http://{host}:{port}")
        store().mkdir(BUCKET)
        yield f"http://{host}:{port}"
    finally:
        conf.pop("s3", None)
        server.stop()


def use(endpoint: str) -> None:
    conf["s3"] = {"endpoint_url": endpoint, **KEYS}


def store() -> Any:
    found = fsspec.filesystem("s3")
    found.invalidate_cache()
    return found


def names(folder: str) -> list[str]:
    """The names of the checkpoints in a folder of the store."""
    return sorted(path.rpartition("/")[2] for path in store().ls(folder, detail=False))


@sharing_captures
def train(
    rank: int,
    endpoint: str,
    how: str,
    folder: str,
    steps: int,
    resume: str | None = None,
    kind: str = "sharded",
    behind: bool = False,
    kill: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train, and save after each step: the two best, and the last.

    Args:
        kill: A rank, and the number of the file at whose upload this rank is killed.
    """
    use(endpoint)
    setting = HOW[how]
    size = max(1, setting.processes)
    module, loader = make("mlp", seed=0 if resume is None else 1, samples=8 * BATCHES)
    strategy = piper.PiperStrategy(
        setting.program(),
        transport="process" if setting.processes else "local",
        timeout=PATIENCE,
        checkpoint=kind,  # type: ignore[arg-type]
        checkpoint_io=AsyncCheckpointIO() if behind else None,
    )
    save = ModelCheckpoint(
        folder, "{step}", monitor="train_loss", save_top_k=2, save_last=True, every_n_train_steps=1
    )
    fit, record = trainer(
        strategy, [save], devices=size, max_steps=steps, max_epochs=-1, enable_checkpointing=True
    )
    if kill is not None and kill[0] == rank:
        _kill_at(kill[1])
    batches = Batches(part(batch, setting.replicas, rank * setting.replicas // size) for batch in loader)
    torch.manual_seed(9)
    fit.fit(module, batches, ckpt_path=resume)
    kept = {Path(path).name for path in save.best_k_models}
    return {"values": values(module), "losses": record.losses, "kept": kept}


def _kill_at(file: int) -> None:
    create, left = RemoteFolder.create, file

    @contextmanager
    def killing(self: RemoteFolder, name: str) -> Iterator[Any]:
        nonlocal left
        with create(self, name) as stream:
            yield stream
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    RemoteFolder.create = killing  # type: ignore[method-assign]


def train_all(rank: int, endpoint: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run trainings one after another; what each has returned, by its folder."""
    return {job["folder"]: train(rank, endpoint, **job) for job in jobs}
