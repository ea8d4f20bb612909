"""Runs an optimizer's step in parts: as several steps, each for some of the parameters, or for some parameters
before the user's step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_piper.capture.torch_private._torch import register_first_post_hook

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


@contextmanager
def only(optimizer: Optimizer, chosen: Iterable[Tensor]) -> Iterator[None]:
    """Restrict the optimizer's groups to the chosen parameters inside of this context. The groups stay, even
    those without a chosen parameter."""
    whole, chosen = [list(group["params"]) for group in optimizer.param_groups], set(chosen)
    try:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = [p for p in params if p in chosen]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = params


def own_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """Return the `step` function of the optimizer's class, which takes the optimizer. Unlike
    `optimizer.step`, it does not run hooks, and learning rate schedulers do not count it."""
    step: Any = type(optimizer).step
    # torch marks a `step` that it has wrapped with `hooked`.
    own: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def after_closure(args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[], None]) -> StepArguments:
    """Return the arguments of a step with a closure that also calls `work`, at its end, because the closure computes
    the gradients. Without a closure, call `work` now."""

    def wrapped(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            work()
            return loss

        return run

    if args and callable(args[0]):
        return (wrapped(args[0]), *args[1:]), kwargs
    if callable(kwargs.get("closure")):
        return args, kwargs | {"closure": wrapped(kwargs["closure"])}
    work()
    return args, kwargs


@dataclass(frozen=True)
class ComputedUpdate:
    """The update of a parameter, computed but not applied.

    Attributes:
        param: The parameter, which has its old value.
        value: Its new value.
        state: Its new state.
        grad: The gradient from which the update was computed.
        options: The options of its group at that time.
        version: The version of the parameter at that time.
    """

    param: Tensor
    value: Tensor
    state: dict[str, Any]
    grad: Tensor
    options: dict[str, Any]
    version: int

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of the update."""
        return [self.value, self.grad, *(x for x in self.state.values() if isinstance(x, Tensor))]

    def is_current(self, optimizer: Optimizer) -> bool:
        """Return whether the parameter, its gradient and the options of its group are as when the update was computed.

        Parameters in one tensor share their version, so call this for all updates before `apply`.
        """
        return (
            self.param._version == self.version
            and _alike(self.param.grad, self.grad)
            and _alike(_options(_groups(optimizer)[self.param]), self.options)
        )

    def apply(self, optimizer: Optimizer) -> None:
        """Put the new value and the new state into the parameter and the optimizer."""
        with torch.no_grad():
            self.param.copy_(self.value)
        if self.param in optimizer.state:
            optimizer.state[self.param].clear()
            optimizer.state[self.param].update(self.state)
        elif self.state:
            optimizer.state[self.param] = self.state


def compute_updates(optimizer: Optimizer, grads: Mapping[Tensor, Tensor]) -> list[ComputedUpdate]:
    """Return what the optimizer's step would make of some parameters. The step works on copies, so parameters,
    gradients, states and options do not change.

    Args:
        grads: Parameter -> its gradient.
    """
    groups = _groups(optimizer)
    own = [_options(group) for group in optimizer.param_groups]
    used = {p: grad.clone() for p, grad in grads.items()}
    copies = {p: _parameter_like(p, grad) for p, grad in used.items()}
    try:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            group.update(_copied(options))
        of_group = {p: _copied(_options(groups[p])) for p in grads}
        optimizer.state.update(
            {copies[p]: _copied(optimizer.state[p]) for p in grads if p in optimizer.state}
        )
        with _replaced(optimizer, copies), torch.enable_grad():
            own_step(optimizer)(optimizer)
    finally:
        for group, options in zip(optimizer.param_groups, own, strict=True):
            for key in group.keys() - options.keys() - {"params", "param_names"}:
                del group[key]
            group.update(options)
        states = {p: optimizer.state.pop(x, {}) for p, x in copies.items()}
    return [
        ComputedUpdate(
            p,
            copies[p].detach(),
            states[p],
            used[p] if used[p]._version == 0 else grad.clone(),  # an optimizer may change gradients in place
            of_group[p],
            p._version,
        )
        for p, grad in grads.items()
    ]


def _parameter_like(p: Tensor, grad: Tensor) -> nn.Parameter:
    """Return a copy of a parameter, with the user's attributes and with this gradient."""
    found = nn.Parameter(p.detach().clone(), p.requires_grad)
    vars(found).update(vars(p))
    found.grad = grad
    return found


@contextmanager
def _replaced(optimizer: Optimizer, copies: Mapping[Tensor, nn.Parameter]) -> Iterator[None]:
    """Let the optimizer's groups have only these copies of their parameters inside of this context."""
    whole = [list(group["params"]) for group in optimizer.param_groups]
    try:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = [copies[p] for p in params if p in copies]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, whole, strict=True):
            group["params"][:] = params


class EarlyUpdates:
    """The updates of some parameters that are computed before the user's step. The step then updates only the other
    parameters. It implements `ops.early_update.GradientReceiver`.

    If a hook has changed the parameter, its gradient or the options of its group after the update was computed, the
    user's step updates this parameter as usual, and there is a warning.
    """

    def __init__(self) -> None:
        self._optimizer: Optimizer | None = None  # no update is computed early before `take`
        self._params: Mapping[str, Tensor] = {}
        self._found: dict[str, ComputedUpdate] = {}
        self._last = self._accumulates = self._told = False
        self._rest = ExitStack()  # closing it restores the full groups
        self._hooks: list[Callable[[], None]] = []

    def take(self, optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
        """Begin to compute updates of an optimizer early.

        Args:
            params: Name -> parameter. Names are looked up later, so the mapping may get new parameters.
        """
        self._optimizer, self._params = optimizer, params
        before = optimizer.register_step_pre_hook(
            lambda _, args, kwargs: after_closure(args, kwargs, self._apply)
        )
        # The other hooks after a step see all parameters in the groups.
        after = register_first_post_hook(optimizer, lambda *_: self._rest.close())
        self._hooks = [before.remove, after.remove]

    def begin(self, last: bool, accumulates: bool) -> None:
        """Begin a step, and forget updates that were not applied.

        Args:
            last: Whether the batch is the last one of a gradient accumulation. No other batch updates parameters.
            accumulates: Whether the gradients of earlier batches are in the `grad` of the parameters.
        """
        self._rest.close()
        self._found, self._last, self._accumulates = {}, last, accumulates

    def update(self, grads: Mapping[str, Tensor]) -> None:
        """Compute the updates of parameters that have not been computed in this step."""
        if self._optimizer is None or not self._last:
            return
        held = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
        names, given = [], {}
        for name, grad in grads.items():
            p = self._params[name]
            if name not in self._found and id(p) in held:
                earlier = p.grad if self._accumulates else None
                names.append(name)
                given[p] = grad if earlier is None else earlier + grad
        if given:
            self._found.update(zip(names, compute_updates(self._optimizer, given), strict=True))

    def made(self) -> list[Tensor]:
        return [x for update in self._found.values() for x in update.tensors]

    def end(self) -> None:
        """Compute no more updates early, and forget updates that were not applied."""
        self._rest.close()
        for remove in self._hooks:
            remove()
        self._optimizer, self._found, self._hooks = None, {}, []

    def _apply(self) -> None:
        """Apply the computed updates, and restrict the optimizer's groups to all other parameters."""
        optimizer, found = self._optimizer, self._found
        if optimizer is None or not found:
            return
        self._found = {}
        self._rest.close()
        current = {name: update for name, update in found.items() if update.is_current(optimizer)}
        for update in current.values():
            update.apply(optimizer)
        stale = [name for name in found if name not in current]
        if stale and not self._told:
            self._told = True
            warnings.warn(
                f"overlap_update: {stale[0]!r}, its gradient or its options changed after the backward pass, so its "
                "update is computed again. Set overlap_update=False, or remove the code that changes them [PIPER-W031]",
                stacklevel=2,
            )
        done = {update.param for update in current.values()}
        self._rest.enter_context(only(optimizer, _groups(optimizer).keys() - done))


def _groups(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Return parameter -> its group."""
    return {p: group for group in optimizer.param_groups for p in group["params"]}


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _copied(value: Any) -> Any:
    """Return a copy in which no tensor or container is shared with `value`."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return copy.deepcopy(value)


def _alike(one: Any, other: Any) -> bool:
    """Return whether two values, or all values of two containers, are equal. NaN equals NaN."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and _equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    return type(one) is type(other) and bool(one == other)


def _equal(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())
