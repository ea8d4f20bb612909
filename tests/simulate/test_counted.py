"""The predicted memory equals the real one: the bytes of live tensors are counted while an executor runs a
step on one device.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_piper as piper
from lightning_piper import Offload, Order, Place, Recompute, Split
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.simulate import simulate
from lightning_piper.simulate.footprint import Footprint
from tests.tensors import decoder, tensors

SCALARS = 64  # bytes of the gradients of the loss, which the executor makes before the plan begins
HEAD = [Place(filter={}, devices=[0]), Split(filter={}, dim_name="MB", num_microbatches=4)]
LOOP = [Order(filters=[{"MB": i, "PASS": kind} for i in range(4) for kind in "FB"])]
HALVES = [Order(filters=[{"LAYER": 1, "MB": i, "PASS": kind} for i in range(4) for kind in ("BI", "BW")])]
AGAIN: dict[str, list[Any]] = {
    "all": [],
    "again": [Recompute(filter={})],
    "products": [Recompute(filter={}, keep=["*mm"])],
    "half": [Recompute(filter={}, keep=0.5)],
    "away": [Offload(filter={})],
    "inputs away": [Recompute(filter={}), Offload(filter={}, ahead=2)],
}
ORDERS: dict[str, list[Any]] = {"free": [], "loop": LOOP, "halves": HALVES}
PROGRAMS = {f"{order}, {kept}": [*HEAD, *AGAIN[kept], *ORDERS[order]] for order in ORDERS for kept in AGAIN}


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, each from its creation until nothing refers to
    it. `most` is the largest number of bytes at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._there: dict[int, Any] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
        }
        for x in tree_leaves(result):
            if (
                isinstance(x, torch.Tensor)
                and (key := x.untyped_storage()._cdata) not in given | self._there.keys()
            ):
                storage = x.untyped_storage()
                nbytes = storage.nbytes()
                self._there[key] = weakref.ref(
                    storage, lambda _, key=key, nbytes=nbytes: self._gone(key, nbytes)
                )
                self.now += nbytes
        self.most = max(self.most, self.now)
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self.now -= nbytes
        del self._there[key]


def counted(program: list[Any]) -> tuple[int, int]:
    """The largest number of bytes as predicted, and as counted."""
    module, leaves = decoder(), tensors(8)
    compiled = piper.compile(module, leaves, program)
    params = {name: x.detach() for name, x in module.named_parameters()}
    executor = Executor(
        compiled.plans[0], compiled.dag.step, params, {}, LocalTransport(compiled.plans), torch.device("cpu")
    )
    run_local([executor], list(leaves), seed=0)
    with Live() as live:
        run_local([executor], list(leaves), seed=0)
    return simulate(compiled.dag, compiled.plans).devices[0].peak_bytes, live.most


QUICK = {"free, all", "free, away", "loop, again", "halves, half"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in PROGRAMS]
)
def test_the_predicted_peak_is_the_counted_one(name: str) -> None:
    predicted, found = counted(PROGRAMS[name])
    assert abs(predicted - found) <= SCALARS < 0.01 * found


def test_without_what_is_there_inside_of_passes_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: nothing is let go of before a pass ends, and it needs nothing for itself."""

    def everything(self: Footprint, given: Any, sizes: tuple[int, ...]) -> Any:
        peak = original(self, given, sizes)
        made = {n for bundle in self.outputs for n in bundle if n in self.nbytes}
        nbytes = sum(sizes) + sum(self.nbytes[n] for n in made)
        return peak._replace(nbytes=nbytes, results=frozenset(made), groups=frozenset(range(len(sizes))))

    original = Footprint.peak
    monkeypatch.setattr(Footprint, "peak", everything)
    predicted, found = counted(PROGRAMS["loop, all"])
    assert abs(predicted - found) > 0.02 * found
