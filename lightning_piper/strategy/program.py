"""Where a strategy's directives come from."""

from __future__ import annotations

import os
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
    return parse(path) if path else None


def from_module(module: nn.Module) -> list[Directive]:
    """The directives that a module brings along: its attribute, or its method without arguments.

    Raises:
        DirectiveError: there are none, or they are malformed.
    """
    found = getattr(module, ATTRIBUTE, None)
    if callable(found):
        found = found()
    if found is None:
        raise DirectiveError(
            f"PiperStrategy has no directives. Give PiperStrategy(directives=[...]), or an attribute or method {ATTRIBUTE!r} of "
            f"{type(module).__name__}, or in a JSON file that the environment variable {VARIABLE} names"
        )
    return parse(found)
