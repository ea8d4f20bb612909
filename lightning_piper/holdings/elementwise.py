"""Does an optimizer treat each element on its own, or each parameter? Found out by running it, for no list of names is complete.

An optimizer that does can be given shards of parameters, or some of the parameters. One that looks at a whole parameter (at its
norm, its rows, its matrix) would do something else with a shard, one that looks at all of them would with those of one stage, and
nobody would notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_piper.holdings.trial import COURSES, Kind, Run, kinds_of, remade, run

__all__ = ["NotElementwise", "StateKeys", "Untried", "goes_in_parts", "remade", "sees_others", "state_keys"]

# The same kernels may round an element differently at the end of a longer vector; a norm changes it by more than a tenth.
RTOL, ATOL = 1e-9, 1e-12
SINGLE = 1e-4  # what counts as equal in float32: whole parameters meet the same kernels


class NotElementwise(Exception):
    """An optimizer does not treat each element on its own. The message says what was seen. `param`: of the optimizer, at which it
    was seen; None if at none."""

    def __init__(self, message: str, param: Tensor | None = None) -> None:
        super().__init__(message)
        self.param = param


class Untried(Exception):
    """No copy of the optimizer can be run. The message says why."""


@dataclass(frozen=True)
class StateKeys:
    """The keys of an optimizer's state of one parameter.

    Attributes:
        cut: tensors with one number for each element.
        once: everything else, the same for every shard.
    """

    cut: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()

    def __or__(self, other: StateKeys) -> StateKeys:
        return StateKeys(self.cut | other.cut, self.once | other.once)

    def is_cut(self, key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
        """Does the value, of a parameter or shard of this shape, have a number for each element?"""
        if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or key in self.once:
            return False
        return key in self.cut or value.ndim > 0


def state_keys(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device) -> StateKeys:
    """Run copies of an optimizer on parameters like its own, whole and in shards.

    Args:
        optimizer: left as it is.
        chosen: of each of its groups, the parameters that will be in shards.
        device: to run on.

    Raises:
        NotElementwise: shards are not updated as the whole is, or copies cannot be run.
    """
    kinds = kinds_of(chosen)
    keys = StateKeys()
    for course in COURSES:
        try:
            whole = run(optimizer, kinds, course, device)
            shards = [_run_shards(optimizer, kinds, whole, part, device) for part in range(2)]
        except Exception as error:
            raise NotElementwise(f"a copy of it fails with {type(error).__name__}: {error}") from error
        for i, kind in enumerate(kinds):
            try:
                found = [(p.params[i], p.states[i]) for p in shards if i in p.params]
                keys |= _compared(kind, whole, i, found, len(whole.grads))
            except NotElementwise as error:
                raise NotElementwise(str(error), kind.like) from None
    if both := keys.cut & keys.once:
        raise NotElementwise(f"its state {min(both)!r} has a number for each element of some parameters, and not of others")
    return keys


def _run_shards(optimizer: Optimizer, kinds: Sequence[Kind], whole: Run, part: int, device: torch.device) -> Run:
    """The same with the first or the second shard of each parameter."""
    starts = {i: shard for i, kind in enumerate(kinds) if (shard := _cut(whole.before[i], kind)[part]).numel()}
    grads = [{i: _cut(step[i], kinds[i])[part] for i in starts} for step in whole.grads]
    return run(optimizer, kinds, whole.course, device, starts, grads)


def _cut(value: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    flat = value.flatten()
    return flat[: kind.cut], flat[kind.cut :]


def _compared(kind: Kind, whole: Run, i: int, shards: Sequence[tuple[Tensor, dict[str, Any]]], steps: int) -> StateKeys:
    """The keys of a parameter's state, which is that of its shards, as is the parameter."""
    after = f"after {steps} steps with gradients {whole.course.what}, of a parameter of shape {tuple(kind.like.shape)}"
    _compare(f"{after}, the values differ", whole.params[i], [shard for shard, _ in shards])
    cut, once = set(), set()
    for key, kept in whole.states[i].items():
        found = [shard.get(key) for _, shard in shards]
        if isinstance(kept, Tensor) and kept.shape == kind.shape and (math.prod(kind.shape) > 1 or kept.ndim > 0):
            _compare(f"{after}, the state {key!r} differs", kept, found)
            cut.add(key)
            continue
        for other in found:
            _compare(f"{after}, the state {key!r} differs", kept, [other])
        if math.prod(kind.shape) > 1:
            once.add(key)
    return StateKeys(frozenset(cut), frozenset(once))


def _compare(what: str, whole: Any, shards: Sequence[Any]) -> None:
    if isinstance(whole, Tensor):
        if all(isinstance(shard, Tensor) for shard in shards):
            flat, joined = whole.flatten(), torch.cat([shard.flatten() for shard in shards])
            if joined.shape == flat.shape and torch.allclose(joined, flat, rtol=RTOL, atol=ATOL, equal_nan=True):
                return
    elif all(type(shard) is type(whole) and shard == whole for shard in shards):
        return
    raise NotElementwise(f"{what} between the whole and its pieces")


def sees_others(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device) -> str:
    """Why an optimizer must have all parameters at once; empty if it need not.

    Args:
        optimizer, device: as for `state_keys`.
        chosen: of each of its groups, the parameters that it trains.

    Raises:
        Untried: copies of it cannot be run.
    """
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # there are optimizers for float32 alone
        try:
            return _sees_others(optimizer, kinds_of(chosen) * 2, device, dtype)
        except Exception as error:
            failure = failure or error
    raise Untried(f"{type(failure).__name__}: {failure}") from failure


def _sees_others(optimizer: Optimizer, kinds: Sequence[Kind], device: torch.device, dtype: torch.dtype) -> str:
    for course in COURSES:
        together = run(optimizer, kinds, course, device, dtype=dtype)
        if course is COURSES[0]:
            again = run(optimizer, kinds, course, device, together.before, together.grads, seed=1)
            if any(not torch.equal(x, again.params[i]) for i, x in together.params.items()):
                return "draws random numbers, and those for a parameter depend on how many it drew for others before"
        for part in (range(len(kinds) // 2), range(len(kinds) // 2, len(kinds))):
            grads = [{i: step[i] for i in part} for step in together.grads]
            apart = run(optimizer, kinds, course, device, {i: together.before[i] for i in part}, grads)
            rtol, atol = (RTOL, ATOL) if dtype == torch.float64 else (SINGLE, SINGLE)
            close = (torch.allclose(x, together.params[i], rtol, atol, equal_nan=True) for i, x in apart.params.items())
            if not all(close):
                return "updates a parameter otherwise when there are others"
    return ""


def goes_in_parts(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device) -> bool:
    """Is a step of some parameters, and then one of the others, bit by bit a step of all? False also if copies cannot be run.

    One that counts its steps in a group (not with each parameter), or that runs its closure again, is not.

    Args:
        optimizer, chosen, device: as for `sees_others`.
    """
    kinds = kinds_of(chosen) * 2
    try:
        for course in COURSES:
            whole = run(optimizer, kinds, course, device, dtype=torch.float32)
            parts = run(optimizer, kinds, course, device, whole.before, whole.grads, dtype=torch.float32, apart=True)
            if any(not torch.equal(x, parts.params[i]) for i, x in whole.params.items()):
                return False
    except Exception:
        return False
    return True
