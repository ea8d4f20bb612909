"""Sparse gradients of uncaptured replicas, which the processes exchange row by row outside of the plan. The
plan sums dense gradients."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.processes.world import World


def sparse_weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of embeddings with `sparse=True`, each once.

    The list is the same on all processes, whichever of the weights a batch uses.
    """
    embeddings = (
        part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    )
    found: dict[int, nn.Parameter] = {
        id(part.weight): part.weight for part in embeddings if isinstance(part.weight, nn.Parameter)
    }
    return list(found.values())


def mean_over_replicas(param: nn.Parameter, world: World) -> torch.Tensor | None:
    """Return the mean of a parameter's gradients over the processes, each of which is a replica. Collective.

    Returns:
        None if no process has a gradient. Otherwise a sparse tensor, or a dense tensor if this process has a
        dense gradient (because a dense operation also uses the weight).
    """
    own = param.grad
    rows = (
        torch.zeros_like(param, layout=torch.sparse_coo)
        if own is None
        else own
        if own.is_sparse
        else own.to_sparse(1)
    )
    rows = rows.coalesce()
    indices, values = rows.indices()[0], rows.values() / world.size
    counts = torch.zeros(world.size, 2, dtype=torch.int64, device=param.device)
    counts[world.rank] = torch.tensor([indices.numel(), own is not None])
    dist.all_reduce(counts)
    if not bool(counts[:, 1].any()):
        return None
    numbers = counts[:, 0].tolist()
    total = torch.sparse_coo_tensor(
        _gathered(indices, numbers)[None],
        _gathered(values, numbers),
        param.shape,
        dtype=param.dtype,
        device=param.device,
    ).coalesce()
    return total if own is None or own.is_sparse else total.to_dense()


def _gathered(rows: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Return the rows of all processes by rank, given the number of rows of each process. Collective."""
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, numbers, strict=True)])


def added(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of the gradients of earlier passes (`old`) and of this pass (`new`); None if both are
    None. The function may change `old` in place."""
    if old is None or new is None:
        return new if old is None else old
    return new + old if old.is_sparse and not new.is_sparse else old.add_(new)
