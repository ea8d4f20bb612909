"""Metric objects that steps update, in the processes of a run.

A step's arguments for an object are made in one device group: one process of each replica, the object's *owners*. They alone update
it, each with the samples of its replica. Where it is computed, which all processes do together, the owners sync its states in the
order of the replicas and compute, and all processes get what the first of them has: states and results travel, arguments do not. So
an owner does what a process does under DDP.

Relied on of torchmetrics (tried on 1.9), by name: `Metric.dist_sync_fn`, called to gather a state for a `compute` that syncs;
`dist_sync_on_step`, which lets `forward` give the value over all replicas; `_forward_cache`, which Lightning logs on each step;
`_persistent`: the states that a checkpoint has; `_reductions` and `_is_synced`, with which `sync` knows how states become one;
`_update_count`, behind `update_count` and `update_called`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import _torch
from lightning_piper.capture.metric_objects import object_of
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.metric_calls import MetricCall, MetricCalls, MetricLog
from lightning_piper.ops.arguments import Arguments
from lightning_piper.processes.world import World

Ranks = tuple[int, ...]
_MISSING = object()
_UPDATING = ("forward", "update")


def owners_of(dag: TrainingDAG) -> dict[str, Ranks]:
    """Name of each metric object that a step updates -> the processes in which its arguments are made, by replica; none where it
    gets no tensors, so that all processes have what it gets."""
    found: dict[str, Ranks] = {call.metric: () for call in dag.code.metrics.calls if call.method in _UPDATING}
    first = dag.mesh.lines(DATA)[0]  # of the members of a replica, which all have the same
    return found | {
        object_of(dag.value(node.inputs[0]).names[0]): tuple(node.devices[place] for place in first)
        for node in dag.of_type(Arguments)
    }


def wanted_by_all(metrics: MetricCalls, step: str) -> frozenset[int]:
    """Numbers of the calls that give a value to all processes: what is logged on each step, or used."""
    by_step = step == "training_step"  # Lightning's default
    logged = {
        event.value for event in metrics.events
        if isinstance(event, MetricLog) and isinstance(event.value, str)
        and (by_step if event.kwargs.get("on_step") is None else event.kwargs["on_step"])
    }  # fmt: skip
    return metrics.used | {i for i, call in enumerate(metrics.calls) if any(_overlap(call.metric, name) for name in logged)}


def _overlap(a: str, b: str) -> bool:
    """Is one of two objects the other one, or inside of it?"""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


class Gather:
    """A metric's state in each replica (`Metric.dist_sync_fn`).

    Args:
        world: the processes.
        owners: which alone call this; None: all processes do, and those of one replica have the same.
    """

    def __init__(self, world: World, owners: Ranks | None = None) -> None:
        self._world, self._owners = world, owners

    def __call__(self, state: torch.Tensor, group: Any | None = None) -> list[torch.Tensor]:
        return self.all(state.detach())

    def all(self, value: Any) -> list[Any]:
        """By replica; a list may be of another length in each."""
        found = self._world.gather(_moved(value, torch.device("cpu")), self._owners)
        by_replica = found if self._owners else [found[rank] for rank in self._world.first_ranks]
        return [_moved(x, self._world.device) for x in by_replica]


@contextlib.contextmanager
def whole_lists(metric: Any, gather: Gather) -> Iterator[None]:
    """While a metric syncs, its states that are lists of what nothing joins (the boxes of each image) are gathered as lists.
    torchmetrics gathers their entries one by one, as many as the replica has, and another replica may have more or fewer."""
    own, before = metric._reductions, metric._is_synced
    names = [name for name, reduction in own.items() if reduction is None and isinstance(getattr(metric, name), list)]
    metric._reductions = {name: reduction for name, reduction in own.items() if name not in names}
    try:
        yield
    finally:
        metric._reductions = own
    if names and metric._is_synced and not before:
        for name, lists in zip(names, zip(*gather.all([getattr(metric, name) for name in names]), strict=True), strict=True):
            rounds = itertools.zip_longest(*lists, fillvalue=_MISSING)
            setattr(metric, name, [x for entries in rounds for x in entries if x is not _MISSING])


@dataclass
class _Claim:
    """A metric object that steps update.

    Attributes:
        name, part: of the module.
        owners: the processes that update it, by replica.
        before: attributes that were changed, and what they were.
    """

    name: str
    part: Any
    owners: Ranks
    before: dict[str, Any] = field(default_factory=dict)

    def set(self, name: str, value: Any) -> None:
        self.before.setdefault(name, vars(self.part).get(name, _MISSING))
        setattr(self.part, name, value)

    def undo(self) -> None:
        for name, value in self.before.items():
            if value is _MISSING:
                delattr(self.part, name)
            else:
                setattr(self.part, name, value)


class MetricObjects:
    """The metric objects that the steps of a module update."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._claims: dict[int, _Claim] = {}
        self._seen: dict[int, tuple[Ranks, list[int]]] = {}  # objects, with what was in them
        self._inside = False

    def claim(self, module: nn.Module, owners: Mapping[str, Ranks]) -> None:
        """Steps update these objects, by name, from now on. Collective.

        Raises:
            PiperError: its arguments are made elsewhere than those of another step; its states cannot be merged over replicas; or
                it uses a part of the model that is elsewhere.
        """
        if self._world.size == 1:
            return
        for name, ranks in owners.items():
            metric = module.get_submodule(name)
            seen = ranks, [id(part) for part in metric.modules()]  # a MetricTracker gets one more in each epoch
            if self._seen.get(id(metric)) == seen:
                continue
            self._seen[id(metric)] = seen
            self._check_network(name, metric, ranks)
            syncing = {path: part for path, part in metric.named_modules() if hasattr(part, "dist_sync_fn")}
            if not syncing and self._world.count > 1:
                raise PiperError(
                    f"self.{name} is updated in a step, and {type(metric).__name__} has no states that could be merged over the "
                    f"{self._world.count} replicas; derive it from torchmetrics.Metric, and give it its states with add_state"
                )
            for path, part in (syncing or {"": metric}).items():
                self._claim(part, ".".join(filter(None, (name, path))), ranks)

    def _check_network(self, name: str, metric: nn.Module, ranks: Ranks) -> None:
        away = [
            path for path, x in metric.named_parameters() if x.is_meta and self._world.rank in (ranks or self._world.first_ranks)
        ]
        if away:
            raise PiperError(
                f"self.{name} uses {away[0]}, which is on another process, or in pieces, for it is a part of the model; give the "
                "metric a network of its own (copy.deepcopy)"
            )

    def _claim(self, part: Any, name: str, ranks: Ranks) -> None:
        known = self._claims.get(id(part))
        if known is not None:
            if ranks and ranks != known.owners:
                here, there = (",".join(map(str, x)) for x in (ranks, known.owners))
                raise PiperError(
                    f"self.{name} is updated on device {here} in one step, and on device {there} in another; give each step a "
                    "metric object of its own, or compute what it gets in the same annotated region"
                )
            return
        ranks = ranks or self._world.first_ranks
        if self._world.rank in ranks:
            self._world.group_of(ranks)
        self._claims[id(part)] = claim = _Claim(name, part, ranks)
        claim.set("compute", partial(self._compute, claim, part.compute))
        if isinstance(getattr(part, "dist_sync_fn", self), Gather | None):
            claim.set("dist_sync_fn", Gather(self._world, ranks))
        if getattr(part, "device", None) != self._world.device:
            part.to(self._world.device)

    def _compute(self, claim: _Claim, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return compute(*args, **kwargs)
        return self._on_owners(claim.owners, partial(compute, *args, **kwargs))

    def _on_owners(self, owners: Ranks, work: Callable[[], Any]) -> Any:
        """What `work` gives on the first of the owners, on all processes. Collective."""
        value = None
        if self._world.rank in owners:
            value = self._alone(work)
        if len(owners) == self._world.size:
            return value
        found = self._world.broadcast(_moved(value, torch.device("cpu")), owners[0])
        return _moved(found, self._world.device)

    def call(
        self, module: nn.Module, event: MetricCall, tensors: Sequence[torch.Tensor | None], given: Callable[[Any], Any],
        wanted: bool,
    ) -> Any:  # fmt: skip
        """Repeat a call of the step. Collective.

        Args:
            tensors: among its arguments; on other processes than the owners there are none.
            given: what stands in the arguments for lists of the batch and for what other calls gave.
            wanted: all processes need what the call gives.
        """
        metric: Any = module.get_submodule(event.metric)
        run = metric if event.method == "forward" else getattr(metric, event.method)
        if event.method not in _UPDATING:
            return run()
        owners = self._owners(metric)
        self._count(metric, owners)

        def work() -> Any:
            args, kwargs = event.arguments(tensors, given)
            try:
                value = run(*args, **kwargs)
            except Exception as error:
                error.add_note(f"raised by self.{event.metric}.{event.method}, which {event.where} calls, after the step has run")
                raise
            return value, {name: x for name, x in _caches(metric)}

        if not wanted:
            return None if self._world.rank not in owners else self._alone(work)[0]
        with self._over_replicas(metric):
            value, caches = self._on_owners(owners, work)
        if self._world.rank not in owners:
            for name, cache in caches.items():
                metric.get_submodule(name)._forward_cache = cache
        return value

    def updated(self, module: nn.Module, names: Sequence[str], owners: Ranks) -> None:
        """These objects were updated on their owners, by the step's own code. Collective.

        Raises:
            PiperError: as `claim`.
        """
        self.claim(module, dict.fromkeys(names, owners))
        for name in names:
            self._count(module.get_submodule(name), owners)

    def _count(self, metric: nn.Module, owners: Ranks) -> None:
        parts: Iterable[Any] = metric.modules() if self._world.rank not in owners else ()
        for part in parts:
            if hasattr(part, "_update_count"):
                part._update_count += 1  # hooks ask `update_called`

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, what an object gives is what it gives in this process."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _alone(self, work: Callable[[], Any]) -> Any:
        with self.alone():
            return work()

    def _owners(self, metric: nn.Module) -> Ranks:
        return next((self._claims[id(part)].owners for part in metric.modules() if id(part) in self._claims), (0,))

    @contextlib.contextmanager
    def _over_replicas(self, metric: nn.Module) -> Iterator[None]:
        """The value of a call is that of all replicas' samples."""
        parts: list[Any] = [part for part in metric.modules() if self._world.count > 1 and hasattr(part, "dist_sync_on_step")]
        before = [part.dist_sync_on_step for part in parts]
        try:
            for part in parts:
                part.dist_sync_on_step = True
            yield
        finally:
            for part, value in zip(parts, before, strict=True):
                part.dist_sync_on_step = value

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Meanwhile the states that a checkpoint has are those of all samples, in every process. Collective."""
        kept: list[tuple[Any, dict[str, Any]]] = []
        try:
            for claim in self._claims.values():
                names = [name for name, is_kept in getattr(claim.part, "_persistent", {}).items() if is_kept]
                if names:
                    kept.append((claim.part, {name: getattr(claim.part, name) for name in names}))
                    found = self._on_owners(claim.owners, partial(self._synced, claim.part, names))
                    _set(claim.part, found)
            yield
        finally:
            for part, states in kept:
                _set(part, states)

    def _synced(self, part: Any, names: Sequence[str]) -> dict[str, Any]:
        """States of all replicas together."""
        with part.sync_context(dist_sync_fn=part.dist_sync_fn):
            return {name: _like(part._defaults[name], getattr(part, name)) for name in names}

    def release(self, failed: bool = False) -> None:
        """The steps are over: every process of a replica gets what its owner has. Collective, unless it failed."""
        claims, self._claims = self._claims, {}
        self._seen.clear()
        for claim in claims.values():
            claim.undo()
            if failed or len(claim.owners) == self._world.size:
                continue
            part, names = claim.part, getattr(claim.part, "_defaults", {})
            own = {name: getattr(part, name) for name in (*names, *(["_update_count", "_computed"] if names else []))}
            found = self._world.gather(_moved(own, torch.device("cpu")) if self._world.rank in claim.owners else None)
            _set(part, _moved(found[claim.owners[self._world.replica]], self._world.device))


def _caches(metric: nn.Module) -> Iterator[tuple[str, Any]]:
    """What Lightning logs on each step, of an object and those in it, by name."""
    for name, part in metric.named_modules():
        if hasattr(part, "_forward_cache"):
            yield name, part._forward_cache


def _like(default: Any, state: Any) -> Any:
    """A list state is one tensor when it is synced."""
    if isinstance(default, list) and isinstance(state, torch.Tensor):
        return [state] if state.numel() else []
    return state


def _set(part: Any, states: Mapping[str, Any]) -> None:
    for name, value in states.items():
        setattr(part, name, value)


def _moved(value: Any, device: torch.device) -> Any:
    leaves, tree = _torch.tree_flatten(value)
    return _torch.tree_unflatten([x.to(device) if isinstance(x, torch.Tensor) else x for x in leaves], tree)
