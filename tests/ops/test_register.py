"""The table of operations: users' operations are known, and names that are taken or unknown raise an error."""

from __future__ import annotations

import dataclasses
from importlib.metadata import EntryPoint
from typing import Any, ClassVar
from unittest import mock

import pytest

from lightning_piper import ops
from lightning_piper.errors import PiperError, VerificationError
from lightning_piper.ir import Node
from lightning_piper.ops import base
from lightning_piper.ops.order import check, interpret


@pytest.fixture(autouse=True)
def restored() -> Any:
    with mock.patch.dict(base.OPERATIONS), mock.patch.dict(base.BINDERS), mock.patch.dict(base.INSTRUCTIONS):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(Node):
    """A node that no operation handles."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started(ops.Instruction):
    op: ClassVar[str] = "mine"


OPERATION = ops.Operation(Mine, check, interpret, bind={Started: lambda instruction, on: None})


def test_a_registered_operation_is_known() -> None:
    with pytest.raises(
        VerificationError,
        match=r"%-1 mine is a Mine, a kind of node that has no operation. Register an Operation for it",
    ):
        ops.operation_of(Mine())
    ops.register_operation(OPERATION)
    assert ops.operation_of(Mine()) is OPERATION
    assert base.INSTRUCTIONS["mine"] is Started
    ops.register_operation(OPERATION)  # again, as when a module is imported twice


def test_an_installed_package_is_asked() -> None:
    point = EntryPoint("mine", f"{__name__}:OPERATION", ops.ENTRY_POINTS)
    load = mock.patch.object(EntryPoint, "load", lambda self: OPERATION)
    with mock.patch.object(base, "entry_points", lambda group: [point]), load:
        assert ops.operation_of(Mine()) is OPERATION


def test_what_is_taken_is_refused() -> None:
    with pytest.raises(PiperError, match="node Barrier is registered already"):
        ops.register_operation(ops.Operation(ops.Barrier, check, interpret))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Added(ops.Instruction):
        op: ClassVar[str] = "add"

    with pytest.raises(PiperError, match=r"op 'add' is taken by lightning_piper\.ops\.update\.Add"):
        ops.register_operation(
            ops.Operation(Mine, check, interpret, bind={Added: lambda instruction, on: None})
        )

    class Nameless(ops.Instruction):
        pass

    with pytest.raises(PiperError, match="Nameless has no op"):
        ops.register_operation(
            ops.Operation(Mine, check, interpret, bind={Nameless: lambda instruction, on: None})
        )
    assert Mine not in base.OPERATIONS
