"""Errors of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_piper.strategy import consolidate
from tests.errors.case import Case, Cases, Elsewhere, batch, fit, net, written
from tests.strategy.fitting import Batches, local, trainer

TITLE = "Checkpoints"
INTRO = "All processes raise these errors when they save or load a checkpoint."


def saved(checkpoint: str = "sharded", *changes: tuple[str, str]) -> Path:
    """Save a checkpoint `a.ckpt` of one step."""
    made, _ = trainer(local(checkpoint=checkpoint), max_steps=1)
    made.fit(net("pass", *changes), Batches([batch()]))
    made.save_checkpoint("a.ckpt")
    return Path("a.ckpt")


def damaged(what: str, damage: Callable[[Path], object]) -> Case:
    def run() -> None:
        damage(saved())
        fit(ckpt_path="a.ckpt", max_steps=2)

    return Case(what, run)


def resumed(what: str, *changes: tuple[str, str], checkpoint: str = "sharded") -> Case:
    def run() -> None:
        saved(checkpoint)
        fit(net("pass", *changes), ckpt_path="a.ckpt", max_steps=2)

    return Case(what, run)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def bit_of_one_file() -> None:
    flip(saved("consolidated"))
    fit(ckpt_path="a.ckpt", max_steps=2)


def another_version(folder: Path) -> None:
    rewrite(folder, lambda body: body.update(version=body["version"] + 1))


def another_file(folder: Path) -> None:
    rewrite(folder, lambda body: body["files"].update({"../secret": [1, 2]}))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, and write it with a valid checksum."""
    from lightning_piper.checkpoint import files

    body = json.loads((folder / "manifest.json").read_text())["manifest"]
    change(body)
    content = {"crc32": files._crc(body), "manifest": body}
    (folder / "manifest.json").write_text(json.dumps(content))


def link(folder: Path) -> None:
    (folder / "meta.pt").rename("meta.pt")
    (folder / "meta.pt").symlink_to(Path("meta.pt").absolute())


def to_a_web_server() -> None:
    made, _ = trainer(local(checkpoint="sharded"), max_steps=1)
    made.fit(net(), Batches([batch()]))
    made.save_checkpoint("https://a.example/a.ckpt")


def with_options() -> None:
    made, _ = trainer(local(checkpoint="sharded"), max_steps=1)
    made.fit(net(), Batches([batch()]))
    made.save_checkpoint("a.ckpt", storage_options={})


class Early(L.Callback):
    """A callback that saves before the first batch."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint("b.ckpt")


def early() -> None:
    saved("sharded", MOMENTUM)
    fit(net("pass", MOMENTUM), ckpt_path="a.ckpt", max_steps=2, callbacks=[Early()])


def of_two_optimizers() -> None:
    saved("consolidated")
    content = torch.load("a.ckpt", weights_only=True)
    content["optimizer_states"] *= 2
    torch.save(content, "a.ckpt")
    fit(ckpt_path="a.ckpt", max_steps=2)


def of_another_data_set() -> None:
    for samples in (24, 16):
        loader = DataLoader(TensorDataset(torch.randn(samples, 8), torch.randn(samples, 1)), batch_size=8)
        made, _ = trainer(local(), max_steps=1 if samples == 24 else 2)
        made.fit(net("pass"), loader, ckpt_path=None if samples == 24 else "a.ckpt")
        made.save_checkpoint("a.ckpt")


def over_a_folder() -> None:
    Path("runs").mkdir()
    Path("runs/notes.txt").write_text("")
    made, _ = trainer(local(), max_steps=1)
    made.fit(net("pass"), Batches([batch()]))
    made.save_checkpoint("runs")


CONVERTED = (
    "tests/checkpoint/test_distributed_folder.py::test_a_folder_of_another_strategy_says_how_to_convert_it"
)
ON_META = "tests/strategy/test_on_meta.py::test_refusals_over_processes"
MOMENTUM = ("lr=0.1)", "lr=0.1, momentum=0.9)")
GROUPS = (
    "torch.optim.SGD(self.parameters(), lr=0.1)",
    "torch.optim.SGD([{'params': x.parameters()} for x in (self.first, self.second)], lr=0.1)",
)
MORE = (
    'self.register_buffer("scale", torch.ones(()))',
    'self.third = nn.Linear(2, 2); self.register_buffer("scale", torch.ones(()))',
)
WIDER = ("nn.Linear(8, 6), nn.Linear(6, 1)", "nn.Linear(8, 7), nn.Linear(7, 1)")

CASES: Cases = [
    Case("the checkpoint does not exist", lambda: fit(ckpt_path="a.ckpt")),
    damaged("a directory that is not a checkpoint, or whose save was interrupted",
            lambda folder: (folder / "manifest.json").unlink()),
    Elsewhere("a folder of `FSDPStrategy` or `ModelParallelStrategy`",
              "is a folder that FSDPStrategy or ModelParallelStrategy has saved", "PiperError", CONVERTED),
    Elsewhere("a folder of DeepSpeed", "is a folder that DeepSpeed has saved", "PiperError", CONVERTED),
    damaged("a damaged manifest", lambda folder: flip(folder / "manifest.json")),
    damaged("a file with the wrong size", lambda folder: cut(folder / "meta.pt")),
    damaged("a file with changed content", lambda folder: flip(folder / "meta.pt")),
    Case("a checkpoint of one file that is damaged", bit_of_one_file),
    damaged("a file is missing", lambda folder: (folder / "meta.pt").unlink()),
    damaged("a manifest that names a file outside the checkpoint", another_file),
    damaged("a file that is a link", link),
    damaged("a checkpoint of a later version", another_version),
    resumed("the checkpoint of a different module", MORE),
    resumed("the checkpoint of a module with different sizes", WIDER),
    resumed("the checkpoint of an optimizer with different groups", GROUPS, checkpoint="consolidated"),
    Case("the checkpoint of several optimizers", of_two_optimizers),
    Case("the middle of an epoch, and a data set with another length", of_another_data_set),
    Elsewhere("the middle of an epoch, and loader states of another number of "
              "replicas", "has the loader states of 2 replicas", "PiperError",
              "tests/strategy/test_loader_states.py::test_another_number_of_replicas_needs_a_method"),
    Case("a sharded checkpoint to a web server", to_a_web_server),
    Case("a sharded checkpoint with `storage_options`", with_options),
    Case("a save under the name of a folder with other content", over_a_folder),
    Elsewhere("a remote store that keeps only a part of an upload", "but a process wrote", "PiperError",
              "tests/checkpoint/test_remote.py::test_a_store_that_keeps_a_part_says_so"),
    Case("a save before the first batch of a fit that resumes from a sharded checkpoint", early),
    Elsewhere("a save of a module on the meta device before the first "
              "batch", "has no values to save before the first step",
              "PiperError", ON_META),
    Elsewhere("a run after one with `ckpt_path` and without a step, of a module on the meta "
              "device", "the previous run had no step",
              "PiperError", ON_META),
    Case("`consolidate` of a file", lambda: consolidate(written("a.ckpt", ""), "b.ckpt")),
    Elsewhere("a class in the checkpoint that loading does not "
              "trust", "which weights_only=True does not load", "PiperError",
              "tests/checkpoint/test_sharded_files.py::test_no_file_runs_code"),
]  # fmt: skip
