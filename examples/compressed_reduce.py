"""Write an operation: a sum of gradients over replicas in bfloat16, with error feedback.

This operation is not part of the package. The file defines a node, its static rule, its reference semantics
with an error bound, its instruction and the code that runs it. The directive `Compress` replaces the sums of
`replicate` by this operation. Each replica sends its gradients rounded to bfloat16, and adds the rounding
error to the gradients that it sends in the next step (Seide et al., 1-bit SGD, 2014).

    python examples/compressed_reduce.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper import ops
from lightning_piper.ir import Node, Replicated, TrainingDAG
from lightning_piper.ir.nodes import IssuePriority
from lightning_piper.ops.reference import sum_in_order

HALF_ULP = 2.0**-8  # the largest rounding error of bfloat16, relative to the number


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedReduce(Node):
    """A node that sums a bucket of gradients over its group, after each member has rounded its term to
    bfloat16. The input has the placement `Partial`, the output `Replicated`.
    """

    turn = IssuePriority.ON_DEMAND
    communicates = sums = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressed(ops.Collective):
    """The instruction: sum a flat tensor over the members. Each member sends its whole term, in bfloat16, to
    all other members."""

    op: ClassVar[str] = "compressed_reduce"
    color: ClassVar[str] = "#8fd3c8"
    sums: ClassVar[bool] = True

    nbytes = property(lambda self: self.bucket.numel * 2 * len(self.members))


def check(facts: ops.Facts, node: CompressedReduce) -> Iterable[str]:
    """Check that the input is an unsummed bucket of all samples of the replicas, and that the output is its
    sum.
    """
    facts.forward(node)
    value, made = facts.dag.value(node.inputs[0]), node.outputs[0]
    if str(value.placement) != "P(sum)" or value.bucket is None:
        yield (
            f"{facts.at(node)} sums {facts.named(node.inputs[0])}, which is {value.placement}: it takes a "
            "partial sum in a bucket"
        )
    if made != dataclasses.replace(value, placement=Replicated()):
        yield (
            f"{facts.at(node)} describes its output differently from its input {facts.named(node.inputs[0])}"
        )


def interpret(run: ops.Reference, node: CompressedReduce) -> list[list[list[torch.Tensor]]]:
    """Return the sum of the rounded terms, for each member. This is the first step, in which there is no
    rounding error of an earlier step to add. The error bound of each parameter is the sum, over the members,
    of `HALF_ULP` times the largest element.
    """
    flats = [run.values[node.inputs[0], replica][0] for replica in run.group_ranks]
    bucket = node.outputs[0].bucket
    for flat in flats:
        for name, x in zip(bucket.names, bucket.views(flat), strict=True):
            run.loosen(node, name, HALF_ULP * float(x.abs().max()))
    return [[sum_in_order([[flat.bfloat16().to(flat.dtype)] for flat in flats])]] * len(flats)


def lower(plan: ops.Planning, node: CompressedReduce) -> None:
    """Emit the instruction that starts the sum on a device. Before the first node that reads the sum, the
    plan waits for it."""
    plan.start(node, Compressed, (plan.read(node.inputs[0], node),), bucket=node.outputs[0].bucket)


class Exchange(ops.Exchange):
    """One member's side of the sum. It keeps the rounding error for the next step."""

    def __init__(self, instruction: Compressed, on: ops.Binding) -> None:
        self._read, self._slots, self._count = instruction.reads[0], on.slots, len(instruction.members)
        self._lost: torch.Tensor | None = None

    def bring(self) -> tuple[torch.dtype, torch.Tensor]:
        (flat,) = self._slots[self._read.slot]
        self._slots[self._read.slot] = None
        if self._lost is not None:
            flat = flat + self._lost
        sent = flat.bfloat16()
        self._lost = flat - sent.to(flat.dtype)
        return flat.dtype, sent

    def parts(self, state: Any) -> Sequence[torch.Tensor]:
        return [state[1]] * self._count

    def join(self, state: Any, received: Sequence[torch.Tensor]) -> tuple[torch.Tensor]:
        total = received[0].to(state[0])
        for other in received[1:]:  # in the order of the members, so that all members get the same bits
            total = total + other.to(state[0])
        return (total,)


def bind(instruction: Compressed, on: ops.Binding) -> Any:
    return on.endpoint.collective(instruction, Exchange(instruction, on), on.slots)


ops.register_operation(ops.Operation(CompressedReduce, check, interpret, lower, bind={Compressed: bind}))


@piper.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Compress(piper.Directive):
    """A directive that sums the gradients of the regions that `filter` selects in bfloat16. Use it after a
    `replicate` that shards nothing.
    """

    op: ClassVar[str] = "compress"
    contract: ClassVar[Any] = "bounded"

    filter: Any = dataclasses.field(default_factory=dict)

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)

    def apply(self, dag: TrainingDAG) -> None:
        regions = {chunk.region for chunk in self.select(dag, "filter", self.filter)}
        for total in list(dag.of_type(ops.AllReduce)):
            if total.sums and dag.producer(total.inputs[0]).region in regions:
                fields = {field.name: getattr(total, field.name) for field in dataclasses.fields(Node)}
                compressed = dag.add(CompressedReduce(**(fields | {"id": -1, "origin": None})))
                for reader in dag.users(total):
                    dag.substitute(reader, (total.id, 0), (compressed.id, 0))
                dag.remove([total])


PROGRAM = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1]), Compress()]


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    x = torch.randn(256, 8)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True) / 8), batch_size=16)
    print(piper.verify(Regression(), next(iter(data)), PROGRAM))
    L.Trainer(strategy=piper.PiperStrategy(PROGRAM), devices=2, accelerator="cpu", max_epochs=5).fit(
        Regression(), data
    )
