"""Every small change of a training DAG that changes what it computes is refused by the static check.

All single changes of some DAGs are tried: reading any other value of the same shape, an input more or less, other samples,
another device, a node less. Whatever the check lets through must compute the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from lightning_piper.directives import finish
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Accumulate, AllReduce, Chunk, Concat, Cut, Metrics, Node, Ref, Report, Update
from lightning_piper.ir.values import Slice
from lightning_piper.schedules import gpipe
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static import check
from tests.dags import build, place, run, split

Change = tuple[str, Callable[[TrainingDAG], None]]

BASES: dict[str, tuple[str, list[Any]]] = {
    "mlp": ("mlp", gpipe(2, 3)),
    "tied": ("used_twice", gpipe(2, 2)),
    "buffers": ("conv", gpipe(2, 2)),
    "metrics": ("logs", gpipe(2, 2)),
    "part": ("residual", [split(2, PP=1), *place(0, 1, 2)]),
    "one device": ("losses", [split(2), *place(0, 0)]),
}


def rewired(dag: TrainingDAG, node: int, inputs: tuple[Ref, ...], **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(dag.nodes[node], name, value)
    dag.rewire(dag.nodes[node], inputs=inputs)


def changed(dag: TrainingDAG, node: int, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(dag.nodes[node], name, value)


def form(dag: TrainingDAG, ref: Ref) -> list[Any]:
    return [(spec.shape, spec.dtype) for spec in dag.value(ref).tensors]


def changes(dag: TrainingDAG) -> Iterator[Change]:
    refs = [(node.id, i) for node in dag.nodes.values() for i in range(len(node.outputs))]
    slices = sorted({chunk.slice for chunk in dag.of_type(Chunk)})
    for node in list(dag.nodes.values()):
        yield f"remove {node.label}", partial(removed, node=node.id)
        for k, ref in enumerate(node.inputs):
            for other in refs:
                if other != ref and other[0] != node.id and form(dag, other) == form(dag, ref):
                    inputs = (*node.inputs[:k], other, *node.inputs[k + 1 :])
                    yield f"{node.label} reads {other} for {ref}", partial(rewired, node=node.id, inputs=inputs)
        if isinstance(node, Chunk):
            yield from chunk_changes(dag, node, slices)
        if isinstance(node, Accumulate | Update | AllReduce | Report | Concat | Metrics):
            yield from sum_changes(dag, node, slices)
        if isinstance(node, Cut):
            for by in (-1, 1):
                yield "cut shifted", partial(changed, node=node.id, start=node.start + by, stop=node.stop + by)
        if isinstance(node, Cut | Concat):
            yield "other dimension", partial(changed, node=node.id, dim=1 - node.dim)


def removed(dag: TrainingDAG, node: int) -> None:
    dag.remove([dag.nodes[node]])


def chunk_changes(dag: TrainingDAG, node: Chunk, slices: list[Slice]) -> Iterator[Change]:
    for part in slices:
        if part != node.slice:
            yield f"{node.label} on samples {part}", partial(changed, node=node.id, slice=part)
    for device in dag.devices():
        if (device,) != node.devices:
            yield f"{node.label} on device {device}", partial(changed, node=node.id, devices=(device,))
    buffers = [(c.id, i) for c in dag.of_type(Chunk) for i, value in enumerate(c.outputs) if value.kind == "buffer"]
    for k, ref in enumerate(node.state):
        for other in [None, *buffers]:
            if other != ref:
                state = (*node.state[:k], other, *node.state[k + 1 :])
                yield f"{node.label} state {k} from {other}", partial(state_changed, node=node.id, state=state)


def state_changed(dag: TrainingDAG, node: int, state: tuple[Ref | None, ...]) -> None:
    dag.rewire(dag.nodes[node], state=state)


def sum_changes(dag: TrainingDAG, node: Node, slices: list[Slice]) -> Iterator[Change]:
    def chosen(indices: list[int]) -> Callable[[TrainingDAG], None]:
        more: dict[str, Any] = {}
        if isinstance(node, Metrics):
            more = {"metrics": tuple(node.metrics[i] for i in indices), "slices": tuple(node.slices[i] for i in indices)}
        return partial(rewired, node=node.id, inputs=tuple(node.inputs[i] for i in indices), **more)

    everything = list(range(len(node.inputs)))
    for k in everything:
        if len(everything) > 1:
            yield f"{node.label} without input {k}", chosen([i for i in everything if i != k])
        yield f"{node.label} with input {k} twice", chosen([*everything, k])
    yield f"{node.label} in reverse", chosen(everything[::-1])
    if isinstance(node, Metrics):
        for k in everything:
            for metric in set(range(len(node.outputs[0].names))) - {node.metrics[k]}:
                yield "other metric", partial(changed, node=node.id, metrics=(*node.metrics[:k], metric, *node.metrics[k + 1 :]))
            for part in set(slices) - {node.slices[k]}:
                yield "other weight", partial(changed, node=node.id, slices=(*node.slices[:k], part, *node.slices[k + 1 :]))


@pytest.mark.parametrize("name", list(BASES))
def test_no_single_change_goes_unnoticed(name: str) -> None:
    model, program = BASES[name]
    dag = build(model, *program)
    finish(dag)
    clean = run(model, dag)
    refused, unnoticed = 0, []
    passed = set()
    for what, change in changes(dag):
        copy = dag.copy()
        change(copy)
        try:
            check(copy)
        except VerificationError:
            refused += 1
            continue
        passed.add(what)
        if compare(clean, run(model, copy), {}).verdict == "differs":
            unnoticed.append(what)
    assert unnoticed == []
    assert refused > 100
    assert "accumulate in reverse" in passed, "the control: a change that is only a re-association passes"
