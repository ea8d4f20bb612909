"""Norms of gradients on several processes. Gradient clipping and users' hooks that call torch use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_piper.capture import clipping_replaced
from lightning_piper.errors import PiperError
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.remote_gradient import RemoteGradient
from lightning_piper.processes.world import World

_ADVICE = (
    "Pass the gradients of all parameters, as in torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm), in every "
    "process. For the norm of each parameter, use lightning_piper.grad_norm(module, norm_type)"
)
_CALL = "PiperStrategy: clip_grad_norm_ or get_total_norm"
_NO_SUM = "so Piper cannot add the gradients of the other processes to the norm"
_SOME = f"{_CALL} got only some of the gradients that a process has, {_NO_SUM}"
_ONE = (
    f"{_CALL} got one gradient in a process. Piper cannot tell whether this is the norm of one parameter, or of "
    "the parameters of all processes together"
)
# A process's answer for a gradient: not requested, but on this process; requested and on this process;
# requested, but only on other processes. 0 if the gradient is neither requested nor on this process.
_HERE, _ASKED, _ASKED_ELSEWHERE = 1, 2, 3


class GlobalNorms:
    """Norms over the gradients of all processes.

    From the constructor until `remove`, `torch.nn.utils.clip_grad_norm_` and `get_total_norm` measure the
    gradients of all processes. All processes must pass the same parameters of the module, or whole groups of
    the optimizer, which have different parameters on each process. Each element counts once, even if it is
    tied, replicated or sharded.

    Args:
        optimizer: The sharded optimizer.
        ownership: The module's tensors on the processes.
        trained: Names of the parameters that get gradients, on any process.
        world: The processes of the run.
        keeps: Returns whether gradients of an accumulation are accumulated locally.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        ownership: Ownership,
        trained: Collection[str],
        world: World,
        keeps: Callable[[], bool],
    ) -> None:
        self._optimizer, self._ownership, self._world, self._keeps = optimizer, ownership, world, keeps
        self._clipped: Tensor | None = None
        self._patches = contextlib.ExitStack()
        self._torchs = self._patches.enter_context(clipping_replaced(self._total_norm, self._held_of))
        self.of(trained)

    def of(self, trained: Collection[str]) -> None:
        """Set the names of the parameters that get gradients from now on.

        The key of a parameter is its canonical name. The key of a parameter outside of the module is its
        number and its group.
        """
        optimizer, ownership, world = self._optimizer, self._ownership, self._world
        self._held = dict(ownership.owned_params)  # key -> the parameter or shard that gets a gradient here
        self._groups: list[set[str]] = []  # for each group of the optimizer, the keys of its parameters
        for i, (group, names) in enumerate(
            zip(optimizer.optimizer.param_groups, optimizer.names, strict=True)
        ):
            own = {id(x) for x in self._held.values()}
            foreign = {
                f"{k} of group {i}": x for k, x in enumerate(y for y in group["params"] if id(y) not in own)
            }
            self._held |= foreign  # parameters outside the module, which every process has
            self._groups.append({name for name in names if name is not None} | set(foreign))
        keys = dict.fromkeys([*ownership.params, *(key for group in self._groups for key in sorted(group))])
        self._keys = {key: i for i, key in enumerate(keys)}  # key -> its index, the same on every process
        kinds = {key: x.dtype.to_real() for key, x in (*self._held.items(), *ownership.params.items())}
        self._dtypes = [kinds[key] for key in self._keys]  # by index of the key: dtype of the gradient's norm
        self._named = {id(x): key for key, x in self._held.items()}
        tensor_map = ownership.tensor_map
        order = [n for names in optimizer.names for n in names if n is not None and n in trained]
        lists = [[n for n in order if tensor_map.held(n, rank) is not None] for rank in range(world.size)]
        # In a loop over single norms, a process with fewer parameters would finish while another process
        # still waits for it.
        self._ends_early = any(len(x) < len(y) and x == y[: len(x)] for x in lists for y in lists)
        # names of the parameters of which this process holds a shard
        self._in_pieces = {
            n
            for n in ownership.params
            if tensor_map.held(n, world.rank) and not tensor_map.holds_whole(n, world.rank)
        }
        # whether every process holds every parameter whole, so that torch's own norm is right
        self._whole = all(
            tensor_map.holds_whole(n, rank) for n in ownership.params for rank in range(world.size)
        )

    @property
    def is_whole(self) -> bool:
        """Whether every process holds every parameter whole."""
        return self._whole

    def clipped(self) -> Tensor | None:
        """Return the norm of the last `clip`, and forget it; None if there was none."""
        norm, self._clipped = self._clipped, None
        return norm

    def remove(self) -> None:
        """Give torch its own functions back."""
        self._patches.close()

    def clip(self, params: Sequence[Tensor], clip_val: int | float) -> None:
        """Scale gradients down to a norm of at most `clip_val`, over all processes. Collective.

        Args:
            params: The parameters and shards of this process whose gradients are clipped together. On some
                processes there may be none.
            clip_val: The largest norm.

        Raises:
            PiperError: A gradient is sparse.
        """
        grads = {self._named[id(p)]: p.grad for p in params if p.grad is not None}
        own, here = self._own_norms(grads, 2.0), torch.zeros(len(self._keys), dtype=torch.float64)
        here[[self._keys[key] for key in grads]] = 1
        squares, counts = self._world.sum(torch.stack([own.square(), here.to(own.device)]))
        self._clipped = total = self._total(squares.sqrt(), counts, 2.0)
        if params:
            torch.nn.utils.clip_grads_with_norm_(params, clip_val, total)

    def _own_norms(self, grads: Mapping[str, Tensor], p: float) -> Tensor:
        """Return the norms of the elements that count on this process: [keys], 0 for all other keys.

        The norms are in float64, so that norms of low-precision shards sum precisely.
        """
        counted = {key: grad for key, grad in grads.items() if self._counts(key)}
        own = torch.zeros(len(self._keys), dtype=torch.float64, device=self._world.device)
        if counted:
            indices = torch.tensor([self._keys[key] for key in counted], device=own.device)
            own[indices] = torch.stack([x.to(own) for x in _norms(counted, p)])
        return own

    def _total(self, norms: Tensor, counts: Tensor, p: float, strict: bool = False) -> Tensor:
        """Return the total norm of gradients with known norms, as torch computes it on one device.

        Each norm is rounded to the dtype of its gradient, and the total has the widest of these dtypes. So it
        is the same on every process.

        Args:
            norms: [keys], 0 if there is no gradient.
            counts: [keys], the number of processes that have the gradient.
            p: Order of the norm.
            strict: Raise torch's error if the total is not finite.
        """
        if len(set(self._dtypes)) == 1:
            return self._torchs([norms.to(self._dtypes[0])], p, strict)
        chosen = (counts > 0).tolist()
        found = [
            norm.to(dtype)
            for norm, dtype, here in zip(norms.cpu(), self._dtypes, chosen, strict=True)
            if here
        ]
        return self._torchs(found, p, strict).to(norms.device)

    @staticmethod
    def _held_of(params: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of this process whose gradients are to be clipped: the given parameters
        themselves, or the local shards if their gradients are placeholders. Without a local shard, a
        parameter is left out."""
        grads = [(x, x.grad) for x in params]
        return [
            y for y in (g.shard if isinstance(g, RemoteGradient) else x for x, g in grads) if y is not None
        ]

    def _counts(self, key: str) -> bool:
        return (
            self._ownership.is_canonical(key) if key in self._ownership.params else self._world.is_rank_zero
        )

    def _total_norm(
        self,
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Return the total norm in place of torch's `get_total_norm`, with the same arguments. Collective,
        unless every process holds every parameter whole, or tensors are given and none of them is a gradient
        of the module or the optimizer. An empty list takes part, because other processes may have gradients.

        Raises:
            PiperError: The gradients are not summed yet, a gradient is sparse, or the gradients are only some
                of this process's gradients, so that Piper cannot know which gradients of other processes
                belong to them.
        """
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        here = {key: p.grad for key, p in self._held.items() if p.grad is not None}
        elsewhere = {x.of_parameter for x in given if isinstance(x, RemoteGradient)}
        key_of = {id(x): key for key, x in here.items()} | {
            x.data_ptr(): key for key, x in here.items() if x.numel()
        }
        found = [
            key_of.get(id(x), key_of.get(x.data_ptr())) for x in given if not isinstance(x, RemoteGradient)
        ]
        asked = elsewhere.union(key for key in found if key is not None)
        if (asked or not given) and self._keeps():
            raise PiperError(
                f"{_CALL} was called in the middle of a gradient "
                "accumulation, but gradients are summed over replicas only with its last batch. Compute the "
                "norm in on_before_optimizer_step or configure_gradient_clipping [PIPER-S008]"
            )
        if self._whole or (given and not asked):
            return self._torchs(given, norm_type, error_if_nonfinite, foreach)
        # `partly`: only some of this process's gradients of a group are requested. `incomplete`: other processes
        # might not take part in the exchange.
        partly = any(not here.keys() & group <= asked for group in self._groups if asked & group)
        incomplete = not elsewhere and (
            (partly and asked & self._in_pieces) or (len(asked) == 1 and self._ends_early)
        )
        if None in found:
            raise PiperError(
                f"{_CALL} got gradients of the module together with a tensor that is not a gradient of the module "
                f"or the optimizer, {_NO_SUM}. {_ADVICE} [PIPER-S008]"
            )
        if incomplete:
            raise PiperError(f"{_SOME if partly else _ONE}. {_ADVICE} [PIPER-S008]")
        return self._of_all(asked, here, float(norm_type), error_if_nonfinite)

    def _of_all(self, asked: Collection[str], here: Mapping[str, Tensor], p: float, strict: bool) -> Tensor:
        """Return the norm of the requested gradients over all processes. This process may have only some of them.
        Collective.

        Args:
            asked: Keys of the requested gradients.
            here: Key -> gradient on this process.
            p: Order of the norm.
            strict: Raise torch's error if the total is not finite.
        """
        own = self._own_norms({key: here[key] for key in asked if key in here}, p)
        said = torch.zeros(len(self._keys), dtype=torch.float64)
        for key in (*here, *asked):
            said[self._keys[key]] = _HERE if key not in asked else _ASKED if key in here else _ASKED_ELSEWHERE
        both = torch.stack([own, said.to(own.device)])
        everyones = [torch.empty_like(both) for _ in range(self._world.size)]
        dist.all_gather(everyones, both)
        norms, answers = torch.stack(everyones).cpu().unbind(1)
        self._check_asked(answers)
        total = self._total(torch.linalg.vector_norm(norms, p, dim=0), (answers == _ASKED).sum(0), p, strict)
        return total.to(self._world.device)

    def _check_asked(self, answers: Tensor) -> None:
        """Check that all processes requested the same gradients, or all their gradients of some of the
        optimizer's groups.

        Args:
            answers: [processes, keys], the answer of each process for each key.

        Raises:
            PiperError: The processes requested different gradients, or only some gradients of a group.
        """
        asked = answers >= _ASKED
        if bool((asked == asked[0]).all()):
            return
        # From here on, the processes requested different gradients. That is right only for whole groups of
        # the optimizer, of which each process has different parameters.
        groups = [[self._keys[key] for key in group] for group in self._groups]
        used = [group for group in groups if asked[:, group].any()]  # groups of which gradients are requested
        # A process requested some of its gradients of a group, but not all.
        if any(((answers[:, group] == _HERE).any(1) & asked[:, group].any(1)).any() for group in used):
            raise PiperError(f"{_SOME}. {_ADVICE} [PIPER-S008]")
        # A process requested none of its gradients of a group, and another process requested its own.
        if any((answers[:, group] == _HERE).any() for group in used):
            raise PiperError(
                "PiperStrategy: the processes called clip_grad_norm_ or get_total_norm with gradients of "
                f"different parameter groups. {_ADVICE} [PIPER-S008]"
            )
        # The processes requested parameters that are in no group, or named gradients of other processes.
        grouped = {i for group in used for i in group}
        outside = any(bool(asked[:, i].any()) for i in range(asked.shape[1]) if i not in grouped)
        if outside or bool((answers == _ASKED_ELSEWHERE).any()):
            raise PiperError(
                f"{_CALL} got gradients of different parameters in different processes. {_ADVICE} [PIPER-S008]"
            )
        if int(asked.sum(1).max()) < 2:
            raise PiperError(f"{_ONE}. {_ADVICE} [PIPER-S008]")


def norms_of_each(ownership: Ownership, world: World, p: float) -> dict[str, torch.Tensor]:
    """Return name -> norm of the whole gradient, for each parameter that has a gradient on any process. The
    norms are tensors in host memory, in the dtypes of the parameters, and equal on every process. Collective.

    Raises:
        PiperError: A gradient is sparse.
    """
    grads = {
        n: x.grad
        for n, x in ownership.owned_params.items()
        if x.grad is not None and ownership.is_canonical(n)
    }
    own = [float(x) for x in _norms(grads, p)]
    parts: dict[str, list[float]] = {}
    for norms in world.gather(dict(zip(grads, own, strict=True))):
        for name, norm in norms.items():
            parts.setdefault(name, []).append(norm)
    params = ownership.params
    return {
        n: torch.linalg.vector_norm(torch.tensor(parts[n], dtype=params[n].dtype.to_real()), p)
        for n in params
        if n in parts
    }


def _norms(grads: Mapping[str, Tensor], p: float) -> list[Tensor]:
    """Return the norm of each gradient, in the order of `grads`, with at least the precision of float32.

    Raises:
        PiperError: A gradient is sparse.
    """
    sparse = next((key for key, x in grads.items() if x.layout is not torch.strided), None)
    if sparse is not None:
        raise PiperError(
            f"parameter {sparse!r}: its gradient is sparse, and Piper cannot compute the norm of a sparse "
            "gradient. Create its embedding with sparse=False [PIPER-C017]"
        )
    return [
        torch.linalg.vector_norm(x, p, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in grads.values()
    ]
