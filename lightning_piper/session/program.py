"""Where a strategy's directives come from: its argument, else the environment, else the module."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_piper.directives import Directive, parse
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


def for_fit(given: list[Directive] | None, module: nn.Module, say: Callable[[str], None]) -> list[Directive]:
    """The directives of a fit: what `given_or_from_environment` found, else those that the module brings along.

    A module's own are a default, so that a configuration can give others; that it does is said once.

    Args:
        say: tells the user.

    Raises:
        DirectiveError: there are none, or they are malformed.
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
        raise DirectiveError(
            f"PiperStrategy has no directives. Give PiperStrategy(directives=[...]), or give {name} an attribute or method "
            f"{ATTRIBUTE!r}, or name a JSON file by the environment variable {VARIABLE}"
        )
    return _parsed(found, f"{name}.{ATTRIBUTE}")


def _parsed(source: Any, where: str) -> list[Directive]:
    try:
        return parse(source)
    except DirectiveError as error:
        raise DirectiveError(f"{where}: {error}") from None
