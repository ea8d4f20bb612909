"""Every small change of a training DAG that changes its result is refused by the static check.

All single changes of some DAGs are tried: a node reads another value of the same shape, has an input more or
less, has other samples or another device, or is removed. A change that the check accepts must compute the
same step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk, Node, Ref
from lightning_piper.ir.values import Partial, Replicated, Sharded, Slice
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.samples import Concat, Cut
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import complete, eliminate
from lightning_piper.schedules import gpipe
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.dags import build, place, run, split
from tests.groups import marked

Change = tuple[str, Callable[[TrainingDAG], None]]


def replicated(**level: Any) -> list[Any]:
    """Two stages, two microbatches and two replicas; stage i is on devices i and i + 2."""
    stages = [{"op": "place", "filter": {"PP": i}, "devices": [i, i + 2]} for i in (0, 1)]
    return [*stages, split(2), {"op": "replicate", "filter": {}, "devices": [[0, 2], [1, 3]], **level}]


BASES: dict[str, tuple[str, list[Any]]] = {
    "mlp": ("mlp", gpipe(2, 3)),
    "tied": ("used_twice", gpipe(2, 2)),
    "buffers": ("conv", gpipe(2, 2)),
    "metrics": ("logs", gpipe(2, 2)),
    "part": ("residual", [split(2, PP=1), *place(0, 1, 2)]),
    "one device": ("losses", [split(2), *place(0, 0)]),
    "replicas": ("mlp", replicated()),
    "optimizer": ("mlp", replicated(shard_optimizer=True)),
    "gradients": ("mlp", replicated(shard_grads=True)),
    "parameters": ("mlp", replicated(shard_params=True)),
    "parameters, tied": ("used_twice", replicated(shard_params=True)),
    "tokens": ("terms", replicated()),
    "buckets": ("mlp", replicated(shard_params=True, bucket_size=1e-6)),
}


def rewired(dag: TrainingDAG, node: int, inputs: tuple[Ref, ...], **attributes: Any) -> None:
    dag.change(dag.nodes[node], **attributes)
    dag.rewire(dag.nodes[node], inputs=inputs)


def changed(dag: TrainingDAG, node: int, **attributes: Any) -> None:
    dag.change(dag.nodes[node], **attributes)


def form(dag: TrainingDAG, ref: Ref) -> list[Any]:
    return [(spec.shape, spec.dtype) for spec in dag.value(ref).tensors]


def changes(dag: TrainingDAG) -> Iterator[Change]:
    refs = [(node.id, i) for node in dag.nodes.values() for i in range(len(node.outputs))]
    slices = sorted({chunk.slice for chunk in dag.of_type(Chunk)})
    for node in list(dag.nodes.values()):
        yield from value_changes(dag, node)
        yield f"remove {node.label}", partial(removed, node=node.id)
        for k, ref in enumerate(node.inputs):
            for other in refs:
                if other != ref and other[0] != node.id and form(dag, other) == form(dag, ref):
                    inputs = (*node.inputs[:k], other, *node.inputs[k + 1 :])
                    yield (
                        f"{node.label} reads {other} for {ref}",
                        partial(rewired, node=node.id, inputs=inputs),
                    )
        if isinstance(node, Chunk):
            yield from chunk_changes(dag, node, slices)
            yield from weight_changes(dag, node)
        if isinstance(node, Accumulate | Update | AllReduce | StepReport | Concat | Metrics | Total):
            yield from sum_changes(dag, node, slices)
        if isinstance(node, Cut):
            for by in (-1, 1):
                yield (
                    "cut shifted",
                    partial(changed, node=node.id, start=node.start + by, stop=node.stop + by),
                )
        if isinstance(node, Cut | Concat):
            yield "other dimension", partial(changed, node=node.id, dim=1 - node.dim)


def value_changes(dag: TrainingDAG, node: Node) -> Iterator[Change]:
    """Changes of what a node says about its outputs and its devices."""
    for i, value in enumerate(node.outputs):
        others: dict[str, Any] = {
            str(p): {"placement": p} for p in (Replicated(), Partial(), Sharded(0)) if p != value.placement
        }
        if len(value.names) > 1:
            others["names in reverse"] = {"names": value.names[::-1]}
        if bucket := value.bucket:
            others["no bucket"] = {"bucket": None}
            others["more members"] = {"bucket": replace(bucket, mesh=Mesh.flat(bucket.members + 1))}
            others["bucket in reverse"] = {
                "bucket": replace(bucket, names=bucket.names[::-1], tensors=bucket.tensors[::-1])
            }
            others["both in reverse"] = {"names": value.names[::-1], **others["bucket in reverse"]}
            others["other dtype"] = {"bucket": bucket.in_dtype(torch.float64)}
        for what, fields in others.items():
            outputs = (*node.outputs[:i], replace(value, **fields), *node.outputs[i + 1 :])
            if outputs != node.outputs:
                yield f"{node.label} output {i}: {what}", partial(changed, node=node.id, outputs=outputs)
    if len(node.devices) > 1:
        yield (
            f"{node.label} on the devices in reverse",
            partial(changed, node=node.id, devices=node.devices[::-1]),
        )
        yield f"{node.label} on one of its devices", partial(changed, node=node.id, devices=node.devices[:1])


def removed(dag: TrainingDAG, node: int) -> None:
    dag.remove([dag.nodes[node]])


def chunk_changes(dag: TrainingDAG, node: Chunk, slices: list[Slice]) -> Iterator[Change]:
    for part in slices:
        if part != node.slice:
            yield f"{node.label} on samples {part}", partial(changed, node=node.id, slice=part)
    for device in dag.devices():
        if (device,) != node.devices:
            yield f"{node.label} on device {device}", partial(changed, node=node.id, devices=(device,))
    gathers = [(n.id, 0) for n in dag.nodes.values() if n.outputs and n.outputs[0].kind == "param"]
    for k, ref in enumerate(node.params):
        for other in [None, *gathers]:
            if other != ref:
                params = (*node.params[:k], other, *node.params[k + 1 :])
                yield (
                    f"{node.label} parameter {k} from {other}",
                    partial(params_changed, node=node.id, params=params),
                )
    buffers = [
        (c.id, i) for c in dag.of_type(Chunk) for i, value in enumerate(c.outputs) if value.kind == "buffer"
    ]
    for k, ref in enumerate(node.state):
        for other in [None, *buffers]:
            if other != ref:
                state = (*node.state[:k], other, *node.state[k + 1 :])
                yield (
                    f"{node.label} state {k} from {other}",
                    partial(state_changed, node=node.id, state=state),
                )


def weight_changes(dag: TrainingDAG, node: Chunk) -> Iterator[Change]:
    made = [
        (n.id, i)
        for n in dag.nodes.values()
        for i, value in enumerate(n.outputs)
        if value.kind in ("weight", "seed")
    ]
    for k, ref in enumerate(node.weights):
        for other in [None, *made]:
            if other != ref:
                weights = (*node.weights[:k], other, *node.weights[k + 1 :])
                yield (
                    f"{node.label} weight {k} from {other}",
                    partial(weights_changed, node=node.id, weights=weights),
                )


def state_changed(dag: TrainingDAG, node: int, state: tuple[Ref | None, ...]) -> None:
    dag.rewire(dag.nodes[node], state=state)


def params_changed(dag: TrainingDAG, node: int, params: tuple[Ref | None, ...]) -> None:
    dag.rewire(dag.nodes[node], params=params)


def weights_changed(dag: TrainingDAG, node: int, weights: tuple[Ref | None, ...]) -> None:
    dag.rewire(dag.nodes[node], weights=weights)


def sum_changes(dag: TrainingDAG, node: Node, slices: list[Slice]) -> Iterator[Change]:
    def chosen(indices: list[int]) -> Callable[[TrainingDAG], None]:
        more: dict[str, Any] = {}
        if isinstance(node, Metrics):
            more = {
                name: tuple(getattr(node, name)[i] for i in indices)
                for name in ("metrics", "terms", "slices")
            }
        return partial(rewired, node=node.id, inputs=tuple(node.inputs[i] for i in indices), **more)

    everything = list(range(len(node.inputs)))
    if isinstance(node, Metrics) and node.weights:
        yield (
            f"{node.label} with the weights in reverse",
            partial(weights_changed, node=node.id, weights=node.weights[::-1]),
        )
    for k in everything:
        if len(everything) > 1:
            yield f"{node.label} without input {k}", chosen([i for i in everything if i != k])
        yield f"{node.label} with input {k} twice", chosen([*everything, k])
    yield f"{node.label} in reverse", chosen(everything[::-1])
    if isinstance(node, Metrics):
        for k in everything:
            for metric in set(range(len(node.outputs[0].names))) - {node.metrics[k]}:
                yield (
                    "other metric",
                    partial(
                        changed, node=node.id, metrics=(*node.metrics[:k], metric, *node.metrics[k + 1 :])
                    ),
                )
            for term in set(range(len(dag.code.terms))) - {node.terms[k]}:
                yield (
                    "other term",
                    partial(changed, node=node.id, terms=(*node.terms[:k], term, *node.terms[k + 1 :])),
                )
            for part in set(slices) - {node.slices[k]}:
                yield (
                    "other weight",
                    partial(changed, node=node.id, slices=(*node.slices[:k], part, *node.slices[k + 1 :])),
                )


QUICK = ("mlp", "tied", "replicas", "gradients", "parameters", "metrics")


@pytest.mark.parametrize("name", marked(BASES, QUICK))
def test_no_single_change_goes_unnoticed(name: str) -> None:
    model, program = BASES[name]
    dag = build(model, *program)
    complete(dag)
    eliminate(dag)
    clean = run(model, dag)
    refused, unnoticed = 0, []
    passed = set()
    for what, change in changes(dag):
        copy = dag.copy()
        change(copy)
        try:
            check(copy, final=True)
        except VerificationError:
            refused += 1
            continue
        passed.add(what)
        if compare(clean, run(model, copy), {}).verdict == "differs":
            unnoticed.append(what)
    assert unnoticed == []
    assert refused > 100
    assert "accumulate in reverse" in passed, "the control: a change that is only a re-association passes"
