"""The order in which directives are applied, whatever the order of the list."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_piper as piper
from lightning_piper.directives import Directive, parse
from lightning_piper.directives.sequence import FOLLOWS, applied_order
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.text import text_of
from tests.axes import EXPERTS, HEADS, columns, everywhere, sparse
from tests.dags import Fixed, b, build, f, order, place, split
from tests.tensors import compiled_for, grid

ORDER = piper.Order(filters=[{"PASS": "F"}, {"PASS": "B"}])
OF_KIND: dict[str, Directive] = {
    "chunk_loss": piper.ChunkLoss(),
    "place": piper.Place([0]),
    "split": piper.Split(2),
    "place of microbatches": piper.Place([0], filter={"MB": 0}),
    "shard_weights": piper.ShardWeights(params={}),
    "shard_sequences": piper.ShardSequences(),
    "shard_experts": piper.ShardExperts(),
    "replicate": piper.Replicate(),
    "recompute": piper.Recompute(),
    "offload": piper.Offload(),
    "order": ORDER,
    "order of R": piper.Order(filters=[{"PASS": "F"}, {"PASS": ["B", "R"]}]),
    "order of copies": piper.Order(filters=[{"PASS": "F"}, {"PASS": "STORE"}]),
}


def test_each_kind_has_its_row():
    program = list(OF_KIND.values())
    assert {kind: directive.kind_in(program) for kind, directive in OF_KIND.items()} == {
        kind: kind for kind in FOLLOWS
    }
    assert Fixed().kind_in(program) not in FOLLOWS
    assert (
        OF_KIND["place of microbatches"].kind_in([]) == "place"
    )  # without the split it is not a tag of parts


@given(st.lists(st.sampled_from([*FOLLOWS, "fixed"]), max_size=12))
def test_programs_are_sorted_as_the_table_says(kinds: list[str]) -> None:
    if "split" not in kinds:
        kinds = ["place" if kind == "place of microbatches" else kind for kind in kinds]
    found = applied_order([OF_KIND.get(kind) or Fixed() for kind in kinds])
    assert sorted(found) == list(range(len(kinds)))
    fixed = [i for i, kind in enumerate(kinds) if kind == "fixed"]
    assert [i for i, at in enumerate(found) if at in fixed] == fixed  # and so nothing passes them
    inverted = [
        (early, late)
        for early, late in itertools.combinations(range(len(kinds)), 2)
        if kinds[late] in FOLLOWS.get(kinds[early], ()) and not any(early < i < late for i in fixed)
    ]
    if not inverted:
        assert found == list(range(len(kinds)))  # a right order stays
    for early, late in inverted:
        assert found.index(late) < found.index(early)
    for kind in FOLLOWS:  # directives of one kind stay in their order
        assert (own := [i for i in found if kinds[i] == kind]) == sorted(own)


PROGRAMS: dict[str, list[Any]] = {
    "a place after an order": [*place(0, 1), order(f(0), b(0))],
    "a split after an order": [split(2), order(f(0), b(0))],
    "a place after a recompute": [*place(0, 1), {"op": "recompute", "filter": {"PP": 0}}],
    "a split after a recompute": [split(2), {"op": "recompute", "filter": {"PP": 0}}],
    "a recompute after its order": [
        *place(0, 1),
        {"op": "recompute", "filter": {"PP": 0}},
        order(f(0), {"PP": 0, "PASS": "R"}, b(0)),
    ],
    "a place of microbatches before the split": [
        split(2),
        *({"op": "place", "filter": {"PP": i, "MB": [0, 1]}, "devices": [i]} for i in (0, 1)),
    ],
    "an offload before a place": [*place(0, 1), {"op": "offload", "filter": {"PP": 0}}],
    "a replicate before its place": [
        place(0)[0] | {"filter": {}, "devices": [0, 1]},
        piper.Replicate(devices=[0, 1]),
    ],
}


def nodes(dag: TrainingDAG) -> str:
    """Return the DAG as text, without the numbers of the directives that made its nodes."""
    return re.sub(r" #\d+", "", text_of(dag))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_list_in_another_order_is_the_same_program(name: str) -> None:
    right = parse(PROGRAMS[name])
    wrong = [
        program
        for program in itertools.permutations(right)
        if [program[i] for i in applied_order(program)] == right != list(program)
    ]
    assert wrong
    for program in wrong:
        assert nodes(build("mlp", *program)) == nodes(build("mlp", *right))


def test_tensors_and_experts_in_another_order() -> None:
    right = [
        grid(ep=2, tp=2),
        columns(params=HEADS),
        EXPERTS,
        everywhere(4),
        piper.Recompute(),
        piper.Offload(),
    ]
    wanted = nodes(compiled_for(right, sparse).dag)
    for numbers in ((2, 3, 4, 5, 1, 0), (1, 2, 0, 3, 5, 4)):
        wrong = [right[i] for i in numbers]
        assert [wrong[i] for i in applied_order(wrong)] == right
        assert nodes(compiled_for(wrong, sparse).dag) == wanted


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "directives.md").read_text()
    rows = re.findall(
        r"^\| (.+?) \| ?(.*?) \|$", page.split("## Order in the list")[1].split("\n## ")[0], re.M
    )
    plain = {re.sub(r"[`\[\]]|\(#.*?\)", "", kind): re.sub("`", "", earlier) for kind, earlier in rows[1:]}
    assert plain == {kind: ", ".join(x for x in FOLLOWS if x in earlier) for kind, earlier in FOLLOWS.items()}
