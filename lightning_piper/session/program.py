"""Where a strategy's directives come from: its argument, else the environment, else the module; else it is data parallel."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_piper.directives import Directive, Place, Replicate, parse
from lightning_piper.errors import DirectiveError

VARIABLE = "PIPER_DIRECTIVES"
ATTRIBUTE = "piper_directives"


def given_or_from_environment(directives: Any | None) -> list[Directive] | None:
    """The directives given to the strategy, else those of the file that the environment variable names; None if neither is there.

    Raises:
        DirectiveError: they are malformed.
    """
    if directives is not None:
        return parse(directives)
    path = os.environ.get(VARIABLE)
    return _parsed(path, f"environment variable {VARIABLE}") if path else None


def for_fit(given: list[Directive] | None, module: nn.Module, devices: int, say: Callable[[str], None]) -> list[Directive]:
    """The directives of a fit: what `given_or_from_environment` found, else those that the module brings along, else data
    parallelism.

    A module's own are a default, so that a configuration can give others; that it does is said once.

    Args:
        devices: of which each is a replica, if nobody says anything.
        say: tells the user.

    Raises:
        DirectiveError: they are malformed.
    """
    name = type(module).__name__
    found = getattr(module, ATTRIBUTE, None)
    if given is not None:
        if found is not None:
            first = f"those of the strategy, or of {VARIABLE}, come first"
            say(f"PiperStrategy: the {ATTRIBUTE} of {name} are not used; {first}")
        return given
    if callable(found):
        found = found()
    if found is None:
        say(
            f"PiperStrategy has no directives: data parallelism over {devices} device(s). Others come from "
            f"PiperStrategy(directives=[...]), {name}.{ATTRIBUTE}, or a JSON file that {VARIABLE} names"
        )
        everywhere = list(range(devices))
        replicas = [Replicate(filter={}, devices=everywhere)] if devices > 1 else []
        return [Place(filter={}, devices=everywhere), *replicas]
    return _parsed(found, f"{name}.{ATTRIBUTE}")


def _parsed(source: Any, where: str) -> list[Directive]:
    try:
        return parse(source)
    except DirectiveError as error:
        raise DirectiveError(f"{where}: {error}") from None
