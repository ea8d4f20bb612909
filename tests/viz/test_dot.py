"""The DAG of one device as Graphviz's text."""

from __future__ import annotations

import dataclasses

import pytest

from lightning_piper.errors import PiperError
from lightning_piper.viz import dot_graph
from tests.simulate.programs import pipeline


def test_nodes_and_edges_of_one_device() -> None:
    text = dot_graph(pipeline("gpipe", 2, 1).dag, 0)
    assert (
        text
        == """\
digraph "device 0" {
  rankdir=LR;
  node [shape=box, style=filled, fontname="sans-serif"];
  n15 [label="%15 F[PP=0,MB=0]\\nsamples 0:1\\ndirective 2", fillcolor="#9cc3e6"];
  n19 [label="%19 send\\nto device 1\\nstream send\\ndirective 1", fillcolor="#c9c9c9"];
  n14 [label="%14 allreduce\\nstream metrics\\ndirective 1", fillcolor="#c9c9c9"];
  n9 [label="%9 report", fillcolor="#ececec"];
  n22 [label="%22 recv\\nfrom device 1\\nstream recv\\ndirective 1", fillcolor="#c9c9c9"];
  n18 [label="%18 B[PP=0,MB=0]\\nsamples 0:1\\ndirective 2", fillcolor="#f6b26b"];
  n5 [label="%5 accumulate", fillcolor="#ececec"];
  n7 [label="%7 update", fillcolor="#ececec"];
  n15 -> n19;
  n14 -> n9;
  n15 -> n18 [label="directive 3"];
  n22 -> n18;
  n18 -> n5;
  n5 -> n7;
}
"""
    )


def test_an_edge_that_only_orders_is_dashed_and_names_its_directive() -> None:
    assert '[style=dashed, label="directive 3"]' in dot_graph(pipeline("gpipe", 2, 2).dag, 0)


def test_a_users_tags_are_quoted() -> None:
    dag = pipeline("gpipe", 2, 1).dag.copy()
    dag.nodes[15] = dataclasses.replace(dag.nodes[15], tags={'a"\\b': 0, "PASS": "F"})
    assert r'n15 [label="%15 F[a\"\\b=0]\nsamples' in dot_graph(dag, 0)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(PiperError, match=r"the training DAG has no device 2. Give one of 0, 1"):
        dot_graph(pipeline("gpipe", 2, 1).dag, 2)
