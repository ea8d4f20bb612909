"""A checkpoint whose tensors a thread copies while the next step runs has the bits of a checkpoint that is written
at once. The thread here copies as late as possible: when the training waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import lightning_piper as piper
from lightning_piper.checkpoint import late_copies
from lightning_piper.checkpoint.late_copies import HostRoom, LateCopies
from lightning_piper.directives import Offload
from lightning_piper.strategy import PiperStrategy
from tests.distributed.processes import PATIENCE as LIMIT
from tests.distributed.processes import launch_trainings
from tests.strategy import sharded
from tests.strategy.fitting import PROGRAM, Batches, sharing_captures, trainer
from tests.strategy.models import make
from tests.strategy.scenarios import equal
from tests.strategy.test_saves import KINDS, PATIENCE, SaveAt, content

IN_ONE_PROCESS = {
    "replicas": ("mlp", sharded.PROGRAMS["dp2 zero0"]),
    "zero1": ("varied", sharded.PROGRAMS["dp2 zero1"]),
    "zero3": ("varied", sharded.PROGRAMS["dp2 zero3"]),
    "stages": ("dropout", lambda: list(PROGRAM)),
    "batch norm": ("conv", lambda: list(PROGRAM)),
    "states on the host": ("mlp", lambda: [*sharded.dp2(0), Offload(filter={}, saved=False, states=True)]),
}
IN_PROCESSES = {
    "batch norm": ("conv", lambda: list(PROGRAM)),
    **{
        name: ("varied", sharded.PROGRAMS[name])
        for name in ("dp2 zero0", "dp2 zero1", "dp2 zero3", "dp2 zero1 overlapped", "pp2 dp2 zero3, zero1")
    },
}


class Asked(threading.Event):
    """An event that knows whether a thread waits for it."""

    waits = True

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.waits:
            return True
        self.asked.set()
        return super().wait(PATIENCE)


class Unasked(Asked):
    """The fault that nothing waits for the copies."""

    waits = False


@contextmanager
def latest(event: type[Asked] = Asked) -> Iterator[None]:
    """Let the thread begin to copy when the training waits for the copies, or when `Release` says so."""
    make_copies = LateCopies.make

    def late(copies: Any) -> None:
        if copies._memory:
            assert copies._made.asked.wait(PATIENCE)
        make_copies(copies)

    with (
        mock.patch.object(LateCopies, "make", late),
        mock.patch.object(late_copies, "threading", SimpleNamespace(Event=event)),
    ):
        yield


class Release(L.Callback):
    """Releases the copies when the second step is over."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        copies = trainer.strategy._saves.late  # type: ignore[attr-defined]
        if trainer.global_step == 2 and isinstance(copies._made, Asked):
            copies._made.asked.set()


class Writes(L.Callback):
    """Changes this process's parameters and states in one hook, after the checkpoint of the first step."""

    def __init__(self, hook: str, as_arrays: bool) -> None:
        setattr(self, hook, self.write)
        self.as_arrays = as_arrays

    def write(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != 1:
            return
        (optimizer,) = trainer.optimizers
        if self.as_arrays:
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.detach().numpy()[...] *= 0.5
            return
        with torch.no_grad():
            for group in optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.5)  # type: ignore[attr-defined]
        for state in optimizer.state.values():
            state["exp_avg"].data[...] = 7.0


@sharing_captures
def save(
    folder: Path,
    model: str,
    program: Any,
    kind: Any,
    io: Any,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> None:
    module, loader = make(model, samples=24, batch_size=8)
    options = {"transport": "local", "devices": 1, **options}
    strategy = piper.PiperStrategy(
        program(), transport=options.pop("transport"), checkpoint=kind, checkpoint_io=io, timeout=LIMIT
    )
    torch.manual_seed(3)
    run, _ = trainer(
        strategy, [SaveAt(1), *callbacks, Release()], max_steps=3, default_root_dir=folder, **options
    )
    run.fit(module, Batches(list(loader)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_ONE_PROCESS)
def test_a_late_copy_is_what_was_there(name: str, kind: str, tmp_path: Path) -> None:
    """Without the wait, the copy has values of the next step."""
    save(tmp_path / "now", *IN_ONE_PROCESS[name], kind, None)
    expected = content(tmp_path / "now" / "1.ckpt", kind)
    for event in (Asked, Unasked):
        folder = tmp_path / event.__name__
        with latest(event):
            save(folder, *IN_ONE_PROCESS[name], kind, AsyncCheckpointIO())
        assert equal(content(folder / "1.ckpt", kind), expected) == event.waits


HOOKS = ["on_train_batch_end", "on_train_batch_start", "on_before_zero_grad", "on_after_backward",
         "on_before_optimizer_step"]  # fmt: skip


@pytest.mark.parametrize(
    ("hook", "as_arrays"), [*((hook, False) for hook in HOOKS), ("on_train_batch_start", True)]
)
def test_a_hook_that_changes_weights_waits_for_the_copy(hook: str, as_arrays: bool, tmp_path: Path) -> None:
    """`on_before_optimizer_step` comes after the wait of the update. numpy changes memory without an operation."""
    model, program = IN_ONE_PROCESS["zero1"]
    save(tmp_path / "now", model, program, "sharded", None, [Writes(hook, as_arrays)])
    expected = content(tmp_path / "now" / "1.ckpt", "sharded")
    for watches in (True, False):
        folder = tmp_path / f"watched {watches}"
        with (
            latest(),
            mock.patch.object(LateCopies, "watch", LateCopies.watch if watches else lambda self: None),
        ):
            save(folder, model, program, "sharded", AsyncCheckpointIO(), [Writes(hook, as_arrays)])
        found = equal(content(folder / "1.ckpt", "sharded"), expected)
        assert found == (watches or hook == "on_before_optimizer_step")


class Replaces(L.Callback):
    """Gives the parameters other memory, after the checkpoint of the first step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == 1:
            with torch.no_grad():
                for param in module.parameters():
                    param.data = param * 0.5


def test_new_memory_of_a_parameter_waits_for_the_copy(tmp_path: Path) -> None:
    """Before the step, Piper copies the values in the new memory into the memory that is not copied yet."""
    save(tmp_path / "now", *IN_ONE_PROCESS["replicas"], "consolidated", None, [Replaces()])
    expected = content(tmp_path / "now" / "1.ckpt", "consolidated")
    run_plan = PiperStrategy._run_plan

    def unwatched(self: Any, *args: Any) -> Any:
        with self._saves.late.unwatched():
            return run_plan(self, *args)

    for watches in (True, False):
        folder = tmp_path / f"watched {watches}"
        with latest(), mock.patch.object(PiperStrategy, "_run_plan", run_plan if watches else unwatched):
            save(folder, *IN_ONE_PROCESS["replicas"], "consolidated", AsyncCheckpointIO(), [Replaces()])
        assert equal(content(folder / "1.ckpt", "consolidated"), expected) == watches


def test_averaged_weights_that_are_swapped_in_wait_for_the_copy(tmp_path: Path) -> None:
    for io in (None, AsyncCheckpointIO()):
        with latest():
            save(
                tmp_path / str(io is None),
                *IN_ONE_PROCESS["replicas"],
                "consolidated",
                io,
                [WeightAveraging()],
            )
    assert equal(*(content(tmp_path / str(now) / "1.ckpt", "consolidated") for now in (True, False)))


def in_processes(rank: int, folder: Path, names: Sequence[str], size: int) -> dict[str, Any]:
    for name in names:
        for how, io in (("now", None), ("Asked", AsyncCheckpointIO()), ("Unasked", AsyncCheckpointIO())):
            with latest(Unasked if how == "Unasked" else Asked):
                save(
                    folder / name / how, *IN_PROCESSES[name], "sharded", io, transport="process", devices=size
                )
    return {}


@pytest.mark.parametrize("size", [2, 4])
def test_each_process_copies_what_was_there(size: int, tmp_path: Path) -> None:
    names = [name for name in IN_PROCESSES if sharded.PROCESSES.get(name, 2) == size]
    launch_trainings(size, in_processes, tmp_path / "ranks", tmp_path, names, size)
    for name in names:
        now, late, torn = (
            content(tmp_path / name / how / "1.ckpt", "sharded") for how in ("now", "Asked", "Unasked")
        )
        assert equal(late, now) and not equal(torn, now), name


def started(*tensors: torch.Tensor) -> tuple[LateCopies, list[torch.Tensor]]:
    copies = LateCopies(HostRoom(), late_copies.memory_of(tensors))
    return copies, [torch.empty(0).set_(copies.copied_memory(x.untyped_storage())) for x in tensors]


def test_only_changes_of_memory_that_is_not_copied_yet_wait() -> None:
    first, other = torch.ones(4), torch.ones(4)
    with latest():
        copies, (copy,) = started(first)
        thread = threading.Thread(target=copies.make)
        thread.start()
        copies.watch()
        try:
            other.add_(1)
            first.clone().add_(first)
            assert not copies._made.asked.is_set()  # type: ignore[attr-defined]
            first[1:].numpy()  # a view does not change anything
            first.view(2, 2)[0].mul_(3)
            assert copies._made.is_set()
        finally:
            copies.settle()
        thread.join()
    assert copy.tolist() == [1.0] * 4
    assert torch._C._len_torch_dispatch_stack() == 0


def test_while_another_mode_is_active_tensors_are_copied_at_once() -> None:
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Other():
        copies, (copy,) = started(x := torch.ones(4))
        copies.watch()
        x.zero_()
    assert copy.tolist() == [1.0] * 4


def test_a_forked_process_does_not_wait() -> None:
    x = torch.ones(4)
    with latest():
        copies, _ = started(x)
        copies.watch()
        copies._forked()  # as in a worker of a DataLoader, where no thread copies
        x.zero_()
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_failure_to_copy_is_an_error_of_the_next_save(tmp_path: Path) -> None:
    """The training goes on, and no torn checkpoint is written."""

    def failing(self: LateCopies) -> None:
        self._made.set()
        raise MemoryError("of the copies")

    with mock.patch.object(LateCopies, "make", failing), pytest.raises(MemoryError, match="of the copies"):
        save(tmp_path, *IN_ONE_PROCESS["replicas"], "consolidated", AsyncCheckpointIO())
    assert not list(tmp_path.iterdir())
