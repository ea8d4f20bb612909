"""Local SGD: replicas that train alone, and now and then continue from a common model.

Each *local replica* runs the program on its own processes and its own samples, with the
result of one device that has these samples. After a number of updates, an *exchange* averages the changes of the
replicas since the previous exchange. An outer optimizer applies this average to the *anchor*, the parameters after
the previous exchange. All replicas continue from the new anchor.

DiLoCo (Douillard et al. 2023) is this algorithm with AdamW inside and SGD with Nesterov momentum outside. In
Streaming DiLoCo (Douillard et al. 2025), parts of the model are exchanged at different times.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_piper.common.limits import integer, is_number, shown
from lightning_piper.common.tensor_versions import sum_of_elements
from lightning_piper.common.units import counted
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.optimizer import ShardedOptimizer
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.processes.world import World
from lightning_piper.simulate.durations import Number
from lightning_piper.simulate.network import Link

State = dict[str, Any]
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # (anchor, current value) of tensors
BUCKET_BYTES = 2**25  # largest message of an exchange, unless one tensor is larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Local SGD (DiLoCo): `PiperStrategy(local_sgd=LocalSGD(replicas=4, every=64))`.

    The processes are divided into local replicas. Replica r of R has the r-th of R equal groups of consecutive
    processes, which run the strategy's program on the samples of this replica. There is no sum of gradients over
    the replicas. Instead, after every `every` updates, all replicas take one outer step together:

        change = mean over the replicas of (anchor - parameters)
        anchor = outer SGD step from the anchor, with `change` as its gradient
        parameters = anchor, in all replicas

    The outer optimizer has DiLoCo's defaults. With `lr=1.0, momentum=0.0`, the outer step is the
    average of the parameters.

    Attributes:
        replicas: Number of local replicas. It must divide the number of processes.
        every: Number of updates of the optimizer from one exchange to the next.
        lr: Learning rate of the outer optimizer.
        momentum: Momentum of the outer optimizer.
        nesterov: Whether the momentum is Nesterov's. Without momentum, this changes nothing.
        parts: Number of parts of the parameters, in the order of the module, with about equal numbers of
            elements. Each part is exchanged after every `every` updates, but at its own time, so that a message
            has only one part (default: one part).

    Raises:
        PiperError: A field has an invalid value.
    """

    replicas: int
    every: int
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    parts: int = 1

    def __post_init__(self) -> None:
        for name, least in (("replicas", 2), ("every", 1), ("parts", 1)):
            number = integer(getattr(self, name))
            if number is None or number < least:
                self._refuse(name, f"Give an integer >= {least}")
            object.__setattr__(self, name, number)
        if self.parts > self.every:
            self._refuse(
                "parts", f"Give at most every={self.every}, because a part needs an update of its own"
            )
        if not isinstance(self.lr, int | float) or not is_number(self.lr, positive=True):
            self._refuse("lr", "Give a number above 0")
        if (
            not isinstance(self.momentum, int | float)
            or not is_number(self.momentum)
            or not 0 <= self.momentum < 1
        ):
            self._refuse("momentum", "Give a number from 0 to below 1")
        if not isinstance(self.nesterov, bool):
            self._refuse("nesterov", "Give True or False")

    def _refuse(self, name: str, advice: str) -> None:
        raise PiperError(
            f"LocalSGD({name}={shown(getattr(self, name))}) is not usable. {advice} [PIPER-S001]"
        )

    def processes(self, of_all: int) -> int:
        """Return the number of processes of a local replica.

        Raises:
            PiperError: The replicas would have different numbers of processes.
        """
        if of_all % self.replicas:
            divisor = f", or replicas that divide {of_all}" if of_all > 1 else ""
            raise PiperError(
                f"LocalSGD(replicas={self.replicas}) does not divide the Trainer's {counted(of_all, 'process')}. Give a "
                f"multiple of {self.replicas} processes (Trainer(devices=..., num_nodes=...)){divisor} [PIPER-S003]"
            )
        return of_all // self.replicas

    def optimizer(self, anchors: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """Return the outer optimizer."""
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(anchors, lr=self.lr, momentum=self.momentum, nesterov=nesterov)

    def part_of(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the part of each parameter.

        Args:
            sizes: Name of each parameter of the whole module -> its number of elements.
        """
        ends, total = itertools.accumulate(sizes.values()), max(1, sum(sizes.values()))
        middles = (end - size / 2 for end, size in zip(ends, sizes.values(), strict=True))
        return {n: int(at * self.parts / total) for n, at in zip(sizes, middles, strict=True)}

    def is_due(self, part: int, steps: int) -> bool:
        """Return whether a part is exchanged after the update number `steps`, counted from 1."""
        return (steps + part * self.every // self.parts) % self.every == 0

    def cost(self, compiled: Compiled, step_time: Number, link: Link) -> RoundCost:
        """Return what a round costs.

        The optimizer's outer step and the small messages of its check are not included. The next step waits for an
        exchange, so exchanges never overlap with steps.

        Args:
            compiled: The program of one local replica.
            step_time: The time of its step, such as `Simulation.step_time`.
            link: The link between processes of the same rank in different replicas, with bytes per unit of
                `step_time`. All devices of a replica use it at the same time.
        """
        params = {name: x.spec for name, x in compiled.step.params.items()}
        part = self.part_of({name: spec.numel for name, spec in params.items()})
        times: list[Number] = [0] * self.parts
        most = 0
        for device in compiled.plans:
            exchanged = [0] * self.parts
            for name, count in _elements(compiled, device).items():
                exchanged[part[name]] += count * _itemsize(params[name].dtype)
            buffers = [compiled.step.buffers[name] for name in compiled.buffers_on(device)]
            floats = sum(x.numel * _itemsize(x.dtype) for x in buffers if x.dtype.is_floating_point)
            for k, nbytes in enumerate(exchanged):
                time = self._exchange(nbytes, link) + (0 if k else self._exchange(floats, link))
                times[k] = max(times[k], time)
            most = max(most, sum(exchanged) + floats)
        return RoundCost(self, step_time, tuple(times), most)

    def _exchange(self, nbytes: int, link: Link) -> Number:
        """Return the time of the all-reduces of `nbytes` over the replicas, in messages of `BUCKET_BYTES`."""
        whole, rest = divmod(nbytes, BUCKET_BYTES)
        messages = [BUCKET_BYTES] * whole + [rest] * (rest > 0)
        return 2 * (self.replicas - 1) * sum(link.time(each, self.replicas) for each in messages)


@dataclasses.dataclass(frozen=True)
class RoundCost:
    """The time and the bytes of a round of local SGD. `print` shows them.

    Attributes:
        settings: The algorithm.
        update_time: The time of a step without exchanges.
        pauses: For each part of the parameters, the time in which training waits for its exchange.
        nbytes: The bytes of the values that the device with most of them exchanges in a round.
    """

    settings: LocalSGD
    update_time: Number
    pauses: tuple[Number, ...]
    nbytes: int

    @property
    def step_time(self) -> Number:
        """The mean time of a step, with its share of the exchanges of a round."""
        return self.update_time + sum(self.pauses) / self.settings.every

    @property
    def bytes_per_step(self) -> float:
        """The mean number of bytes that a device sends to other replicas in a step: 2 (R - 1) / R times its
        exchanged bytes in a round, with R replicas."""
        replicas = self.settings.replicas
        return 2 * (replicas - 1) / replicas * self.nbytes / self.settings.every

    def to_json(self) -> dict[str, Any]:
        """Return the figures as JSON data."""
        times = {"step_time": self.step_time, "update_time": self.update_time}
        plain = {name: float(value) for name, value in times.items()}
        pauses = [float(pause) for pause in self.pauses]
        return {**plain, "pauses": pauses, "nbytes": self.nbytes, "bytes_per_step": self.bytes_per_step}

    def __str__(self) -> str:
        share = float(1 - self.update_time / self.step_time) if self.step_time else 0.0
        return (
            f"local SGD: {float(self.step_time):.6g} a step, {share:.1%} of it for exchanges; longest pause "
            f"{float(max(self.pauses)):.6g}; each device sends {self.bytes_per_step:,.0f} bytes a step to other replicas"
        )


def _elements(compiled: Compiled, device: int) -> dict[str, int]:
    """Return the number of elements that a device holds of each trained parameter."""
    plan, trained = compiled.plans[device], compiled.step.params
    found = {name: compiled.dag.spec_of(name).numel for name in compiled.params_on(device)}
    for bucket in plan.shards:
        start = bucket.member(plan.group_rank) * bucket.shard
        for name, offset, spec in zip(bucket.names, bucket.offsets, bucket.tensors, strict=True):
            end = min(offset + spec.numel, start + bucket.shard)
            found[name] = max(0, end - max(offset, start))
    return {name: count for name, count in found.items() if trained[name].requires_grad}


def _itemsize(dtype: torch.dtype) -> int:
    """Return the bytes of an element in an exchange, which is at least in float32."""
    return torch.promote_types(dtype, torch.float32).itemsize


class Rounds:
    """The exchanges of one fit, on one process. All methods are collective over the local replicas, except
    `state`.

    This process exchanges values with the processes of the same rank in the other local replicas. These processes
    hold the same tensors, or the same shards.

    The running averages of batch norms, and all other buffers of floating-point numbers, are averaged with part 0.
    Other buffers stay each replica's own.

    Args:
        settings: The algorithm.
        ownership: The module's tensors on the processes of this local replica.
        optimizer: The inner optimizer, which has its own state in each local replica.
        world: The processes of this local replica.
        replica: Index of this local replica.
        state: The result of `state` in a checkpoint; None to begin from the parameters of replica 0.

    Attributes:
        steps: Number of updates since the fit, or the fit of the checkpoint, began.
        ended_within: Whether the fit has ended within a round, so that the module has the mean of the replicas.
    """

    def __init__(
        self,
        settings: LocalSGD,
        ownership: Ownership,
        optimizer: ShardedOptimizer,
        world: World,
        replica: int,
        state: State | None,
    ) -> None:
        self._settings, self._ownership = settings, ownership
        self._world, self._replica = world, replica
        members = [each * world.size + world.rank for each in range(settings.replicas)]
        # The processes of this rank in all local replicas.
        self._across = World(replica, settings.replicas, world.device, world.timeout, members=members)
        if state is None:
            shared = {**ownership.owned_params, **ownership.owned_buffers}
            self._check_tensors({name: f"{x.dtype} {tuple(x.shape)}" for name, x in shared.items()})
            for tensor in shared.values():
                self._across.share(tensor.detach())
        sizes = {name: spec.numel for name, spec in ownership.tensor_map.specs.items()}
        self._part = settings.part_of({name: sizes[name] for name in ownership.params})
        trained = {id(x) for group in optimizer.optimizer.param_groups for x in group["params"]}
        self._anchors = {
            name: x.detach().clone()
            for name, x in ownership.owned_params.items()
            if id(x) in trained or x.requires_grad
        }
        self._buffers = {name: x.detach().clone() for name, x in self._float_buffers().items()}
        # The empty tensor is for a process without parameters, because torch rejects an empty list.
        self._outer = settings.optimizer([*self._anchors.values(), torch.zeros(0)])
        self.ended_within, self._position = (
            False,
            (0, 0),
        )  # indices of the epoch and of the batch of the last update
        self._own: dict[str, torch.Tensor] = {}  # this process's values before a fit ended within a round
        self._bits: dict[str, int] = {}  # sums of the bits of whole tensors at the end of the fit
        self.steps = 0
        if state is not None:
            self._load(state)

    @property
    def is_between(self) -> bool:
        """Whether the last update ended a round, and the next update begins a round."""
        return self._settings.is_due(0, self.steps)

    @property
    def is_due(self) -> bool:
        """Whether a part is exchanged after the next update."""
        return any(self._settings.is_due(part, self.steps + 1) for part in range(self._settings.parts))

    @torch.no_grad()
    def after_update(self, epoch: int, batch: int) -> int:
        """Count an update of the inner optimizer, and exchange the parts that are due. Return the bytes of the values
        that this process exchanges, as they travel.

        Args:
            epoch, batch: Indices of the epoch, and of the last batch of the update in the epoch.

        Raises:
            PiperError: The local replicas are at different batches, or exchange different tensors.
        """
        self.steps, self._position = self.steps + 1, (epoch, batch)
        due = {part for part in range(self._settings.parts) if self._settings.is_due(part, self.steps)}
        if not due:
            return 0
        params, buffers = self._exchanged(due)
        for anchor, _, change in self._changes(params):
            anchor.grad = change
        self._outer.step()
        self._outer.zero_grad()
        for anchor, param in params:
            param.copy_(anchor)
        for anchor, value, change in self._changes(buffers, constants=True):
            value.copy_(anchor.sub_(change))
        return sum(anchor.numel() * _itemsize(anchor.dtype) for anchor, _ in params + buffers)

    @torch.no_grad()
    def end(self) -> None:
        """If the fit ends within a round, give all replicas the mean of their parameters, without an outer step,
        so that they end with one model. Each replica's own values stay for a checkpoint.

        Raises:
            PiperError: The local replicas have not ended at the same batch, or exchange different tensors.
        """
        left = {part for part in range(self._settings.parts) if not self._settings.is_due(part, self.steps)}
        self.ended_within = bool(self.steps and left)
        if not self.ended_within:
            self._check_alike([], {}, ends=True)
        else:
            self._own = {name: x.detach().clone() for name, x in self._current().items()}
            params, buffers = self._exchanged(left, ends=True)
            for anchor, value, change in self._changes(params + buffers, constants=True):
                value.copy_(anchor - change)
        self._bits = self._sums()

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module that replicas exchange."""
        owned = {**self._ownership.owned_params, **self._ownership.owned_buffers}
        return {name: owned[name] for name in [*self._anchors, *self._buffers] if name in owned}

    def _sums(self) -> dict[str, int]:
        """Return the sum of the bits of each exchanged tensor, over all its shards. Collective over the processes of
        the local replica."""
        own = {
            name: sum_of_elements(x)
            for name, x in self._current().items()
            if self._ownership.is_canonical(name)
        }
        found: Counter[str] = Counter()
        for sums in self._world.gather(own):
            found.update(sums)
        return {name: total % 2**64 for name, total in found.items()}

    def _exchanged(self, parts: Collection[int], ends: bool = False) -> tuple[Pairs, Pairs]:
        """Return the parameters and the buffers of some parts of the model, after a check that the local replicas
        exchange the same tensors. `ends` says whether the fit ends."""
        params = self._ownership.owned_params
        names = [name for name in self._anchors if name in params and self._part[name] in parts]
        buffers = self._float_buffers() if 0 in parts else {}
        self._check_alike(names, buffers, ends)
        return (
            [(self._anchors[name], params[name]) for name in names],
            [(self._buffers[name], buffer) for name, buffer in buffers.items()],
        )

    def _changes(
        self, pairs: Pairs, constants: bool = False
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each anchor, its current value, and the mean over the local replicas of their differences: the
        anchor minus the current value.

        Args:
            pairs: The anchors and the current values.
            constants: Whether values may be infinite, as in masks. They do not change.
        """
        for bucket in _buckets(pairs):
            first, _ = bucket[0]
            sizes = [anchor.numel() for anchor, _ in bucket]
            dtype = torch.promote_types(first.dtype, torch.float32)
            flat = torch.empty(sum(sizes), dtype=dtype, device=first.device)
            for room, (anchor, value) in zip(flat.split(sizes), bucket, strict=True):
                room.copy_(anchor.flatten()).sub_(value.flatten())
                if constants:
                    room.masked_fill_((anchor == value).flatten(), 0)
            mean = self._across.sum(flat).div_(self._settings.replicas)
            for (anchor, value), change in zip(bucket, mean.split(sizes), strict=True):
                yield anchor, value, change.view_as(anchor).to(anchor.dtype)

    def _check_alike(
        self, names: Sequence[str], buffers: Mapping[str, torch.Tensor], ends: bool = False
    ) -> None:
        """Check that the local replicas exchange the same tensors, after the same batches and updates. `ends` says
        whether the fit of this replica ends.

        Raises:
            PiperError: They do not.
        """
        params = self._ownership.owned_params
        exchanged = {
            name: f"{'trained' if params[name].requires_grad else 'frozen'} {tuple(params[name].shape)}"
            for name in names
        }
        exchanged |= {name: f"a buffer {tuple(buffer.shape)}" for name, buffer in buffers.items()}
        place = _Place(self.steps, *self._position, ends)
        places = self._across.gather(place)
        if len({(each.epoch, each.batch) for each in places}) > 1:
            raise PiperError(
                f"PiperStrategy(local_sgd=...): the local replicas are at different batches: {_differing(places)}. Give all "
                "replicas the same number of batches (Trainer(limit_train_batches=...) sets a limit), and stop all of "
                "them together [PIPER-L004]"
            )
        if len({each.updates for each in places}) > 1:
            raise PiperError(
                "PiperStrategy(local_sgd=...): the local replicas have made different numbers of updates: "
                f"{[each.updates for each in places]}, by replica. Let every optimizer_step of each replica make an update "
                "[PIPER-L004]"
            )
        self._check_tensors(exchanged)

    def _check_tensors(self, tensors: Mapping[str, str]) -> None:
        """Check that the local replicas have the same tensors to exchange: name -> text that must be equal. Collective.

        Raises:
            PiperError: They do not.
        """
        if len(set(self._across.gather(zlib.crc32(repr(tensors).encode())))) > 1:
            raise PiperError(
                "PiperStrategy(local_sgd=...): the local replicas exchange different parameters or buffers"
                f"{_difference(self._across.gather(tensors))}. Build the module in the same way in every process, and "
                "freeze the same parameters [PIPER-L004]"
            )

    def _float_buffers(self) -> dict[str, torch.Tensor]:
        return {n: x for n, x in self._ownership.owned_buffers.items() if x.is_floating_point()}

    @property
    def nbytes(self) -> int:
        """The bytes of the values that this process exchanges in a round."""
        return sum(x.numel() * _itemsize(x.dtype) for x in [*self._anchors.values(), *self._buffers.values()])

    def summary(self) -> str:
        """Return a text for the user about the exchanges of this process."""
        settings, size = self._settings, self._world.size
        return (
            f"PiperStrategy: local SGD with {settings.replicas} replicas of {counted(size, 'process')}. Each process "
            f"exchanges {self.nbytes / 1e6:,.3g} MB in every {counted(settings.every, 'update')}. Between exchanges the "
            "replicas differ, so the training is not that of one device: only the steps of each replica are verified"
        )

    def before_end(self, module: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict of the module with the values that this local replica had before the fit ended within
        a round. Only the first process of a replica gets them. Collective over the processes of the local replica."""
        own, canonical = self._ownership.assembled(self._own), self._ownership.tensor_map.canonical
        return {name: own.get(canonical.get(name, name), value) for name, value in module.items()}

    def has_changed(self, module: Mapping[str, Any]) -> bool:
        """Return whether the values in a state dict of the module differ from the module's at the end of the fit."""
        return any(sum_of_elements(module[n]) != bits for n, bits in self._bits.items() if n in module)

    def state(self, changed: Mapping[str, torch.Tensor] | None = None) -> State | None:
        """Return the entry for a checkpoint, complete on rank 0 of the run, None on other processes. Collective
        over the processes of local replica 0.

        Args:
            changed: A state dict of the module if its values have changed since the end of the fit. A round
                then begins with these values.
        """
        if self._replica:
            return None
        momenta = {
            name: buffer
            for name, anchor in self._anchors.items()
            if (buffer := self._outer.state.get(anchor, {}).get("momentum_buffer")) is not None
        }
        found = {"anchor": {**self._anchors, **self._buffers}, "momentum": momenta}
        whole = {key: self._ownership.assembled(values) for key, values in found.items()}
        if changed is None:
            return {"steps": self.steps, **whole}
        return {"steps": 0, **whole, "anchor": {name: changed[name] for name in whole["anchor"]}}

    @torch.no_grad()
    def _load(self, state: State) -> None:
        self.steps = int(state["steps"])
        for name, anchor in [*self._anchors.items(), *self._buffers.items()]:
            anchor.copy_(self._ownership.held_of(name, state["anchor"][name]))
        for name, anchor in self._anchors.items():
            if name in state["momentum"]:
                held = self._ownership.held_of(name, state["momentum"][name])
                self._outer.state[anchor]["momentum_buffer"] = torch.empty_like(anchor).copy_(held)


@torch.no_grad()
def end_without_updates(module: nn.Module, state: State, first: Mapping[str, torch.Tensor]) -> None:
    """Give a module the mean of the replicas in a checkpoint, as `Rounds.end` does, because a fit that resumed from
    it has ended without an update.

    Args:
        module: The module, whole.
        state: The entry of the checkpoint, with the values of all replicas except replica 0 in `replicas`.
        first: State dict of replica 0.
    """
    of_replicas = [first, *(replica["state_dict"] for replica in state["replicas"])]
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, anchor in state["anchor"].items():
        if not all(name in each for each in of_replicas):
            continue  # the module does not save this buffer
        changes = [(anchor - each[name]).masked_fill_(anchor == each[name], 0) for each in of_replicas]
        tensors[name].copy_(anchor - sum(changes) / len(changes))


class _Place(NamedTuple):
    """How far a local replica has come: its updates, the indices of its epoch and of its batch in the epoch, and
    whether its fit has ended."""

    updates: int
    epoch: int
    batch: int
    ended: bool


def _differing(places: Sequence[_Place]) -> str:
    """Return the places of replica 0 and of the first replica at another batch, as text."""
    other = next(i for i, each in enumerate(places) if each[1:3] != places[0][1:3])
    return ", ".join(
        f"replica {i} {'has ended its fit after' if places[i].ended else 'is at'} batch {places[i].batch} of epoch "
        f"{places[i].epoch} ({counted(places[i].updates, 'update')})"
        for i in (0, other)
    )


def _difference(found: Sequence[Mapping[str, str]]) -> str:
    """Return which tensor differs first between replica 0 and another, from the tensors of each; "" if none does."""
    first = found[0]
    return next(
        (
            f": {name!r} is {first.get(name, 'absent')} in replica 0, but {other.get(name, 'absent')} in replica {replica}"
            for replica, other in enumerate(found)
            for name in {**first, **other}
            if first.get(name) != other.get(name)
        ),
        "",
    )


def _buckets(pairs: Pairs) -> Iterator[Pairs]:
    """Yield the pairs in groups of one dtype, which one message carries."""
    for _, group in itertools.groupby(
        sorted(pairs, key=lambda pair: str(pair[0].dtype)), lambda pair: pair[0].dtype
    ):
        bucket: Pairs = []
        size = 0
        for pair in group:
            if bucket and size + pair[0].nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(pair)
            size += pair[0].nbytes
        yield bucket
