"""A log directory with recordings: the demo's training on two processes, and a second run."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.profile import PiperProfiler
from tests.distributed.processes import launch_trainings
from tests.profile.board import ROOT
from tests.simulate.programs import Chain
from tests.strategy.fitting import sharing_captures, trace


def trace_demo(folder: Path) -> None:
    sys.path[:0] = [str(ROOT / "examples")]
    import demo

    trace(
        demo.make_module(),
        next(iter(demo.make_loader())),
        (demo.BATCH_SIZE, demo.BATCH_SIZE // 8),
        "training_step",
    )


@sharing_captures
def train_demo(rank: int, folder: Path) -> dict[str, Any]:
    import demo

    warnings.simplefilter("ignore")
    demo.STEPS = 6
    program = piper.schedules.one_f_one_b(stages=2, microbatches=8)
    strategy = piper.PiperStrategy(program, profile=piper.Schedule(wait=2, warmup=1, active=2))
    demo.train(devices=2, strategy=strategy, logger=demo.make_logger(str(folder)))
    return {}


def record_demo(folder: Path) -> Path:
    """Train the demo's model for some steps on two processes. Returns the run's folder, which is below
    `folder`.
    """
    launch_trainings(2, train_demo, folder / "ranks", folder, prepare=trace_demo)
    (plan,) = folder.rglob("piper/plan.json")
    return plan.parents[1]


def record_local(folder: Path, name: str, **profile: Any) -> tuple[L.Trainer, Path]:
    """Record a training of a small pipeline in this process, under GPipe. Returns the Trainer and the run's
    folder.
    """
    profiler = PiperProfiler(**{"wait": 1, "warmup": 1, "active": 2, **profile})
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=6,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        enable_checkpointing=False,
        logger=TensorBoardLogger(str(folder), name=name, version=""),
        profiler=profiler,
        strategy=piper.PiperStrategy(piper.schedules.gpipe(3, 2), transport="local", verify="first_batch"),
    )
    module = Chain(3)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    trainer.fit(module, DataLoader(torch.randn(24, 4), batch_size=4))
    return trainer, folder / name


def steps(run: Path) -> list[dict[str, Any]]:
    paths = sorted((run / "piper").glob("step_*.json"))
    return [json.loads(path.read_text()) for path in paths]


def plan(run: Path) -> dict[str, Any]:
    return json.loads((run / "piper" / "plan.json").read_text())


def write_large(run: Path, count: int) -> None:
    """Write a made-up recording of `count` boxes on 8 devices."""
    folder = run / "piper"
    folder.mkdir(parents=True)
    rows = [[device, stream] for device in range(8) for stream in ("compute", "send")]
    each = count // len(rows)
    kinds = ("F", "B", "send", "recv")
    boxes = [
        [row, k * 1e-4, k * 1e-4 + 0.9e-4, row * each + k, kinds[(row + k) % 4]]
        for row in range(len(rows))
        for k in range(each)
    ]
    nodes = {
        str(node): {
            "label": f"{kind}[PP={row},MB={k}]",
            "kind": kind,
            "tags": {"PP": row},
            "devices": [rows[row][0]],
            "stream": rows[row][1],
            "bytes": 4096,
            "origin": 0,
            "placed_by": None,
            "text": "",
        }
        for k, (row, _, _, node, kind) in enumerate(boxes)
    }
    figures = {
        "busy": 1,
        "idle": 1,
        "exposed": 0,
        "bubble": 1,
        "peak_bytes": 1,
        "peak_in_flight": 1,
        "streams": {},
    }
    curves = {
        "memory": [[0, 0]],
        "in_flight": [[0, 0]],
        "memory_by_kind": {"activations": [[0, 1], [0.01, 4]]},
        "directives": [],
    }
    devices = {str(device): {**figures, **curves} for device in range(8)}
    shares = {"bubble_fraction": 0.1, "exposed_fraction": 0.1, "directives": []}
    step = {"step_time": each * 1e-4, **shares, "devices": devices, "boxes": boxes}
    colors = {"F": "#9cc3e6", "B": "#f6b26b", "send": "#c9c9c9", "recv": "#c9c9c9"}
    edges = [[node, node + 1, 1, None] for node in range(len(boxes) - 1)]
    common = {
        "version": 1,
        "directives": [{"op": "place"}],
        "rows": rows,
        "nodes": nodes,
        "edges": edges,
        "colors": colors,
    }
    (folder / "plan.json").write_text(json.dumps({**common, "kind": "plan", "step": step}))
    fixed = {str(device): {"parameters": 1, "optimizer": 1} for device in range(8)}
    (folder / "step_0.json").write_text(
        json.dumps({"version": 1, "plan": "plan.json", "number": 0, "fixed": fixed, "step": step})
    )
