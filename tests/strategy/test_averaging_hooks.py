"""The hooks of callbacks that average the weights are the user's again after a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_piper.strategy.compatibility import Averages

HOOK = "on_train_batch_end"


def averages(callback: Any) -> Averages:
    trainer: Any = SimpleNamespace(callbacks=[callback])
    return Averages(trainer, lambda: False)


def test_hooks_of_the_instance_are_restored() -> None:
    callback, calls = EMAWeightAveraging(), []
    own = calls.append
    vars(callback)[HOOK] = own
    found = averages(callback)
    assert vars(callback)[HOOK] is not own
    callback.on_train_batch_end(1)  # type: ignore[call-arg, arg-type]
    found.release()
    assert vars(callback)[HOOK] is own and calls == [1]


def test_a_hook_set_during_the_run_stays() -> None:
    callback = EMAWeightAveraging()
    found = averages(callback)
    own = vars(callback)[HOOK] = print
    found.release()
    assert vars(callback)[HOOK] is own


def test_hooks_of_the_class_alone_leave_nothing() -> None:
    """A control: without the user's hooks, the instance has none during and after the run."""
    callback = EMAWeightAveraging()
    before = dict(vars(callback))
    found = averages(callback)
    assert HOOK in vars(callback)
    found.release()
    assert vars(callback) == before
