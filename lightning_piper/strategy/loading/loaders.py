"""Training loaders in checkpoints: a fit that resumes in the middle of an epoch takes the samples that are left.

A loader is one of three kinds:

- The order of its samples is known (`EpochSampler`). A checkpoint has the position, so any number of replicas,
  any batch size and any number of workers can continue.
- It has a state of its own (`state_dict`). A checkpoint has the states of all replicas, and as many replicas can
  continue.
- It has neither. Piper warns when a checkpoint is saved in the middle of an epoch.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.strategy import _lightning
from lightning_piper.strategy.loading._datasets import at_epoch_end, forget_state, has_shuffle_buffer
from lightning_piper.strategy.loading.data import drawn_length
from lightning_piper.strategy.loading.epoch_order import Position
from lightning_piper.strategy.loading.epoch_sampler import EpochSampler, epoch_sampler, problem_of

COUNTS = ("ready", "started", "processed", "completed")
LIGHTNINGS_WARNING = "You're resuming from a checkpoint that ended before the epoch ended"


class Loaders:
    """The training loaders of a fit: their positions for checkpoints, and their positions in the checkpoint
    from which the fit resumes."""

    def __init__(self) -> None:
        self._content: Mapping[str, Any] | None = None  # of the checkpoint; None without one
        # For each loader of the checkpoint: the loader, and how many batches are left. None if that is not known.
        self._left: list[tuple[Any, int] | None] = []
        self._local: dict[str, Any] | None = None  # this process's entry of the next checkpoint
        self._begun = (0, 0)  # an epoch, and how many of its batches an earlier fit has done
        # States of loaders before each of the last batches was drawn. None: as at the start of the fit.
        self._states: deque[list[Any] | None] = deque()
        self._trainer: pl.Trainer | None = None  # of the running fit
        self._warned = False

    def load(self, content: Mapping[str, Any] | None) -> None:
        """Continue with the loaders' entry of a checkpoint; None if the fit does not resume."""
        self._content, self._left = content, []

    def end(self) -> None:
        """End the fit. Checkpoints that are saved afterwards have its last positions."""
        self._content, self._trainer, self._left = None, None, []
        self._states.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has the positions for a checkpoint that is saved after a fit."""
        return {**vars(Loaders()), "_local": self._local}

    def attach(self, loader: object, trainer: pl.Trainer, world: World, at_end: ExitStack) -> None:
        """Follow the position of a training loader. If the fit resumes, continue at the loader's position in
        the checkpoint.

        Args:
            loader: The loader. The Trainer passes its loaders one after another, before it draws a batch.
            world: The processes, each with the replica that it draws data for.
            at_end: Has the callbacks that restore the loader at the end of the run.

        Raises:
            PiperError: The loader cannot continue at the position.
        """
        if isinstance(loader, DataLoader) and problem_of(loader, world.count) is None:
            batches: Any = loader.batch_sampler
            own = batches.sampler.own if epoch_sampler(loader) is not None else batches.sampler
            batches.sampler = EpochSampler(own, world.count, world.replica)
            at_end.callback(setattr, batches, "sampler", own)
        epochs: Any = trainer.fit_loop.epoch_progress.current
        if self._content is not None:
            self._resume(loader, world)
            if len(self._left) == len(self._content["loaders"]):
                self._begin_epoch(trainer, world)
        counts = trainer.fit_loop.epoch_loop.batch_progress
        over = trainer.fit_loop.is_resuming and counts.is_last_batch and epochs.ready > epochs.processed
        # Workers draw before Lightning sets the epoch.
        _lightning.set_sampler_epoch(loader, epochs.processed + over)

    def _resume(self, loader: Any, world: World) -> None:
        assert self._content is not None
        saved, index = self._content["loaders"], len(self._left)
        if index == len(saved):
            raise PiperError(
                f"the checkpoint has the positions of {counted(len(saved), 'training loader')}, but this fit has more. "
                "Resume with the same loaders [PIPER-K012]"
            )
        entry: Mapping[str, Any] = saved[index]
        left: int | None = None
        if "states" in entry:
            self._load_state(loader, entry, world)
            left = None if self._content["running"] else 0
            if "problem" in entry:
                self._warn(entry["problem"], world)
        elif not self._content["running"]:
            left = 0  # if the epoch has ended
        elif "taken" in entry:
            sampler, position = epoch_sampler(loader), Position.read(entry)
            if sampler is None:
                raise PiperError(
                    "the checkpoint is in the middle of an epoch of a data set with known order, but the "
                    f"training loader {type(loader).__name__} cannot continue it, because "
                    f"{_problem(loader, world)}. Resume with a loader as in the fit that saved the "
                    "checkpoint, or from a checkpoint at the end of an epoch [PIPER-K012]"
                )
            sampler.resume(position)
            left = position.batches_left(
                loader.batch_sampler.batch_size, world.count, sampler.drops, loader.batch_sampler.drop_last
            )
        else:
            self._warn(entry["problem"], world)
        sized = drawn_length(loader, 1.0) is not None
        self._left.append((loader, left) if left is not None and sized else None)

    def _load_state(self, loader: Any, entry: Mapping[str, Any], world: World) -> None:
        """Load the state of this process's replica.

        Raises:
            PiperError: The states are of another number of replicas or workers.
        """
        assert self._content is not None
        states, workers = entry["states"], entry["workers"]
        alike = _alike(entry, world) and workers == getattr(loader, "num_workers", None)
        if "epoch" in entry:
            loader.dataset.set_epoch(entry["epoch"])  # a stream loads only a state of its own epoch
        if not alike and hasattr(loader, "load_replica_states"):
            loader.load_replica_states(states, world.replica, world.count)
        elif alike and isinstance(loader, _lightning.Stateful):
            state = states[world.replica]
            if state is not None:
                loader.load_state_dict(state)
        elif self._content["running"]:
            kind, end = type(loader).__name__, "from a checkpoint at the end of an epoch"
            if alike:
                raise PiperError(
                    "the checkpoint is in the middle of an epoch and has the loader's state, but the training loader "
                    f"{kind} does not have both state_dict and load_state_dict. Resume with a loader that has both, or {end} "
                    "[PIPER-K012]"
                )
            here = _of(world.count, getattr(loader, "num_workers", None), " with ")
            raise PiperError(
                "the checkpoint is in the middle of an epoch and has the loader states of "
                f"{_of(len(states), workers, ' with ')}. The training loader {kind} of {here} cannot load them. "
                f"Resume with {_of(len(states), workers, ' and ')}, or {end}. Or "
                "give the loader a method load_replica_states(states, replica, replicas) [PIPER-K012]"
            )

    def _begin_epoch(self, trainer: pl.Trainer, world: World) -> None:
        """Continue the epoch of the checkpoint, whose batches are counted in batches of this fit's size."""
        assert self._content is not None
        content, counts = self._content, trainer.fit_loop.epoch_loop.batch_progress
        if content["running"]:
            _lightning.continue_epoch(trainer)
        current: Any = counts.current
        total: Any = counts.total
        states = [
            entry["states"][world.replica] if _alike(entry, world) else None for entry in content["loaders"]
        ]
        entries = [{k: x for k, x in entry.items() if k != "states"} for entry in content["loaders"]]
        self._local = {**content, "loaders": entries, "states": states}
        if not content["running"] and not counts.is_last_batch:  # no batch of the epoch was done
            return
        done, undone = self._batches_done(trainer, current.processed), content.get("undone", 0)
        moved = done - current.processed
        for name in COUNTS:
            setattr(current, name, getattr(current, name) + moved)
            setattr(total, name, getattr(total, name) - undone)
        if content["running"]:
            self._begun = (_epoch(trainer), done)
            self._local |= {"batches": done, "undone": 0}

    def _batches_done(self, trainer: pl.Trainer, processed: int) -> int:
        """Return how many batches of this fit's size were done in the epoch of the checkpoint. If the samples
        that are left make no batch, end the epoch.

        Args:
            processed: How many batches of the earlier fit's size were done, also since the last update.
        """
        assert self._content is not None
        known = [each for each in self._left if each is not None]
        if not known or len(known) < len(self._left):
            done: int = self._content.get("batches", processed)
            return done
        warnings.filterwarnings("ignore", message=LIGHTNINGS_WARNING)
        decides = min if self._content["mode"] == "min_size" else max
        loader, left = decides(known, key=lambda each: len(each[0]))
        done, most = len(loader) - left, drawn_length(loader, trainer.limit_train_batches) or 0
        if done < most:
            return done
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True
        for sampler in (epoch_sampler(loader) for loader, _ in known):
            if sampler is not None:
                sampler.forget()
        return most

    def begin(self, trainer: pl.Trainer) -> None:
        """Begin to note the states of loaders, after the Trainer has passed all loaders to `attach`.

        Raises:
            PiperError: The fit has fewer loaders than the checkpoint.
        """
        if self._content is None:
            self._local = None
        self._trainer = trainer
        loaders, _ = _lightning.train_loaders(trainer)
        if self._content is not None and len(self._left) < len(self._content["loaders"]):
            raise PiperError(
                "the checkpoint has the positions of "
                f"{counted(len(self._content['loaders']), 'training loader')}, but "
                f"this fit has {len(loaders)}. Resume with the same loaders [PIPER-K012]"
            )
        if self._content is not None and not self._content["running"]:
            _lightning.begin_next_epoch(trainer)
        self._content = None
        stateful = [
            each for each in loaders if epoch_sampler(each) is None and isinstance(each, _lightning.Stateful)
        ]
        if stateful:
            # A batch may be drawn before the step of the previous batch, or wait for an update.
            ahead, begun = _lightning.batches_ahead(trainer), _lightning.draws_ahead(trainer)
            self._states = deque([None] * ahead, maxlen=2 + ahead + trainer.accumulate_grad_batches)
            _lightning.before_fetches(trainer, lambda: self._states.append(_states(loaders)))
            for loader in stateful if begun else ():  # even if a state had no batch left
                forget_state(getattr(loader, "dataset", None))

    def remember(self) -> None:
        """Note the positions of this process's loaders, while a fit runs."""
        trainer = self._trainer
        if trainer is None:
            return
        loaders, mode = _lightning.train_loaders(trainer)
        given = _lightning.batches_given(trainer)
        if not given:
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress
        counts: Any = progress.current
        running = counts.processed > 0 and not (progress.is_last_batch and counts.ready == counts.processed)
        epoch, begun = self._begun
        here = counts.processed - (begun if epoch == _epoch(trainer) else 0)
        undone = min(counts.processed % trainer.accumulate_grad_batches, here) if running else 0
        back = _lightning.batches_ahead(trainer) + counts.ready - counts.processed + undone
        states = _states(loaders) if back == 0 or back > len(self._states) else self._states[-back]
        if states is None:
            states = [None] * len(loaders) if self._local is None else self._local["states"]
        if counts.processed > 0 and not running:
            states = [at_epoch_end(*pair) for pair in zip(loaders, states, strict=True)]
        entries = [
            self._entry(loader, None if count is None else count - back, running)
            for loader, count in zip(loaders, given, strict=True)
        ]
        batches = {"batches": counts.processed - undone, "undone": undone} if running else {}
        self._local = {"running": running, **batches, "mode": mode, "loaders": entries, "states": states}

    def _entry(self, loader: Any, given: int | None, running: bool) -> dict[str, Any]:
        sampler = epoch_sampler(loader)
        if sampler is None and isinstance(loader, _lightning.Stateful):
            return _stateful_entry(loader, running)
        if not running:
            return {}
        if sampler is None:
            return {"problem": f"the training loader {type(loader).__name__} does not have a state_dict"}
        if sampler.start is None:
            return {"problem": f"the samples of the {type(sampler.own).__name__} are not integers"}
        if given is None:
            kind = type(loader).__name__
            return {
                "problem": f"Piper cannot count the batches of the training loader {kind}, which has its own __iter__"
            }
        if given < 0:
            return {"problem": "a training loader began a new pass while gradients were accumulated"}
        return sampler.start.after(given, loader.batch_sampler.batch_size, sampler.replicas).content()

    def content(self, world: World) -> dict[str, Any] | None:
        """Return the entry of the loaders for a checkpoint, after `remember`; None if there are none.
        Collective."""
        if self._local is None:
            return None
        content = {**self._local, "loaders": [dict(entry) for entry in self._local["loaders"]]}
        states, entries = content.pop("states"), content["loaders"]
        if any("workers" in entry for entry in entries):
            every = world.gather(states)
            for index, entry in enumerate(entries):
                if "workers" in entry:
                    entry["states"] = [every[rank][index] for rank in world.first_ranks]
        for entry in entries:
            if "problem" in entry:
                self._warn(entry["problem"], world)
        return content

    def _warn(self, problem: str, world: World) -> None:
        if not self._warned:
            world.warn(
                "a checkpoint is in the middle of an epoch, and a fit that resumes from it takes samples of "
                f"this epoch twice or not at all, because {problem}. Save checkpoints at the end of epochs "
                "[PIPER-W029]"
            )
        self._warned = True


def _of(replicas: int, workers: int | None, joint: str) -> str:
    """Return the number of replicas as text, with the number of a loader's workers if the loader has one."""
    return counted(replicas, "replica") + (f"{joint}num_workers={workers}" if workers is not None else "")


def _stateful_entry(loader: Any, running: bool) -> dict[str, Any]:
    """Return the entry of a loader with a state, without the state."""
    dataset: Any = getattr(loader, "dataset", None)
    entry: dict[str, Any] = {"workers": getattr(loader, "num_workers", None)}
    if running and hasattr(dataset, "set_epoch") and isinstance(getattr(dataset, "epoch", None), int):
        entry["epoch"] = dataset.epoch
    if running and has_shuffle_buffer(dataset):
        entry["problem"] = "the samples in the shuffle buffer of the data set are not in the data set's state"
    return entry


def _epoch(trainer: pl.Trainer) -> int:
    current: Any = trainer.fit_loop.epoch_progress.current
    return int(current.processed)


def _alike(entry: Mapping[str, Any], world: World) -> bool:
    """Return whether an entry of a checkpoint has the state of each replica."""
    return len(entry.get("states", ())) == world.count


def _states(loaders: list[Any]) -> list[Any]:
    """Return copies of the states of the loaders whose position only they know. None for other loaders."""
    return [
        copy.deepcopy(each.state_dict())
        if epoch_sampler(each) is None and isinstance(each, _lightning.Stateful)
        else None
        for each in loaders
    ]


def _problem(loader: object, world: World) -> str:
    found = problem_of(loader, world.count) if isinstance(loader, DataLoader) else None
    return found or "it is not a DataLoader"
