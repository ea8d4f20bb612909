"""Does an optimizer treat each element on its own, or each parameter? Found out by running it, for no list of names is complete.

An optimizer that does can be given pieces of parameters, or some of the parameters. One that looks at a whole parameter (at its
norm, its rows, its matrix) would do something else with a piece, one that looks at all of them would with those of one stage, and
nobody would notice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

SHAPE, CUT = (6, 10), 25  # of the parameter that is tried, and where it is cut in two; the first piece ends within a row
SCALES = (0.1, 1.0, 10.0, 1.0)  # of the gradients, one for each step
# The same kernels may round an element differently at the end of a longer vector; a norm changes it by more than a tenth.
RTOL, ATOL = 1e-9, 1e-12


class NotElementwise(Exception):
    """The message says what was seen."""


@dataclass(frozen=True)
class StateKeys:
    """The keys of an optimizer's state of one parameter.

    Attributes:
        cut: tensors with one number for each element.
        once: everything else, the same for every piece.
    """

    cut: frozenset[str] = frozenset()
    once: frozenset[str] = frozenset()

    def __or__(self, other: StateKeys) -> StateKeys:
        return StateKeys(self.cut | other.cut, self.once | other.once)

    def is_cut(self, key: str, value: Any, shape: torch.Size | tuple[int, ...]) -> bool:
        """Does the value, of a parameter or piece of this shape, have a number for each element?"""
        if not isinstance(value, Tensor) or value.shape != torch.Size(shape) or key in self.once:
            return False
        return key in self.cut or value.ndim > 0


def remade(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """A new optimizer of the same class and settings over other groups. Raises whatever the constructor raises."""
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if anything or k in accepted}
    made = type(optimizer)([dict(group) for group in groups], **defaults)
    for name, value in vars(optimizer).items():  # settings that are kept beside the defaults
        if name in vars(made) and isinstance(value, bool | int | float | str | None):
            setattr(made, name, value)
    return made


def state_keys(optimizer: Optimizer, options: Mapping[str, Any], device: torch.device) -> StateKeys:
    """Run copies of an optimizer on one parameter, whole and in pieces.

    Args:
        optimizer: left as it is.
        options: of the group in question, without its parameters.
        device: to run on.

    Raises:
        NotElementwise: pieces are not updated as the whole is.
    """
    value, grads = _course(0)
    parts = (slice(0, CUT), slice(CUT, math.prod(SHAPE)))
    try:
        whole, state = _trained(optimizer, options, value, grads, device)
        pieces = [_trained(optimizer, options, value.flatten()[p], [g.flatten()[p] for g in grads], device) for p in parts]
    except Exception as error:
        raise NotElementwise(f"a copy of it, made of its defaults, fails with {type(error).__name__}: {error}") from error
    _compare("the parameter", whole, [piece for piece, _ in pieces])
    cut, once = set(), set()
    for key, kept in state.items():
        found = [piece.get(key) for _, piece in pieces]
        if isinstance(kept, Tensor) and kept.shape == SHAPE:
            _compare(f"its state {key!r}", kept, found)
            cut.add(key)
        else:
            for other in found:
                _compare(f"its state {key!r}", kept, [other])
            once.add(key)
    return StateKeys(frozenset(cut), frozenset(once))


def sees_others(optimizer: Optimizer, options: Mapping[str, Any], device: torch.device) -> bool:
    """Does it update a parameter otherwise when there is another one? False also where this cannot be tried: for an optimizer that
    cannot be made of its defaults, or draws random numbers.

    Args:
        optimizer, options, device: as for `state_keys`.
    """
    courses = [_course(0), _course(1)]
    try:
        together, again = (_steps(optimizer, options, courses, device, seed)[0] for seed in (0, 1))
        apart = [_steps(optimizer, options, [course], device)[0][0] for course in courses]
    except Exception:
        return False
    drawn = any(not torch.equal(x, y) for x, y in zip(together, again, strict=True))
    return not drawn and any(not _close(x, y) for x, y in zip(together, apart, strict=True))


def _course(seed: int) -> tuple[Tensor, list[Tensor]]:
    """A parameter's values, and its gradients in some steps."""
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    value[SHAPE[0] // 2 :] *= 5
    return value, [scale * torch.randn(SHAPE, dtype=torch.float64, generator=generator) for scale in SCALES]


def _trained(
    optimizer: Optimizer, options: Mapping[str, Any], value: Tensor, grads: Sequence[Tensor], device: torch.device
) -> tuple[Tensor, dict[str, Any]]:
    """The parameter and its state after some steps."""
    (param,), (state,) = _steps(optimizer, options, [(value, grads)], device)
    return param, state


def _steps(
    optimizer: Optimizer,
    options: Mapping[str, Any],
    courses: Sequence[tuple[Tensor, Sequence[Tensor]]],
    device: torch.device,
    seed: int = 0,
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The parameters and their states after some steps of a copy, with random numbers of their own."""
    options = {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    if "lr" in options:  # a schedule may begin with 0
        options["lr"] = torch.full_like(options["lr"], 0.01) if isinstance(options["lr"], Tensor) else 0.01
    params = [nn.Parameter(value.clone().to(device)) for value, _ in courses]
    with isolate_rng():
        torch.manual_seed(seed)
        copy = remade(optimizer, [{**options, "params": params}])
        for grads in zip(*(grads for _, grads in courses), strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.clone().to(device)
            copy.step()
    return [param.detach() for param in params], [copy.state[param] for param in params]


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=RTOL, atol=ATOL, equal_nan=True)


def _compare(what: str, whole: Any, pieces: Sequence[Any]) -> None:
    if isinstance(whole, Tensor):
        flat = whole.flatten()
        if all(isinstance(piece, Tensor) for piece in pieces):
            joined = torch.cat([piece.flatten() for piece in pieces])
            if joined.shape == flat.shape and _close(joined, flat):
                return
    elif all(type(piece) is type(whole) and piece == whole for piece in pieces):
        return
    raise NotElementwise(f"after {len(SCALES)} steps, {what} differs between a whole parameter and its pieces")
