"""Meshes: lines along each axis, and the part of a divided tensor that a group rank has."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_piper.ir.mesh import DATA, Mesh

quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)


@quick
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_lines_join_the_places_that_differ_in_one_coordinate(data: st.DataObject, shape: list[int]) -> None:
    axes = [DATA, "a", "b"][: len(shape)]
    group_ranks = data.draw(st.permutations(range(int(np.prod(shape)))))
    mesh = Mesh(tuple(axes), tuple(shape), tuple(group_ranks))
    at = dict(zip(group_ranks, itertools.product(*map(range, shape)), strict=True))
    for i, axis in enumerate(axes):
        assert sorted(group_rank for line in mesh.lines(axis) for group_rank in line) == sorted(group_ranks)
        for group_rank in group_ranks:
            others = [
                q
                for q in group_ranks
                if all(at[q][j] == at[group_rank][j] for j in range(len(shape)) if j != i)
            ]
            assert mesh.line(axis, group_rank) == tuple(sorted(others, key=lambda q: at[q][i]))
    parts = {group_rank: mesh.part(group_rank, axes[1:]) for group_rank in group_ranks}
    assert set(parts.values()) == set(range(mesh.parts)) and mesh.parts * mesh.size(DATA) == len(group_ranks)
    assert all((parts[p] == parts[q]) == (at[p][1:] == at[q][1:]) for p in group_ranks for q in group_ranks)
    for block in mesh.blocks(axes[1:]):
        assert [parts[group_rank] for group_rank in block] == list(range(mesh.parts)) and len(
            {at[group_rank][0] for group_rank in block}
        ) == 1


def test_a_flat_mesh_has_one_line_and_one_part() -> None:
    mesh = Mesh.flat(3)
    assert (
        mesh.lines(DATA) == ((0, 1, 2),)
        and mesh.parts == 1
        and mesh.part(2, ()) == 0
        and mesh.blocks(()) == ((0,), (1,), (2,))
        and str(mesh) == "data=3"
    )
    assert mesh.size("ep") == 1


def test_one_axis_against_all_others() -> None:
    mesh = Mesh(("node", "ep", "dp"), (2, 2, 2), tuple(range(8)))
    assert mesh.against("ep") == Mesh((DATA, "ep"), (4, 2), (0, 2, 1, 3, 4, 6, 5, 7))
    assert mesh.against("ep").lines(DATA) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.against("ep", "node") == Mesh((DATA, "ep", "node"), (2, 2, 2), (0, 4, 2, 6, 1, 5, 3, 7))
