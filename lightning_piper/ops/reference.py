"""What the reference interpreter keeps of a run, and how it adds up. Values are kept by (ref, place): what the devices at
one place of their groups hold of a value is the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import Slice, TensorSpec

Bundle = list[torch.Tensor]
Made = list[list[Bundle]]  # [place][output]


class Reference:
    """One run of the reference interpreter.

    Attributes:
        dag: the training DAG that is run.
        tensors: parameters and buffers by canonical name; not changed.
        leaves: the tensors of the global batch.
        seed: of the step's random numbers.
        values: what was made and is still to be read.
        metrics, grads, buffers: what the step hands out.
        results: the same of a forward-only step, by replica.
        kept: what operations keep for the time of the run, by keys of theirs.
        slack: parameter name -> by how much operations that only approximate may have moved any element of its gradient.
        approximate: labels of these operations.
    """

    def __init__(self, dag: TrainingDAG, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int) -> None:
        self.dag, self.tensors, self.leaves, self.seed = dag, tensors, leaves, seed
        self.values: dict[tuple[Ref, int], Bundle] = {}
        self.metrics: dict[str, torch.Tensor] = {}
        self.grads: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.results: list[dict[str, torch.Tensor]] = [{} for _ in range(dag.replicas)]
        self.kept: dict[object, Any] = {}
        self.slack: dict[str, float] = {}
        self.approximate: dict[str, None] = {}

    @property
    def places(self) -> range:
        """Of all groups: one for each replica, or for each member of each."""
        return range(len(self.dag.mesh.places))

    @property
    def replicas(self) -> range:
        """`places`, by the name that it had before."""
        warnings.warn("Reference.replicas is Reference.places now; replicas ends with 0.3", DeprecationWarning, stacklevel=2)
        return self.places

    def samples_of(self, place: int, part: Slice) -> Slice:
        """The samples of the global batch that a slice of a place's local batch is."""
        first = self.dag.replica_of(place) * self.dag.local_batch_size
        return Slice(first + part.start, first + part.stop)

    def inputs(self, node: Node, place: int) -> list[Bundle]:
        """What a node reads at a place."""
        return [self.values[ref, place] for ref in node.inputs]

    def loosen(self, node: Node, name: str, by: float) -> None:
        """An operation states its bound: what it makes of a parameter's gradient may be off by `by`, in any element."""
        self.slack[name] = self.slack.get(name, 0.0) + by
        self.approximate[node.label] = None

    def sum_over(self, node: Node, places: Sequence[int]) -> Bundle:
        """The sum of all inputs of a node, of some places, from the first to the last."""
        return sum_in_order([self.values[ref, place] for place in places for ref in node.inputs])


def each(made: Callable[[Reference, Any, list[Bundle]], list[Bundle]]) -> Callable[[Reference, Any], Made]:
    """The semantics of a node that does the same at every place, with what it reads there."""

    def interpret(run: Reference, node: Any) -> Made:
        return [made(run, node, run.inputs(node, replica)) for replica in run.places]

    return interpret


def sum_in_order(bundles: Sequence[Bundle]) -> Bundle:
    """The sum, from the first to the last."""
    total = bundles[0]
    for bundle in bundles[1:]:
        total = [a + b for a, b in zip(total, bundle, strict=True)]
    return total


def strided(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The same numbers with the strides of `spec`: strides choose kernels, and so bits."""
    return x if x.stride() == spec.stride else torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device).copy_(x)
