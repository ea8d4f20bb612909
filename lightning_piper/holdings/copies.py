"""Copies of a module that is distributed, such as averages of its weights over time: each process keeps of a copy what it holds of
the module, so that work on each element finds the same elements in both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_piper.errors import PiperError
from lightning_piper.holdings.elementwise import ATOL, RTOL
from lightning_piper.holdings.materialize import Known, like
from lightning_piper.holdings.ownership import Ownership

SHAPES = {"a": (6, 5), "b": (7,)}
DRAWS = 10  # what chooses by a norm chooses alike for a tensor and its pieces now and then

Refer = Callable[[str], Any]  # of a parameter or buffer: what a state dict is to have in its place


class Copy(Ownership):
    """The tensors of a copy of a module, in dtypes and on a device of its own. No plan works on them.

    While it is distributed, its `state_dict()`, which is collective, has whole tensors on rank 0, or what `refer` gives.

    Args:
        module: the copy, whole in every process; rank 0's values count.
        of: how the module lies over processes.
        refer: None where the state dict is to have tensors.

    Raises:
        PiperError: its parameters and buffers are not those of the module.
    """

    def __init__(self, module: nn.Module, of: Ownership, refer: Callable[[], Refer | None]) -> None:
        super().__init__(module, of._compiled, of._world)
        self._refer = refer
        own = {name: self._get(name) for name in self.places}
        for name, spec in of.tensor_map.specs.items():
            if name not in own or own[name].shape != spec.shape or own[name].is_meta:
                raise PiperError(
                    f"PiperStrategy: a callback averages weights in a copy of the module, which has no {name!r} like the module's. "
                    "It was copied before the module was complete: make all layers in __init__"
                )
        self.tensor_map = copy.copy(of.tensor_map)
        self.tensor_map.specs = {name: replace(spec, dtype=own[name].dtype) for name, spec in of.tensor_map.specs.items()}
        self._device = next((x.device for x in own.values()), self._device)
        self._hooks: list[RemovableHandle] = []

    def distribute(self, seed: int = 0, known: Known | None = None, before: Ownership | None = None) -> None:
        super().distribute(seed, known or Known(), before)
        self._hooks.append(self._module.register_state_dict_post_hook(partial(self._fill)))  # torch marks what it is given

    def _make_local_shards(self) -> None:
        for name in self.tensor_map.holder_groups:
            held = self.tensor_map.held(name, self._world.rank)
            if held is not None and not self.tensor_map.holds_whole(name, self._world.rank):
                room = torch.empty(held[1] - held[0], dtype=self.tensor_map.specs[name].dtype, device=self._device)
                self._local_shards[name] = like(self._get(name), room)  # type: ignore[assignment]

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        refer, canonical = self._refer(), self._compiled.step.canonical
        if refer is not None:
            state.update({prefix + n: refer(name) for n, name in canonical.items() if prefix + n in state})
            return
        with self.whole_on_rank_zero():
            state.update({prefix + n: self._get(name).detach() for n, name in canonical.items() if prefix + n in state})

    def restore(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super().restore()


def averages_each_element(update: Callable[[nn.Module, nn.Module], None]) -> bool:
    """Does it average each element on its own, whatever else there is? Found out by running it on tensors whole and in pieces.

    Args:
        update: the values of one module by those of another one.
    """
    draw = torch.Generator().manual_seed(0)
    return all(_tried(update, draw) for _ in range(DRAWS))


def _tried(update: Callable[[nn.Module, nn.Module], None], draw: torch.Generator) -> bool:
    first, second = ({n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in SHAPES.items()} for _ in range(2))
    try:
        whole = _averaged(update, first, second)
        parts = [_averaged(update, _piece(first, part), _piece(second, part)) for part in range(3)]
    except Exception:
        return False
    return all(
        torch.allclose(torch.cat([part[n].flatten() for part in parts]), x.flatten(), rtol=RTOL, atol=ATOL)
        for n, x in whole.items()
    )


def _piece(of: Mapping[str, torch.Tensor], part: int) -> dict[str, torch.Tensor]:
    """Of three: the first has elements of all tensors, the last of one."""
    cuts = {"a": (0, 7, 19, 30), "b": (0, 2, 7, 7)}
    return {name: x.flatten()[cuts[name][part] : cuts[name][part + 1]] for name, x in of.items()}


def _averaged(
    update: Callable[[nn.Module, nn.Module], None], first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    average, current = (nn.ParameterDict({n: nn.Parameter(x.clone()) for n, x in of.items()}) for of in (first, second))
    with torch.no_grad():
        update(average, current)
    return {name: x.detach() for name, x in average.items()}
