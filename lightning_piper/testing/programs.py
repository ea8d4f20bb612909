"""Hypothesis strategies for models, batch sizes and directive programs, valid and broken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
from hypothesis import strategies as st

from lightning_piper.directives import Directive, Order, Place, Replicate, ShardExperts, Split, to_json
from lightning_piper.directives.rewrites.backward import split_backward
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from lightning_piper.testing.models import (
    BLOCKS,
    EXACT_BLOCKS,
    EXACT_LOSSES,
    LOSSES,
    ROUTED_BLOCKS,
    WHOLE_BLOCKS,
    Case,
    Spec,
    case,
)

Draw = Callable[[st.SearchStrategy[Any]], Any]
JSON = dict[str, Any]


@st.composite
def specs(
    draw: Draw, exact: bool | None = None, blocks: Sequence[str] | None = None, max_blocks: int = 4
) -> Spec:
    """Draw a model of 1 to `max_blocks` blocks with 1 to 3 pipeline stages. Some models return to an earlier
    stage.

    Args:
        exact: True for exact models only, False for other models only, None for both (default).
        blocks: Kinds of blocks to draw from (default: `EXACT_BLOCKS` for an exact model, and all kinds except
            `WHOLE_BLOCKS` for other models).
        max_blocks: The maximum number of blocks.
    """
    is_exact = draw(st.booleans()) if exact is None else exact
    others = tuple(kind for kind in BLOCKS if kind not in WHOLE_BLOCKS)
    kinds = tuple(blocks) if blocks is not None else EXACT_BLOCKS if is_exact else others
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_blocks))
    # A model needs trainable parameters.
    if all(kind in ("bare", "frozen") for kind in chosen):
        chosen[draw(st.integers(0, len(chosen) - 1))] = "linear"
    stages, stage = [], 0
    for i in range(len(chosen)):
        if i and stage < 2 and draw(st.booleans()):
            stage += 1
        stages.append(stage)
    if len(set(stages)) > 1 and draw(st.integers(0, 4)) == 0:
        stages[-1] = 0  # V-shaped: the end of the model returns to its first stage
    stages = [sorted(set(stages)).index(s) for s in stages]
    loss = draw(st.sampled_from(("samples", *(EXACT_LOSSES if is_exact else LOSSES))))
    return Spec(tuple(chosen), tuple(stages), is_exact, loss)


def sizes(exact: bool) -> st.SearchStrategy[int]:
    """Return a strategy that draws the number of samples in a batch. Exact models need powers of two, so that
    the weights n_i/N are exact.
    """
    return st.sampled_from([1, 2, 4, 8] if exact else [1, 2, 3, 5, 8])


@st.composite
def cases(
    draw: Draw,
    exact: bool | None = None,
    blocks: Sequence[str] | None = None,
    pool: Sequence[Spec] | None = None,
) -> Case:
    """Draw a captured model with a batch. With a `pool`, the model's spec comes from the pool, so that examples
    share captures.
    """
    spec = (
        draw(specs(exact, blocks))
        if pool is None
        else draw(st.sampled_from([s for s in pool if exact in (None, s.exact)]))
    )
    return case(spec, draw(sizes(spec.exact)))


@st.composite
def programs(draw: Draw, case: Case) -> list[Directive]:
    """Draw a valid program for a case: splits, places, replicas, shards of experts, and orders, or only some
    of these directives.

    A region may have several device groups. Splits may be nested or of one stage, and come before or after
    the `place` directives. Programs are valid by construction, because orders follow a random linear
    extension of the DAG.
    """
    stages = sorted(set(case.spec.stages))
    replicas = draw(st.sampled_from([1, 1, 2, 4])) if case.size % 4 == 0 and not case.spec.coupled else 1
    head: list[Directive] = draw(_splits(case, replicas))
    if replicas > 1 or draw(st.integers(0, 5)):
        whole = [d.num_microbatches for d in head if isinstance(d, Split) and not d.filter]
        if whole and not draw(st.integers(0, 2)):
            head += draw(_device_groups(stages, whole[0], replicas))
        else:
            placing: list[Directive] = draw(_places(stages, replicas))
            head = placing + head if replicas == 1 and draw(st.booleans()) else head + placing
    ready = len(head)
    if replicas > 1:
        head += draw(_replicas(case, head))
        if set(case.spec.blocks) & set(ROUTED_BLOCKS) and draw(st.integers(0, 4)):
            head.insert(draw(st.integers(ready, len(head))), draw(_sharding(head[:ready], replicas)))
    if draw(st.integers(0, 3)):
        head += draw(_orders(apply_program(build_dag(case.step), head)))
    return head


@st.composite
def _sharding(draw: Draw, head: list[Directive], replicas: int) -> ShardExperts:
    """Draw a shard of the routed blocks, which divides the group ranks of all stages in the same way."""
    places = draw(st.permutations(range(replicas)))
    degree = draw(st.sampled_from([n for n in (2, 4) if replicas % n == 0]))
    groups = [places[i : i + degree] for i in range(0, replicas, degree)]
    placed = dict.fromkeys(tuple(p.devices) for p in head if isinstance(p, Place))
    return ShardExperts(
        filter={"EP": "*"}, devices=[[base[place] for place in group] for base in placed for group in groups]
    )


@st.composite
def _places(draw: Draw, stages: list[int], replicas: int = 1) -> list[Directive]:
    """Draw `place` directives for all stages, in any order, on groups of `replicas` devices."""
    devices = draw(st.lists(st.integers(0, 2), min_size=len(stages), max_size=len(stages)))
    used = sorted(set(devices))
    order = {stage: used.index(device) for stage, device in zip(stages, devices, strict=True)}
    groups = [[base + r * len(used) for r in range(replicas)] for base in range(len(used))]
    streams = st.sampled_from(["compute", "compute", "side"])
    places = [
        Place(filter={"PP": stage}, devices=groups[base], stream=draw(streams))
        for stage, base in order.items()
    ]
    if len(used) == 1 and draw(st.booleans()):
        return [Place(filter={}, devices=groups[0])]
    if draw(st.booleans()):  # place the passes of a stage separately, in any order
        places = [
            Place(filter={**p.filter, "PASS": kind}, devices=p.devices) for p in places for kind in "BF"
        ]
    return list(draw(st.permutations(places)))


@st.composite
def _device_groups(draw: Draw, stages: list[int], microbatches: int, replicas: int) -> list[Directive]:
    """Draw `place` directives that give each stage and microbatch a group of `replicas` devices."""
    keys = [(stage, mb) for stage in stages for mb in range(microbatches)]
    devices = draw(st.lists(st.integers(0, 2), min_size=len(keys), max_size=len(keys)))
    used = sorted(set(devices))
    parts: dict[tuple[int, int], list[int]] = {}
    for (stage, mb), device in zip(keys, devices, strict=True):
        parts.setdefault((stage, used.index(device)), []).append(mb)
    groups = [[base + r * len(used) for r in range(replicas)] for base in range(len(used))]
    places = [
        Place(filter={"PP": stage, "MB": found}, devices=groups[base])
        for (stage, base), found in parts.items()
    ]
    return list(draw(st.permutations(places)))


# Fields of `Replicate` for each ZeRO level, also with whole parameters, and with groups of two replicas
# that each have all shards.
ZERO_STAGES: list[dict[str, Any]] = [
    {},
    {"shard_optimizer": True},
    {"shard_grads": True},
    {"shard_params": True},
    {"shard_params": True, "shard_by": "parameter"},
    {"shard_optimizer": True, "shard_by": "parameter", "overlap_update": True},
    {"shard_optimizer": True, "shard_size": 2},
    {"shard_params": True, "shard_size": 2},
]


@st.composite
def _replicas(draw: Draw, case: Case, head: list[Directive]) -> list[Directive]:
    """Draw directives that replicate everything that is placed.

    There is one directive, or one for each `place` directive of `head`. Buckets hold one tensor, a few or all.
    Each directive has its own ZeRO level, if no parameter is shared between stages.
    """
    sizes, zero_stages = st.sampled_from([1e-6, 0.0003, 25.0]), st.sampled_from(ZERO_STAGES)
    dtypes = st.sampled_from([{}, {}, {"reduce_dtype": "float64"}])  # all models are in float64
    places = [p for p in head if isinstance(p, Place)]
    groups = [list(group) for group in dict.fromkeys(tuple(p.devices) for p in places)]
    options = draw(zero_stages) | draw(dtypes)
    # All groups of a region must be replicated at once.
    if any("MB" in p.filter for p in places) or draw(st.booleans()):
        return [Replicate(filter={}, devices=groups, bucket_size=draw(sizes), **options)]
    backward = [p for p in places if p.filter.get("PASS", "B") == "B"]
    untied = not any(
        case.spec.blocks.count(kind) > 1 for kind in ("tied", "gathered")
    )  # they share a parameter
    return [
        Replicate(
            filter=p.filter,
            devices=p.devices,
            bucket_size=draw(sizes),
            **(draw(zero_stages) if untied else options),
        )
        for p in draw(st.permutations(backward))
    ]


@st.composite
def _splits(draw: Draw, case: Case, replicas: int = 1) -> list[Directive]:
    """Draw no split, one split of the whole step or of one stage, or two nested splits."""
    # With replicas, the batch has 4 or 8 samples. Replicas must divide each microbatch, so the number of
    # microbatches is a power of two.
    count = draw(st.sampled_from([1, 2, 4])) if replicas > 1 else draw(st.integers(1, min(4, case.size)))
    count = min(count, case.size // replicas)
    kind = draw(st.sampled_from(["none", "whole", "whole", "whole", "nested", "part"]))
    if kind == "none":
        return []
    if kind == "part" and not case.spec.coupled:
        stage = draw(st.sampled_from(sorted(set(case.spec.stages))))
        return (
            [Split(filter={"PP": stage}, dim_name="MB", num_microbatches=count)]
            if _can_split_only(case, stage)
            else []
        )
    program: list[Directive] = [Split(filter={}, dim_name="MB", num_microbatches=count)]
    smallest = case.size // count // replicas
    if kind == "nested" and smallest > 1:
        program.append(
            Split(filter={}, dim_name="UB", num_microbatches=draw(st.integers(1, min(2, smallest))))
        )
    return program


def _can_split_only(case: Case, stage: int) -> bool:
    """Return whether a program may split only this stage.

    A loss term of an `auxiliary` block is a scalar, so the parts of it cannot be joined. The stage must not
    send such a term to another stage, which computes the loss.
    """
    others = [
        b for b, s in zip(case.spec.blocks, case.spec.stages, strict=True) if b == "auxiliary" and s == stage
    ]
    return not others or set(case.spec.stages) == {stage} or case.spec.stages[-1] == stage


@st.composite
def _orders(draw: Draw, dag: TrainingDAG) -> list[Directive]:
    """Draw orders of some devices along one random linear extension of the DAG. Some backward passes are
    split.

    Returns an empty list if chunks with the same tags would have to run both before and after other chunks.
    """
    dag = draw(_with_split_backward(dag))
    coarse: nx.DiGraph[Any] = nx.DiGraph()
    of = {chunk.id: _key(chunk) for chunk in dag.of_type(Chunk)}  # an order names all chunks of one key
    coarse.add_nodes_from(of.values())
    for a, b in nx.transitive_closure_dag(dag.graph).edges:
        if a in of and b in of and of[a] != of[b]:
            coarse.add_edge(of[a], of[b])
    if not nx.is_directed_acyclic_graph(coarse):  # the model returns to an earlier stage
        return []
    rank = {key: i for i, key in enumerate(draw(st.permutations(sorted(coarse.nodes, key=repr))))}
    sequence = list(nx.lexicographical_topological_sort(coarse, key=rank.__getitem__))
    program: list[Directive] = []
    for devices in sorted({key[0] for key in sequence}):
        mine = [dict(key[1:]) for key in sequence if key[0] == devices]
        kept = [condition for condition in mine if draw(st.integers(0, 4))]
        groups: list[Any] = []
        for condition in kept:
            inputs = {**condition, "PASS": "BI"}
            if condition["PASS"] == "BW" and inputs not in mine and draw(st.booleans()):
                groups.append(inputs)  # schedules usually name BI of every stage
            if (
                condition["PASS"] == "BW"
                and groups[-1:] == [inputs]
                and inputs in mine
                and draw(st.booleans())
            ):
                groups[-1] = {**condition, "PASS": ["BI", "BW"]}
            elif groups and not draw(st.integers(0, 3)):
                groups[-1] = (
                    [*groups[-1], condition] if isinstance(groups[-1], list) else [groups[-1], condition]
                )
            else:
                groups.append(condition)
        if len(groups) > 1:
            program.append(Order(filters=groups))
    return program


@st.composite
def _with_split_backward(draw: Draw, dag: TrainingDAG) -> TrainingDAG:
    """Return a copy of a DAG with some backward passes split, as orders that name these passes would do."""
    backward = [chunk for chunk in dag.of_type(Chunk) if chunk.kind == "B"]
    keys = sorted({_key(chunk) for chunk in backward}, key=repr)
    chosen = draw(
        st.one_of(st.just([]), st.just(keys), st.lists(st.sampled_from(keys), min_size=1, unique=True))
    )
    copy = dag.copy()
    split_backward(
        copy, [chunk for chunk in copy.of_type(Chunk) if chunk.kind == "B" and _key(chunk) in chosen]
    )
    return copy


def _key(chunk: Chunk) -> tuple[Any, ...]:
    """Return the devices of a chunk and its tags except EP, as the orders here distinguish chunks."""
    return (chunk.devices, *((tag, value) for tag, value in chunk.tags.items() if tag != "EP"))


@dataclass(frozen=True)
class Broken:
    """A program that must raise an error, and its fault."""

    fault: str
    program: Any


# Names of the faults that `broken_programs` draws.
FAULTS = (
    "unknown op", "missing op", "unknown field", "missing field", "no match", "bad filter", "bad pass",
    "duplicate place",
    "region without place", "device gap", "bad device", "several devices", "passes apart",
    "too many microbatches",
    "no microbatches", "split twice", "contradicting order", "order in a circle",
    "chunk in two groups",
    "one group", "part after whole", "whole after part", "whole and part", "not a list",
)  # fmt: skip


@st.composite
def broken_programs(draw: Draw, case: Case) -> Broken:
    """Draw a program with one fault of `FAULTS`, anywhere in an otherwise valid program."""
    program = to_json([Place(filter={}, devices=[0]), Split(filter={}, dim_name="MB", num_microbatches=1)])
    if case.size > 1:
        program[1]["num_microbatches"] = draw(st.integers(2, min(4, case.size)))
    fault = draw(st.sampled_from(FAULTS))
    return Broken(fault, _break(fault, program, case, draw))


def _break(fault: str, program: list[JSON], case: Case, draw: Draw) -> Any:
    """Return a program with the fault. `program` has a `place` and a `split` entry, which may be changed."""
    place, split = program
    if orders := _broken_orders(fault, split["num_microbatches"], draw):
        return [place, split, *orders]
    stage = draw(st.sampled_from(sorted(set(case.spec.stages))))
    victim = draw(st.sampled_from(program))
    match fault:
        case "unknown op":
            victim["op"] = draw(st.text(max_size=8).filter(lambda op: op not in ("place", "split", "order")))
        case "missing op":
            del victim["op"]
        case "unknown field":
            victim[draw(st.sampled_from(["filters_", "Devices", "num", "PP", ""]))] = 1
        case "missing field":
            del victim[draw(st.sampled_from([k for k in victim if k not in ("op", "filter", "dim_name")]))]
        case "no match":
            victim["filter"] = draw(st.sampled_from([{"PP": 17}, {"TP": 0}, {"PP": "-"}, {"MB": 99}]))
        case "bad filter":
            victim["filter"] = draw(
                st.sampled_from(
                    [None, 3, [], "PP", {"PP": -1}, {"PP": []}, {"PP": 1.5}, {"PP": None}, {"": 0}]
                )
            )
        case "bad pass":
            victim["filter"] = {"PASS": draw(st.sampled_from(["f", "X", 0, "BWD"]))}
        case "duplicate place":
            return [*program, {"op": "place", "filter": {"PP": stage}, "devices": [0]}]
        case "region without place":
            return [{**place, "filter": {"PASS": "F"}}, split]
        case "device gap":
            place["devices"] = [draw(st.integers(1, 5))]
        case "bad device":
            place["devices"] = draw(st.sampled_from([[], [-1], ["0"], [0, 0], 0, None, [True], [0.0], {}]))
        case "several devices":
            place["devices"] = [0, 1]
        case "passes apart":
            return [
                {**place, "filter": {"PASS": "F"}},
                {**place, "filter": {"PASS": "B"}, "devices": [1]},
                split,
            ]
        case "too many microbatches":
            split["num_microbatches"] = case.size + draw(st.integers(1, 3))
        case "no microbatches":
            split["num_microbatches"] = draw(st.sampled_from([0, -1, 1.5, "2", None, True]))
        case "split twice":
            return [place, split, {**split, "num_microbatches": 1}]
        case "not a list":
            return draw(
                st.sampled_from(
                    [None, 3, place, {"directives": program}, {"version": 2, "directives": program}]
                )
            )
    return program


def _broken_orders(fault: str, microbatches: int, draw: Draw) -> list[JSON]:
    """Return the directives that come after place and split, if the fault is in an order. Return an empty
    list for any other fault."""
    forward, backward = {"MB": 0, "PASS": "F"}, {"MB": 0, "PASS": "B"}
    part = {**backward, "PASS": draw(st.sampled_from(["BI", "BW"]))}

    def order(groups: Any) -> JSON:
        return {"op": "order", "filters": groups}

    match fault:
        case "contradicting order":
            return [order([backward, forward])]
        case "order in a circle":
            last = {"MB": microbatches - 1, "PASS": "F"}
            one = [forward, last] if last != forward else [forward, backward]
            return [order(one), order(one[::-1])]
        case "chunk in two groups":
            return [order([forward, {"PASS": "F"}])]
        case "one group":
            return [order(draw(st.sampled_from([[], [forward], forward, None, [[]]])))]
        case "part after whole":
            return [order([forward, backward]), order([forward, part])]
        case "whole after part":
            parts = [forward, {**backward, "PASS": "BI"}, {**backward, "PASS": "BW"}]
            return [order(parts), order([forward, backward])]
        case "whole and part":
            return [order(draw(st.permutations([forward, backward, part])))]
    return []
