"""The result of a capture: regions, the interface of each of their passes, and callable code.

A *region* is a maximal run of work with the same tags, in trace order. Each region has a forward pass `F`,
and a backward pass `B` if gradients flow through it. `B` can be split in two: `BI` makes the gradients of
inputs, which other regions wait for, and `BW` the gradients of weights, which only the optimizer waits for.
The interface of a pass does not depend on the batch size. Its code does, because a captured graph has fixed
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Change, Division
from lightning_piper.ir.metric_calls import MetricCalls
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.terms import Term
from lightning_piper.ir.values import Kind, Placement, Sharded, Slice, TensorSpec, view_as

# The name of the returned loss among the metrics. It has a space, because users may log a value named "loss".
LOSS = "returned loss"

SPLIT_BACKWARD = ("BI", "BW")  # the two passes of a split B: input-gradient pass, weight-gradient pass

PassKey = tuple[int, str]  # (region index, "F", "B" or one of SPLIT_BACKWARD)
Run = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]  # see `Code.run`


@dataclass(frozen=True)
class Region:
    """A run of operations of the step with the same annotations.

    Attributes:
        index: Position in trace order.
        tags: The annotations that were open, e.g. `{"PP": 1}`; empty outside of any annotation.
        source: The user's source line at which the region starts; messages show it.
        joined: Whether the region computes from gathered samples, so that each replica computes the whole
            batch.
    """

    index: int
    tags: Mapping[str, int]
    source: str
    joined: bool = False

    @property
    def label(self) -> str:
        return ",".join(f"{k}={v}" for k, v in self.tags.items()) or "untagged"


@dataclass(frozen=True)
class Output:
    """An output of a pass: a bundle of tensors that travels together.

    Attributes:
        kind: The role of the bundle.
        names: Names of the bundle's contents: parameters or buffers, the log key, or the value in the graph.
            A `saved` bundle is private to the region; its names are the backward passes that read it.
        term: For a loss or a logged value, the index of its term in `StepCode.terms`; otherwise None.
        partial: Whether the output is a term of a sum over the whole batch. Readers get the sum.
        exchange: `gather` if readers work on the whole batch and get the rows of all parts of the batch.
            `scatter` if readers work on a part of the batch and get the rows of this part, from the gradients
            of the whole batch. Otherwise "".
        held: (axis, placement) for each axis of `Step.divisions` along which not all members have the whole
            output. Empty if the step is not divided.
        changes: The placement changes on the way to the readers, in order.
    """

    kind: Kind
    names: tuple[str, ...]
    term: int | None = None
    partial: bool = False
    exchange: str = ""
    held: tuple[tuple[str, Placement], ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True)
class Interface:
    """A description of a pass's inputs and outputs, the same for every batch size.

    The code's arguments are, in this order: the tensors of all inputs, params, buffers, state, batch, and the
    gradients of the loss terms.

    Attributes:
        inputs: (region, pass, output index) of each incoming bundle.
        outputs: The outgoing bundles.
        params: Parameters that the pass reads, by canonical name.
        buffers: Buffers that the pass reads and no pass changes.
        state: Buffers that the pass reads and this region's forward pass changes. `Chunk.state` says where
            the current values come from.
        batch: Indices of the batch leaves that the pass reads.
        seeds: Indices in `StepCode.terms` of the loss terms whose gradients are the last arguments.
        random: Whether the pass draws random numbers. It then runs with a seed of its own.
        takes_statistics: Whether the pass has a batch norm in training mode. A forward pass takes its statistics
            from the pass's part of the batch.
        arrives, leaves: For a region to which rows are dispatched, the role of each input and output in the
            exchange of rows: `counts`, `dispatch` (rows that arrived), `combine` (rows on their way back), or
            "". Empty for all other regions.
    """

    inputs: tuple[tuple[int, str, int], ...]
    outputs: tuple[Output, ...]
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    batch: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    random: bool = False
    takes_statistics: bool = False
    arrives: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()

    @property
    def seeds_gradient(self) -> bool:
        """Whether the step's backward pass begins in this pass. It may begin in several passes."""
        return bool(self.seeds)


@dataclass(frozen=True)
class Routed:
    """A region between `dispatch` and `combine`, which sends each row to one of E experts.

    Attributes:
        sites: Indices, among the step's calls of `dispatch`, of the calls that lead to the region.
        count: E.
        params: The region's parameters whose first dimension is E.
        even: Whether every expert gets the same number of rows (its capacity). Otherwise counts give the
            numbers.
    """

    sites: tuple[int, ...]
    count: int
    params: tuple[str, ...]
    even: bool


@dataclass(frozen=True)
class Code:
    """A pass's code for one batch size.

    Attributes:
        made: Returns `run` and `graph`. It makes them in its first call, because a process runs few passes.
        outputs: Specs of the tensors of each output bundle, in the order of `Interface.outputs`.
        inputs: Specs of the arguments of `run`.
        sizes: The values of `sizes` in the graph.
    """

    made: Callable[[], tuple[Run, torch.fx.Graph]]
    outputs: tuple[tuple[TensorSpec, ...], ...]
    inputs: tuple[TensorSpec, ...] = ()
    sizes: tuple[Any, ...] = ()

    @property
    def run(self) -> Run:
        """A function that takes a list of tensors, empties it, and returns the flat tuple of outputs. It frees tensors
        after their last use."""
        return self.made()[0]

    @property
    def graph(self) -> torch.fx.Graph:
        """The functional graph. A graph for several shapes reads each size that varies from `sizes`, as in
        `sizes[3]`."""
        return self.made()[1]


@dataclass(frozen=True)
class Computed:
    """A logged value that Piper computes from other outputs, on the whole batch.

    Attributes:
        names: Names of the outputs of kind `log` from which Piper computes the value.
        of: Computes the value from these outputs' values on the whole batch.
        text: The computation as text.
    """

    names: tuple[str, ...]
    of: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    text: str


@dataclass(frozen=True)
class Logged:
    """A `self.log` call of the step.

    Attributes:
        name: The metric's key.
        reduce: How the values of an epoch's batches become one: `mean`, `sum`, `max` or `min`. The values of
            microbatches become one in the same way if the step does not show how the whole batch's value
            follows from them (`Output.term`).
        kwargs: The other arguments of the call, which the replay passes on unchanged.
        constant: The value, if it was a Python number and not a tensor; a function without arguments if the
            number changes from step to step. None for a tensor.
        computed: Set if the value is computed from several outputs instead of being an output.
        where: The user's source line.
    """

    name: str
    reduce: str
    kwargs: Mapping[str, object]
    constant: float | Callable[[], float] | None = None
    computed: Computed | None = None
    where: str = field(default="", compare=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs of kind `log` from which the value comes; empty for a Python number."""
        if self.computed is not None:
            return self.computed.names
        return (self.name,) if self.constant is None else ()


class Rebuild(Protocol):
    """A function that rebuilds a step's return value (`StepCode.rebuild`)."""

    def __call__(self, *given: Any) -> Any: ...

    def and_keep(self, *given: Any) -> Any:
        """Rebuild the return value like `__call__`, and replay the side effects of the step's Python code."""
        ...


@dataclass(frozen=True)
class Undivided:
    """A note that Piper must not cut batches by samples, for example because their tensors share no first dimension.

    Attributes:
        batches: The number of such batches that the step gets at once, one for each replica.
        why: The reason that messages show, as a clause about the batch ("it has no tensor").
    """

    batches: int
    why: str


@dataclass(frozen=True)
class StepCode:
    """A step's passes for one batch size.

    Attributes:
        size: Number of samples.
        regions: The regions in trace order.
        interfaces, code: (region, pass F or B) -> the interface of the pass, and its code.
        logs: The `self.log` calls.
        batch_specs: Specs of the leaves of the batch.
        split_passes: (region, pass BI or BW) -> (interface, code) of the pass. A region without trained
            weights has only BI, and a region that does not output a gradient has only BW; this one pass is
            then all of B. The first of the region's passes gets the inputs from other regions.
        routed: Index of each region to which rows are dispatched -> its experts.
        terms: How Piper weights the terms of the loss and of logged values.
        rebuild: For a forward-only step, the function that rebuilds its return value from its tensors, which
            are the outputs of kind `result` named "0", "1", .... It also takes a function, which supplies the
            returned items of the batch without tensors. None for a training step.
        metrics: The step's calls of metric objects.
        undivided: Set if Piper must not cut the batch.
        assumed: Whether Piper assumes that the loss is a mean over samples, because the loss is not a sum of
            means, sums and ratios.
        unknown: Names of logged values other than the loss for which Piper makes the same assumption.
        meet: The operation, on the way to the loss or to a gradient, that mixes samples or indexes into the
            batch; None if Piper did not find such an operation.
        nonlinear: The backward operation that is not linear in the gradient of the loss, with the user's
            line; None if all are linear.
        weighs_gradients: Whether the backward pass of each part of the batch starts with a gradient of 1, and
            Piper weights the resulting gradients. Otherwise Piper weights the gradient of the loss, which
            gives the same gradients if the backward pass is linear.
        local: Buffers whose new values depend on the samples of the local batch, on their number, or on
            random numbers. All other buffers that the step changes get the same values on any part of the
            batch.
        divided: Parameter -> (the axis along which members have parts of the parameter, how it is divided
            into parts), such as `{"fc.weight": ("tp", Sharded(0))}`. Whole parameters are absent.
    """

    size: int
    regions: tuple[Region, ...]
    interfaces: Mapping[PassKey, Interface]
    code: Mapping[PassKey, Code]
    logs: tuple[Logged, ...]
    batch_specs: tuple[TensorSpec, ...]
    split_passes: Mapping[PassKey, tuple[Interface, Code]] = field(default_factory=dict)
    routed: Mapping[int, Routed] = field(default_factory=dict)
    rebuild: Rebuild | None = None
    terms: tuple[Term, ...] = ()
    metrics: MetricCalls = field(default_factory=MetricCalls)
    undivided: Undivided | None = None
    assumed: bool = False
    unknown: tuple[str, ...] = ()
    meet: str | None = None
    nonlinear: str | None = None
    weighs_gradients: bool = False
    local: frozenset[str] = frozenset()
    divided: Mapping[str, tuple[str, Sharded]] = field(default_factory=dict)

    def samples(self, leaf: int, part: Slice) -> Slice | None:
        """Return the samples of batch tensor `leaf` that the chunks of `part` get. None: the chunks get the
        whole tensor."""
        return part if self.batch_specs[leaf].shape and self.undivided is None else None

    @property
    def forward_only(self) -> bool:
        return self.rebuild is not None

    @cached_property
    def sums_over_batch(self) -> bool:
        """Whether the step sums an intermediate value over the whole batch."""
        return any(output.partial for interface in self.interfaces.values() for output in interface.outputs)

    @cached_property
    def gathers_samples(self) -> bool:
        """Whether the step computes from gathered samples of the whole batch."""
        return any(region.joined for region in self.regions)

    @cached_property
    def makes_loss(self) -> bool:
        """Whether a pass outputs the loss. No pass does so in a forward-only or an uncaptured step."""
        return any(
            output.kind == Kind.LOSS for interface in self.interfaces.values() for output in interface.outputs
        )

    @property
    def loss_dtype(self) -> torch.dtype:
        """The dtype of the loss as the step computes it; float64 if the step does not have a loss."""
        for key, interface in self.interfaces.items():
            for output, specs in zip(interface.outputs, self.code[key].outputs, strict=True):
                if output.kind == Kind.LOSS:
                    return specs[0].dtype
        return torch.float64

    def goes_on(self, buffer: str) -> bool:
        """Return whether each microbatch starts with the value of `buffer` that the previous microbatch left.

        This returns false if the new value is the same for any part of the batch (a counter, a spectral norm,
        statistics of the whole batch). Such a buffer changes once a step, as on one device. This also returns
        false if the value comes from gathered samples. Such a buffer changes once, after all microbatches
        have read the value from before the step.
        """
        return buffer in self.local and buffer not in self._joined_buffers

    @cached_property
    def _joined_buffers(self) -> frozenset[str]:
        """The buffers that joined regions change (`Region.joined`)."""
        made = [
            (self.regions[region], out)
            for (region, _), each in self.interfaces.items()
            for out in each.outputs
        ]
        return frozenset(
            name for region, out in made if region.joined and out.kind == Kind.BUFFER for name in out.names
        )

    def backward_passes_of(self, region: int) -> tuple[str, ...]:
        """Return the passes of a region's split backward: `BI`, `BW` or both; empty without a backward."""
        backward = self.interfaces.get((region, "B"))
        made = {out.kind for out in backward.outputs} if backward else set()
        return tuple(
            part for part, kind in zip(SPLIT_BACKWARD, ("cotangent", "grad"), strict=True) if kind in made
        )

    def interface_of(self, key: PassKey) -> Interface:
        """Return the interface of any pass, including a pass of a split backward."""
        return self._split_pass(key)[0] if key[1] in SPLIT_BACKWARD else self.interfaces[key]

    def code_of(self, key: PassKey) -> Code:
        """Return the code of any pass, including a pass of a split backward."""
        return self._split_pass(key)[1] if key[1] in SPLIT_BACKWARD else self.code[key]

    def _split_pass(self, key: PassKey) -> tuple[Interface, Code]:
        if key not in self.split_passes:
            raise CaptureError(
                f"{key[1]} of region {self.regions[key[0]].label} has a different structure for "
                f"{counted(self.size, 'sample')} than for the size captured first. Name B instead of BI and BW in "
                "orders, or choose microbatches of another size [PIPER-C012]"
            )
        return self.split_passes[key]

    def whole(self, region: int, kind: str, index: int) -> tuple[int, str, int]:
        """Return the output of B that is the same as an output of BI or BW, as (region, pass, index). Return
        any other output unchanged."""
        if kind in SPLIT_BACKWARD:
            out = self.interface_of((region, kind)).outputs[index]
            if out.kind != Kind.SAVED:
                return (region, "B", self.interfaces[region, "B"].outputs.index(out))
        return (region, kind, index)


@dataclass(frozen=True)
class ParamInfo:
    """A parameter of the module.

    Attributes:
        name: Its canonical name.
        spec: Spec of the whole parameter. Shards count elements in the order of this spec: in memory order,
            or part by part if it has `runs`. In this order, each part of a divided parameter is contiguous.
        aliases: Further names of the same tensor (tied parameters).
        strides: The parameter's strides in the module, if they differ from the spec's.
    """

    name: str
    spec: TensorSpec
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    strides: tuple[int, ...] | None = None

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the parameter with its shape and strides in the module, from a one-dimensional tensor of all
        its elements in the order of `spec`. It is a copy if `strides` is set, otherwise the `view_as` of
        `flat`."""
        found = view_as(flat, self.spec)
        if self.strides is None:
            return found
        return flat.new_empty_strided(self.spec.shape, self.strides).copy_(found)


class Step(Protocol):
    """A captured step: everything that Piper uses of the user's module when it compiles a program."""

    @property
    def size(self) -> int:
        """Samples in the batch that the step was captured with."""
        ...

    @property
    def params(self) -> Mapping[str, ParamInfo]: ...

    @property
    def buffers(self) -> Mapping[str, TensorSpec]: ...

    @property
    def divisions(self) -> tuple[Division, ...]:
        """The divisions of tensors among members, one for each axis. Empty: nothing is divided."""
        ...

    @property
    def member(self) -> Step:
        """The same step as one rank of the axes in `divisions` runs it, on its shards."""
        ...

    def divided(self, divisions: Sequence[Division]) -> Step:
        """Return the same step, cut wherever the placement of a value along an axis changes."""
        ...

    def recomputing(self, recomputation: Recomputation) -> Step:
        """Return the same step with backward passes that recompute some of their inputs."""
        ...

    def chunking_losses(self, chunk: int) -> Step:
        """Return the same step with the scores of a cross entropy of a linear layer computed for `chunk` rows at a
        time (0: see `placements.chunked_scores`)."""
        ...

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """Return the step's code for a batch of `size` samples. The first call for a size may trace the step.

        Args:
            size: Samples.
            degrees: For each call of `dispatch`, the number of parts into which its region's parameters are
                divided. The region's code then takes one part and any number of rows. Empty: nothing is
                divided.
        """
        ...

    def batch_specs_at(self, size: int) -> tuple[TensorSpec, ...]:
        """Return the specs of the arguments of the code for a batch of `size` samples. Unlike `at`, this never
        traces the step for this size."""
        ...


class LateSpecs(Sequence[TensorSpec]):
    """The specs of an output of a pass, in place of a tuple of them. A read may trace the step.

    Two `LateSpecs` of one output are equal without a read.

    Args:
        step, samples, degrees: The step, and the arguments of `Step.at`.
        key, index: The pass, and the index of the output.
    """

    def __init__(self, step: Step, samples: int, degrees: tuple[int, ...], key: PassKey, index: int) -> None:
        self._about = step, samples, degrees, key, index

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        step, samples, degrees, key, index = self._about
        return step.at(samples, degrees).code_of(key).outputs[index]

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, index: Any) -> Any:
        return self.specs[index]

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LateSpecs):
            return self.specs == other
        return self._about == other._about or self.specs == other.specs

    def __hash__(self) -> int:
        return hash(self.specs)

    def __repr__(self) -> str:
        return repr(self.specs)
