"""The orders of torch.distributed.pipelining's schedules, made without any process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase


class Stage(_PipelineStageBase):
    """The part of a stage that a schedule of torch reads before the first step."""

    def __init__(self, index: int, local: int, ranks: int) -> None:
        self.stage_index, self.num_stages, self.group_size, self.group_rank = index, local * ranks, ranks, 0
        self.group, self.submod, self.device = None, torch.nn.Identity(), torch.device("cpu")  # type: ignore[assignment]
        self.has_backward = True

    def _create_grad_recv_info(self, *_: Any) -> tuple[Any, ...]:
        return ()

    def _prepare_forward_infra(self, *_: Any) -> Any:
        return None

    def _prepare_backward_infra(self, *_: Any) -> Any:
        return None


def schedule(name: str, stages: int, microbatches: int, local: int = 2) -> Any:
    """A schedule of torch for `stages` stages, with `local` of them on each rank."""
    ranks = stages // local
    own = [Stage(i, local, ranks) for i in range(local)]
    return getattr(torch_schedules, name)(own, microbatches, loss_fn=lambda *_: torch.zeros(()))


def with_messages(rows: list[list[tuple[int, str, int]]], stages: int) -> list[list[str]]:
    """The passes (stage, kind, microbatch) of each rank, and where torch places sends and receives."""
    kinds = {"F": torch_schedules.FORWARD, "B": torch_schedules.FULL_BACKWARD}
    made = {
        rank: [torch_schedules._Action(stage, kinds[kind], microbatch) for stage, kind, microbatch in row]
        for rank, row in enumerate(rows)
    }
    return cells(torch_schedules._add_send_recv(made, lambda stage: stage % len(rows), stages))


def cells(rows: Any) -> list[list[str]]:
    """The rows of a schedule as text, in the order of the ranks, without idle slots."""
    return [
        [str(action) for action in rows[rank] if action is not None and str(action)] for rank in sorted(rows)
    ]
