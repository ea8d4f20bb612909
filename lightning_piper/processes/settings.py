"""The settings of a process that decide how it trains, as text. The processes compare them, because they must
be equal on all processes."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_piper.errors import PiperError

# The settings that must be equal on all processes, even if each process has all parameters
# and updates its own copy of them.
_CLASS, _FACTOR = _SAME = (
    "the class of the optimizer",
    "the factor with which backward multiplied the last loss",
)
_PLAIN = (bool, int, float, str, type(None))
Settings = tuple[tuple[str, str], ...]  # (setting, its value)


def settings_of(optimizer: Optimizer, factor: float | None, read: bool = True) -> Settings:
    """Return the optimizer's class, its defaults, the options of its parameter groups, and the factor that
    `backward` applied to the last loss.

    Args:
        factor: The factor that `backward` applied; None if `backward` did not run.
        read: Whether to read numbers in GPU tensors, which makes the host wait. If not, the result does not
            have them.
    """
    found = [(_CLASS, f"{type(optimizer).__module__}.{type(optimizer).__qualname__}")]
    found += [(f"the optimizer's default {key!r}", x) for key, x in _plain(optimizer.defaults, read)]
    for number, group in enumerate(optimizer.param_groups):
        found += [
            (f"{key!r} of the optimizer's parameter group {number}", x) for key, x in _plain(group, read)
        ]
    return (*found, (_FACTOR, repr(factor)))


class Watched:
    """A cache of `settings_of` for one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._found: tuple[str, Settings] = ("", ())
        # the factor of the last call as text, and its options; without options if one of them may change in place
        self._factor, self._objects = "", list[Any]()

    def __call__(self, factor: float | None, read: bool = True) -> Settings:
        """Return `settings_of` the optimizer. If nothing has changed, return the object of the last call.

        If an option is a tensor, the settings are computed in each call.
        """
        objects, text = [x for options in self._options() for x in options.values()], repr(factor)
        unchanged = text == self._factor and len(objects) == len(self._objects)
        if unchanged and all(map(is_, objects, self._objects)):
            return self._found[1]
        values = [x for options in self._options() for key, x in options.items() if key not in _NAMES]
        fixed = all(isinstance(y, _PLAIN) for x in values for y in (x if isinstance(x, tuple) else (x,)))
        self._objects, self._factor = objects if fixed else [], text
        if any(isinstance(x, torch.Tensor) for x in values):
            # The text of a tensor does not show every element and digit.
            return settings_of(self._optimizer, factor, read)
        now = repr((values, factor))
        if self._found[0] != now:
            self._found = (now, settings_of(self._optimizer, factor, read))
        return self._found[1]

    def _options(self) -> list[dict[str, Any]]:
        return [self._optimizer.defaults, *self._optimizer.param_groups]


_NAMES = ("params", "param_names")


def _plain(options: dict[str, Any], read: bool) -> list[tuple[str, str]]:
    """Return pairs of an option's name and its value as text, by name. The values are numbers, strings, None,
    lists or tuples of these, and tensors of one number. Other options are left out."""
    found = {
        k: x
        for k, x in options.items()
        if all(isinstance(y, _PLAIN) for y in (x if isinstance(x, list | tuple) else [x]))
    }
    for key, x in options.items():
        if isinstance(x, torch.Tensor) and x.numel() == 1 and (read or x.device.type == "cpu"):
            found[key] = x.item()
    return [(key, repr(found[key])) for key in sorted(found) if key not in _NAMES]


def check_alike(by_rank: list[Settings], apart: bool = False) -> str | None:
    """Check that the settings of all ranks are equal.

    Args:
        by_rank: The settings of each rank.
        apart: Whether options of the optimizer may differ, because each process has all parameters and
            updates its own copy.

    Returns:
        A description of the first option that differs; None if all options are equal.

    Raises:
        PiperError: A setting that must be equal differs; the error names it and two ranks.
    """
    first, text = dict(by_rank[0]), None
    for rank, settings in enumerate(by_rank):
        own = dict(settings)
        for what in (*first, *own):
            if (one := first.get(what, "absent")) == (other := own.get(what, "absent")):
                continue
            text = text or f"{what} is {one} on rank 0, and {other} on rank {rank}"
            if not apart or what in _SAME:
                raise PiperError(
                    f"PiperStrategy: {what} is {one} on rank 0, and {other} on rank {rank}, but it must be "
                    "the same on all processes. Give it one value [PIPER-L003]"
                )
    return text


def always_alike(settings: Settings) -> Settings:
    """Return the settings that must be equal in every case."""
    return tuple((what, value) for what, value in settings if what in _SAME)
