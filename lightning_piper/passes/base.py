"""The definition of a pass, and the loop that runs passes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

from lightning_piper.common.limits import shown
from lightning_piper.directives.base import Contract, Directive, error_at, error_of
from lightning_piper.errors import DirectiveError, PiperError, VerificationError
from lightning_piper.ir.dag import TrainingDAG


@dataclass(frozen=True)
class Pass:
    """A rewrite of a DAG.

    Attributes:
        name: Name in reports. A directive's name is its op.
        contract: The contract that the pass keeps, as in `Directive.contract`.
        run: Rewrites the DAG in place. Returns the contract that it kept on this DAG, or None for `contract`.
        directive: The directive that the pass applies, or None for a pass of Piper's own.
        index: Index of this directive, which new nodes and errors carry. None for a pass of Piper's own.
        apart: Whether verification checks the DAG after this pass, or only after a later pass.
        finished: Whether the program is complete after this pass, so that no node may wait for another
            directive.
    """

    name: str
    contract: Contract
    run: Callable[[TrainingDAG], Contract | None]
    index: int | None = None
    apart: bool = True
    finished: bool = False
    directive: Directive | None = None

    @property
    def title(self) -> str:
        return self.name if self.index is None else f"{self.index} {self.name}"


@dataclass(frozen=True)
class Done:
    """A pass that has run.

    Attributes:
        by: The pass.
        contract: The contract that the pass kept on this DAG.
        seconds: The duration of the pass.
    """

    by: Pass
    contract: Contract
    seconds: float


After = Callable[[TrainingDAG, Done], None]  # a hook that gets the DAG after each pass


def run_passes(dag: TrainingDAG, passes: Iterable[Pass], after: After | None = None) -> TrainingDAG:
    """Run passes on `dag` in place, call `after` after each pass, and return `dag`.

    Raises:
        DirectiveError: A directive does not fit. The message names its index, or the degrees for which Piper
            wrote the program.
        VerificationError: `after` raised it. If the pass applies a directive, the message names this
            directive.
    """
    for each in passes:
        # Lightning does not read this clock, so tests that replace Lightning's clocks do not affect it.
        start = time.monotonic_ns()
        with _applying(dag, each):
            contract = each.run(dag)
            if contract is not None and contract not in get_args(Contract):
                accepted = " or ".join(map(repr, get_args(Contract)))
                raise DirectiveError(
                    f"({each.name}): apply returned {shown(contract)}. Return {accepted}, or nothing"
                    " [PIPER-D019]"
                )
        done = Done(each, contract or each.contract, (time.monotonic_ns() - start) / 1e9)
        if after is None:
            continue
        try:
            after(dag, done)
        except VerificationError as error:
            if each.index is None:
                raise
            # `after` accepted the DAG before this pass, so the directive of this pass is the cause.
            raise VerificationError(f"after directive {each.index} ({each.name}), {error}") from None
    return dag


@contextlib.contextmanager
def _applying(dag: TrainingDAG, each: Pass) -> Iterator[None]:
    """Name the directive of this pass, if any, as the cause of new nodes and errors inside the block."""
    dag.program.index = each.index
    try:
        yield
    except DirectiveError as error:
        if each.index is not None:
            raise error_at(each.index, each.directive, error) from None
        if (degrees := dag.program.degrees) is None:
            raise
        raise error_of(degrees, str(error)) from None
    except PiperError:
        raise
    except Exception as error:
        if each.index is not None:
            error.add_note(f"raised while Piper applied directive {each.index} ({each.name})")
        raise
    finally:
        dag.program.index = None
