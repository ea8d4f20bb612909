"""Trainings on batches of many lengths, on two processes (DP2) or four (PP2 x DP2)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import lightning_piper as piper
from tests.distributed.processes import PATIENCE
from tests.lengths import Causal, Deeper, tokens
from tests.strategy.fitting import Batches, sharing_captures, trainer, values
from tests.strategy.replicated import PROGRAMS

SAMPLES = 4  # in the batch of one replica
# The lengths of the replicas' batches in each step. In the second step, replica 0 goes on while replica 1
# compiles. In later steps the lengths are known to both replicas, or known to one and new to the other.
LENGTHS = {
    "alike at first": [(6, 6), (6, 9), (7, 9), (9, 6), (6, 6), (8, 8), (30, 7), (7, 30)],
    "never alike": [(5, 8), (5, 9), (8, 5), (11, 12)],
    # From the fourth step on, the processes exchange a note together with the gradients. In the fourth step
    # both have a new length, and later only one has.
    "alike later": [(6, 9), (9, 6), (5, 8), (7, 7), (9, 9), (9, 9)],
    "alike for long": [(6, 6), (6, 6), (6, 6), (9, 9), (6, 6), (6, 6), (9, 7), (8, 6), (6, 6)],
}
# Accumulated batches; the lengths are first equal in the second batch of an accumulation.
ACCUMULATED = {"alike later": 2}


def net(make: type[Causal] = Causal) -> Causal:
    torch.manual_seed(3)
    return make().double()


def batches(name: str, replica: int) -> list[Any]:
    """The batches of a replica. No two steps have the same samples."""
    return [
        tuple(x.roll(step, 0) for x in tokens(SAMPLES + replica, lengths[replica]))
        for step, lengths in enumerate(LENGTHS[name])
    ]


def local_batches(name: str, replica: int) -> list[Any]:
    return [tuple(x[:SAMPLES].contiguous() for x in batch) for batch in batches(name, replica)]


def by_hand(
    name: str, replicas: Sequence[int] = (0, 1), even: bool = False
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The mean over the tokens of all replicas, on one device without the package: parameters afterwards, and
    losses.

    `even`: each replica counts as much as any other, for a control.
    """
    module, losses = net(), []
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = module.configure_optimizers()
    batches = ACCUMULATED.get(name, 1)
    for number, parts in enumerate(zip(*(local_batches(name, replica) for replica in replicas), strict=True)):
        weights = [1 if even else part[1].numel() for part in parts]
        loss = sum(module.training_step(part, 0) * n for part, n in zip(parts, weights, strict=True)) / sum(
            weights
        )
        if number % batches == 0:
            optimizer.zero_grad()
        (loss / batches).backward()
        if number % batches == batches - 1:
            optimizer.step()
        losses.append(loss.detach() / batches)
    return values(copy.deepcopy(module)), losses


def strategy(processes: int, **options: Any) -> piper.PiperStrategy:
    return piper.PiperStrategy(PROGRAMS[processes](), timeout=PATIENCE, **options)


def refused(processes: int, replica: int) -> str:
    """The error that is raised if the replicas' lengths lead to different regions. With two stages, the third
    region is refused before that.
    """
    fit, _ = trainer(strategy(processes), devices=processes, max_steps=-1, max_epochs=1)
    try:
        fit.fit(net(Deeper), Batches([tokens(SAMPLES, (6, 25)[replica])]))
    except piper.PiperError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@sharing_captures
def train(rank: int, processes: int) -> dict[str, Any]:
    """Run all trainings in this process."""
    found: dict[str, Any] = {"refused": refused(processes, rank * 2 // processes)}
    for name in LENGTHS:
        module, replica = net(), rank * 2 // processes
        options: dict[str, Any] = {
            "max_steps": -1,
            "max_epochs": 1,
            "accumulate_grad_batches": ACCUMULATED.get(name, 1),
        }
        fit, record = trainer(strategy(processes, verify="first_batch"), devices=processes, **options)
        fit.fit(module, Batches(local_batches(name, replica)))
        found[name] = {"values": values(module), "losses": record.losses}
    return found
