"""The names of arguments and fields, and the nearest name to a misspelled one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from lightning_piper.errors import DirectiveError

P = ParamSpec("P")
R = TypeVar("R")

# The least similarity of a name to an unknown name at which an error suggests it (0 to 1, by difflib).
SIMILAR = 0.5


def unknown(name: object, accepted: Iterable[str]) -> str:
    """Return what an error says about an unknown name: the accepted names, and the nearest of them if it is
    similar. An example is "unknown. Give one of filter, devices. Did you mean 'devices'?"."""
    names = list(dict.fromkeys(accepted))
    return f"unknown. Give one of {', '.join(names)}{did_you_mean(str(name), names)}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the most similar of some names, such as ". Did you mean 'devices'?". Upper and
    lower case count as equal. Empty if no name is similar."""
    known = {each.casefold(): each for each in names}
    near = difflib.get_close_matches(name.casefold(), known, 1, SIMILAR)
    return f". Did you mean {known[near[0]]!r}?" if near else ""


def problem_of(function: Callable[..., Any], given: Iterable[str]) -> str | None:
    """Return the text of an error for the first keyword argument in `given` that a function or class does not
    have.

    Return None if the function or class has all of these arguments, or accepts any keyword argument.
    """
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    name = next((name for name in given if name not in parameters), None)
    return (
        None
        if name is None
        else f"{function.__name__}({name}=...): the argument is {unknown(name, parameters)}"
    )


def checks_names(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function to name the accepted arguments if a keyword argument is misspelled.

    The decorated function raises a DirectiveError.
    """

    @functools.wraps(function)
    def checked(*args: P.args, **arguments: P.kwargs) -> R:
        if (problem := problem_of(function, arguments)) is not None:
            raise DirectiveError(f"{problem} [PIPER-D002]")
        return function(*args, **arguments)

    return checked
