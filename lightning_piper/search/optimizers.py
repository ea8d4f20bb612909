"""The optimizer that a module makes: what it keeps of each parameter, and how long its updates take, follow from it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.optim import Optimizer

from lightning_piper.search.chain import copy_of
from lightning_piper.search.parameters import options_of

ADAM = 2.0  # bytes of state for one of parameters
SIDE = 64  # of the tensors that a step is tried on, at most: what it keeps of larger ones is more of the same


def optimizer_of(module: nn.Module) -> Optimizer | None:
    """The optimizer of a module that has one, and makes it without a Trainer. The module is not changed."""
    made = copy_of(module)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning's own: that there is none
            found = list(_optimizers(made.configure_optimizers()))  # type: ignore[operator]
    except Exception:  # it asks the Trainer, or the module has no such method
        return None
    return found[0] if len(found) == 1 else None


def _optimizers(found: Any) -> Iterable[Optimizer]:
    """Those in what `configure_optimizers` returns."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers(found.get("optimizer"))
    elif isinstance(found, Sequence):
        for each in found:
            yield from _optimizers(each)


def states_of(optimizer: Optimizer | None, module: nn.Module) -> float:
    """Bytes that an optimizer keeps for one byte of a module's parameters that get gradients; as many as Adam does if there is no
    optimizer, or if it cannot be tried.

    Found out by a step of an optimizer like it on small tensors, one of each kind. Numbers that it keeps beside them, such as how
    many steps it has made, do not grow with the parameters, and are not counted.
    """
    total = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    if optimizer is None or not total:
        return ADAM
    try:
        kept = sum(_kept(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # of its class, whatever it needs
        return ADAM
    return kept / total


def _kept(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Bytes that it keeps of all parameters of a group."""
    trained = [p for p in group["params"] if p.requires_grad and p.numel()]
    kinds: dict[tuple[Any, ...], int] = {}
    for p in trained:
        kind = tuple(min(n, SIDE) for n in p.shape), p.dtype, "cpu" if p.is_meta else p.device
        kinds[kind] = kinds.get(kind, 0) + p.nbytes
    params = [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape, dtype, device in kinds]
    if not params:
        return 0.0
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    tried = type(optimizer)([{"params": params, **options}], **options_of(optimizer))
    for p in params:
        p.grad = torch.ones_like(p)
    with isolate_rng():  # an optimizer may draw random numbers
        tried.step()
    return math.fsum(
        nbytes * sum(x.nbytes for x in tried.state[p].values() if isinstance(x, torch.Tensor) and x.ndim) / p.nbytes
        for p, nbytes in zip(params, kinds.values(), strict=True)
    )
