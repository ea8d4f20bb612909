"""`chunk_loss`: compute the scores of a cross entropy of a linear layer for a chunk of rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from lightning_piper.common.limits import integer, shown
from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.regions import Step


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkLoss(Directive):
    """Compute each cross entropy of a linear layer like `linear_cross_entropy`, without the scores of all rows at
    once.

        F -> scores, softmax -> B      --chunk_loss-->      F -> one number a row -> B

    Piper finds the losses in the captured step: `F.cross_entropy(linear(x).flatten(0, 1), target.flatten())` and
    `F.cross_entropy(linear(x).transpose(1, 2), target)`, with views, slices and casts between the layer and the loss.
    The loss has classes as targets, without class weights and label smoothing, and nothing else reads the scores. The
    forward and the backward pass compute the scores of a chunk of rows at a time, so they compute the scores twice.
    Losses and gradients stay equal within rounding.

    Attributes:
        chunk: The number of rows whose scores exist at once (default: as many as have 16,777,216 scores, but at
            least 512).
    """

    op: ClassVar[str] = "chunk_loss"
    contract: ClassVar[Contract] = "reassociated"

    chunk: int | None = None

    def check_fields(self) -> None:
        if self.chunk is not None and ((number := integer(self.chunk)) is None or number < 1):
            self.refuse(
                "chunk",
                f"{shown(self.chunk)} is not a number of rows",
                "give an integer >= 1, or leave it out [PIPER-D003]",
            )

    def prepare(self, step: Step, program: Sequence[Directive]) -> Step:
        return step.chunking_losses(self.chunk or 0)

    def apply(self, dag: TrainingDAG) -> None:
        """Do nothing, because `prepare` has already changed the code of the passes."""
