"""Metric objects that steps update, on the processes of a run.

The arguments that a step passes to an object are computed in one device group. One process of each replica in
this group is an *owner* of the object. Only the owners update the object, each with the samples of its
replica. Computing the object is collective. The owners sync its states in the order of the replicas, and each
owner computes the result. All processes then receive the first owner's result. States and results travel,
arguments do not. So an owner does the same as a process under DDP.

This module relies on these names of torchmetrics (tested with 1.9):

- `Metric.dist_sync_fn` is called to gather a state for a `compute` that syncs.
- `dist_sync_on_step` makes `forward` return the value over all replicas.
- `_forward_cache` is the value that Lightning logs on each step.
- `_persistent` says which states a checkpoint contains.
- `_reductions` and `_is_synced` tell `sync` how to merge states. The reduction to a mean is `dim_zero_mean`.
- `_update_count` is the value of `update_count` and `update_called`.
- `_defaults` has the names of the states, and `_computed` is the kept result.
- `_dtype` is the dtype of arguments. Lightning's `log` sets it to torch's default dtype, by a move to the device.
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

from lightning_piper.capture.metrics.metric_objects import object_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import PiperError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import DATA
from lightning_piper.ir.metric_calls import MetricCall, MetricCalls, MetricLog
from lightning_piper.ops.arguments import Arguments
from lightning_piper.processes.world import World

Ranks = tuple[int, ...]
_MISSING = object()
_UPDATING = ("forward", "update")


def metric_states(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the states that this process has of the metric objects of a module, by the name of the object."""
    return {
        name: {key: getattr(each, key) for key in (*states, "_update_count", "_computed", "_dtype")}
        for name, each in module.named_modules()
        if isinstance(states := getattr(each, "_defaults", None), dict) and hasattr(each, "_update_count")
    }


def restore_metric_states(module: nn.Module, states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the states that `metric_states` has returned."""
    for name, state in states.items():
        _set(module.get_submodule(name), state)


def add_metric_states(
    module: nn.Module,
    states: Mapping[str, dict[str, Any]],
    lost: Sequence[Mapping[str, Mapping[str, Any]]],
    left: int,
    is_first: bool,
) -> None:
    """Merge `lost`, the states of lost processes, into `states`, so that a sync has the same result as with these
    processes. A state that torchmetrics does not merge stays.

    Args:
        module: The module.
        states: The result of `metric_states` on this process.
        lost: The results on the lost processes.
        left: Number of processes that are left. All of them call this function.
        is_first: Whether this is the first of these processes, which gets the states except means.
    """
    for name, state in states.items() if lost else ():
        metric: Any = module.get_submodule(name)
        for key, reduction in metric._reductions.items():
            more = [each[name][key] for each in lost]
            if getattr(reduction, "__name__", "") == "dim_zero_mean":
                state[key] = reduction(torch.stack([state[key]] * left + more))
            elif is_first and isinstance(metric._defaults[key], list):
                state[key] = [*state[key], *itertools.chain(*more)]
            elif is_first and reduction is not None:
                state[key] = reduction(torch.stack([state[key], *more]))
        state["_update_count"] += sum(each[name]["_update_count"] for each in lost) * is_first
        state["_computed"] = None


def owners_of(dag: TrainingDAG) -> dict[str, Ranks]:
    """Return, for each metric object that a step updates, the processes that compute its arguments, by
    replica.

    The tuple is empty if the object receives no tensors, because then all processes have its arguments.
    """
    found: dict[str, Ranks] = {call.metric: () for call in dag.code.metrics.calls if call.method in _UPDATING}
    first = dag.mesh.lines(DATA)[0]  # All members of a replica have the same arguments.
    return found | {
        object_of(dag.value(node.inputs[0]).names[0]): tuple(node.devices[group_rank] for group_rank in first)
        for node in dag.of_type(Arguments)
    }


def wanted_by_all(metrics: MetricCalls, step: str) -> frozenset[int]:
    """Return the indices of the calls whose values all processes need, because Lightning logs the value on
    each step, or the step uses the value.

    Args:
        metrics: The step's calls of metric objects.
        step: Name of the step. Lightning logs on each step by default only in "training_step".
    """
    by_step = step == "training_step"  # Lightning's default
    logged = {
        event.value
        for event in metrics.events
        if isinstance(event, MetricLog)
        and isinstance(event.value, str)
        and (by_step if event.kwargs.get("on_step") is None else event.kwargs["on_step"])
    }
    return metrics.used | {
        i for i, call in enumerate(metrics.calls) if any(_overlap(call.metric, name) for name in logged)
    }


def _overlap(a: str, b: str) -> bool:
    """Return whether two objects are the same, or one is inside the other."""
    return f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.")


class Gather:
    """A callable for `Metric.dist_sync_fn` that gathers a metric's state over the replicas.

    Args:
        owners: The only processes that call this; None if all processes do, and the processes of one replica
            have the same state.
    """

    def __init__(self, world: World, owners: Ranks | None = None) -> None:
        self._world, self._owners = world, owners

    def __call__(self, state: torch.Tensor, group: Any | None = None) -> list[torch.Tensor]:
        return self.all(state.detach())

    def all(self, value: Any) -> list[Any]:
        """Return the values of all replicas, by replica, with tensors on this process's device. A list may
        have a different length in each replica. Collective over the owners, or over all processes."""
        found = self._world.gather(_moved(value, torch.device("cpu")), self._owners)
        by_replica = found if self._owners else [found[rank] for rank in self._world.first_ranks]
        return [_moved(x, self._world.device) for x in by_replica]


@contextlib.contextmanager
def whole_lists(metric: Any, gather: Gather) -> Iterator[None]:
    """Return a context in which a metric's sync gathers its unreduced list states (such as the boxes of each
    image) as lists.

    torchmetrics gathers the entries of such a list one by one, and assumes that each replica has as many
    entries as this replica. Another replica may have more or fewer entries.
    """
    own, before = metric._reductions, metric._is_synced
    names = [
        name
        for name, reduction in own.items()
        if reduction is None and isinstance(getattr(metric, name), list)
    ]
    metric._reductions = {name: reduction for name, reduction in own.items() if name not in names}
    try:
        yield
    finally:
        metric._reductions = own
    if names and metric._is_synced and not before:
        for name, lists in zip(
            names, zip(*gather.all([getattr(metric, name) for name in names]), strict=True), strict=True
        ):
            rounds = itertools.zip_longest(*lists, fillvalue=_MISSING)
            setattr(metric, name, [x for entries in rounds for x in entries if x is not _MISSING])


@dataclass
class _Claim:
    """A metric object that steps update.

    Attributes:
        name: Its name in the module.
        part: The object.
        owners: The processes that update it, by replica.
        before: The changed attributes with their previous values.
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
    """The metric objects that the steps of a module update. `Replay` repeats the calls of a step on these
    objects through this class, so that only the owners of an object update it. With one process, no object is
    changed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._claims: dict[int, _Claim] = {}  # id of an object -> its registration
        # id of an object -> its owners and the ids of its submodules
        self._seen: dict[int, tuple[Ranks, list[int]]] = {}
        self._inside = False  # whether objects now return the values of this process alone

    def claim(self, module: nn.Module, owners: Mapping[str, Ranks]) -> None:
        """Register objects, by name. From now on, only an object's owners update it, and its `compute` covers
        all replicas. Collective.

        Raises:
            PiperError: Another step computes an object's arguments on different processes; an object's states
                cannot be merged over replicas; or an object uses a part of the model that is on another
                process.
        """
        if self._world.size == 1:
            return
        for name, ranks in owners.items():
            metric = module.get_submodule(name)
            # The submodules are part of the key, because a MetricTracker gets one more in each epoch.
            seen = (ranks, [id(part) for part in metric.modules()])
            if self._seen.get(id(metric)) == seen:
                continue
            self._seen[id(metric)] = seen
            self._check_network(name, metric, ranks)
            syncing = {path: part for path, part in metric.named_modules() if hasattr(part, "dist_sync_fn")}
            if not syncing and self._world.count > 1:
                raise PiperError(
                    f"self.{name} is updated in a step, but {type(metric).__name__} has no states that Piper "
                    f"can merge over the {self._world.count} replicas. Derive it from torchmetrics.Metric, "
                    "and register its states with add_state [PIPER-C008]"
                )
            for path, part in (syncing or {"": metric}).items():
                self._claim(part, ".".join(filter(None, (name, path))), ranks)

    def _check_network(self, name: str, metric: nn.Module, ranks: Ranks) -> None:
        """If this rank updates a metric, check that all parameters of the metric have values on this rank.

        Raises:
            PiperError: A parameter belongs to the model, and is sharded or on another rank.
        """
        away = [
            path
            for path, x in metric.named_parameters()
            if x.is_meta and self._world.rank in (ranks or self._world.first_ranks)
        ]
        if away:
            raise PiperError(
                f"self.{name} uses {away[0]}, which is a part of the model and is on another rank or "
                "sharded. Give the metric its own copy of the network (copy.deepcopy) [PIPER-C008]"
            )

    def _claim(self, part: Any, name: str, ranks: Ranks) -> None:
        """Register one object, and move it to this process's device. From then on, `compute` of the object
        covers all replicas. If the object is registered already, only check its owners. Collective.

        Args:
            part: The object.
            name: Name of the object in the module, which errors show.
            ranks: The owners. Empty means the first rank of each replica, or the owners that are registered
                already.

        Raises:
            PiperError: Another step updates the object on different processes.
        """
        known = self._claims.get(id(part))
        if known is not None:
            if ranks and ranks != known.owners:
                here, there = (",".join(map(str, x)) for x in (ranks, known.owners))
                raise PiperError(
                    f"self.{name} is updated on device {here} in one method (such as training_step), and on device "
                    f"{there} in another method (such as validation_step). Give each method its own metric object, or "
                    "compute the metric's arguments in the same annotated region [PIPER-C008]"
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
        """Run `work` on the owners and return the first owner's result on all processes. If all processes are
        owners, each of them returns its own result. Collective."""
        value = None
        if self._world.rank in owners:
            value = self._with_local_values(work)
        if len(owners) == self._world.size:
            return value
        found = self._world.broadcast(_moved(value, torch.device("cpu")), owners[0])
        return _moved(found, self._world.device)

    def call(
        self,
        module: nn.Module,
        event: MetricCall,
        tensors: Sequence[torch.Tensor | None],
        given: Callable[[Any], Any],
        wanted: bool,
    ) -> Any:
        """Repeat a metric call of the step, and return its result. If not `wanted`, the result of an update
        is None on a process that is not an owner. Collective.

        Args:
            module: The module that has the object.
            event: The recorded call.
            tensors: The tensors among the call's arguments; None on processes that are not owners.
            given: Returns the value for a placeholder in the arguments: a list of the batch, or the result of
                another call.
            wanted: Whether all processes need the call's result.
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
                error.add_note(
                    f"raised by self.{event.metric}.{event.method}, which {event.where} calls, after the "
                    "step has run"
                )
                raise
            return value, {name: x for name, x in _caches(metric)}

        if not wanted:
            return None if self._world.rank not in owners else self._with_local_values(work)[0]
        with self._over_replicas(metric):
            value, caches = self._on_owners(owners, work)
        if self._world.rank not in owners:
            for name, cache in caches.items():
                metric.get_submodule(name)._forward_cache = cache
        return value

    def updated(self, module: nn.Module, names: Sequence[str], owners: Ranks) -> None:
        """Register objects that the step's own code has updated on their owners, and count the update on the
        other processes. Collective.

        Raises:
            PiperError: An object cannot be registered, as in `claim`.
        """
        self.claim(module, dict.fromkeys(names, owners))
        for name in names:
            self._count(module.get_submodule(name), owners)

    def _count(self, metric: nn.Module, owners: Ranks) -> None:
        """On a process that is not an owner, count the update, which the owners' objects count themselves."""
        parts: Iterable[Any] = metric.modules() if self._world.rank not in owners else ()
        for part in parts:
            if hasattr(part, "_update_count"):
                part._update_count += 1  # hooks may read `update_called`

    @contextlib.contextmanager
    def local_values(self) -> Iterator[None]:
        """Return a context in which `compute` of each object returns the value of this process alone."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _with_local_values(self, work: Callable[[], Any]) -> Any:
        with self.local_values():
            return work()

    def _owners(self, metric: nn.Module) -> Ranks:
        return next(
            (self._claims[id(part)].owners for part in metric.modules() if id(part) in self._claims), (0,)
        )

    @contextlib.contextmanager
    def _over_replicas(self, metric: nn.Module) -> Iterator[None]:
        """Return a context in which a call returns the value over all replicas' samples."""
        parts: list[Any] = [
            part for part in metric.modules() if self._world.count > 1 and hasattr(part, "dist_sync_on_step")
        ]
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
        """Return a context in which the states that a checkpoint contains cover all samples, on every
        process. Collective."""
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
        """Return states that are merged over all replicas."""
        with part.sync_context(dist_sync_fn=part.dist_sync_fn):
            return {name: _like(part._defaults[name], getattr(part, name)) for name in names}

    def release(self, failed: bool = False) -> None:
        """End the registration after the last step: every process of a replica receives its owner's states.
        Collective, unless the run failed."""
        claims, self._claims = self._claims, {}
        self._seen.clear()
        for claim in claims.values():
            claim.undo()
            if failed or len(claim.owners) == self._world.size:
                continue
            part, names = claim.part, getattr(claim.part, "_defaults", {})
            own = {
                name: getattr(part, name)
                for name in (*names, *(["_update_count", "_computed"] if names else []))
            }
            found = self._world.gather(
                _moved(own, torch.device("cpu")) if self._world.rank in claim.owners else None
            )
            _set(part, _moved(found[claim.owners[self._world.replica]], self._world.device))


def _caches(metric: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value that Lightning logs on each step) for a metric object and the objects inside it. The
    name is relative to `metric`."""
    for name, part in metric.named_modules():
        if hasattr(part, "_forward_cache"):
            yield name, part._forward_cache


def _like(default: Any, state: Any) -> Any:
    """Return a synced list state as a list, because syncing makes it one tensor."""
    if isinstance(default, list) and isinstance(state, torch.Tensor):
        return [state] if state.numel() else []
    return state


def _set(part: Any, states: Mapping[str, Any]) -> None:
    for name, value in states.items():
        setattr(part, name, value)


def _moved(value: Any, device: torch.device) -> Any:
    leaves, tree = _torch.tree_flatten(value)
    return _torch.tree_unflatten([x.to(device) if isinstance(x, torch.Tensor) else x for x in leaves], tree)
