"""`replicate`: data parallelism and ZeRO. Replicas of a part of the step divide the batch and sum their
gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from lightning_piper.common.limits import integer, is_number, shown
from lightning_piper.common.units import counted
from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.directives.place import example_of, groups_of
from lightning_piper.directives.rewrites.batch_sharding import shard_batch
from lightning_piper.directives.rewrites.sharded_parameters import hold_parts
from lightning_piper.directives.rewrites.sharding import (
    Conflict,
    gather_as_in_training,
    gather_parameters,
    reduce_gradients,
)
from lightning_piper.directives.rewrites.transfers import connect
from lightning_piper.directives.rewrites.unplaced_regions import without_device
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.policies import ShardingPolicy
from lightning_piper.ops.communication.gather import rounded_params

MEBI = 2**20
SHARDS = ("elements", "parameter")
LEVELS = ("shard_optimizer", "shard_grads", "shard_params")  # the fields of ZeRO stages 1, 2 and 3
AVERAGES = ("batch", "replicas")
REDUCE_DTYPES = ("float16", "bfloat16", "float32", "float64")
GATHER_DTYPES = ("float16", "bfloat16", "float32")


@register
@dataclasses.dataclass(frozen=True)
class Replicate(Directive):
    """Run the chunks that `filter` selects on a group of devices, each with its local batch, an equal part of
    the batch.

        B 0:8 @0,1 -> accumulate -> update    --replicate {} over [0, 1]-->    B 0:4 @0,1 -> accumulate -> all-reduce -> update

    Attributes:
        filter: Selects chunks (default: all chunks). A `place` must put them on the groups.
        devices: One group, `[0, 1]`, or a list of groups, `[[0, 2], [1, 3]]`, on which the stages are placed
            (default: the groups on which the program places chunks). A device's position in its group is its
            replica index: replica r of R has the r-th of R equal parts of the batch.
        reduce_stream: The logical stream of gradient sums.
        gather_stream: The logical stream of gathers of sharded parameters.
        bucket_size: Size of a bucket of parameters or gradients, which travel in one message, in MB (2**20
            bytes; default: 25).
        shard_optimizer: Each replica updates a shard of the parameters and holds the optimizer state of that
            shard only. The parameters are gathered once a step (ZeRO-1).
        shard_grads: As `shard_optimizer`. In addition, gradients are summed after each microbatch, and each
            replica keeps its shard of the sums (ZeRO-2).
        shard_params: As `shard_grads`. In addition, parameters are gathered for each use and freed after it
            (ZeRO-3).
        shard_size: Number of replicas of a group of replicas that shard together (HSDP). Replicas 0 to
            `shard_size` - 1 are the first group. Each group has all shards. Gathers and reduce-scatters are within a group, and
            an all-reduce sums each shard of the gradients over the groups (default: all replicas are one group).
        shard_by: How to cut a bucket. "elements": into equal parts, which may cut through parameters.
            "parameter": each parameter has one owner among the replicas, which updates it whole. Optimizers that
            need whole matrices (Muon, Adafactor) require this.
        overlap_update: Each owner updates a parameter as soon as its gradient is summed, beside the backward
            passes of earlier layers. The owner keeps the new values, and the optimizer's step puts them into the
            parameters. Needs `shard_by="parameter"`.
        average: The definition of the loss. "batch": the loss of the whole batch. A ratio, such as a mean
            over the tokens that count, is divided by the count of all replicas. "replicas": the mean of the
            replicas' losses, as in DistributedDataParallel. All replicate directives of a program must have
            the same value.
        reduce_dtype: The dtype in which gradients are summed over microbatches and replicas, such as
            "float32" for bfloat16 gradients (default: the gradients' dtype).
        gather_dtype: The dtype in which sharded parameters are gathered, such as "bfloat16" for float32
            parameters (default: the parameters' dtype). Passes then compute with rounded parameters, in the
            parameters' dtype. The optimizer and checkpoints have the full numbers. Parameters that do
            not have more bytes are not rounded.
        zero: Only in the constructor: the ZeRO stage from 0 to 3, which sets one of the three fields.
            `Replicate(zero=3)` is `Replicate(shard_params=True)`.

    If another directive shards a parameter, each part is summed and sharded over the replicas that hold this part.

    The local batches are the same for all regions of a step, whether one directive or several directives
    replicate them. The ZeRO stages of regions may differ.

    Gradients become sums over the replicas, weighted as the loss requires. They are equal up to reassociation
    if no sample's loss depends on other samples. With `gather_dtype`, this holds for one device whose gathered
    parameters are rounded to this dtype in each step.
    """

    op: ClassVar[str] = "replicate"
    contract: ClassVar[Contract] = "reassociated"

    filter: Filter = dataclasses.field(default_factory=dict, kw_only=True)
    devices: Sequence[int] | Sequence[Sequence[int]] | None = None
    _: dataclasses.KW_ONLY
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"
    bucket_size: float = 25.0
    shard_optimizer: bool = False
    shard_grads: bool = False
    shard_params: bool = False
    shard_size: int | None = None
    shard_by: str = "elements"
    overlap_update: bool = False
    average: str = "batch"
    reduce_dtype: str | None = None
    gather_dtype: str | None = None
    zero: dataclasses.InitVar[int | None] = None

    def __post_init__(self, zero: int | None) -> None:
        """Set the field of the ZeRO stage `zero`. Raise an error if a field sets a different stage."""
        super().__post_init__()
        if zero is None:
            return
        level = integer(zero)
        if level is None or not 0 <= level <= 3:
            self.refuse(
                "zero",
                f"{shown(zero)} is not a level of ZeRO",
                "give a level of ZeRO from 0 to 3 [PIPER-D003]",
            )
        own = max((i for i, field in enumerate(LEVELS, 1) if getattr(self, field) is True), default=0)
        if own not in (0, level):
            self.refuse(
                "zero",
                f"the level is {level}, but {LEVELS[own - 1]} is set, which is level {own}",
                "give only one of the two [PIPER-D003]",
            )
        if level:
            object.__setattr__(self, LEVELS[level - 1], True)

    def completed(self, program: Sequence[Directive]) -> Replicate:
        groups = groups_of(program)
        return dataclasses.replace(self, devices=groups) if self.devices is None and groups else self

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        if self.devices is not None:
            self._check_devices()
        self._check_options()

    def _check_devices(self) -> None:
        """Raise an error unless all groups have the same size, at least 2, and each device has the same
        position in all of its groups."""
        self.check_groups("devices", self.devices)
        sizes = sorted({len(group) for group in self.replica_groups()})
        if len(sizes) > 1 or sizes[0] < 2:
            self.refuse(
                "devices",
                f"the groups have {' and '.join(map(str, sizes))} {'device' if sizes == [1] else 'devices'}",
                "give groups of one size, of at least two devices, and place the chunks on them [PIPER-D005]",
            )
        replica: dict[int, int] = {}
        for group in self.replica_groups():
            for index, device in enumerate(group):
                if replica.setdefault(device, index) != index:
                    self.refuse(
                        "devices",
                        f"device {device} is replica {replica[device]} in one group and replica {index} in another",
                        "give the device the same position in all groups [PIPER-D005]",
                    )

    def _check_options(self) -> None:
        """Raise an error if a field for sums of gradients, or for shards, has a value that is not valid."""
        self.check_stream("reduce_stream", "reduce")
        self.check_stream("gather_stream", "gather")
        if not isinstance(self.bucket_size, int | float) or not is_number(self.bucket_size, positive=True):
            self.refuse(
                "bucket_size",
                f"{shown(self.bucket_size)} is not a size",
                "give a number of MB, such as 25 [PIPER-D003]",
            )
        for field in (*LEVELS, "overlap_update"):
            if not isinstance(getattr(self, field), bool):
                self.refuse(
                    field,
                    f"{shown(getattr(self, field))} is not a Boolean",
                    "give True or False [PIPER-D003]",
                )
        sharded = self.shard_optimizer or self.shard_grads or self.shard_params
        if self.shard_size is not None:
            size = integer(self.shard_size)
            if size is None or size < 2:
                self.refuse(
                    "shard_size",
                    f"{shown(self.shard_size)} is not a number of replicas that shard together",
                    "give an integer >= 2 [PIPER-D003]",
                )
            if not sharded:
                self.refuse(
                    "shard_size",
                    "the directive shards nothing",
                    "give zero=1, 2 or 3, or remove shard_size [PIPER-D003]",
                )
        if not isinstance(self.shard_by, str) or self.shard_by not in SHARDS:
            self.refuse(
                "shard_by",
                f"{shown(self.shard_by)} is unknown",
                f"give one of {', '.join(map(repr, SHARDS))} [PIPER-D003]",
            )
        if self.shard_by == "parameter" and not sharded:
            self.refuse(
                "shard_by",
                "the directive shards nothing",
                "give zero=1, 2 or 3, or remove shard_by [PIPER-D003]",
            )
        if self.overlap_update and self.shard_by != "parameter":
            self.refuse(
                "overlap_update",
                "no replica updates whole parameters on its own",
                f"give shard_by='parameter'{'' if sharded else ' with zero=1, 2 or 3'}, or remove overlap_update [PIPER-D003]",
            )
        if not isinstance(self.average, str) or self.average not in AVERAGES:
            self.refuse(
                "average",
                f"{shown(self.average)} is unknown",
                f"give one of {', '.join(map(repr, AVERAGES))} [PIPER-D003]",
            )
        for field, known in (("reduce_dtype", REDUCE_DTYPES), ("gather_dtype", GATHER_DTYPES)):
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, str) and dtype in known):
                self.refuse(
                    field,
                    f"{shown(dtype)} is unknown",
                    f"give one of {', '.join(map(repr, known))} [PIPER-D003]",
                )
        if self.gather_dtype is not None and not sharded:
            self.refuse(
                "gather_dtype",
                "the directive shards nothing",
                "give zero=1, 2 or 3, or remove gather_dtype [PIPER-D003]",
            )

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Divide the batch as in training, and gather parameters from the shards of training.

        Without a training step there is no optimizer, so only `shard_params` shards parameters.
        """
        if training is None:
            self.apply(dag)
            return
        self._shard_batch(dag)
        gather_as_in_training(dag, training)

    def apply(self, dag: TrainingDAG) -> Contract | None:
        """Divide the batch, sum gradients over the replicas, and shard what the fields say. Parameters that a
        `shard_experts` divides get their sums and gathers again, with this directive's policy. Raise an error if
        another directive treats the same parameters differently.

        Returns:
            `rounded` if gathers round parameters, otherwise `bounded` if gradients are summed in a dtype with
            larger rounding errors than their own dtype.
        """
        regions, policy = self._shard_batch(dag), self._policy()
        rounded_before = rounded_params(dag).keys()
        try:
            again = [region for region in sorted(regions & dag.meshes.keys()) if region in dag.policies]
            if again:
                raise Conflict(
                    "an earlier directive already replicates the sharded parameters of "
                    f"{dag.regions[again[0]].label}",
                    "replicate each region only once",
                )
            dag.policies |= dict.fromkeys(regions, policy)
            touched = reduce_gradients(dag, regions, policy)
            if policy.optimizer:
                gather_parameters(dag, regions, policy)
            touched += hold_parts(dag, regions)
        except Conflict as conflict:
            advice = conflict.advice or "give regions that share parameters the same options"
            self.refuse("filter", str(conflict), f"{advice} [PIPER-D003]")
        connect(dag, touched)
        if rounded_params(dag).keys() - rounded_before:
            return "rounded"
        return "bounded" if _rounds_more(dag, regions, policy.dtype) else None

    def _agree_on_average(self, dag: TrainingDAG) -> None:
        """Record `average` in the DAG. Raise an error if an earlier replicate has another average."""
        mean = self.average == "replicas"
        if dag.policies and dag.mean_of_replicas != mean:
            self.refuse(
                "average",
                f"{shown(self.average)} here, but {AVERAGES[dag.mean_of_replicas]!r} in an earlier replicate",
                "give all replicate directives the same average [PIPER-D003]",
            )
        dag.mean_of_replicas = mean

    def _shard_batch(self, dag: TrainingDAG) -> set[int]:
        """Give every replica its local batch, and record `average` in the DAG. Return the selected regions.
        Raise an error if a chunk of these regions is not on one of the groups."""
        chunks = self.select(dag, "filter", self.filter)
        groups = self.replica_groups()
        if not groups:
            self.refuse(
                "devices",
                "the program does not have a place",
                "add a place of the chunks on two or more devices, such as Place(devices=[0, 1]) [PIPER-D005]",
            )
        for chunk in chunks:
            if chunk.devices not in groups:
                given = [list(group) for group in groups]
                if chunk.devices:
                    found = (
                        f"{given} does not contain the group {list(chunk.devices)}, on which {chunk.label} "
                        "is placed"
                    )
                    self.refuse(
                        "devices", found, "give the place and the replicate the same groups [PIPER-D005]"
                    )
                if (forgotten := without_device(dag)) is not None:
                    self.refuse("devices", *forgotten)
                self.refuse(
                    "devices",
                    f"{chunk.label} is not placed yet",
                    f"place it first, on one of {given} [PIPER-D005]",
                )
        regions = {chunk.region for chunk in chunks}
        for chunk in dag.of_type(Chunk):
            if chunk.region in regions and chunk.devices not in groups:
                region = dag.regions[chunk.region].label
                if not chunk.devices:
                    self.refuse(
                        "devices",
                        f"the filter selects passes of region {region}, but its pass {chunk.label} is not placed yet",
                        "place all passes of the region before this directive [PIPER-D005]",
                    )
                self.refuse(
                    "devices",
                    f"the filter selects passes of region {region}, but its pass {chunk.label} is on "
                    f"{list(chunk.devices)}",
                    f"add the group {list(chunk.devices)} to the groups {[list(group) for group in groups]} "
                    "[PIPER-D005]",
                )
        if dag.member_axes and dag.replicas == 1:
            axes = ", ".join(dag.member_axes)
            mesh = example_of(["dp", *dag.member_axes])
            found = (
                f"all devices of {list(groups[0])} work on the same samples, because they shard tensors "
                f"along {axes}"
            )
            self.refuse(
                "devices",
                found,
                f"remove the replicate, or place the chunks on a mesh with replicas, such as {mesh}, and leave devices "
                "out of the other directives [PIPER-D017]",
            )
        self._agree_on_average(dag)
        # An earlier `shard_weights` or `shard_sequences` has already divided the batch over the replicas of its mesh.
        known = dag.mesh if dag.member_axes and len(dag.mesh.group_ranks) == len(groups[0]) else None
        shard_batch(dag, known or Mesh.flat(len(groups[0])), self)
        if self.shard_size is not None and dag.replicas % self.shard_size:
            sizes = " or ".join(str(n) for n in range(2, dag.replicas + 1) if dag.replicas % n == 0)
            self.refuse(
                "shard_size",
                f"{counted(dag.replicas, 'replica')} cannot be divided into groups of {self.shard_size}",
                f"{f'give {sizes}' if sizes else 'remove shard_size'} [PIPER-D005]",
            )
        return regions

    def replica_groups(self) -> list[tuple[int, ...]]:
        if self.devices is None:
            return []
        groups: Any = self.devices if isinstance(self.devices[0], list | tuple) else [self.devices]
        return [tuple(group) for group in groups]

    def _policy(self) -> ShardingPolicy:
        """Return the policy of the selected regions. A ZeRO stage also shards what the lower stages shard."""
        return ShardingPolicy(
            optimizer=self.shard_optimizer or self.shard_grads or self.shard_params,
            gradients=self.shard_grads or self.shard_params,
            parameters=self.shard_params,
            reduce_stream=self.reduce_stream,
            gather_stream=self.gather_stream,
            bucket_bytes=int(self.bucket_size * MEBI),
            shard_size=self.shard_size,
            by_parameter=self.shard_by == "parameter",
            overlap_update=self.overlap_update,
            dtype=None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype),
            gather_dtype=None if self.gather_dtype is None else getattr(torch, self.gather_dtype),
        )


def _rounds_more(dag: TrainingDAG, regions: Iterable[int], dtype: torch.dtype | None) -> bool:
    """Return whether `dtype` has larger rounding errors than a trained parameter of the regions. The result is
    false for None."""
    names = {
        name
        for chunk in dag.of_type(Chunk)
        if chunk.region in regions
        for name in dag.interface(chunk).params
    }
    own = [param.spec.dtype for name in names if (param := dag.step.params[name]).requires_grad]
    return dtype is not None and any(torch.finfo(dtype).eps > torch.finfo(each).eps for each in own)


# Variants of a program with the same replicas at a lower ZeRO stage

_WHOLE: Mapping[str, Any] = dict.fromkeys(LEVELS, False)


def shards_of(directive: Directive) -> list[str]:
    """Return the names of the sharding fields that are set in a directive."""
    return [field for field in _WHOLE if isinstance(directive, Replicate) and getattr(directive, field)]


def rounds_params(program: Sequence[Directive]) -> bool:
    """Return whether a directive has a `gather_dtype`."""
    return any(isinstance(each, Replicate) and each.gather_dtype is not None for each in program)


def without_sharding(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """Return the program at ZeRO stage 0: replicas shard nothing."""
    return tuple(
        dataclasses.replace(
            each, **_WHOLE, shard_size=None, shard_by="elements", overlap_update=False, gather_dtype=None
        )
        if isinstance(each, Replicate)
        else each
        for each in program
    )


def with_divided_optimizer(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """Return the program with each ZeRO stage above 0 lowered to stage 1, a sharded optimizer state."""
    return tuple(
        dataclasses.replace(each, **{**_WHOLE, "shard_optimizer": True})
        if isinstance(each, Replicate) and shards_of(each)
        else each
        for each in program
    )
