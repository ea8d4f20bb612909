"""GPipe and 1F1B have the orders that the textbooks show."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import networkx as nx
import pytest

from lightning_piper.directives import Directive, Order, Place, Split, parse, to_json
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.passes import complete
from lightning_piper.schedules import gpipe, one_f_one_b
from lightning_piper.verify.static_check import check
from tests.dags import build, run
from tests.models import captured
from tests.reference import differences, plain


def passes(program: list[Directive], tag: str = "PP", dim_name: str = "MB") -> list[str]:
    """The order of each stage, for example `F0 F1 B0 B1`. Asserts that every filter names the stage of its
    directive.
    """
    found = []
    for stage, directive in enumerate(d for d in program if isinstance(d, Order)):
        assert all(item[tag] == stage and set(item) == {tag, dim_name, "PASS"} for item in directive.filters)  # type: ignore[index]
        found.append(" ".join(f"{item['PASS']}{item[dim_name]}" for item in directive.filters))  # type: ignore[index]
    return found


def test_gpipe() -> None:
    assert passes(gpipe(2, 3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert passes(gpipe(4, 1)) == ["F0 B0"] * 4


@pytest.mark.parametrize(
    ("stages", "microbatches", "expected"),
    [
        (1, 3, ["F0 B0 F1 B1 F2 B2"]),
        (2, 1, ["F0 B0", "F0 B0"]),
        (2, 2, ["F0 F1 B0 B1", "F0 B0 F1 B1"]),
        (2, 4, ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]),
        (3, 2, ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]),
        (
            4,
            6,
            [
                "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
                "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
                "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
            ],
        ),
    ],
)
def test_one_f_one_b(stages: int, microbatches: int, expected: list[str]) -> None:
    assert passes(one_f_one_b(stages, microbatches)) == expected


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16])
def test_one_f_one_b_warms_up_and_bounds_the_activations(stages: int, microbatches: int) -> None:
    for stage, line in enumerate(passes(one_f_one_b(stages, microbatches))):
        items = line.split()
        assert sorted(items) == sorted(f"{kind}{mb}" for kind in "FB" for mb in range(microbatches))
        warmup = next(i for i, item in enumerate(items) if item[0] == "B")
        assert warmup == min(stages - stage, microbatches)
        alive = [sum(1 if item[0] == "F" else -1 for item in items[: i + 1]) for i in range(len(items))]
        assert max(alive) == warmup, "never more activations than after the warm-up"
        for kind in "FB":
            assert [item for item in items if item[0] == kind] == [
                f"{kind}{mb}" for mb in range(microbatches)
            ]


def test_gpipe_holds_all_activations() -> None:
    """The control of the bound above."""
    items = passes(gpipe(4, 7))[0].split()
    assert max(sum(1 if item[0] == "F" else -1 for item in items[: i + 1]) for i in range(len(items))) == 7


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
def test_a_program_places_splits_and_orders(builder: Any) -> None:
    program = builder(3, 4)
    assert program[:4] == [
        *(Place(filter={"PP": stage}, devices=[stage]) for stage in range(3)),
        Split(filter={}, dim_name="MB", num_microbatches=4),
    ]
    assert [type(directive) for directive in program[4:]] == [Order] * 3
    assert parse(to_json(program)) == program
    assert len(builder(1, 1)) == 3


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
def test_devices_and_tags_are_the_users(builder: Any) -> None:
    program = builder(2, 3, devices=[1, 0], tag="STAGE", dim_name="UB")
    assert [directive.devices for directive in program[:2]] == [[1], [0]]
    assert program[0].filter == {"STAGE": 0} and program[2].dim_name == "UB"
    assert passes(program, "STAGE", "UB") == passes(builder(2, 3))
    assert [directive.devices for directive in builder(3, 1, devices=[0, 1, 0])[:3]] == [[0], [1], [0]]
    assert [directive.devices for directive in builder(2, 1, devices=[[0, 2], [1, 3]])[:2]] == [
        [0, 2],
        [1, 3],
    ]


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stages": 0, "microbatches": 1}, r"stages=0. Give an integer >= 1"),
        ({"stages": 2, "microbatches": 0}, r"microbatches=0. Give an integer >= 1"),
        ({"stages": 2.0, "microbatches": 1}, r"stages=2.0. Give an integer >= 1"),
        ({"stages": True, "microbatches": 1}, r"stages=True. Give"),
        (
            {"stages": 2, "microbatches": 1, "devices": [0]},
            r"devices=.* does not fit 2 ranks\. Give one device, or one group of devices, for each rank",
        ),
    ],
)
def test_wrong_arguments_name_the_builder(builder: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=f"^{builder.__name__}: {says}"):
        builder(**arguments)


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("name", "stages"), [("gpt", 3), ("mlp", 2)])
def test_the_graph_runs_each_stage_in_that_order_and_computes_the_step(
    builder: Any, name: str, stages: int
) -> None:
    dag = build(name, *builder(stages, 4))
    complete(dag)
    check(dag)
    place = {node: i for i, node in enumerate(nx.lexicographical_topological_sort(dag.graph))}
    for stage, line in enumerate(passes(builder(stages, 4))):
        chunks = sorted((c for c in dag.of_type(Chunk) if c.devices == (stage,)), key=lambda c: place[c.id])
        assert " ".join(f"{c.kind}{c.tags['MB']}" for c in chunks) == line
        assert all(nx.has_path(dag.graph, x.id, y.id) for x, y in pairwise(chunks))
    assert differences(run(name, dag), plain(captured(name), [1, 1, 1, 1])) == []
