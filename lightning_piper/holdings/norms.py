"""Norms of gradients that are on several processes: what gradients are clipped by, and what users' hooks ask torch for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_piper.capture import total_norm_replaced
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World

_ADVICE = (
    "In configure_gradient_clipping or on_before_optimizer_step, use self.clip_gradients(optimizer, gradient_clip_val=...), or "
    "give torch.nn.utils.clip_grad_norm_ all parameters of the optimizer, or of some of its groups, at once; "
    "lightning_piper.grad_norm(module, norm_type) has the norms of single ones"
)


class GlobalNorms:
    """Measures the gradients of all processes, and makes `torch.nn.utils.clip_grad_norm_` and `get_total_norm` measure those of
    whole groups. Each element counts once: of tied parameters, of replicas, and of shards.

    Args:
        optimizer: cut down to what this process holds.
        ownership, compiled, world: of the module.
        keeps: are gradients of an accumulation kept back?
    """

    def __init__(
        self, optimizer: ShardedOptimizer, ownership: Ownership, compiled: Compiled, world: World, keeps: Callable[[], bool]
    ) -> None:
        self._optimizer, self._ownership = optimizer.optimizer, ownership
        self._world, self._keeps = world, keeps
        self._names = {id(x): name for name, x in ownership.owned_params.items()}
        tensor_map, used = ownership.tensor_map, set().union(*(compiled.params_on(device) for device in compiled.plans))
        trained = [[n for n in names if n in used and ownership.params[n].requires_grad] for names in optimizer.names]
        # Some process has several of a group's parameters, and would say so if they were given one by one.
        self._several = [
            any(sum(tensor_map.held(n, rank) is not None for n in names) > 1 for rank in range(world.size)) for names in trained
        ]
        self._whole = all(tensor_map.holds_whole(n, rank) for n in ownership.params for rank in range(world.size))
        self._patches = contextlib.ExitStack()
        self._torchs = self._patches.enter_context(total_norm_replaced(self._total_norm))

    def remove(self) -> None:
        self._patches.close()

    def clip(self, params: Sequence[Tensor], clip_val: int | float) -> None:
        """Scale gradients down to a norm of at most `clip_val`, over all processes. Collective.

        Args:
            params: those of this process that are to be counted, with gradients.
        """
        own = self._torchs([p.grad for p in params if self._counts(p)]).to(self._world.device, torch.float64)
        total = self._world.sum(own.square()).sqrt()
        if params:
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, total.to(params[0].grad.dtype))  # type: ignore[union-attr]

    def _counts(self, param: Any) -> bool:
        name = self._names.get(id(param))
        return self._world.is_rank_zero if name is None else self._ownership.is_canonical(name)

    def _total_norm(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """In the place of torch's. Collective, for gradients that are on several processes."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        plain = any(isinstance(x, Elsewhere) for x in given)  # which says so itself
        groups = [[p for p in group["params"] if p.grad is not None and p.numel()] for group in self._optimizer.param_groups]
        places = {} if plain else {p.grad.data_ptr(): (i, p) for i, group in enumerate(groups) for p in group}
        found = [places[x.data_ptr()] for x in given if x.numel() and x.data_ptr() in places]
        if (found or not given) and self._keeps():
            raise PiperError(
                "PiperStrategy: the norm of gradients was asked for in the middle of a gradient accumulation, but those of "
                "replicas are kept back and summed with its last batch; ask in on_before_optimizer_step, or in "
                "configure_gradient_clipping"
            )
        if plain or self._whole or (given and not found):
            return self._torchs(given, norm_type, error_if_nonfinite, foreach)
        used = {i for i, _ in found}
        alone = len(found) == 1 and not self._several[found[0][0]]
        if alone or len(found) < max(sum(x.numel() > 0 for x in given), sum(len(groups[i]) for i in used)):
            raise PiperError(
                "PiperStrategy: torch was asked for the norm of some of the gradients that this process has, and would not know "
                f"those of other processes. {_ADVICE}"
            )
        return self._of_groups(groups, used, [p for _, p in found], float(norm_type), error_if_nonfinite)

    def _of_groups(
        self, groups: Sequence[Sequence[Tensor]], used: set[int], params: Sequence[Tensor], p: float, strict: bool
    ) -> Tensor:
        """The norm over all processes of the gradients in these groups, of which `params` are here. Collective."""
        own = self._torchs([x.grad for x in params if self._counts(x)], p).to(self._world.device, torch.float64)
        asked = [1.0 if i in used else -1.0 if group else 0.0 for i, group in enumerate(groups)]
        message = torch.cat([own.view(1), torch.tensor(asked, dtype=torch.float64, device=self._world.device)])
        everyones = [torch.empty_like(message) for _ in range(self._world.size)]
        dist.all_gather(everyones, message)
        norms, *by_group = torch.stack(everyones).unbind(1)
        if any(bool((x > 0).any() & (x < 0).any()) for x in by_group):
            raise PiperError(f"PiperStrategy: processes asked torch for norms of gradients of different groups. {_ADVICE}")
        dtype = next(iter(self._ownership.params.values())).dtype
        return self._torchs([norms], p, strict).to(dtype)


def norms_of_each(ownership: Ownership, world: World, p: float) -> dict[str, torch.Tensor]:
    """Name -> norm of the gradient, of the parameters that have one. Collective."""
    grads = {n: x.grad for n, x in ownership.owned_params.items() if x.grad is not None and ownership.is_canonical(n)}
    own = torch.stack([torch.linalg.vector_norm(g.double(), p) for g in grads.values()]).tolist() if grads else []
    parts: dict[str, list[float]] = {}
    for found in world.gather(dict(zip(grads, own, strict=True))):
        for name, norm in found.items():
            parts.setdefault(name, []).append(norm)
    params = ownership.params
    return {n: torch.linalg.vector_norm(torch.tensor(parts[n], dtype=params[n].dtype), p) for n in params if n in parts}
