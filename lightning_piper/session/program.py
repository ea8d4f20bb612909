"""Where a strategy's directives come from: its argument, else the environment, else the module; else it is data parallel."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_piper.directives import Directive, Place, Replicate, parse
from lightning_piper.directives.program import Annotations, annotations_of
from lightning_piper.errors import DirectiveError

AUTO = "auto"  # in the place of directives: a search finds them, at the first batch of a fit
VARIABLE = "PIPER_DIRECTIVES"
ATTRIBUTE = "piper_directives"
SHOWN = 300  # characters of a program in an error


def given_or_from_environment(directives: Any | None) -> list[Directive] | None:
    """The directives given to the strategy, else those of the file that the environment variable names; None if neither is there.

    Raises:
        DirectiveError: they are malformed.
    """
    if directives is not None and not (isinstance(directives, str) and directives == AUTO):
        return parse(directives)
    path = os.environ.get(VARIABLE)
    return _parsed(path, f"environment variable {VARIABLE}") if path and path != AUTO else None


def annotations_given(directives: Any | None) -> Annotations:
    """What the program that `given_or_from_environment` finds says of the module."""
    if directives is not None and not (isinstance(directives, str) and directives == AUTO):
        return annotations_of(directives)
    path = os.environ.get(VARIABLE)
    return annotations_of(path) if path and path != AUTO else {}


def is_searched(directives: Any | None, module: nn.Module) -> bool:
    """Is a search to find the directives, because nobody else gives any?"""
    if given_or_from_environment(directives) is not None:
        return False
    own = _own(module)
    return AUTO in (directives, os.environ.get(VARIABLE)) if own is None else isinstance(own, str) and own == AUTO


def for_fit(
    given: list[Directive] | None, module: nn.Module, devices: int, say: Callable[[str], None], searched: bool = False
) -> list[Directive]:
    """The directives of a fit: what `given_or_from_environment` found, else those that the module brings along, else data
    parallelism.

    A module's own are a default, so that a configuration can give others; that it does is said once.

    Args:
        devices: of which each is a replica, if nobody says anything.
        say: tells the user.
        searched: others may take their place at the first batch.

    Raises:
        DirectiveError: they are malformed.
    """
    name = type(module).__name__
    if given is not None:
        if getattr(module, ATTRIBUTE, None) is not None:
            first = f"those of the strategy, or of {VARIABLE}, come first"
            say(f"PiperStrategy: the {ATTRIBUTE} of {name} are not used; {first}")
        return given
    found = _own(module)
    if found is not None and found != AUTO:
        return _parsed(found, f"{name}.{ATTRIBUTE}")
    if not searched:
        say(
            f"PiperStrategy has no directives: data parallelism over {devices} device(s). Others come from "
            f"PiperStrategy(directives=[...]), {name}.{ATTRIBUTE}, a JSON file that {VARIABLE} names, or PiperStrategy({AUTO!r})"
        )
    everywhere = list(range(devices))
    replicas = [Replicate(filter={}, devices=everywhere)] if devices > 1 else []
    return [Place(filter={}, devices=everywhere), *replicas]


def annotations_for_fit(given: list[Directive] | None, annotations: Annotations, module: nn.Module) -> Annotations:
    """Of the program that `for_fit` chooses.

    Args:
        given: what `given_or_from_environment` found.
        annotations: those of this.
    """
    found = _own(module) if given is None else None
    return annotations if found is None or (isinstance(found, str) and found == AUTO) else annotations_of(found)


def told(program: Sequence[Directive], annotations: Annotations, searched: bool) -> str:
    """What a process was told to run, to be compared with what others were, and shown."""
    given = [directive.to_json() for directive in program]
    text = json.dumps([given, annotations] if annotations else given, skipkeys=True, default=lambda x: type(x).__qualname__)
    if len(text) > SHOWN:
        mark = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
        text = f"{text[:SHOWN]}... ({len(program)} directives, checksum {mark})"
    return f"what a search finds, or {text}" if searched else text


def _own(module: nn.Module) -> Any:
    """What a module says of its directives."""
    found = getattr(module, ATTRIBUTE, None)
    return found() if callable(found) else found


def _parsed(source: Any, where: str) -> list[Directive]:
    try:
        return parse(source)
    except DirectiveError as error:
        raise DirectiveError(f"{where}: {error}") from None
