"""Norms of gradients that are on several processes: what gradients are clipped by, and what users' hooks ask torch for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_piper.capture import clipping_replaced
from lightning_piper.errors import PiperError
from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World

_ADVICE = (
    "In configure_gradient_clipping or on_before_optimizer_step, use self.clip_gradients(optimizer, gradient_clip_val=...), or "
    "give torch.nn.utils.clip_grad_norm_ the parameters of the module or of a part of it, the same in every process, or all of the "
    "optimizer or of some of its groups; lightning_piper.grad_norm(module, norm_type) has the norms of single ones"
)
_SOME = (
    "PiperStrategy: torch was asked for the norm of some of the gradients that this process has, and would not know those of other "
    "processes"
)
_HERE, _ASKED, _ASKED_ELSEWHERE = 1, 2, 3


class GlobalNorms:
    """Measures the gradients of all processes, and makes `torch.nn.utils.clip_grad_norm_` and `get_total_norm` measure those of
    the same parameters of the module, or of whole groups of the optimizer, of which each process has others. Each element counts
    once: of tied parameters, of replicas, and of shards.

    Args:
        optimizer: cut down to what this process holds.
        ownership, world: of the module.
        trained: names of the parameters that get gradients, on any process.
        keeps: are gradients of an accumulation kept back?
    """

    def __init__(
        self, optimizer: ShardedOptimizer, ownership: Ownership, trained: Collection[str], world: World, keeps: Callable[[], bool]
    ) -> None:
        self._optimizer, self._ownership, self._world, self._keeps = optimizer, ownership, world, keeps
        self._patches = contextlib.ExitStack()
        self._torchs = self._patches.enter_context(clipping_replaced(self._total_norm, self._held_of))
        self.of(trained)

    def of(self, trained: Collection[str]) -> None:
        """From now on these parameters get gradients."""
        optimizer, ownership, world = self._optimizer, self._ownership, self._world
        self._held = dict(ownership.owned_params)  # key -> what gets a gradient here
        self._groups: list[set[str]] = []  # keys
        for i, (group, names) in enumerate(zip(optimizer.optimizer.param_groups, optimizer.names, strict=True)):
            own = {id(x) for x in self._held.values()}
            foreign = {f"{k} of group {i}": x for k, x in enumerate(y for y in group["params"] if id(y) not in own)}
            self._held |= foreign  # not the module's, and in every process
            self._groups.append({name for name in names if name is not None} | set(foreign))
        keys = dict.fromkeys([*ownership.params, *(key for group in self._groups for key in sorted(group))])
        self._keys = {key: i for i, key in enumerate(keys)}  # in the same order in every process
        self._named = {id(x): key for key, x in self._held.items()}
        tensor_map = ownership.tensor_map
        order = [n for names in optimizer.names for n in names if n is not None and n in trained]
        lists = [[n for n in order if tensor_map.held(n, rank) is not None] for rank in range(world.size)]
        # Asked for one by one, some process would have done while another still asks.
        self._ends_early = any(len(x) < len(y) and x == y[: len(x)] for x in lists for y in lists)
        self._in_pieces = {
            n for n in ownership.params if tensor_map.held(n, world.rank) and not tensor_map.holds_whole(n, world.rank)
        }
        self._whole = all(tensor_map.holds_whole(n, rank) for n in ownership.params for rank in range(world.size))

    def remove(self) -> None:
        self._patches.close()

    def clip(self, params: Sequence[Tensor], clip_val: int | float) -> None:
        """Scale gradients down to a norm of at most `clip_val`, over all processes. Collective.

        Args:
            params: those of this process that are to be counted, with gradients.
        """
        widest = self._widest(self._keys)
        grads = [p.grad for p in params if p.grad is not None and self._counts(self._named[id(p)])]
        own = self._norm_here(grads, 2.0, widest).to(self._world.device)
        total = self._world.sum(own.square()).sqrt()
        if params:
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, total.to(widest))

    def _widest(self, keys: Iterable[str]) -> torch.dtype:
        """The dtype that torch gives the norm of the gradients of these parameters, wherever they are."""
        params = [self._held[key] if key in self._held else self._ownership.params[key] for key in keys]
        return functools.reduce(torch.promote_types, {x.dtype.to_real() for x in params} or {torch.get_default_dtype()})

    def _norm_here(self, grads: Sequence[Tensor], p: float, widest: torch.dtype) -> Tensor:
        """Of gradients of this process, in float64. As in torch, that of a narrower one is rounded, and the sum of them is not."""
        wide = [x for x in grads if x.dtype.to_real() == widest]
        norms = [self._torchs(wide, p), *(torch.linalg.vector_norm(x, p) for x in grads if x.dtype.to_real() != widest)]
        total: Tensor = torch.linalg.vector_norm(torch.stack([x.double() for x in norms]), p)
        return total

    @staticmethod
    def _held_of(params: Sequence[Tensor]) -> list[Tensor]:
        """What this process has of these parameters: themselves, or their shards."""
        grads = [(x, x.grad) for x in params]
        return [y for y in (g.shard if isinstance(g, Elsewhere) else x for x, g in grads) if y is not None]

    def _counts(self, key: str) -> bool:
        return self._ownership.is_canonical(key) if key in self._ownership.params else self._world.is_rank_zero

    def _total_norm(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """In the place of torch's. Collective, for gradients that are on several processes."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        here = {key: p.grad for key, p in self._held.items() if p.grad is not None}
        elsewhere = {x.of_parameter for x in given if isinstance(x, Elsewhere)}
        places = {id(x): key for key, x in here.items()} | {x.data_ptr(): key for key, x in here.items() if x.numel()}
        found = [places.get(id(x), places.get(x.data_ptr())) for x in given if not isinstance(x, Elsewhere)]
        asked = elsewhere.union(key for key in found if key is not None)
        if (asked or not given) and self._keeps():
            raise PiperError(
                "PiperStrategy: the norm of gradients was asked for in the middle of a gradient accumulation, but those of "
                "replicas are kept back and summed with its last batch; ask in on_before_optimizer_step, or in "
                "configure_gradient_clipping"
            )
        if self._whole or (given and not asked):
            return self._torchs(given, norm_type, error_if_nonfinite, foreach)
        partly = any(not here.keys() & group <= asked for group in self._groups if asked & group)
        alone = not elsewhere and ((partly and asked & self._in_pieces) or (len(asked) == 1 and self._ends_early))
        if alone or None in found:
            raise PiperError(f"{_SOME}. {_ADVICE}")
        return self._of_all(asked, here, float(norm_type), error_if_nonfinite)

    def _of_all(self, asked: Collection[str], here: Mapping[str, Tensor], p: float, strict: bool) -> Tensor:
        """The norm over all processes of the gradients that were asked for, of which some are here. Collective."""
        grads = [here[key] for key in asked if key in here and self._counts(key)]
        said = torch.zeros(1 + len(self._keys), dtype=torch.float64)
        said[0] = self._norm_here(grads, p, self._widest(self._keys))
        for key in (*here, *asked):
            said[1 + self._keys[key]] = _HERE if key not in asked else _ASKED if key in here else _ASKED_ELSEWHERE
        said = said.to(self._world.device)
        everyones = [torch.empty_like(said) for _ in range(self._world.size)]
        dist.all_gather(everyones, said)
        norms, answers = torch.stack(everyones).cpu().tensor_split([1], dim=1)
        self._check_asked(answers)
        keys = [key for key, i in self._keys.items() if bool((answers[:, i] >= _ASKED).any())]
        return self._torchs([norms.to(self._world.device)], p, strict).to(self._widest(keys))

    def _check_asked(self, answers: Tensor) -> None:
        """Did the processes ask for the norm of the same gradients, or of all that each has of some of the optimizer's groups?

        Args:
            answers: [processes, keys], of each process for each key.

        Raises:
            PiperError: neither, in every process.
        """
        asked = answers >= _ASKED
        if bool((asked == asked[0]).all()):
            return
        groups = [[self._keys[key] for key in group] for group in self._groups]
        used = [group for group in groups if asked[:, group].any()]
        if any(((answers[:, group] == _HERE).any(1) & asked[:, group].any(1)).any() for group in used):
            raise PiperError(f"{_SOME}. {_ADVICE}")
        if any((answers[:, group] == _HERE).any() for group in used):
            raise PiperError(f"PiperStrategy: processes asked torch for norms of gradients of different groups. {_ADVICE}")
        grouped = {i for group in used for i in group}
        outside = any(bool(asked[:, i].any()) for i in range(asked.shape[1]) if i not in grouped)
        if outside or bool((answers == _ASKED_ELSEWHERE).any()):
            raise PiperError(f"{_SOME}. {_ADVICE}")
        if int(asked.sum(1).max()) < 2:
            raise PiperError(f"{_SOME}; or for that of a group of which each has one, which cannot be told from it. {_ADVICE}")


def norms_of_each(ownership: Ownership, world: World, p: float) -> dict[str, torch.Tensor]:
    """Name -> norm of the gradient, of the parameters that have one. Collective."""
    grads = {n: x.grad for n, x in ownership.owned_params.items() if x.grad is not None and ownership.is_canonical(n)}
    wide = [g.to(torch.complex128 if g.is_complex() else torch.float64) for g in grads.values()]
    own = torch.stack([torch.linalg.vector_norm(g, p) for g in wide]).tolist() if grads else []
    parts: dict[str, list[float]] = {}
    for found in world.gather(dict(zip(grads, own, strict=True))):
        for name, norm in found.items():
            parts.setdefault(name, []).append(norm)
    params = ownership.params
    return {n: torch.linalg.vector_norm(torch.tensor(parts[n], dtype=params[n].dtype.to_real()), p) for n in params if n in parts}
