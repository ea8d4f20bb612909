"""An optimizer restricted to the part of the module that one process holds, and its state as one device would
have it.

The canonical form of an optimizer's state numbers the parameters through all groups, in the order in which
`configure_optimizers` passed them. A plain optimizer writes this form into a checkpoint and reads it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_piper.compiler import Compiled
from lightning_piper.errors import CaptureError, PiperError
from lightning_piper.holdings.distributed_marks import parts_of, restricted
from lightning_piper.holdings.elementwise import (
    NotElementwise,
    StateKeys,
    Untried,
    remade,
    sees_others,
    state_keys,
)
from lightning_piper.holdings.materialization import places_of, tensor_at
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_map import LocalShard
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import flattened
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.processes.world import RANK_ZERO, World, on_host

State = dict[str, Any]
# For each group, the canonical names of its parameters. None: the parameter is not in the module.
Names = list[list[str | None]]


def parameter_names_in(optimizer: Optimizer, module: nn.Module, before: Names | None = None) -> Names:
    """Return the canonical names of an optimizer's parameters, for each group. While the module is
    distributed, return `before`.

    Args:
        optimizer: An optimizer over the module's current parameters, or over the parameters that the
            module had while it was whole.
        before: The result from the time when the module was whole. Needed while the module is distributed.

    Raises:
        PiperError: The module is distributed, and the sizes of the optimizer's groups have changed.
    """
    if parts_of(module) is None:
        return whole_parameter_names_in(optimizer, module)
    if before is None or [len(group["params"]) for group in optimizer.param_groups] != [
        len(names) for names in before
    ]:
        raise PiperError(
            "PiperStrategy: the optimizer's parameter groups have changed since the sanity check, but a "
            "module that was built on the meta device is distributed over the processes from then on. Use "
            "Trainer(num_sanity_val_steps=0) [PIPER-S005]"
        )
    return before


def whole_parameter_names_in(optimizer: Optimizer, module: nn.Module) -> Names:
    """Return the names of the parameters of an optimizer over a module that is whole on this process."""
    names = {id(tensor_at(at)): name for name, at in places_of(module).items()}
    return [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]


def check_groups(names: Names, state: State) -> None:
    """Check that the groups of a state in canonical form belong to an optimizer over these parameters.

    A wrapper around another optimizer may save a state without groups. This function accepts such a state,
    because the wrapper's `load_state_dict` checks it.

    Raises:
        PiperError: The groups belong to other parameters.
    """
    if "param_groups" not in state:
        return
    found = [len(group["params"]) for group in state["param_groups"]]
    wanted = [len(group) for group in names]
    if found != wanted:
        raise PiperError(
            f"the checkpoint's optimizer has parameter groups of {found} parameters, but "
            f"configure_optimizers returns groups of {wanted}. Resume with the same module and the same "
            "groups [PIPER-S005]"
        )


def usual_state(optimizer: Optimizer) -> State:
    """Return an optimizer's own `state_dict`.

    Raises:
        PiperError: The result does not have the form of torch's optimizers.
    """
    state = optimizer.state_dict()
    if not {"state", "param_groups"} <= state.keys():
        raise PiperError(
            f"PiperStrategy: {type(optimizer).__name__}.state_dict() does not have 'state' and "
            "'param_groups', so Piper cannot save or load the state in shards. Use "
            "PiperStrategy('ddp', checkpoint='consolidated') [PIPER-K005]"
        )
    return state


class ShardedOptimizer:
    """An optimizer restricted to the part of the module that one process holds.

    `group["params"]` loses, in place, the parameters of other processes. This process's local shards replace
    sharded parameters. All groups stay, including empty ones, because schedulers hold references to them.

    Args:
        optimizer: An optimizer over the parameters that the whole module had before it was distributed.
        names: Names of these parameters.
        ownership: The module's tensors on the processes. Other parameters of the optimizer stay on every
            process, and rank 0 saves them.
        compiled: The program; it determines which directive shards which parameter.
        world: The processes of the run. The constructor is collective.

    Attributes:
        optimizer: The optimizer that was passed.
        names: For each group, the names of its parameters before the restriction.
        keys: The keys of the states of sharded parameters.

    Raises:
        PiperError: The optimizer is not over the module's parameters, or is over different parameters on
            different processes. A parameter is sharded, and the optimizer is not elementwise. Processes have
            different parameters, and the optimizer does not treat each parameter independently.
    """

    def __init__(
        self, optimizer: Optimizer, names: Names, ownership: Ownership, compiled: Compiled, world: World
    ) -> None:
        self.optimizer, self.names, self._ownership, self._world = optimizer, names, ownership, world
        self._check_whole()
        # the names in each group's option `param_names`; None without this option
        self._labels: list[list[str] | None] = [
            list(g["param_names"]) if "param_names" in g else None for g in optimizer.param_groups
        ]
        # for each name in `names`: whether this process keeps the parameter
        self._kept = [[True for _ in group] for group in names]
        whole, devices = ownership.tensor_map.holds_whole, compiled.plans
        found = {frozenset((n, whole(n, d)) for n in compiled.params_on(d)) for d in devices}
        if world.size > 1 and len(found) > 1:  # devices have different parameters
            self._check_independence()
        self.keys = self._checked(compiled)
        owned = ownership.owned_params
        self._kept = [[name is None or name in owned for name in group] for group in self.names]
        self._sizes = [sum(kept) for kept in self._kept]  # number of parameters that each group keeps
        lacking: set[Tensor] = set()  # new tensors that do not fit the whole parameter's state
        for group, labels, kept in zip(optimizer.param_groups, self.names, self._kept, strict=True):
            for p, name in zip(group["params"], labels, strict=True):
                new = None if name is None else owned.get(name)
                if name is None or new is p:
                    continue
                state = optimizer.state.pop(p, None)
                if new is not None and (ownership.tensor_map.is_sharded(name) or (state and p.is_meta)):
                    lacking.add(new)
                elif new is not None and state:
                    optimizer.state[new] = state
            group["params"][:] = [
                p if n is None else owned[n]
                for p, n in zip(group["params"], labels, strict=True)
                if n is None or n in owned
            ]
            if "param_names" in group:
                group["param_names"][:] = [
                    x for x, keep in zip(group["param_names"], kept, strict=True) if keep
                ]
        if lacking:
            self._make_state(lacking)
        restricted.update([] if self.is_whole else [optimizer])

    @property
    def is_whole(self) -> bool:
        """Whether every process has all parameters and buffers whole. If so, the canonical state is the
        optimizer's own `state_dict`, in whatever form its class returns it."""
        return self._ownership.tensor_map.is_replicated

    def drop_unowned(self) -> None:
        """Drop parameters that only other processes hold from now on. No step has updated them before."""
        owned = self._ownership.owned_params
        for group, names, kept in zip(self.optimizer.param_groups, self.names, self._kept, strict=True):
            stays = [name is None or name in owned for name, keep in zip(names, kept, strict=True) if keep]
            for p in itertools.compress(group["params"], map(operator.not_, stays)):
                self.optimizer.state.pop(p, None)
            for key in ("params", "param_names"):
                if key in group:
                    group[key][:] = itertools.compress(group[key], stays)
            kept[:] = [
                keep and (name is None or name in owned) for name, keep in zip(names, kept, strict=True)
            ]
        self._sizes = [sum(kept) for kept in self._kept]

    def _check_whole(self) -> None:
        """Check that the optimizer is over the same whole parameters on all processes. Collective.

        Raises:
            PiperError: The parameters differ between processes, or are not in the module.
        """
        found = self._world.gather(self.names)
        where = next(
            (
                f" ({name!r} is in parameter group {group} on rank {one} and not on rank {other})"
                for rank in range(1, len(found))
                for one, other in ((0, rank), (rank, 0))
                for group, names in enumerate(found[one])
                for name in names
                if name is not None and (group >= len(found[other]) or name not in found[other][group])
            ),
            "",
        )
        apart = any(names != self.names for names in found)
        if apart or not any(name for names in self.names for name in names):
            problem = f"does not have the same parameters in each process, in the same order{where}"
            same = ", in the same way in each process" if apart else ""
            raise PiperError(
                f"PiperStrategy: the optimizer {problem if apart else 'has no parameters of this module'}. In "
                "configure_optimizers, create a new optimizer for each fit, from the module's parameters"
                f"{same} [PIPER-S004]"
            )

    def _check_independence(self) -> None:
        """Check that the optimizer treats each parameter independently, because processes have different
        parameters. All processes get the same result.

        Raises:
            PiperError: The optimizer does not treat parameters independently, or copies of it cannot run.
        """
        name = type(self.optimizer).__name__
        try:
            why = sees_others(self.optimizer, self.of_groups(), self._world.device)
        except Untried as error:
            raise PiperError(
                f"PiperStrategy: {name} must update each parameter independently, because each process has "
                f"only some of the parameters. {error.unchecked} an optimizer such as AdamW or SGD [PIPER-S004]"
            ) from error.__cause__
        if why:
            raise PiperError(
                f"PiperStrategy: {name} {why}. Each process has only some of the parameters. "
                "Use an optimizer that updates each parameter independently, such as AdamW or SGD"
                " [PIPER-S004]"
            )

    def _checked(self, compiled: Compiled) -> StateKeys:
        """If a parameter is sharded, check that the optimizer treats each element independently, and return
        the keys of its state. If no parameter is sharded, return no keys. All processes get the same result.

        Raises:
            PiperError: The optimizer does not treat each element independently, or copies of it cannot run.
        """
        is_sharded = self._ownership.tensor_map.is_sharded
        sharded = {name: x for name, x in self._ownership.params.items() if is_sharded(name)}
        found = [name for names in self.names for name in names if name in sharded]
        if not found:
            return StateKeys()
        try:
            return state_keys(self.optimizer, self.of_groups(sharded), self._world.device)
        except (NotElementwise, Untried) as error:
            name = next((name for name in found if sharded[name] is error.param), found[0])
            raise PiperError(
                _refusal(type(self.optimizer).__name__, error, name, compiled)
            ) from error.__cause__

    def of_groups(self, only: Mapping[str, Tensor] | None = None) -> list[list[Tensor]]:
        """Return the parameters of each group in their full shapes. Parameters that are not whole on this
        process are placeholders.

        Args:
            only: Return only these parameters of the module; None for all parameters of the groups.
        """
        params = self._ownership.params if only is None else only
        beside = iter([p for _, name, p in self.held() if name is None])
        return [
            [
                next(beside) if name is None else params[name]
                for name in names
                if (only is None if name is None else name in params)
            ]
            for names in self.names
        ]

    def _make_state(self, lacking: set[Tensor]) -> None:
        """Give the tensors in `lacking` the state that the optimizer's constructor creates, because the
        constructor ran before these tensors existed."""
        groups = [
            {**{k: v for k, v in group.items() if k != "param_names"}, "params": own}
            for group in self.optimizer.param_groups
            if (own := [p for p in group["params"] if p in lacking])
        ]
        made = remade(self.optimizer, groups)
        for p in lacking:
            if p in made.state:
                self.optimizer.state[p] = made.state[p]

    def check_groups_stay(self) -> None:
        """Check that parameters were not added to the groups or removed from them since the optimizer was
        restricted.

        Raises:
            CaptureError: Parameters were added or removed.
        """
        if [len(group["params"]) for group in self.optimizer.param_groups] != self._sizes:
            raise CaptureError(
                "PiperStrategy: the optimizer's parameter groups have changed since the first batch, when "
                "Piper reduced them to the parameters that each process holds. Change them (add_param_group) "
                "in on_train_start or earlier [PIPER-S005]"
            )

    def local_shards(self, replicas: bool = False) -> list[LocalShard]:
        """Return the elementwise state tensors (such as `exp_avg`) of the parameters whose canonical holder is
        this process. Over all processes, each element occurs once. Parameters without dimensions are left to
        `once`.

        Args:
            replicas: Also return the state tensors of parameters that this process holds as a member of the
                canonical group, although another process is their canonical holder.
        """
        found = []
        for name, p, state in self._canonical_state(replicas):
            spec = self._ownership.tensor_map.specs[name]
            held = self._ownership.tensor_map.canonical_range(name, self._world.rank)
            whole = self._ownership.tensor_map.holds_whole(name, self._world.rank)
            assert held is not None
            for key, value in state.items():
                if spec.shape and self.keys.is_cut(key, value, p.shape):
                    found.append(
                        LocalShard(
                            name,
                            spec.shape,
                            value.dtype,
                            *held,
                            flattened(value, spec) if whole else value,
                            key,
                        )
                    )
        return found

    def once(self) -> dict[tuple[str, str], Any]:
        """Return the state that is not elementwise, such as step counts: (parameter, key) -> value.

        Over all processes, each value occurs once. The result includes all state of parameters without
        dimensions, because their elementwise state has the same shape as a step count.
        """
        found = {}
        for name, p, state in self._canonical_state():
            shape = self._ownership.tensor_map.specs[name].shape
            for key, value in state.items():
                cut = self.keys.is_cut(key, value, p.shape)
                if self._ownership.tensor_map.canonical_holders(name)[self._world.rank][0] == 0 and not (
                    shape and cut
                ):
                    found[name, key] = value.reshape(shape) if cut else value
        return found

    def _canonical_state(self, replicas: bool = False) -> Iterator[tuple[str, Tensor, State]]:
        """Yield name, tensor and state of the module's parameters that have state and whose canonical holder is
        this process. The tensor is the whole parameter or its local shard. `local_shards` explains
        `replicas`."""
        for _, name, p in self.held():
            if name is None or p not in self.optimizer.state:
                continue
            if self._ownership.is_canonical(name) or (
                replicas and self._ownership.tensor_map.canonical_range(name, self._world.rank)
            ):
                yield name, p, self.optimizer.state[p]

    def held(self) -> Iterator[tuple[int, str | None, Tensor]]:
        """Iterate over this process's parameters.

        Yields:
            The number in the canonical form, the canonical name (None for parameters outside the module), and
            the whole parameter or its local shard.
        """
        number = 0
        for group, names, kept in zip(self.optimizer.param_groups, self.names, self._kept, strict=True):
            params = iter(group["params"])
            for name, keep in zip(names, kept, strict=True):
                if keep:
                    yield number, name, next(params)
                number += 1

    def outline(self, refer: Callable[[str, str], Any]) -> State:
        """Return the state in canonical form, with `refer(parameter, key)` instead of each tensor that
        `local_shards` returns on any process. The result is equal on every process. State of parameters
        outside the module is rank 0's. Collective.

        Raises:
            CaptureError: The groups have changed since the optimizer was restricted.
            PiperError: The state does not have the form of torch's optimizers.
        """
        own = [(p.name, p.key) for p in self.local_shards()]
        others = {
            n: self.optimizer.state[p]
            for n, name, p in self.held()
            if name is None and p in self.optimizer.state
        }
        numbers = {name: number for number, name in enumerate(name for names in self.names for name in names)}
        state: dict[int, State] = {}
        for cut, once, not_the_modules in self._world.gather((own, on_host(self.once()), on_host(others))):
            for name, key in cut:
                state.setdefault(numbers[name], {})[key] = refer(name, key)
            for (name, key), value in once.items():
                state.setdefault(numbers[name], {})[key] = value
            for number, values in not_the_modules.items():
                state.setdefault(number, values)  # rank 0's values, because they come first
        return {"state": dict(sorted(state.items())), "param_groups": self.full_groups()}

    def full_state(self) -> State:
        """Return the state in canonical form. It is complete on rank 0. Collective.

        If every process has all parameters whole, the state is complete on every rank. For torch's
        ZeroRedundancyOptimizer, it is empty except on rank 0. Otherwise, a rank other than 0 returns only the state of
        unsharded parameters whose canonical holder it is.

        Raises:
            CaptureError: The groups have changed since the optimizer was restricted.
            PiperError: The state does not have the form of torch's optimizers, or a process lacks its part.
        """
        if self.is_whole:
            self.check_groups_stay()
            if hasattr(self.optimizer, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer
                self.optimizer.consolidate_state_dict(RANK_ZERO)
                return self.optimizer.state_dict() if self._world.is_rank_zero else {}
            return self.optimizer.state_dict()
        local = usual_state(self.optimizer)
        own: dict[int, State] = {}  # number in the canonical form -> state that counts on this process
        number, position = 0, 0  # in the canonical form, and in the restricted optimizer's state
        for names, kept in zip(self.names, self._kept, strict=True):
            for name, keep in zip(names, kept, strict=True):
                if keep and self._is_canonical(name) and position in local["state"]:
                    own[number] = local["state"][position]
                number, position = number + 1, position + keep
        # Rank 0 receives the states of the other processes: number -> rank -> state.
        found = {number: {self._world.rank: state} for number, state in own.items()}
        for source in range(1, self._world.size):
            sent = on_host(own) if self._world.rank == source else None
            for number, state in (self._world.move_object(sent, source, RANK_ZERO) or {}).items():
                found.setdefault(number, {})[source] = state
        flat_names = [name for names in self.names for name in names]
        state = {
            n: full for n in sorted(found) if (full := self._joined(flat_names[n], found[n])) is not None
        }
        return {"state": state, "param_groups": self.full_groups()}

    def _joined(self, name: str | None, parts: Mapping[int, State]) -> State | None:
        """Return the state of a parameter, joined from the states of its local shards (rank -> state). On
        ranks other than 0, return None for a sharded parameter.

        Raises:
            PiperError: A rank that holds a shard does not have its state.
        """
        if name is None or not self._ownership.tensor_map.is_sharded(name):
            return next(iter(parts.values()))
        ranges = self._ownership.tensor_map.canonical_holders(name)
        spec = self._ownership.tensor_map.specs[name]
        if not self._world.is_rank_zero:
            return None
        if parts.keys() != ranges.keys():
            raise PiperError(
                f"saving optimizer state: ranks {sorted(ranges)} hold {name!r}, but only ranks "
                f"{sorted(parts)} have optimizer state of it. Use an optimizer that makes the state "
                "of a parameter in the same step on all ranks [PIPER-S004]"
            )
        full: State = {}
        first_rank = next(iter(ranges))
        for key, first in parts[first_rank].items():
            if self.keys.is_cut(key, first, (ranges[first_rank][1] - ranges[first_rank][0],)):
                flat = torch.empty(spec.numel, dtype=first.dtype)
                for rank, (start, stop) in ranges.items():
                    flat[start:stop] = parts[rank][key]
                full[key] = self._ownership.tensor_map.whole(name, flat)
            else:
                full[key] = first
        return full

    def _is_canonical(self, name: str | None) -> bool:
        return self._world.is_rank_zero if name is None else self._ownership.is_canonical(name)

    def full_groups(self) -> list[State]:
        """Return the groups in canonical form: each group's options, the numbers of all its parameters, and
        `param_names` before the restriction.

        Raises:
            CaptureError: The groups have changed since the optimizer was restricted.
            PiperError: The state does not have the form of torch's optimizers.
        """
        self.check_groups_stay()
        groups, start = [], 0
        for group, names, labels in zip(
            usual_state(self.optimizer)["param_groups"], self.names, self._labels, strict=True
        ):
            full = group | {"params": list(range(start, start + len(names)))}
            if labels is not None:
                full["param_names"] = labels
            groups.append(full)
            start += len(names)
        return groups

    def load_full_state(self, full: Mapping[str, Any]) -> None:
        """Load, of a state in canonical form, the state of the parameters and local shards that this process
        holds, and the options of the groups. `full` is not changed."""
        if self.is_whole:
            self.optimizer.load_state_dict(dict(full))
            return
        own = {
            number: self.cut(name, full["state"][number])
            for number, name, _ in self.held()
            if number in full["state"]
        }
        self.load_parts(full["param_groups"], own)

    def load_parts(self, full: Sequence[State], parts: Mapping[int, State]) -> None:
        """Load the state of this process's parameters.

        Args:
            full: The groups in canonical form.
            parts: Number in the canonical form -> state of the whole parameter or of its local shard.
        """
        state: dict[int, State] = {}
        groups: list[State] = []
        number = position = 0
        for group, kept in zip(full, self._kept, strict=True):
            start = position
            for keep in kept:
                if keep:
                    if number in parts:
                        state[position] = parts[number]
                    position += 1
                number += 1
            own = {**group, "params": list(range(start, position))}
            if "param_names" in group:
                own["param_names"] = [x for x, keep in zip(group["param_names"], kept, strict=True) if keep]
            groups.append(own)
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def put_back(self, full: State) -> None:
        """Give the optimizer all parameters and states again, after every process got the whole module back.
        Changes the optimizer's groups and state in place.

        Args:
            full: The state in canonical form, complete on every process.
        """
        beside = {number: p for number, name, p in self.held() if name is None}
        params = self._ownership.params
        number = 0
        for group, names, labels in zip(self.optimizer.param_groups, self.names, self._labels, strict=True):
            group["params"][:] = [
                beside[i] if n is None else params[n] for i, n in enumerate(names, start=number)
            ]
            number += len(names)
            if labels is not None:
                group["param_names"][:] = labels
        self.optimizer.state.clear()
        self.optimizer.load_state_dict(full)
        restricted.discard(self.optimizer)

    def cut(self, name: str | None, full: State) -> State:
        """Return the part of a parameter's state that belongs to this process's local shard: copies of the
        shard's elements, and values that are not elementwise unchanged. If this process holds the parameter
        whole, or the parameter is not in the module (`name` is None), return `full` itself."""
        tensor_map = self._ownership.tensor_map
        if name is None or tensor_map.holds_whole(name, self._world.rank):
            return full
        held, spec = tensor_map.held(name, self._world.rank), tensor_map.specs[name]
        assert held is not None
        return {
            key: flattened(value, spec)[slice(*held)].clone()
            if self.keys.is_cut(key, value, spec.shape)
            else value
            for key, value in full.items()
        }


def _refusal(optimizer: str, error: NotElementwise | Untried, name: str, compiled: Compiled) -> str:
    """Return the error text for an optimizer that needs whole parameters, or that Piper cannot try."""
    index = next(n.placed_by for n in compiled.dag.of_type(Parameters) if name in n.outputs[0].names)
    chunk = next(c for c in compiled.dag.of_type(Chunk) if name in compiled.dag.interface(c).params)
    region = compiled.dag.regions[chunk.region]
    directive = None if index is None else compiled.program[index]
    degrees = None if directive is None else directive.written_for
    source = "a directive" if directive is None else f"directive {index} ({directive.op})"
    source = source if degrees is None else "this program"
    shards = f"{source} leaves every process only a shard of {name!r} (region {region.label})"
    what = "update each element of a parameter independently"
    why = (
        f"must {what}, because {shards}. {error.unchecked}"
        if isinstance(error, Untried)
        else f"does not {what}: {error}. But {shards}. Use"
    )
    return (
        f"PiperStrategy{'' if degrees is None else f'({degrees})'}: {optimizer} {why} an optimizer that works "
        "element by element, such as AdamW or SGD [PIPER-S004]"
    )
