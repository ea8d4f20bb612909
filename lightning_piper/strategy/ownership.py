"""Who holds which parameters and buffers, and how the whole module is put together again.

A process keeps the tensors that its device's chunks use. All others become tensors of the same shape on the `meta` device, so
that summaries, `configure_optimizers` and later captures see the whole module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.strategy.world import LEAD, World

Place = tuple[nn.Module, str]  # a submodule and the attribute under which it has the tensor


class Ownership:
    """The tensors of one module over the processes of a run.

    Attributes:
        homes: canonical name -> ranks that hold it, ascending. The first one speaks for it: in checkpoints and in norms.
        whole: every process holds everything again.
    """

    def __init__(self, module: nn.Module, compiled: Compiled, world: World) -> None:
        self._module, self._world = module, world
        self._places = _places(module, compiled.step.canonical)
        self.homes = _homes(compiled, world.size)
        self.whole = world.size == 1

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Parameters by canonical name, in the module's order; those of other processes are on the meta device."""
        return {n: x for n in self.homes if isinstance(x := self._get(n), nn.Parameter)}

    def owns(self, name: str) -> bool:
        return self._world.rank in self.homes[name]

    def speaks_for(self, name: str) -> bool:
        """Is this the one process whose copy counts?"""
        return self._world.rank == self.homes[name][0]

    @property
    def owned_params(self) -> dict[str, nn.Parameter]:
        return {n: x for n in self.homes if self.owns(n) and isinstance(x := self._get(n), nn.Parameter)}

    @property
    def owned_buffers(self) -> dict[str, torch.Tensor]:
        return {n: x for n in self.homes if self.owns(n) and not isinstance(x := self._get(n), nn.Parameter)}

    def distribute(self) -> None:
        """Give every tensor the lead's value wherever it has a home, move it to its device, and drop the foreign ones."""
        for name, homes in self.homes.items():
            tensor = self._get(name)
            for home in homes:
                self._world.move(tensor, LEAD, home, into=tensor)
            if self.owns(name):
                tensor.data = tensor.data.to(self._world.device)
            else:
                self._set(name, _like(tensor, torch.device("meta")))

    def restore(self) -> None:
        """Give every process the whole module again. Collective."""
        if not self.whole:
            self._receive(range(self._world.size))
            self.whole = True

    @contextlib.contextmanager
    def whole_on_lead(self) -> Iterator[None]:
        """The lead has the whole module inside of this context. Collective."""
        if self.whole:
            yield
            return
        dropped = self._receive([LEAD])
        try:
            yield
        finally:
            for name, tensor in dropped.items():
                self._set(name, tensor)

    def _receive(self, targets: Sequence[int]) -> dict[str, torch.Tensor]:
        """Bring every tensor to the targets, into host memory, for a device may have room for its own part only.

        Returns what this process had in place of those that it received.
        """
        before = {}
        for name, homes in self.homes.items():
            for target in targets:
                if target in homes:
                    continue
                tensor = self._get(name)
                if self._world.rank == target:
                    before[name], tensor = tensor, _like(tensor, torch.device("cpu"))
                    self._set(name, tensor)
                self._world.move(tensor, homes[0], target, into=tensor)
        return before

    def _get(self, name: str) -> torch.Tensor:
        part, attribute = self._places[name][0]
        tensor = getattr(part, attribute)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        for part, attribute in self._places[name]:
            setattr(part, attribute, tensor)


def _places(module: nn.Module, canonical: Mapping[str, str]) -> dict[str, list[Place]]:
    """Where each tensor is; several places where it is tied."""
    places: dict[str, list[Place]] = {}
    for name, main in canonical.items():
        path, _, attribute = name.rpartition(".")
        places.setdefault(main, []).append((module.get_submodule(path), attribute))
    return places


def _homes(compiled: Compiled, size: int) -> dict[str, tuple[int, ...]]:
    """What no device uses: parameters stay with the lead, which saves them; buffers, which hooks may use, stay everywhere."""
    used: dict[str, list[int]] = {}
    for device in sorted(compiled.plans):
        for name in compiled.params_on(device) | compiled.buffers_on(device):
            used.setdefault(name, []).append(device)
    if size == 1:
        return dict.fromkeys([*compiled.step.params, *compiled.step.buffers], (LEAD,))
    everywhere = tuple(range(size))
    homes = {name: tuple(used.get(name, [LEAD])) for name in compiled.step.params}
    return homes | {name: tuple(used.get(name, everywhere)) for name in compiled.step.buffers}


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return data
    param = nn.Parameter(data, requires_grad=tensor.requires_grad)
    param.__dict__.update(tensor.__dict__)  # marks that users set, such as "no weight decay"
    return param
