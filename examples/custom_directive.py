"""Write a directive: `checkpoint` repeats a region's forward pass just before its backward pass instead of
saving activations.

This directive is not part of the package. It is a rewrite of the training DAG, registered under a name that
JSON can use. `directive_suite` tests its contract (see tests/examples). Programs with this directive run like
all other programs.

    python examples/custom_directive.py
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.ir import Chunk, TrainingDAG


@piper.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(piper.Directive):
    """A directive that makes the backward passes of the regions that `filter` selects read the activations of
    a second forward pass.

        F -> saved -> B      --checkpoint-->      F     F' -> saved -> B

    `F'` waits for the gradient that `B` waits for.

    The second forward pass reads the same inputs, buffers and random seed, so it makes the same bits. Use it
    after place and split.

    Attributes:
        filter: Selects chunks. The backward passes among them read a second forward pass.
    """

    op: ClassVar[str] = "checkpoint"
    contract: ClassVar[Any] = "bitwise"

    filter: Any

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)

    def apply(self, dag: TrainingDAG) -> None:
        second: dict[int, Chunk] = {}  # id of a first forward pass -> the second forward pass
        for backward in self.select(dag, "filter", self.filter):
            if backward.kind != "F":  # B, or BI and BW of a split backward
                self._recompute(dag, backward, second)

    def _recompute(self, dag: TrainingDAG, backward: Chunk, second: dict[int, Chunk]) -> None:
        for ref in backward.inputs:
            forward = dag.nodes[ref[0]]
            if not isinstance(forward, Chunk) or forward.kind != "F" or dag.value(ref).kind != "saved":
                continue
            if forward.id not in second:
                again = second[forward.id] = dag.duplicate(forward)
                # Drop the tag PASS, so that orders that name forward passes do not select the second one.
                tags = {tag: index for tag, index in forward.tags.items() if tag != "PASS"}
                dag.change(again, tags={**tags, "RECOMPUTED": 0})
                for source in {other[0] for other in backward.inputs} - {forward.id}:
                    if dag.nodes[source].devices == again.devices:
                        dag.order(dag.nodes[source], again, dag.origin)
            dag.substitute(backward, ref, (second[forward.id].id, ref[1]))


class Regressor(L.LightningModule):
    def __init__(self, stages: int = 2, width: int = 64) -> None:
        super().__init__()
        self.stages = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
            )
            for _ in range(stages)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        for i, stage in enumerate(self.stages):
            with piper.annotate("PP", i):
                x = x + stage(x)
        return torch.nn.functional.mse_loss(x, y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    module, data = Regressor(), TensorDataset(torch.randn(256, 64), torch.randn(256, 64))
    program = [*piper.schedules.one_f_one_b(stages=2, microbatches=4), Checkpoint(filter={"PP": 0})]
    loader = DataLoader(data, batch_size=32)
    print(piper.verify(module, next(iter(loader)), program))
    strategy = piper.PiperStrategy(directives=program, transport="local")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
