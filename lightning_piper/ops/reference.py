"""State and sums of the reference interpreter.

Values are stored by (ref, group rank), because devices with the same rank in their groups have the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ir.values import Slice, TensorSpec

Bundle = list[torch.Tensor]
Made = list[list[Bundle]]  # [group rank][output]


class Reference:
    """A run of the reference interpreter.

    Attributes:
        dag: The training DAG.
        tensors: Parameters and buffers by canonical name. The run does not change them.
        leaves: The tensors of the global batch.
        seed: Seed of the step's random numbers.
        values: The values that nodes will still read, by (ref, group rank).
        metrics, grads, buffers: Outputs of the step, by name.
        results: For each replica, the results of a forward-only step and the arguments of metric objects, by
            name.
        kept: State of operations during the run, under keys of their own.
        slack: Parameter name -> bound on the error of any element of its gradient, from operations that
            approximate.
        approximate: Causes of these errors, usually the labels of the operations.
    """

    def __init__(
        self, dag: TrainingDAG, tensors: Mapping[str, torch.Tensor], leaves: Sequence[torch.Tensor], seed: int
    ) -> None:
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
    def group_ranks(self) -> range:
        """The ranks of every group: one for each replica, or one for each member of each replica."""
        return range(len(self.dag.mesh.group_ranks))

    def samples_of(self, group_rank: int, part: Slice) -> Slice:
        """Return the samples of the global batch that are slice `part` of a rank's local batch."""
        first = self.dag.replica_of(group_rank) * self.dag.local_batch_size
        return Slice(first + part.start, first + part.stop)

    def inputs(self, node: Node, group_rank: int) -> list[Bundle]:
        """Return the inputs of a node on a rank."""
        return [self.values[ref, group_rank] for ref in node.inputs]

    def loosen(self, node: Node, name: str, by: float, cause: str | None = None) -> None:
        """Add `by` to the error bound of the gradient of `name`, because the node may change any element of
        this gradient by that much. Record `cause` in `approximate` (default: the node's label)."""
        self.slack[name] = self.slack.get(name, 0.0) + by
        self.approximate[cause or node.label] = None

    def sum_over(self, node: Node, group_ranks: Sequence[int]) -> Bundle:
        """Return the sum of all inputs of a node over some ranks, from the first to the last."""
        return sum_in_order(
            [self.values[ref, group_rank] for group_rank in group_ranks for ref in node.inputs]
        )


def on_each_rank(
    made: Callable[[Reference, Any, list[Bundle]], list[Bundle]],
) -> Callable[[Reference, Any], Made]:
    """Return the reference semantics of a node that does the same on every rank with that rank's inputs.

    `made` takes the run, the node and the inputs on one rank, and returns the outputs on this rank.
    """

    def interpret(run: Reference, node: Any) -> Made:
        return [made(run, node, run.inputs(node, replica)) for replica in run.group_ranks]

    return interpret


def sum_in_order(bundles: Sequence[Bundle]) -> Bundle:
    """Return the sum of bundles from the first to the last, in new tensors. With one bundle, return this
    bundle itself."""
    total = bundles[0]
    for bundle in bundles[1:]:
        total = [a + b for a, b in zip(total, bundle, strict=True)]
    return total


def strided(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """Return the same numbers with the strides of `spec`, because strides choose kernels and thereby bits. The
    result is `x` itself if `x` has these strides, otherwise a copy."""
    return (
        x
        if x.stride() == spec.stride
        else torch.empty_strided(spec.shape, spec.stride, dtype=x.dtype, device=x.device).copy_(x)
    )
