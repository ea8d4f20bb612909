"""Decides whether an optimizer treats each element, or each parameter, independently. Piper runs a copy of
the optimizer to find out, because no list of names is complete.

An elementwise optimizer works with shards of parameters. An optimizer that treats each parameter
independently works with only some of the parameters. An optimizer that reads a whole parameter (its norm,
rows or matrix) would compute something else on a shard. An optimizer that reads all parameters would compute
something else on one stage's parameters. In both cases training would silently be wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_piper.holdings.optimizer_trial import (
    KNOWN,
    ParameterKind,
    TrialResult,
    kinds_to_try,
    remade,
    run,
    scenarios_for,
)

__all__ = ["NotElementwise", "StateKeys", "Untried", "goes_in_parts", "remade", "sees_others", "state_keys"]

# The same kernels may round an element differently at the end of a longer vector. If an optimizer uses a
# norm, an element changes by more than a tenth.
RTOL, ATOL = 1e-9, 1e-12
# Tolerance in float32. It is small enough because whole parameters run through the same kernels.
SINGLE = 1e-4


class NotElementwise(Exception):
    """An optimizer does not treat each element independently. The message says what differs.

    Attributes:
        param: The optimizer's parameter that differs; None if the error is not about one parameter.
    """

    def __init__(self, message: str, param: Tensor | None = None) -> None:
        super().__init__(message)
        self.param = param


class Untried(Exception):
    """A copy of the optimizer cannot run. The message says where the copy failed, and its error."""

    param: Tensor | None = None  # as of `NotElementwise`

    @property
    def unchecked(self) -> str:
        """The sentence that says why Piper cannot check the optimizer, and the beginning of the advice."""
        return f"Piper cannot check this, because a test copy of the optimizer failed {self}. Correct the cause, or use"


@dataclass(frozen=True)
class StateKeys:
    """The keys of an optimizer's states of parameters, as trials have found them. Without trials, both sets
    are empty.

    Attributes:
        cut: Keys of tensors with one number for each element of the parameter, such as `exp_avg`.
        once: Keys of values that are the same for every shard, such as `step`.
    """

    cut: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()

    def __or__(self, other: StateKeys) -> StateKeys:
        return StateKeys(self.cut | other.cut, self.once | other.once)

    def is_cut(self, key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
        """Return whether a state value has one number for each element of its parameter or shard.

        A tensor of the same shape does, unless its key is in `once`. But a tensor without dimensions does
        only if its key is in `cut`, because it may be a step count.

        Args:
            key: The key of the state value.
            value: The state value.
            shape: The shape of the parameter or shard.
        """
        if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or key in self.once:
            return False
        return key in self.cut or value.ndim > 0


def state_keys(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device) -> StateKeys:
    """Run copies of an optimizer on parameters like its own, whole and in shards, and return the keys of its
    state.

    Args:
        optimizer: The optimizer; it is not changed.
        chosen: For each group of the optimizer, the parameters to be sharded.
        device: The device to run on.

    Raises:
        NotElementwise: Shards are updated differently from the whole parameter, or a state has a number for each
            element of only some parameters.
        Untried: A copy of the optimizer cannot run on whole parameters, or not on shards.
    """
    keys = StateKeys()
    scenarios = scenarios_for(optimizer)
    if type(optimizer) in KNOWN:  # a short trial finds the keys of its states
        scenarios = scenarios[-1:]
    for kinds, scenario in product(kinds_to_try(optimizer, chosen), scenarios):
        try:
            whole = run(optimizer, kinds, scenario, device)
        except Exception as error:
            raise Untried(f"with {type(error).__name__}: {error}") from error
        try:
            shards = [_run_shards(optimizer, kinds, whole, part, device) for part in range(2)]
        except Exception as error:
            raise Untried(f"on shards with {type(error).__name__}: {error}") from error
        for i, kind in enumerate(kinds):
            try:
                found = [(p.params[i], p.states[i]) for p in shards if i in p.params]
                keys |= _compared(kind, whole, i, found, len(whole.grads))
            except NotElementwise as error:
                raise NotElementwise(str(error), kind.like) from None
    if both := keys.cut & keys.once:
        raise NotElementwise(
            f"its state {min(both)!r} has a number for each element of some parameters, but not of all "
            "parameters"
        )
    return keys


def _run_shards(
    optimizer: Optimizer, kinds: Sequence[ParameterKind], whole: TrialResult, part: int, device: torch.device
) -> TrialResult:
    """Repeat the trial `whole` with one shard of each parameter: the first (`part` 0) or the second (`part`
    1). Parameters whose shard is empty are left out."""
    starts = {
        i: shard for i, kind in enumerate(kinds) if (shard := _cut(whole.before[i], kind)[part]).numel()
    }
    grads = [{i: _cut(step[i], kinds[i])[part] for i in starts} for step in whole.grads]
    return run(optimizer, kinds, whole.scenario, device, starts, grads)


def _cut(value: Tensor, kind: ParameterKind) -> tuple[Tensor, Tensor]:
    flat = value.flatten()
    return flat[: kind.cut], flat[kind.cut :]


def _compared(
    kind: ParameterKind,
    whole: TrialResult,
    i: int,
    shards: Sequence[tuple[Tensor, dict[str, Any]]],
    steps: int,
) -> StateKeys:
    """Return the keys of a parameter's state, after a check that its shards have the values and the state of
    the whole parameter. A parameter with one element gives no keys for `once`, and gives keys for `cut` only
    if it has dimensions.

    Args:
        kind: The kind of the parameter, which is number `i`.
        whole: The trial on whole parameters.
        shards: Values and state of each shard after the trial on shards.
        steps: Number of steps of the trial.

    Raises:
        NotElementwise: Values or state differ.
    """
    got = (
        f"in a test of {steps} steps with gradients {whole.scenario.what}, on a parameter of shape "
        f"{tuple(kind.like.shape)}, two shards that were updated alone got"
    )
    _compare(f"{got} other values", whole.params[i], [shard for shard, _ in shards])
    cut, once = set(), set()
    for key, kept in whole.states[i].items():
        found = [shard.get(key) for _, shard in shards]
        if (
            isinstance(kept, Tensor)
            and kept.shape == kind.shape
            and (math.prod(kind.shape) > 1 or kept.ndim > 0)
        ):
            _compare(f"{got} another state {key!r}", kept, found)
            cut.add(key)
            continue
        for other in found:
            _compare(f"{got} another state {key!r}", kept, [other])
        if math.prod(kind.shape) > 1:
            once.add(key)
    return StateKeys(frozenset(cut), frozenset(once))


def _compare(what: str, whole: Any, shards: Sequence[Any]) -> None:
    """Check that the shards together equal the whole. `what` begins the error's message.

    Raises:
        NotElementwise: They differ.
    """
    if isinstance(whole, Tensor):
        if all(isinstance(shard, Tensor) for shard in shards):
            flat, joined = whole.flatten(), torch.cat([shard.flatten() for shard in shards])
            if joined.shape == flat.shape and torch.allclose(
                joined, flat, rtol=RTOL, atol=ATOL, equal_nan=True
            ):
                return
    elif all(type(shard) is type(whole) and shard == whole for shard in shards):
        return
    raise NotElementwise(f"{what} than the whole parameter")


def sees_others(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device) -> str:
    """Return why an optimizer needs all parameters at once: the part of an error's text after the optimizer's
    name. Return an empty text if it treats each parameter independently.

    Args:
        optimizer: The optimizer; it is not changed.
        chosen: For each of its groups, the parameters that it trains.
        device: The device to run on.

    Raises:
        Untried: Copies of the optimizer cannot run.
    """
    failure: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # some optimizers support only float32
        try:
            for kinds in kinds_to_try(optimizer, chosen):
                if found := _sees_others(optimizer, kinds * 2, device, dtype):
                    return found
            return ""
        except Exception as error:
            failure = failure or error
    raise Untried(f"with {type(failure).__name__}: {failure}") from failure


def _sees_others(
    optimizer: Optimizer, kinds: Sequence[ParameterKind], device: torch.device, dtype: torch.dtype
) -> str:
    """Do the work of `sees_others` in one dtype."""
    for number, scenario in enumerate(scenarios_for(optimizer)):
        together = run(optimizer, kinds, scenario, device, dtype=dtype)
        if number == 0:
            again = run(optimizer, kinds, scenario, device, together.before, together.grads, seed=1)
            if any(not torch.equal(x, again.params[i]) for i, x in together.params.items()):
                return (
                    "draws random numbers, and the numbers for a parameter depend on the parameters before it"
                )
        for part in (range(len(kinds) // 2), range(len(kinds) // 2, len(kinds))):
            grads = [{i: step[i] for i in part} for step in together.grads]
            apart = run(optimizer, kinds, scenario, device, {i: together.before[i] for i in part}, grads)
            rtol, atol = (RTOL, ATOL) if dtype == torch.float64 else (SINGLE, SINGLE)
            close = (
                torch.allclose(x, together.params[i], rtol, atol, equal_nan=True)
                for i, x in apart.params.items()
            )
            if not all(close):
                return "updates a parameter differently if it has other parameters as well"
    return ""


def goes_in_parts(
    optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]], device: torch.device, early: bool = False
) -> bool:
    """Return whether one step for each parameter gives the same bits as one step for all parameters. False if
    copies of the optimizer cannot run.

    For example, the result is False for an optimizer that counts its steps in a group and not for each
    parameter, or that runs its closure again.

    Args:
        optimizer: The optimizer; it is not changed.
        chosen: For each of its groups, the parameters that it trains.
        device: The device to run on.
        early: Whether the steps for each parameter are computed before they are applied (`compute_updates`).
    """
    in_parts = {"early": True} if early else {"apart": True}
    try:
        for kinds, scenario in product(kinds_to_try(optimizer, chosen), scenarios_for(optimizer)):
            twice = kinds * 2
            whole = run(optimizer, twice, scenario, device, dtype=torch.float32)
            parts = run(
                optimizer, twice, scenario, device, whole.before, whole.grads, dtype=torch.float32, **in_parts
            )
            if any(not torch.equal(x, parts.params[i]) for i, x in whole.params.items()):
                return False
            if not whole.keeps_same(parts):  # such as a number of steps, which may change later steps
                return False
    except Exception:
        return False
    return True
