"""A kind of module: how it is made, its data, and the options of the Trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH = 24, 4


@dataclass(frozen=True)
class Kind:
    """A module as people write them.

    Attributes:
        what: The property of the module that may be difficult for a strategy.
        train, val: Make the loaders; without `val` there is no validation.
        predict: Whether there is a `predict_step`, for the batches of `val`.
        options: The options of the Trainer.
        mixes: a hook changes the batch that it sees as a whole, which is a replica's: so it trains as under
            DDP.
        drifts: DDP does not average what is frozen when it begins, so its processes come apart: one device is
            the reference.
        single: Python numbers that a hook logs, which Lightning keeps in single precision: the mean of the
            replicas' rounds.
        of_batch: logged values that are those of the whole batch, where DDP has the mean of the replicas': no
            sums of means.
    """

    name: str
    what: str
    module: Callable[[], L.LightningModule]
    train: Callable[[], Any]
    val: Callable[[], Any] | None = None
    predict: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    mixes: bool = False
    drifts: bool = False
    of_batch: tuple[str, ...] = ()
    single: tuple[str, ...] = ()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(high: int, *shape: int, seed: int = 0, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def tensors(*made: Tensor) -> Callable[[], Any]:
    """Return a function that makes a loader whose samples are rows of these tensors."""
    return lambda: DataLoader(TensorDataset(*made), batch_size=BATCH)


def samples(items: Sequence[Any], collate: Callable[[list[Any]], Any] | None = None) -> Callable[[], Any]:
    """Return a function that makes a loader whose samples are these objects."""
    return lambda: DataLoader(list(items), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
