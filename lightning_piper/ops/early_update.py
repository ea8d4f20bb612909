"""Updates of whole parameters that run beside the backward passes of earlier layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.mesh import GROUPS
from lightning_piper.ir.nodes import IssuePriority, Node
from lightning_piper.ir.values import Kind, Partial, Sharded, view_as
from lightning_piper.ops.base import Binding, Bound, Operation, Planning, about, register_operation
from lightning_piper.ops.facts import Facts, names_of
from lightning_piper.ops.instruction import Instruction
from lightning_piper.ops.reference import Made, Reference
from lightning_piper.ops.update import Update

STREAM = "update"


class GradientReceiver(Protocol):
    """The receiver of gradients that are complete before the step ends."""

    def update(self, grads: Mapping[str, torch.Tensor]) -> None:
        """Compute the new values of parameters, and keep them until the optimizer's step.

        Args:
            grads: Parameter name -> its whole gradient, which must not change.
        """
        ...

    def made(self) -> list[torch.Tensor]:
        """Return the tensors that `update` made in this step."""
        ...


@dataclass(frozen=True, kw_only=True)
class EarlyUpdate(Node):
    """A node that computes the update of whole parameters from their complete gradients, before the step
    ends.

    Its input is the input of an `Update`, which outputs the same gradients to the optimizer. The parameters
    change only in the optimizer's step.
    """

    turn = IssuePriority.DELAYED
    # A device waits for a sum over replicas after it has started two more (`plan.device.IN_FLIGHT`). So an early
    # update two chunks later does not make the device wait earlier.
    delay = 2


@dataclass(frozen=True, kw_only=True)
class EarlyUpdateInstruction(Instruction):
    """An instruction that computes the updates of the parameters that this device owns.

    Attributes:
        bucket: The bucket of the gradients. Each member owns whole parameters of it.
        shard: Index of the device's shard.
    """

    op: ClassVar[str] = "early_update"
    color: ClassVar[str] = "#76a5af"

    bucket: Bucket
    shard: int

    @property
    def nbytes(self) -> int:
        """Bytes of the new values and of the copied gradients, which stay until the optimizer's step. New states of
        the optimizer do not count."""
        specs = dict(zip(self.bucket.names, self.bucket.tensors, strict=True))
        return 2 * sum(specs[name].nbytes for name, *_ in self.bucket.local_shards(self.shard))

    def details(self) -> list[str]:
        own = (name for name, *_ in self.bucket.local_shards(self.shard))
        return [*super().details(), "of", ",".join(own) or "nothing"]


def check(facts: Facts, node: EarlyUpdate) -> Iterable[str]:
    """The node must read the gradient of whole parameters after all sums: of all samples, regions and
    replicas. An `Update` must read the same value later."""
    dag = facts.dag
    if len(node.inputs) != 1 or (value := dag.value(node.inputs[0])).kind != Kind.GRAD:
        shown = ", ".join(map(facts.named, node.inputs))
        yield f"{facts.at(node)} reads {shown}, but it may read the gradient of one bucket only"
        return
    gradient = f"gradient of {names_of(value.names)} ({facts.at(node)})"
    if problem := facts.uncovered(facts.share, facts.parts.get(node.inputs[0], {})):
        yield f"{gradient}: the update begins before the gradient is complete: {problem}"
    summed = isinstance(value.placement, Sharded) and (GROUPS, Partial()) not in value.others
    if not summed or value.bucket is None or value.bucket.owners is None:
        yield f"{gradient}: the update needs whole gradients, but reads {value.placement} of {value.label}"
    later = [
        update
        for update in dag.of_type(Update)
        if update.devices == node.devices and update.inputs == node.inputs
    ]
    if not any(dag.graph.has_edge(node.id, update.id) for update in later):
        yield f"{gradient}: no update outputs this value to the optimizer after this node"


def interpret(run: Reference, node: EarlyUpdate) -> Made:
    """The node makes no value of the step."""
    return [[] for _ in run.group_ranks]


def lower(plan: Planning, node: EarlyUpdate) -> None:
    ref = node.inputs[0]
    bucket = plan.dag.value(ref).bucket
    assert bucket is not None
    plan.emit(
        EarlyUpdateInstruction(
            **about(node), reads=(plan.read(ref, node),), bucket=bucket, shard=plan.group_rank
        )
    )


def bind(instruction: EarlyUpdateInstruction, on: Binding) -> Bound | None:
    """Return the function that passes the device's whole gradients, in the dtypes of their parameters, to
    `Binding.early_updates`. None if the executor has no such object, or the device owns no parameter."""
    updates, slots, slot = on.early_updates, on.slots, instruction.reads[0].slot
    specs = dict(zip(instruction.bucket.names, instruction.bucket.tensors, strict=True))
    own = [
        (specs[name], name, at, at + stop - start)
        for name, start, stop, at in instruction.bucket.local_shards(instruction.shard)
    ]
    if updates is None or not own:
        return None

    def run() -> None:
        (flat,) = slots[slot]
        updates.update(
            {name: view_as(flat[start:stop], spec).to(spec.dtype) for spec, name, start, stop in own}
        )

    return run


register_operation(
    Operation(EarlyUpdate, check, interpret, lower, bind={EarlyUpdateInstruction: bind}, alike=True)
)
