"""A user's own directive: registered once, usable from Python and JSON, and checked against its contract like
Piper's directives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, get_type_hints

import pytest

from lightning_piper.directives import Directive, base, known, parse, register, to_json
from lightning_piper.directives.base import Contract
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from lightning_piper.verify import verify_step
from tests.models import captured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rename(Directive):
    """A directive that gives the chunks of a filter another stream, or (a bug that the checks must find) the
    wrong samples.
    """

    op: ClassVar[str] = "rename_stream"
    contract: ClassVar[Contract] = "bitwise"

    filter: Filter
    stream: str = "side"

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)

    def apply(self, dag: TrainingDAG) -> None:
        for chunk in self.select(dag, "filter", self.filter):
            dag.change(chunk, stream=self.stream)


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(base, "_registry", dict(known()))
    yield


def test_a_registered_directive_is_read_applied_and_verified() -> None:
    assert register(Rename) is Rename and known()["rename_stream"] is Rename
    program = parse([{"op": "rename_stream", "filter": {"PP": 1}}])
    assert program == [Rename(filter={"PP": 1})]
    assert to_json(program) == [{"op": "rename_stream", "filter": {"PP": 1}}]
    dag = apply_program(build_dag(captured("mlp").step), program)
    assert {chunk.label: chunk.stream for chunk in dag.of_type(Chunk)} == {
        "F[PP=0]": "compute", "F[PP=1]": "side", "B[PP=1]": "side", "B[PP=0]": "compute"
    }  # fmt: skip
    report = verify_step(captured("mlp").step, captured("mlp").module, captured("mlp").batch, program)
    assert report.ok and [row.name for row in report.rows] == [
        "capture",
        "rename_stream",
        "eliminate communication",
    ]
    assert {row.contract for row in report.rows} == {"bitwise"}


def test_an_unregistered_directive_works_from_python_only() -> None:
    assert parse([Rename(filter={})]) == [Rename(filter={})]
    with pytest.raises(DirectiveError, match=r"'rename_stream'.*unknown"):
        parse([{"op": "rename_stream", "filter": {}}])


def test_its_errors_carry_its_name_and_index() -> None:
    with pytest.raises(
        DirectiveError, match=r"directive 0 \(rename_stream\): field 'filter': {PP: 9} matches nothing. "
    ):
        apply_program(build_dag(captured("mlp").step), [Rename(filter={"PP": 9})])


def test_an_op_belongs_to_one_class() -> None:
    class Place(Rename):
        op = "place"

    with pytest.raises(
        DirectiveError,
        match=r"op 'place' is taken by lightning_piper.directives.place.Place. Choose another name",
    ):
        register(Place)
    register(Rename)
    register(Rename)  # the same class again, as a reloaded module does it


def test_a_directive_needs_an_op_and_a_contract() -> None:
    class Nameless(Rename):
        op = ""

    class Careless(Rename):
        op, contract = "careless", "whatever"  # type: ignore[assignment]

    with pytest.raises(DirectiveError, match=r"Nameless has no op. Give it a class attribute op = 'name'"):
        register(Nameless)
    with pytest.raises(
        DirectiveError,
        match=r"Careless has the contract 'whatever'. Give it contract = 'bitwise', 'reassociated', 'bounded' or 'rounded'",
    ):
        register(Careless)


def test_an_entry_point_makes_a_directive_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "rename_stream"

        def load(self) -> type[Directive]:
            return Rename

    asked: list[str] = []
    monkeypatch.setattr(base, "entry_points", lambda group: (asked.append(group), [Point()])[1])
    assert parse([{"op": "rename_stream", "filter": {}}]) == [Rename(filter={})]
    assert set(asked) == {"lightning_piper.directives"}


@pytest.mark.parametrize("cls", [*known().values()], ids=lambda cls: cls.__name__)
def test_the_types_of_the_fields_of_a_directive_can_be_read(cls: Any) -> None:
    """`LightningCLI` reads them. A field may be inherited from a class of another module."""
    types = get_type_hints(cls.__init__)
    assert types.keys() >= {each.name for each in dataclasses.fields(cls)}
    assert not any(isinstance(each, str) for each in types.values())


def test_a_type_that_only_a_type_checker_knows_does_not_matter() -> None:
    namespace: dict[str, Any] = {"op": "unknown_type", "contract": "bitwise", "apply": lambda self, dag: None}
    made = dataclasses.make_dataclass(
        "Unknown", [("n", "Missing")], bases=(Directive,), namespace=namespace, frozen=True
    )
    assert known()[register(made).op] is made
    with pytest.raises(NameError):
        get_type_hints(made.__init__)
