"""Files that `ModelCheckpoint` wrote or removed after the copies from which a fit continues. The fit writes the files
of this time again, and does not count on those removed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_piper.common.lightning_packages import is_a


class WrittenFiles:
    """The files that all `ModelCheckpoint` callbacks of a run write. Rank 0 needs them, and it is never lost.

    A `ModelCheckpoint` does not write over a file that it does not know: it adds a version to the name. If a fit
    continues, the callback has its state from the copies, and knows no later files. They do not exist for it.
    """

    def __init__(self) -> None:
        self._batches: dict[
            str, int
        ] = {}  # file -> number of batches done before its last write, in all epochs
        self._again: set[str] = set()  # files that the fit writes again

    def watch(self, trainer: pl.Trainer, continues: bool) -> Callable[[], object]:
        """Watch the callbacks of a fit that begins. Return a function after which this ends.

        Args:
            continues: Whether the fit continues from copies.
        """
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        self._again = {
            path for path, done in self._batches.items() if continues and done > batches.total.ready
        }
        callbacks = [each for each in trainer.checkpoint_callbacks if is_a(each, ModelCheckpoint)]
        for each in callbacks:
            if continues:
                _forget_removed(each, trainer)
            vars(each)["file_exists"] = partial(self._exists, each.file_exists)

        def end() -> None:
            for each in callbacks:
                vars(each).pop("file_exists")

        return end

    def _exists(self, exists: Callable[..., bool], file: str | PathLike[str], trainer: pl.Trainer) -> bool:
        """Return whether a file exists for a callback. If it does not, the callback writes it now. Collective."""
        path = str(file)
        if exists(file, trainer):
            again = trainer.is_global_zero and path in self._again
            if not trainer.strategy.reduce_boolean_decision(again, all=False):
                return True
        self._again.discard(path)
        batches: Any = trainer.fit_loop.epoch_loop.batch_progress
        self._batches[path] = batches.total.ready
        return False


def _forget_removed(callback: ModelCheckpoint, trainer: pl.Trainer) -> None:
    """Remove files that exist no longer from the best ones of a callback, whose state comes from copies. A fit on fewer
    devices may not save again the better ones for which they were removed. Collective."""
    best = {
        path: score for path, score in callback.best_k_models.items() if callback.file_exists(path, trainer)
    }
    if len(best) < len(callback.best_k_models):
        choose = max if callback.mode == "max" else min
        callback.best_k_models = best
        callback.best_model_path = choose(best, key=best.__getitem__, default="")
        callback.best_model_score = best.get(callback.best_model_path)
