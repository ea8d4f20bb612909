"""The optimizer that a module makes. It determines the bytes of optimizer state and the time of updates."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.optim import Optimizer

from lightning_piper.search.costs.chain import copy_of
from lightning_piper.search.costs.parameters import options_of

ADAM = 2.0  # bytes of state for each byte of parameters
SIDE = 64  # longest side of the tensors of a trial step; the state of larger tensors grows in proportion


def optimizer_of(module: nn.Module) -> Optimizer | None:
    """Return the optimizer that `configure_optimizers` makes on a copy of the module. Return None if it makes
    no optimizer or several optimizers, or if it raises an error, for example because it needs a Trainer.
    """
    made = copy_of(module)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning warns that there is no Trainer
            found = list(_optimizers(made.configure_optimizers()))  # type: ignore[operator]
    except Exception:  # `configure_optimizers` needs the Trainer, or the module does not have the method
        return None
    return found[0] if len(found) == 1 else None


def _optimizers(found: Any) -> Iterable[Optimizer]:
    """Yield the optimizers in the return value of `configure_optimizers`."""
    if isinstance(found, Optimizer):
        yield found
    elif isinstance(found, Mapping):
        yield from _optimizers(found.get("optimizer"))
    elif isinstance(found, Sequence):
        for each in found:
            yield from _optimizers(each)


def states_of(optimizer: Optimizer | None, module: nn.Module) -> float:
    """Return the bytes of optimizer state for each byte of a module's trained parameters.

    To find them, an optimizer of the same class and options takes a step on small tensors. Scalars such as
    the number of steps do not count, because they do not grow with the parameters. If there is no optimizer
    or no trained parameter, or the trial fails, the result is `ADAM`.
    """
    total = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    if optimizer is None or not total:
        return ADAM
    try:
        kept = sum(_kept(optimizer, group) for group in optimizer.param_groups)
    except Exception:  # a user's class may raise anything
        return ADAM
    return kept / total


def _kept(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the bytes of state for all trained parameters of a group, from a step on small tensors of the
    same dtypes. The result is 0 if the group has no trained parameters."""
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
        nbytes
        * sum(x.nbytes for x in tried.state[p].values() if isinstance(x, torch.Tensor) and x.ndim)
        / p.nbytes
        for p, nbytes in zip(params, kinds.values(), strict=True)
    )
