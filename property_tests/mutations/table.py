"""What a seeded bug is, and the table of all of them.

A mutation is a small named patch of behavior: a function of the package is replaced by one that does
something wrong. The patched function tells the `Seeded` it was given each time it really does wrong, so that
a mutation that never bites is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

Where = Literal["rewrite", "plan", "executor", "strategy-like"]
Function = Callable[..., Any]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Seeded:
    """Counts how often a mutation did something wrong."""

    def __init__(self) -> None:
        self.hits = 0

    def hit(self) -> None:
        self.hits += 1


Wrap = Callable[[Function, Seeded], Any]  # the original function, and whom to tell -> the wrong one


@dataclass(frozen=True)
class Mutation:
    """Attributes:
    name: for the table. what: the bug in a sentence. where: `rewrite` (capture, DAG, directives), `plan`,
    `executor`, or `strategy-like`: what whoever drives executors may do wrong. patch: seeds the bug while the
    context is open. scenario: the one to show it on; None: the first one in which it bites. recapture: it
    changes how the step is captured, so captures cannot be shared. processes: only real processes have the
    code that it changes.
    """

    name: str
    what: str
    where: Where
    patch: Callable[[], contextlib.AbstractContextManager[Seeded]]
    scenario: str | None = None
    recapture: bool = False
    processes: bool = False


TABLE: dict[str, Mutation] = {}


def mutation(
    name: str,
    what: str,
    where: Where,
    *targets: tuple[Any, Any],
    scenario: str | None = None,
    recapture: bool = False,
    processes: bool = False,
) -> Callable[[Wrap], Wrap]:
    """Decorator: enter into the table the bug of replacing each target, (module or class, name) or (table,
    key), by what the function makes.
    """

    def enter(wrap: Wrap) -> Wrap:
        @contextlib.contextmanager
        def patch() -> Iterator[Seeded]:
            seeded = Seeded()
            with contextlib.ExitStack() as stack:
                for owner, attribute in targets:
                    original = owner[attribute] if isinstance(owner, dict) else getattr(owner, attribute)
                    wrong = wrap(original, seeded)
                    if inspect.isfunction(original) and inspect.isfunction(wrong):
                        _check_arguments(name, original, wrong)
                    if not isinstance(original, type):
                        functools.update_wrapper(wrong, original)
                    if isinstance(owner, dict):
                        stack.enter_context(mock.patch.dict(owner, {attribute: wrong}))
                    else:
                        stack.enter_context(mock.patch.object(owner, attribute, wrong))
                yield seeded

        assert name not in TABLE, f"two mutations are called {name!r}"
        TABLE[name] = Mutation(name, what, where, patch, scenario, recapture, processes)
        return wrap

    return enter


def _check_arguments(name: str, original: Function, wrong: Function) -> None:
    """Check that a wrong function accepts the arguments of the original, so that it does wrong and does not
    merely fail.
    """
    taken = inspect.signature(wrong, follow_wrapped=False)
    named = {n: x for n, x in inspect.signature(original).parameters.items() if x.kind not in _VARIADIC}
    kinds = [x.kind for x in taken.parameters.values()]
    count = len(named) if inspect.Parameter.VAR_POSITIONAL in kinds else sum(k in _POSITIONAL for k in kinds)
    first = [n for n in list(named)[:count] if named[n].kind in _POSITIONAL]
    try:
        taken.bind(*first, **{n: None for n in named if n not in first})
    except TypeError as error:
        raise AssertionError(
            f"the function of mutation {name!r} does not accept the arguments of {original.__qualname__}: {error}"
        ) from None
