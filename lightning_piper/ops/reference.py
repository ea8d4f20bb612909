"""What the reference interpreter keeps of a run, and how it adds up. Values are kept by (ref, replica): what the devices of one
replica hold of a value is the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import TensorSpec

Bundle = list[torch.Tensor]
Made = list[list[Bundle]]  # [replica][output]


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
    def replicas(self) -> range:
        return range(self.dag.replicas)

    def inputs(self, node: Node, replica: int) -> list[Bundle]:
        """What a node reads in a replica."""
        return [self.values[ref, replica] for ref in node.inputs]

    def loosen(self, node: Node, name: str, by: float) -> None:
        """An operation states its bound: what it makes of a parameter's gradient may be off by `by`, in any element."""
        self.slack[name] = self.slack.get(name, 0.0) + by
        self.approximate[node.label] = None

    def sum_over(self, node: Node, replicas: Sequence[int]) -> Bundle:
        """The sum of all inputs of a node, of some replicas, from the first to the last."""
        return sum_in_order([self.values[ref, r] for r in replicas for ref in node.inputs])


def each(made: Callable[[Reference, Any, list[Bundle]], list[Bundle]]) -> Callable[[Reference, Any], Made]:
    """The semantics of a node that does the same in every replica, with what it reads there."""

    def interpret(run: Reference, node: Any) -> Made:
        return [made(run, node, run.inputs(node, replica)) for replica in run.replicas]

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
