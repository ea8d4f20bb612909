"""Chakra traces of all families of programs: decoded by protobuf, and run by a plain longest path."""

from __future__ import annotations

import json
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lightning_piper.directives import parse
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import compile_plans
from lightning_piper.simulate import Link, Network, simulate
from lightning_piper.simulate.chakra import CollectiveType, NodeType, write_chakra
from tests.certificate.families import FAMILIES

# Message of the format -> its fields: name -> (number, type). A type with a star is repeated.
SCHEMA = {
    "GlobalMetadata": {"version": (1, "string")},
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "uint64_val": (13, "uint64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),
        "data_deps": (5, "uint64*"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "AttributeProto*"),
    },
}
US = Fraction(1, 10**6)
TIMES = {"F": 3 * US, "B": 5 * US, "BI": 2 * US, "BW": 3 * US}


def messages() -> dict[str, Any]:
    """Return the classes of the messages of the format."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="chakra.proto", package="chakra", syntax="proto3")
    for name, fields in SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, (number, type_name) in fields.items():
            plain = type_name.rstrip("*")
            label = kinds.LABEL_REPEATED if type_name.endswith("*") else kinds.LABEL_OPTIONAL
            made = message.field.add(name=field, number=number, label=label)
            if plain in SCHEMA:
                made.type, made.type_name = kinds.TYPE_MESSAGE, f".chakra.{plain}"
            else:
                made.type = getattr(kinds, f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"chakra.{name}")) for name in SCHEMA
    }


MESSAGES = messages()


def decoded(path: Path) -> list[Any]:
    """Return the nodes of a trace, each with its attributes as a dict in `about`."""
    data, found, at = path.read_bytes(), [], 0
    while at < len(data):
        size = shift = 0
        while True:
            byte = data[at]
            size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                break
        found.append(data[at : at + size])
        at += size
    assert MESSAGES["GlobalMetadata"].FromString(found[0]).version == "1.0.0"
    return [MESSAGES["Node"].FromString(each) for each in found[1:]]


def attributes(node: Any) -> dict[str, Any]:
    """Return the attributes of a node. Each one has exactly one value."""
    made = {}
    for each in node.attr:
        values = [value for field, value in each.ListFields() if field.name != "name"]
        made[each.name] = values[0] if values else 0
    return made


def length(folder: Path, devices: list[int], latency: int, waits: bool = True) -> int:
    """Return the length of the longest path of the traces, in microseconds. A message takes `latency`. A
    collective takes `latency` for each step around a ring. Without `waits`, work does not wait for
    communication."""
    graph, meetings = nx.DiGraph(), defaultdict[Any, list[Any]](list)
    groups = json.loads((folder / "comm_groups.json").read_text())
    for device in devices:
        in_group = defaultdict[str, int](int)
        nodes = decoded(folder / f"trace.{device}.et")
        for node in nodes:
            about, key = attributes(node), (device, node.id)
            meeting, time = key, node.duration_micros
            if node.type in (NodeType.SEND, NodeType.RECEIVE):
                meeting = ("message", about["comm_src"], about["comm_dst"], about["comm_tag"])
                meetings[meeting].append((device, node.type, about["comm_size"]))
                time = latency
            elif node.type == NodeType.COLLECTIVE:
                name = about["pg_name"]
                in_group[name] += 1
                meeting = ("collective", name, in_group[name])
                meetings[meeting].append((device, about["comm_type"], about["comm_size"]))
                rings = 2 if about["comm_type"] == CollectiveType.ALL_REDUCE else 1
                time = rings * (len(groups[name]) - 1) * latency
            graph.add_edge((meeting, "begin"), (meeting, "end"), time=time)
            graph.nodes[meeting, "end"].setdefault("keys", []).append(key)
            graph.add_edge((key, "joins"), (meeting, "begin"), time=0)
            graph.add_edge((meeting, "end"), (key, "over"), time=0)
            for before in node.data_deps:
                assert before < node.id
                if waits or nodes[before].type == NodeType.COMPUTE:
                    graph.add_edge(((device, before), "over"), (key, "joins"), time=0)
    for meeting, joined in meetings.items():
        if meeting[0] == "message":
            assert sorted(kind for _, kind, _ in joined) == [NodeType.SEND, NodeType.RECEIVE]
        else:
            assert sorted(device for device, _, _ in joined) == sorted(groups[meeting[1]])
            assert len({kind for _, kind, _ in joined}) == 1
        assert len({size for _, _, size in joined}) == 1
    return nx.dag_longest_path_length(graph, weight="time")


FAST = {"ZeRO-3", "1F1B", "experts", "ring attention", "offload"}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in FAST else pytest.mark.long) for name in FAMILIES]
)
def test_traces_take_the_simulated_time(family: str, tmp_path: Path) -> None:
    """Without bandwidths, the longest path takes as long as the simulation."""
    step, directives = FAMILIES[family]()
    dag = run_pipeline(step, tuple(parse(directives)))
    plans = compile_plans(dag)
    write_chakra(tmp_path, dag, plans, TIMES)
    result = simulate(dag, plans, TIMES, Network(Link(latency=7 * US)))
    assert length(tmp_path, list(plans), 7) == result.step_time / US
    if len(plans) > 1:
        assert length(tmp_path, list(plans), 7, waits=False) < result.step_time / US
