"""What a pass is, and the one loop that runs passes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from lightning_piper.directives.base import Contract
from lightning_piper.errors import DirectiveError, PiperError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.limits import shown


@dataclass(frozen=True)
class Pass:
    """One rewrite of a DAG.

    Attributes:
        name: for reports; of a directive, its op.
        contract: what it keeps, as in `Directive.contract`.
        run: rewrites the DAG in place. Returns the contract that it kept on this DAG, or None for `contract`.
        index: of the directive that it applies. What the pass adds carries it, and errors name it. None: it is the package's own.
        apart: it is judged by itself; otherwise together with the pass after it.
        finished: after it the program is complete, and nothing may wait for another directive.
    """

    name: str
    contract: Contract
    run: Callable[[TrainingDAG], Contract | None]
    index: int | None = None
    apart: bool = True
    finished: bool = False

    @property
    def title(self) -> str:
        return self.name if self.index is None else f"{self.index} {self.name}"


@dataclass(frozen=True)
class Done:
    """A pass that has run.

    Attributes:
        contract: the one that it kept on this DAG.
        seconds: that it took.
    """

    by: Pass
    contract: Contract
    seconds: float


After = Callable[[TrainingDAG, Done], None]


def run_passes(dag: TrainingDAG, passes: Iterable[Pass], after: After | None = None) -> TrainingDAG:
    """Run passes on `dag`, in place, and return it. `after` is called after each one.

    Raises:
        DirectiveError: a directive does not fit; names its index.
        VerificationError: `after` raises it; names the directive that was applied last.
    """
    for each in passes:
        start = time.monotonic_ns()  # not one of the clocks that Lightning asks, which tests replace
        with _applying(dag, each):
            contract = each.run(dag)
            if contract is not None and contract not in get_args(Contract):
                accepted = " or ".join(map(repr, get_args(Contract)))
                raise DirectiveError(f"({each.name}): apply returned {shown(contract)}; return {accepted}, or nothing")
        done = Done(each, contract or each.contract, (time.monotonic_ns() - start) / 1e9)
        if after is None:
            continue
        try:
            after(dag, done)
        except VerificationError as error:
            if each.index is None:
                raise
            # All was well before: it is this directive's doing.
            raise VerificationError(f"after directive {each.index} ({each.name}), {error}") from None
    return dag


@contextlib.contextmanager
def _applying(dag: TrainingDAG, each: Pass) -> Iterator[None]:
    """What is done to `dag` meanwhile is done by the directive of this pass, if it has one."""
    dag.program.index = each.index
    try:
        yield
    except DirectiveError as error:
        if each.index is None:
            raise
        raise DirectiveError(f"directive {each.index} {error}") from None
    except PiperError:
        raise
    except Exception as error:
        if each.index is not None:
            error.add_note(f"raised while directive {each.index} ({each.name}) was applied")
        raise
    finally:
        dag.program.index = None
