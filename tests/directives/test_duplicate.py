"""A chunk that runs twice: a forward pass runs again before its backward pass, as recomputation needs it.

tests/examples tests a directive that does this with `directive_suite`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest

from lightning_piper import verify
from lightning_piper.directives import Directive, Replicate, parse
from lightning_piper.directives.base import Contract
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Slice
from lightning_piper.schedules import gpipe
from lightning_piper.testing import POOL, case, check_program, suite
from lightning_piper.verify import hook
from tests.dags import build, chunk, place, split
from tests.models import captured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again(Directive):
    """A directive that runs each forward pass once more for its backward pass. With `lame`, the second
    forward pass is of another microbatch.
    """

    op: ClassVar[str] = "again"
    contract: ClassVar[Contract] = "bitwise"
    lame: bool = False

    def apply(self, dag: TrainingDAG) -> None:
        copies: dict[int, Chunk] = {}
        for backward in [c for c in dag.of_type(Chunk) if c.kind != "F"]:
            for ref in backward.inputs:
                if (
                    dag.value(ref).kind == "saved"
                    and isinstance(forward := dag.nodes[ref[0]], Chunk)
                    and forward.kind == "F"
                ):
                    if forward.id not in copies:
                        copies[forward.id] = dag.duplicate(forward)
                        dag.change(copies[forward.id], tags={"AGAIN": 1})
                    dag.substitute(backward, ref, (copies[forward.id].id, ref[1]))
        made = list(copies.values())
        for one, other in zip(made, made[1:] + made[:1], strict=True) if self.lame else ():
            if one.region == other.region:
                dag.change(one, slice=other.slice)


def test_what_a_copy_has() -> None:
    dag = build("conv", *place(0, 1), split(2))
    forward = chunk(dag, "F[PP=0,MB=1]")
    dag.order(chunk(dag, "F[PP=0,MB=0]"), forward, 4)
    dag.program.index = 3
    copy = dag.duplicate(forward)
    assert dataclasses.replace(copy, id=forward.id, origin=forward.origin) == forward
    assert copy.id not in (forward.id, -1) and copy.origin == 3
    assert forward.state != (None,) * len(forward.state), "it reads what another chunk has made of a buffer"
    assert not dag.users(copy) and dag.users(forward)
    data = {source for source, _, kind in dag.graph.in_edges(forward.id, data="data") if kind}
    assert set(dag.graph.predecessors(copy.id)) == data == {ref[0] for ref in copy.reads}
    assert [edge["order"] for _, _, edge in dag.graph.in_edges(copy.id, data=True)] == [None] * len(data)


@pytest.mark.parametrize("name", ["mlp", "conv", "dropout"])
def test_a_pass_that_runs_twice_is_verified_bit_by_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one device on the same microbatches; on the whole batch, `conv` (batch norm) and `dropout` give
    another result.
    """
    c = captured(name)
    program: list[Any] = [*gpipe(2, 2), Again()]
    assert build(name, *program).microbatches() == tuple(
        Slice(i * c.case.size // 2, (i + 1) * c.case.size // 2) for i in (0, 1)
    )
    report = verify(c.module, c.batch, program)
    assert report.rows[-2].name == "again" and report.verdict == (
        "verified" if name == "mlp" else "verified except"
    )
    for row in report.rows[-2:]:
        assert row.before.verdict == row.single.verdict == "bitwise equal" and row.contract == "bitwise"
    monkeypatch.setattr(hook, "check", lambda dag, final=False: None)
    assert verify(c.module, c.batch, [*gpipe(2, 2), Again(lame=True)]).verdict == "NOT EQUIVALENT"


def test_the_suite_sees_a_pass_that_runs_twice_on_other_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With batch norm, whose graphs are compared only where they work on the same samples."""
    monkeypatch.setattr(suite, "check", lambda dag, final=False: None)
    check_program(case(POOL[5], 4), parse([split(2), Again()]))
    with pytest.raises(AssertionError, match=r"gradient .* differs by"):
        check_program(case(POOL[5], 4), parse([split(2), Again(lame=True)]))


GROUPS = [[0, 2], [1, 3]]


@pytest.mark.parametrize(("level", "gathers"), [("shard_params", 6), ("shard_optimizer", 1)])
def test_parameters_are_gathered_for_the_copy_too(level: str, gathers: int) -> None:
    """For each use of a stage (F, its copy and B, of two microbatches), unless they are there for the whole
    step.
    """
    c = captured("mlp")
    program = [*gpipe(2, 2, devices=GROUPS), Replicate(filter={}, devices=GROUPS, **{level: True}), Again()]  # type: ignore[arg-type]
    uses = [use for use in build("mlp", *program).of_type(Chunk) if use.region == 1]
    assert len(uses) == 6 and len({ref for use in uses for ref in use.params}) == gathers
    report = verify(c.module, c.batch, program)
    assert report.verdict == "verified" and report.rows[-2].before.verdict == "bitwise equal"
