"""Sparse gradients of replicas whose step is not captured: a plan sums dense ones, so these are exchanged beside it, row by row."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_piper.processes.world import World


def sparse_weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights of embeddings with `sparse=True`, each once. These are the same in all processes, whatever each batch uses."""
    embeddings = (part for part in module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse)
    found: dict[int, nn.Parameter] = {id(part.weight): part.weight for part in embeddings if isinstance(part.weight, nn.Parameter)}
    return list(found.values())


def mean_over_replicas(param: nn.Parameter, world: World) -> torch.Tensor | None:
    """The mean of the gradients that this parameter has in the processes, of which each is a replica; None if none has one.
    Sparse, unless this process has a dense one, as of a weight that a dense operation uses, too. Collective."""
    own = param.grad
    rows = torch.zeros_like(param, layout=torch.sparse_coo) if own is None else own if own.is_sparse else own.to_sparse(1)
    rows = rows.coalesce()
    indices, values = rows.indices()[0], rows.values() / world.size
    counts = torch.zeros(world.size, 2, dtype=torch.int64, device=param.device)
    counts[world.rank] = torch.tensor([indices.numel(), own is not None])
    dist.all_reduce(counts)
    if not bool(counts[:, 1].any()):
        return None
    numbers = counts[:, 0].tolist()
    total = torch.sparse_coo_tensor(
        _gathered(indices, numbers)[None], _gathered(values, numbers), param.shape, dtype=param.dtype, device=param.device
    ).coalesce()
    return total if own is None or own.is_sparse else total.to_dense()


def _gathered(rows: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """The rows of all processes, which have these numbers of them."""
    padded = rows.new_zeros(max(numbers), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in numbers]
    dist.all_gather(parts, padded)
    return torch.cat([part[:n] for part, n in zip(parts, numbers, strict=True)])


def added(old: torch.Tensor | None, new: torch.Tensor | None) -> torch.Tensor | None:
    """Gradients of earlier passes and of this one; the first may be changed."""
    if old is None or new is None:
        return new if old is None else old
    return new + old if old.is_sparse and not new.is_sparse else old.add_(new)
