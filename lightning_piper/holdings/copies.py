"""Copies of a distributed module, such as averages of its weights over time.

Each process keeps the same part of a copy as of the module. So elementwise work on the module and the copy
finds the same elements in each process.
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
from lightning_piper.holdings.materialization import Known, like
from lightning_piper.holdings.ownership import Ownership

SHAPES = {"a": (6, 5), "b": (7,)}  # name -> shape of the tensors on which `averages_each_element` tries
# Number of trials. One trial is not enough: a function that selects elements by a norm may select the same
# elements of a tensor and of its shards.
DRAWS = 10

Refer = Callable[[str], Any]  # parameter or buffer name -> its replacement in a state dict


class Copy(Ownership):
    """The distribution of a copy of a module, such as the average of `EMAWeightAveraging`. The dtypes and the
    device of the copy may differ from the module's, and no plan works on its tensors.

    While the copy is distributed, its `state_dict()` contains whole tensors on rank 0, and is collective. If
    `refer` returns a function, the state dict contains the results of this function instead.

    Args:
        module: The copy, whole on every process; rank 0's values count.
        of: The distribution of the module, which the copy follows.
        refer: Called for each state dict. Returns the function that maps a canonical name to the value in the
            state dict; None if the state dict gets tensors.

    Raises:
        PiperError: The copy's parameters and buffers do not match the module's.
    """

    def __init__(self, module: nn.Module, of: Ownership, refer: Callable[[], Refer | None]) -> None:
        super().__init__(module, of._compiled, of._world)
        self._refer = refer
        own = {name: self._get(name) for name in self.places}
        for name, spec in of.tensor_map.specs.items():
            if name not in own or own[name].shape != spec.shape or own[name].is_meta:
                raise PiperError(
                    "PiperStrategy: a callback averages weights in a copy of the module, but the copy's "
                    f"{name!r} is missing or different. Complete the module before the callback copies it, such as in "
                    "__init__ [PIPER-S002]"
                )
        self.tensor_map = copy.copy(of.tensor_map)
        self.tensor_map.specs = {
            name: replace(spec, dtype=own[name].dtype) for name, spec in of.tensor_map.specs.items()
        }
        self._device = next((x.device for x in own.values()), self._device)
        self._hooks: list[RemovableHandle] = []

    def distribute(self, seed: int = 0, known: Known | None = None, before: Ownership | None = None) -> None:
        super().distribute(seed, known or Known(), before)
        # A `partial`, because torch sets an attribute on the hook, and a method does not accept attributes.
        self._hooks.append(self._module.register_state_dict_post_hook(partial(self._fill)))

    def _make_local_shards(self) -> None:
        for name in self.tensor_map.holder_groups:
            held = self.tensor_map.held(name, self._world.rank)
            if held is not None and not self.tensor_map.holds_whole(name, self._world.rank):
                room = torch.empty(
                    held[1] - held[0], dtype=self.tensor_map.specs[name].dtype, device=self._device
                )
                self._local_shards[name] = like(self._get(name), room)  # type: ignore[assignment]

    def _fill(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Hook after `state_dict`: put whole tensors, or the results of `refer`, into the state dict."""
        refer, canonical = self._refer(), self._compiled.step.canonical
        if refer is not None:
            state.update({prefix + n: refer(name) for n, name in canonical.items() if prefix + n in state})
            return
        with self.whole_on_rank_zero():
            state.update(
                {prefix + n: self._get(name).detach() for n, name in canonical.items() if prefix + n in state}
            )

    def _put_back(self) -> None:
        for hook in self._hooks:
            hook.remove()
        super()._put_back()


def averages_each_element(update: Callable[[nn.Module, nn.Module], None]) -> bool:
    """Return whether a function averages each element independently. To find out, this function runs `update`
    on whole tensors and on shards of them.

    Args:
        update: Updates the values of its first module, the average, with the values of its second module.
    """
    draw = torch.Generator().manual_seed(0)
    return all(_tried(update, draw) for _ in range(DRAWS))


def _tried(update: Callable[[nn.Module, nn.Module], None], draw: torch.Generator) -> bool:
    """Return whether `update` gives the same averages on whole tensors and on their shards.

    The values are drawn once. An `update` that raises counts as false.
    """
    first, second = (
        {n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in SHAPES.items()}
        for _ in range(2)
    )
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
    """Return shard number `part` (0 to 2) of each tensor. Shards 0 and 1 have elements of both tensors. Shard
    2 of "b" is empty."""
    cuts = {"a": (0, 7, 19, 30), "b": (0, 2, 7, 7)}
    return {name: x.flatten()[cuts[name][part] : cuts[name][part + 1]] for name, x in of.items()}


def _averaged(
    update: Callable[[nn.Module, nn.Module], None],
    first: Mapping[str, torch.Tensor],
    second: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    average, current = (
        nn.ParameterDict({n: nn.Parameter(x.clone()) for n, x in of.items()}) for of in (first, second)
    )
    with torch.no_grad():
        update(average, current)
    return {name: x.detach() for name, x in average.items()}
