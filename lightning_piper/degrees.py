"""Translate degrees of parallelism (`pp=2, dp=2, zero=3`) into directives.

Device numbers count the mesh (pp, dp, tp) in row-major order: tp changes fastest, then dp, then pp. With cp,
the mesh is (pp, dp, cp), because only one of tp and cp can be above 1. So the devices of a tensor-parallel or
sequence-parallel group have consecutive numbers. All devices of a stage also have consecutive numbers.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from lightning_piper.capture import CapturedStep, PartlyCaptured, as_before, capture, flatten
from lightning_piper.common.argument_names import checks_names
from lightning_piper.common.limits import DEVICES, integer, shown
from lightning_piper.common.units import counted
from lightning_piper.directives import ChunkLoss, Directive, Place, Replicate, ShardExperts, ShardSequences
from lightning_piper.directives.base import set_degrees
from lightning_piper.directives.sequence import applied_order
from lightning_piper.errors import CaptureError, DirectiveError, PiperError, with_notes
from lightning_piper.ir.regions import Region
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.workload import Work
from lightning_piper.search.program_writer import TAG, Params, Written, write
from lightning_piper.search.proposal import sizes_of, write_stages
from lightning_piper.search.space import Candidate, Layout
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.tensor_parallel import weights_to_shard

# Short name of a schedule -> name of its builder.
SHORT = {"1f1b": "one_f_one_b", "interleaved": "interleaved_one_f_one_b"}
# Name of a program -> ZeRO stage of data parallelism over all processes.
NAMES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3}
# Names of hardware files. Their figures give the costs by which blocks are divided into stages. Only ratios
# of costs matter, so the files need not describe the user's hardware.
ACCELERATOR, CPU = "h100-sxm", "cpu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Degrees:
    """A division of devices by degrees of parallelism. `parallel` documents each field. If `dp` is None, the
    method `for_devices` chooses it. A pair in `dp` is (groups of replicas, replicas of a group).

    Raises:
        DirectiveError: A field has an invalid value, or two fields do not fit together.
    """

    pp: int = 1
    dp: int | tuple[int, int] | None = None
    tp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int | None = None
    recompute: bool = False
    chunk_loss: bool = False

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "cp", "ep", "microbatches"):
            value = getattr(self, name)
            if value is None and name in ("dp", "microbatches"):
                continue
            if name == "dp" and isinstance(value, Sequence) and not isinstance(value, str):
                object.__setattr__(self, name, _pair(value))
                continue
            number = integer(value)
            if number is None or not 1 <= number <= DEVICES:
                _refuse(name, value, f"give an integer from 1 to {DEVICES}")
            object.__setattr__(self, name, number)
        if (level := integer(self.zero)) is None or not 0 <= level <= 3:
            _refuse("zero", self.zero, "give a ZeRO stage from 0 to 3")
        object.__setattr__(self, "zero", level)
        if isinstance(self.dp, tuple) and not level:
            _refuse(
                "dp",
                self.dp,
                "give zero=1, 2 or 3, because the replicas of a group shard nothing with zero=0",
            )
        if not isinstance(self.schedule, str) or SHORT.get(self.schedule, self.schedule) not in SEARCHED:
            _refuse("schedule", self.schedule, f"give one of {', '.join([*SHORT, *SEARCHED])}")
        for name in ("recompute", "chunk_loss"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "give True or False")
        if sum(degree > 1 for degree in (self.tp, self.cp, self.ep)) > 1:
            found = ", ".join(
                f"{name}={getattr(self, name)}" for name in ("tp", "cp", "ep") if getattr(self, name) > 1
            )
            raise DirectiveError(
                f"degrees {found}: only one of tp, cp and ep may be above 1. Leave out all but one, or give "
                "directives with an axis for each: Place(axes=...), ShardWeights, ShardSequences and ShardExperts "
                "[PIPER-D023]"
            )

    @property
    def replicas(self) -> int:
        """Number of replicas; 1 if `dp` is None."""
        return math.prod(self.dp) if isinstance(self.dp, tuple) else self.dp or 1

    @property
    def builder(self) -> str:
        """Name of the schedule builder. Without a pipeline (`pp=1`), it is always 1F1B."""
        return SHORT.get(self.schedule, self.schedule) if self.pp > 1 else "one_f_one_b"

    @property
    def needs_module(self) -> bool:
        """Whether the directives depend on the module: on its weights, or on the location of its stages."""
        return self.pp > 1 or self.tp > 1

    def __str__(self) -> str:
        """The degrees that differ from their defaults, such as "pp=2, dp=2"."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return ", ".join(
            f"{field.name}={given[field.name]!r}"
            for field in dataclasses.fields(self)
            if given[field.name] != field.default and (field.name, given[field.name]) != ("dp", 1)
        )

    def for_devices(self, devices: int) -> Degrees:
        """Return the same degrees with the number of replicas that uses all devices.

        Raises:
            DirectiveError: The product of the degrees is not the number of devices.
        """
        others = self.pp * self.tp * self.cp
        found = self if self.dp else dataclasses.replace(self, dp=max(1, devices // others))
        if others * found.replicas != devices:
            named = [name for name in ("pp", "dp", "tp", "cp") if getattr(self, name) not in (None, 1)] or [
                "dp"
            ]
            product = " x ".join(f"{name}={getattr(self, name)}" for name in named)
            must = (
                f"Give degrees whose product is {devices}"
                if self.dp
                else f"Give degrees whose product divides {devices}"
            )
            needed = f" = {others * found.replicas}" if len(named) > 1 and self.dp else ""
            raise DirectiveError(
                f"degrees {product}{needed} do not fit {counted(devices, 'device')}. {must} [PIPER-D023]"
            )
        return found

    def program(self, module: nn.Module | None = None, batch: Any = None) -> Written:
        """Return the program of these degrees, like `directives`. Later errors of the returned directives
        name the degrees."""
        written = self.directives(module, batch)
        for directive in written.directives:
            set_degrees(directive, str(self))
        return written

    def directives(self, module: nn.Module | None = None, batch: Any = None) -> Written:
        """Return the program of these degrees.

        Without a module, the stages must be annotated, and tensor parallelism shards no weights yet.

        Raises:
            CaptureError: The step cannot be captured.
            DirectiveError: `ep` does not divide `dp`, or the module annotates other stages.
            PiperError: The module cannot be divided by these degrees.
        """
        cut: BlockCut | None = None
        params: Params | None = {} if self.tp > 1 else None
        if module is not None and (self.pp > 1 or self.tp > 1):
            step = capture(module, batch, _device_of(module))
            if self.tp > 1:
                params = weights_to_shard(step, self.tp)
            if self.pp > 1 and not self._annotates(step, batch):
                cut = blocks_of(module, batch)
        if cut is None:
            written = write(self._candidate(()), (), params, None if module is not None else 0)
        else:
            written = write_stages(self._candidate(self._cuts(cut, module, batch)), cut, params)
        chunks = (ChunkLoss(),) if self.chunk_loss else ()
        lines = self._with_lines(self._with_groups(written.directives))
        return dataclasses.replace(written, directives=(*lines, *chunks))

    def _annotates(self, step: CapturedStep, batch: Any) -> bool:
        """Return whether the module annotates its stages itself.

        Raises:
            CaptureError: Neither the step nor the calls of annotated modules can be captured.
            DirectiveError: The stages that the module annotates do not fit these degrees.
        """
        stages = self._candidate(()).layout.stages
        found = {region.tags[TAG] for region in _regions(step, batch) if TAG in region.tags}
        if found and found != set(range(stages)):
            raise DirectiveError(
                f"degrees {self}: {self._stages_of}, but {type(step.module).__name__} annotates "
                f"{', '.join(f'{TAG}={i}' for i in sorted(found))}. Annotate {TAG}=0 to {TAG}={stages - 1}"
                f"{self._other_degrees(found)} [PIPER-D023]"
            )
        return bool(found)

    @property
    def _stages_of(self) -> str:
        """The number of stages as text, with the schedule if it puts several stages on each device."""
        per_rank = SEARCHED[self.builder].per_rank[0]
        why = f" (schedule={self.schedule!r} has {per_rank} on each device)"
        return f"{counted(self.pp * per_rank, 'stage')}{why if per_rank > 1 else ''}"

    def _other_degrees(self, found: set[int]) -> str:
        """Return the degrees that have the stages of a module, as the end of a message; empty if no degrees have
        them."""
        if found != set(range(n := len(found))):
            return ""
        per_rank = SEARCHED[self.builder].per_rank[0]
        each = "" if per_rank == 1 else "schedule='1f1b'" if n == self.pp else f"pp={n} with schedule='1f1b'"
        ranks = n // per_rank if n % per_rank == 0 and n > per_rank else 0
        return f", or choose {' or '.join(filter(None, [f'pp={ranks}' * bool(ranks), each])) or 'pp=1'}"

    def _candidate(self, cuts: tuple[int, ...]) -> Candidate:
        per_rank = SEARCHED[self.builder].per_rank[0]
        stages = self.pp * per_rank
        microbatches = self.microbatches or (2 * self.pp if self.pp > 1 else 1)
        layout = Layout(
            self.builder, per_rank, self.pp, self.replicas, self.tp * self.cp, 1, microbatches, True
        )
        return Candidate(layout, (self.zero,), stages if self.recompute else 0, 0, cuts)

    def _with_groups(self, directives: Sequence[Directive]) -> list[Directive]:
        """Return the directives with the number of replicas that shard together, if `dp` has it."""
        if not isinstance(self.dp, tuple) or self.dp[0] == 1:
            return list(directives)
        size = self.dp[1]
        return [
            dataclasses.replace(each, shard_size=size) if isinstance(each, Replicate) else each
            for each in directives
        ]

    def _with_lines(self, directives: Sequence[Directive]) -> tuple[Directive, ...]:
        """Return the directives with a `shard_sequences` or `shard_experts` after every `place` and `split`, if
        `cp` or `ep` is above 1. Otherwise return the directives. Raise an error if `ep` does not divide
        `dp`."""
        size = self.cp if self.cp > 1 else self.ep
        if size == 1:
            return tuple(directives)
        if self.replicas % self.ep:
            raise DirectiveError(
                f"degrees dp={self.dp or 1}, ep={self.ep}: ep is not a divisor of dp. Give an ep that divides "
                f"{self.replicas} [PIPER-D023]"
            )
        devices = range(self.pp * self.replicas * self.cp)
        lines: Any = [list(devices[i : i + size]) for i in range(0, len(devices), size)]
        lines = lines[0] if len(lines) == 1 else lines
        kind = ShardSequences if self.cp > 1 else ShardExperts
        program = (kind(devices=lines), *directives)
        return tuple(program[i] for i in applied_order(program))

    def _cuts(self, cut: BlockCut, module: nn.Module | None, batch: Any) -> tuple[int, ...]:
        """Return the index of the first block of each stage except the first stage, so that the longest stage
        is as short as possible. Raise an error if there are fewer blocks than stages."""
        assert module is not None
        stages = self._candidate(()).layout.stages
        if len(cut.names) < stages:
            raise PiperError(
                f"degrees: {self._stages_of}, but {_too_few(cut, stages, type(module).__name__)} [PIPER-D023]"
            )
        hardware = Hardware.read(CPU if _device_of(module) == "cpu" else ACCELERATOR)
        work = analytic(module, batch, hardware, sizes_of(batch)[-1:], (), cut=cut)
        return even_cuts([_seconds(next(iter(block.work.values()))) for block in work.blocks], stages)


def _regions(step: CapturedStep, batch: Any) -> Sequence[Region]:
    """Return the regions of the step. If it cannot be captured as a whole, return the regions of a partial capture,
    which is what the program will run on.

    Raises:
        CaptureError: Neither the step nor the calls of annotated modules can be captured.
    """
    try:
        return step.at(step.size).regions
    except CaptureError as error:
        if error.late or error.raised is not None:
            raise
        problem = error
    try:
        with as_before(step.module):
            partly = PartlyCaptured(step.module, flatten(batch)[1], torch.device(_device_of(step.module)))
            return partly.at(partly.size).regions
    except PiperError as other:
        problem.add_note(f"Capturing only the calls of annotated modules also failed: {with_notes(other)}")
        raise problem from None


def _too_few(cut: BlockCut, stages: int, name: str) -> str:
    """Return why a module of this class name has fewer blocks than stages, and what to do."""
    modules = [module for group in cut.groups for module in group]
    joined = next((i for i, group in enumerate(cut.groups) if len(group) > 1), None)
    if joined is None or len(modules) < stages:
        return (
            f"{name} has only {counted(len(cut.names), 'block')} that can be stages. Give fewer stages, or mark "
            f"them with piper.annotate({TAG!r}, i)"
        )
    first, last = cut.groups[joined][0], cut.groups[joined][-1]
    returns = (
        "uses parameters outside of these modules"
        if joined in cut.untagged
        else "returns to a module after it has run another"
    )
    return (
        f"Piper does not cut between {first!r} and {last!r} of {name} by itself, because the step {returns}. Mark "
        f"the stages with piper.annotate({TAG!r}, i) or piper.annotate_modules"
    )


def requested_degrees(directives: Any, **fields: Any) -> Degrees | None:
    """Return the degrees that a strategy receives: as fields, or as one of `NAMES` instead of directives.

    Returns None if there are neither.

    Raises:
        DirectiveError: There are both fields and directives, a field has an invalid value, or a text is
            neither a name nor a path.
    """
    named = {name: value for name, value in fields.items() if value is not None}
    if isinstance(directives, str):
        _check_name(directives)
        if (stage := NAMES.get(directives)) is not None:
            if integer(named.setdefault("zero", stage)) != stage:
                raise DirectiveError(
                    f"PiperStrategy({directives!r}, zero={shown(named['zero'])}): {directives!r} means "
                    f"zero={stage}. Leave one of them out [PIPER-D023]"
                )
            directives = None
    if named and directives == "auto":
        given = ", ".join(named)
        raise DirectiveError(
            f"PiperStrategy('auto', {', '.join(f'{name}={shown(value)}' for name, value in named.items())}): 'auto' "
            f"chooses all degrees itself. Remove {given}, or remove 'auto' [PIPER-D023]"
        )
    if named and directives is not None:
        raise DirectiveError(
            f"PiperStrategy: directives and {', '.join(named)} are given. Remove the directives, or remove "
            f"{', '.join(named)} [PIPER-D023]"
        )
    if not named:
        return None
    degrees = Degrees(**named)
    # Raise errors that do not depend on the number of devices here, before the devices are known.
    dataclasses.replace(degrees, dp=degrees.dp or degrees.ep).directives()
    return degrees


def _check_name(name: str) -> None:
    """Raise an error for a text that is not the name of a program and does not look like a path."""
    if name in (*NAMES, "auto") or Path(name).suffix or os.path.exists(name):
        return
    raise DirectiveError(
        f"PiperStrategy({shown(name)}): there is neither a program nor a file of this name. Give "
        f"{', '.join(map(repr, [*NAMES, 'auto']))}, or the path of a JSON file [PIPER-D001]"
    )


@checks_names
def parallel(
    *,
    pp: int = 1,
    dp: int | tuple[int, int] = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    zero: int = 0,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    recompute: bool = False,
    chunk_loss: bool = False,
    module: nn.Module | None = None,
    batch: Any = None,
) -> list[Directive]:
    """Return the directives of a program given by degrees of parallelism, to print or to change.

        parallel(pp=2, dp=2, zero=3)
        ->  one_f_one_b(2, 4, devices=[[0, 1], [2, 3]]) with Replicate(zero=3) before the orders

    Device numbers count the mesh (pp, dp, tp), or with `cp` the mesh (pp, dp, cp), in row-major order.

    Args:
        pp: Devices of one pipeline. Without `module`, the model must have its stages under
            `piper.annotate("PP", i)`.
        dp: Replicas. Each has an equal part of the batch. A pair (groups, replicas of a group) makes groups x replicas
            of a group replicas. With `zero`, each group has all shards (HSDP), in the order of torch's
            meshes ("replicate", "shard").
        tp: Devices that shard the weights, as `tensor_parallel` proposes. Needs `module` and `batch`.
        cp: Devices that shard dimension 1 (the sequence) of the values between regions.
        ep: Number of replicas that divide the experts between `dispatch` and `combine`. It must divide `dp`.
        zero: ZeRO stage, 0 to 3. One replica alone shards nothing.
        schedule: "1f1b", "interleaved", or the name of a builder of `lightning_piper.schedules` other than
            `dualpipe` and `fitted`.
        microbatches: Microbatches of each replica (default: twice `pp`, or 1 without a pipeline).
        recompute: Keep only the inputs of each stage, or without a pipeline of each layer, and run its forward pass
            again for the backward pass.
        chunk_loss: Compute a cross entropy of a linear layer without the scores of all rows at once (`ChunkLoss`).
        module: A LightningModule. With `pp` above 1, and if its step has no PP annotation, Piper cuts it into
            stages of similar calculated cost, and annotates the modules of this object.
        batch: The batch of one step.

    Raises:
        DirectiveError: A degree has an invalid value.
        CaptureError: The step of `module` cannot be captured.
        PiperError: `module` cannot be divided by these degrees.
    """
    degrees = Degrees(
        pp=pp,
        dp=dp,
        tp=tp,
        cp=cp,
        ep=ep,
        zero=zero,
        schedule=schedule,
        microbatches=microbatches,
        recompute=recompute,
        chunk_loss=chunk_loss,
    )
    if tp > 1 and module is None:
        raise DirectiveError(
            f"parallel(tp={tp}) needs a module and a batch of it to shard weights. Give module and batch [PIPER-D023]"
        )
    if (module is None) != (batch is None):
        given, missing = ("batch", "module") if module is None else ("module", "batch")
        raise DirectiveError(
            f"parallel: {given} is given without {missing}. Give both, or neither [PIPER-D023]"
        )
    if module is None:
        return [each for each in degrees.directives().directives if not _is_untagged(each)]
    written = degrees.directives(module, batch)
    written.annotate(module)
    return list(written.directives)


def even_cuts(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return where to cut a chain into stages so that the most expensive stage costs as little as possible:
    the index of the first element of each stage except the first stage. `even_cuts([1, 1, 2], 2)` is `(2,)`.

    Args:
        costs: The cost of each element; at least as many elements as stages.
        stages: The number of stages.
    """
    # best[k]: for the first k elements, the lowest cost of the most expensive stage, and the cuts. At first,
    # it is for one stage. Each iteration of the loop adds a stage.
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    best: dict[int, tuple[float, tuple[int, ...]]] = {k: (total[k], ()) for k in range(1, len(total))}
    for stage in range(1, stages):
        best = {
            k: min((max(best[j][0], total[k] - total[j]), (*best[j][1], j)) for j in range(stage, k))
            for k in range(stage + 1, len(total))
        }
    return best[len(costs)][1]


def _seconds(work: Work) -> float:
    return float(work.forward + work.backward_input + work.backward_weights)


def _device_of(module: nn.Module) -> str:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return device if device != "meta" else "cpu"


def _is_untagged(directive: Directive) -> bool:
    return isinstance(directive, Place) and directive.filter == {TAG: "-"}


def _pair(value: Sequence[Any]) -> tuple[int, int]:
    """Return the pair that `dp` gives. Raise an error if it does not give a number of groups and a number of at least
    two replicas."""
    found = [integer(each) for each in value]
    if len(found) != 2 or any(each is None or not 1 <= each <= DEVICES for each in found):
        _refuse("dp", value, "give (groups of replicas, replicas of a group)")
    groups, members = (each for each in found if each is not None)
    if members == 1:
        _refuse("dp", value, f"give dp={groups}, because a group of one replica shards nothing")
    return groups, members


def _refuse(name: str, value: Any, accepted: str) -> NoReturn:
    raise DirectiveError(
        f"degrees: {name} is {shown(value)}. {accepted[0].upper()}{accepted[1:]} [PIPER-D023]"
    )
