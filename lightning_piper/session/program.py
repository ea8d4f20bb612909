"""The source of a strategy's directives.

The strategy's argument takes precedence over the environment variable, and the variable over the module's own
directives. If none of the three gives directives, Piper uses data parallelism.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_piper.common.units import counted
from lightning_piper.directives import Directive, Place, Replicate, parse
from lightning_piper.directives.base import set_degrees
from lightning_piper.directives.program import Annotations, annotations_of
from lightning_piper.errors import DirectiveError

# The value instead of directives that lets a search find the directives at the first batch of a fit.
AUTO = "auto"
VARIABLE = "PIPER_DIRECTIVES"
ATTRIBUTE = "piper_directives"
SHOWN = 300  # largest number of characters of a program in an error


def given_or_from_environment(directives: Any | None) -> list[Directive] | None:
    """Return the directives passed to the strategy. If none were passed, return the directives in the file
    that the environment variable names. None if the variable is not set either, or is "auto".

    Raises:
        DirectiveError: The directives are malformed.
    """
    if directives is not None and not (isinstance(directives, str) and directives == AUTO):
        return parse(directives)
    path = os.environ.get(VARIABLE)
    return _parsed(path, f"environment variable {VARIABLE}") if path and path != AUTO else None


def annotations_given(directives: Any | None) -> Annotations:
    """Return the module annotations of the program that `given_or_from_environment` finds. Empty if that
    function finds no program, or if the program has no annotations."""
    if directives is not None and not (isinstance(directives, str) and directives == AUTO):
        return annotations_of(directives)
    path = os.environ.get(VARIABLE)
    return annotations_of(path) if path and path != AUTO else {}


def is_searched(directives: Any | None, module: nn.Module) -> bool:
    """Return whether a search must find the directives: a source says "auto", and no source gives
    directives."""
    if given_or_from_environment(directives) is not None:
        return False
    own = _own(module)
    return (
        AUTO in (directives, os.environ.get(VARIABLE))
        if own is None
        else isinstance(own, str) and own == AUTO
    )


def is_data_parallel(directives: Any | None, module: nn.Module) -> bool:
    """Return whether no source gives directives or says "auto", so that each device is a replica."""
    given = given_or_from_environment(directives)
    return given is None and _own(module) is None and not is_searched(directives, module)


def for_fit(
    given: list[Directive] | None,
    module: nn.Module,
    devices: int,
    say: Callable[[str], None],
    searched: bool = False,
) -> list[Directive]:
    """Return the directives of a fit: the given directives, or the module's own directives, or data
    parallelism, in this order of precedence.

    If the given directives override the module's own directives, the user gets a message.

    Args:
        given: The result of `given_or_from_environment`.
        devices: Number of devices; without directives, each is a replica.
        say: Shows a message to the user.
        searched: Whether a search may replace the directives at the first batch.

    Raises:
        DirectiveError: The directives are malformed.
    """
    name = type(module).__name__
    if given is not None:
        if getattr(module, ATTRIBUTE, None) is not None:
            first = f"the directives of the strategy or of {VARIABLE} take precedence"
            say(f"PiperStrategy ignores {ATTRIBUTE} of {name}: {first}")
        return given
    found = _own(module)
    if found is not None and found != AUTO:
        return _parsed(found, f"{name}.{ATTRIBUTE}")
    if not searched:
        say(
            f"PiperStrategy has no directives, so it uses data parallelism over {counted(devices, 'device')}. To give "
            f"directives, use PiperStrategy(directives=[...]), {name}.{ATTRIBUTE}, or a JSON file that "
            f"{VARIABLE} names. PiperStrategy({AUTO!r}) searches for a program"
        )
    everywhere = list(range(devices))
    replicas = [Replicate(filter={}, devices=everywhere)] if devices > 1 else []
    written: list[Directive] = [Place(filter={}, devices=everywhere), *replicas]
    for directive in written:
        set_degrees(directive, repr(AUTO) if searched else "")
    return written


def annotations_for_fit(
    given: list[Directive] | None, annotations: Annotations, module: nn.Module
) -> Annotations:
    """Return the module annotations of the program that `for_fit` chooses.

    Args:
        given: The result of `given_or_from_environment`.
        annotations: The annotations of the given program.
    """
    found = _own(module) if given is None else None
    return (
        annotations if found is None or (isinstance(found, str) and found == AUTO) else annotations_of(found)
    )


def told(program: Sequence[Directive], annotations: Annotations, searched: bool) -> str:
    """Return this process's program as text, to compare across ranks and to show in errors. A long text ends
    with a checksum instead of the last directives. With `searched`, the text says that a search may replace
    the program."""
    given = [directive.to_json() for directive in program]
    text = json.dumps(
        [given, annotations] if annotations else given, skipkeys=True, default=lambda x: type(x).__qualname__
    )
    if len(text) > SHOWN:
        mark = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[:SHOWN]}... ({len(program)} directives, checksum {mark})"
    return f"a program from a search, or {text}" if searched else text


def _own(module: nn.Module) -> Any:
    """Return the module's own directives in the form that the module gives; None without directives."""
    found = getattr(module, ATTRIBUTE, None)
    return found() if callable(found) else found


def _parsed(source: Any, where: str) -> list[Directive]:
    try:
        return parse(source)
    except DirectiveError as error:
        error.args = (f"{where}: {error}",)  # Re-raising the same error keeps its notes.
        raise
