"""The arguments of `search`."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from lightning_piper.common import argument_names
from lightning_piper.common.limits import shown
from lightning_piper.errors import SearchError
from lightning_piper.search.best_candidate import check_asked
from lightning_piper.search.space import bytes_of
from lightning_piper.simulate.hardware import Hardware

OPTIONS = ("schedules", "levels", "ranks", "margin", "gap", "budget")  # arguments that `best_of` takes
# All keyword arguments of `search`.
ARGUMENTS = (
    "memory",
    "hardware",
    "objective",
    "workload",
    "check",
    "all_devices",
    "progress",
    "cut",
    *OPTIONS,
)


def check_arguments(
    devices: int, objective: str, check: object, memory: Any, hardware: object, options: Mapping[str, Any]
) -> None:
    """Check the arguments of `search` before its slow part: tracing and measuring the model.

    Raises:
        SearchError: An argument is not valid.
    """
    if check not in ("static", "run", "off"):
        raise SearchError(
            f"search: check={shown(check)} is not usable. Give 'static', 'run' or 'off' [PIPER-P001]"
        )
    if name := min(options.keys() - OPTIONS, default=None):
        raise SearchError(
            f"search({name}=...): the argument is {argument_names.unknown(name, ARGUMENTS)} [PIPER-P001]"
        )
    check_asked(devices, objective, **options)
    if memory is not None:
        bytes_of(memory)
    if not isinstance(hardware, Hardware | str | PathLike | None):
        raise SearchError(
            f"search: hardware={shown(hardware)} is not usable. Give a Hardware, a name, or the path of a JSON file"
            " [PIPER-P001]"
        )


def hardware_of(given: Hardware | str | PathLike[str] | None) -> Hardware:
    """Return the hardware that the argument of `search` names. If it is None, measure this machine."""
    if given is None:
        return Hardware.measure()
    return given if isinstance(given, Hardware) else Hardware.read(given)
