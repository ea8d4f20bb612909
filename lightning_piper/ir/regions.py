"""What a capture hands to the rest of the system: regions, the interface of their passes, and callable code.

A *region* is a maximal run of work with the same tags, in trace order. Each region has a forward pass `F` and, where
gradients flow through it, a backward pass `B`, which can be split in two: `BI` makes the gradients of inputs, for which
other regions wait, and `BW` the gradients of weights, for which only the optimizer waits. The interface of a pass does not
depend on the batch size; its code does, because a captured graph has fixed shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch

from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Change, Division
from lightning_piper.ir.metric_calls import MetricCalls
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.terms import Term
from lightning_piper.ir.values import Kind, Placement, Shard, Slice, TensorSpec, view_as

# The name of the loss that the step returns, among the metrics; users may well log something called "loss" themselves.
LOSS = "returned loss"

SPLIT_BACKWARD = ("BI", "BW")  # the two passes of a split B: input-gradient pass, weight-gradient pass

PassKey = tuple[int, str]  # (region index, "F", "B" or one of SPLIT_BACKWARD)


@dataclass(frozen=True)
class Region:
    """A run of operations of the step with the same annotations.

    Attributes:
        index: position in trace order.
        tags: the annotations that were open, e.g. `{"PP": 1}`; empty outside of any annotation.
        source: the user's source line at which the region starts, for messages.
        joined: it is computed from gathered samples, and works on the whole batch, on each replica.
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
    """One output of a pass: a bundle of tensors that travels together.

    Attributes:
        kind: what it is.
        names: what the bundle holds: parameter or buffer names, the log key, or the graph's name of the value. For `saved`,
            whose content is a private matter of the region, the passes of its backward that read it.
        term: of a loss or a logged value, its place in `StepCode.terms`.
        partial: it is a term of a sum over the whole batch, and whoever reads it gets the sum.
        exchange: `gather`: its readers work on the whole batch, and get the rows of all parts of it; `scatter`: they work on a
            part, and get their rows of the gradients that the whole batch gives; or nothing, "".
        held: of a step that is divided along axes (`Step.divisions`), what their members hold of it: by axis, of those along which
            they do not all have it.
        changes: what becomes of that on the way to whoever reads it, one after another.
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
    """How one pass of a region meets the rest of the step, the same for every batch size.

    Attributes:
        inputs: (region, pass, output index) of each incoming bundle.
        outputs: the outgoing bundles.
        params: parameters read, by canonical name.
        buffers: buffers read that no pass changes.
        state: buffers read that this region's forward changes; their current value comes from the previous forward.
        batch: indices of the batch leaves read.
        seeds: of the loss's terms whose gradients the pass takes as its last arguments, the places in `StepCode.terms`.
        random: the pass draws random numbers and runs under a seed of its own.
        arrives, leaves: of a region to which rows are sent, what each input and output is to that exchange: `counts`, `dispatch`
            (rows that arrived), `combine` (rows on their way back), or nothing, "". Empty where there are none.

    The code's arguments are, in this order: all tensors of all inputs, params, buffers, state, batch, gradients of the loss.
    """

    inputs: tuple[tuple[int, str, int], ...]
    outputs: tuple[Output, ...]
    params: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    state: tuple[str, ...] = ()
    batch: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    random: bool = False
    arrives: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()

    @property
    def seeds_gradient(self) -> bool:
        """The backward pass of the step begins here, or at one of the places where it does."""
        return bool(self.seeds)


@dataclass(frozen=True)
class Routed:
    """A region between `dispatch` and `combine`: each row goes to one of E parts of its parameters.

    Attributes:
        sites: the calls of `dispatch`, by their numbers in the step.
        count: E.
        params: the region's parameters whose first dimension is E.
        even: to each of the E go equally many rows (its capacity); else counts say how many.
    """

    sites: tuple[int, ...]
    count: int
    params: tuple[str, ...]
    even: bool


@dataclass(frozen=True)
class Code:
    """One pass at one batch size.

    Attributes:
        run: takes a list of tensors, empties it, returns the flat tuple of outputs; frees what it no longer needs on the way.
        outputs: specs of the tensors of each output bundle, in the order of `Interface.outputs`.
        graph: the functional graph; where it serves many shapes, sizes that differ are places: `sizes[3]`.
        inputs: specs of its arguments.
        sizes: what is at these places.
    """

    run: Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
    outputs: tuple[tuple[TensorSpec, ...], ...]
    graph: torch.fx.Graph
    inputs: tuple[TensorSpec, ...] = ()
    sizes: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Computed:
    """What a logged value is computed from, on the whole batch.

    Attributes:
        names: of the outputs of kind `log` that it is computed from.
        of: computes it from their values on the whole batch.
        text: what it computes.
    """

    names: tuple[str, ...]
    of: Callable[[Sequence[torch.Tensor]], torch.Tensor]
    text: str


@dataclass(frozen=True)
class Logged:
    """One `self.log` call of the step.

    Attributes:
        name: the metric's key.
        reduce: how the values of an epoch's batches become one: `mean`, `sum`, `max` or `min`. Also those of microbatches, where
            the step does not show how the value of the whole batch comes from them (`Output.term`).
        kwargs: the other arguments of the call, replayed as they were.
        constant: the value, when it was a Python number and not a tensor; a function of nothing, when it changes from step to step.
        computed: set where it is no output, but is computed from several.
        where: the user's line.
    """

    name: str
    reduce: str
    kwargs: Mapping[str, object]
    constant: float | Callable[[], float] | None = None
    computed: Computed | None = None
    where: str = field(default="", compare=False)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that it takes."""
        if self.computed is not None:
            return self.computed.names
        return (self.name,) if self.constant is None else ()


class Rebuild(Protocol):
    """See `StepCode.rebuild`."""

    def __call__(self, *given: Any) -> Any: ...

    def and_keep(self, *given: Any) -> Any:
        """The same; what the step's Python code keeps is put where it keeps it."""
        ...


@dataclass(frozen=True)
class Undivided:
    """Batches that nothing may cut by samples, for their tensors do not share a first dimension.

    Attributes:
        batches: how many such batches the step gets at once: one of each replica.
        found: the tensors with their shapes, for messages.
    """

    batches: int
    found: str


@dataclass(frozen=True)
class StepCode:
    """All passes of the step at one batch size.

    Attributes:
        size: number of samples.
        regions: in trace order.
        interfaces, code: of the passes F and B.
        logs: the `self.log` calls.
        batch_specs: specs of the leaves of the batch.
        split_passes: of the passes BI and BW. A region without weights to train has only BI, one that hands on no gradient only BW;
            this one is then all of B. What comes from other regions enters by the first of them.
        routed: the regions to which rows are sent.
        terms: how the terms of the loss and logged values are weighed.
        rebuild: of a forward-only step: puts what it returns together from its tensors, the outputs of kind `result` named "0",
            "1", ..., and for what it returns of the batch that has no tensors from what a function says; None for a training step.
        metrics: what it does with metric objects.
        undivided: set where nothing may cut the batch.
        assumed: the loss is weighed as a mean for want of another way: it is no sum of means, sums and ratios.
        unknown: names of logged values other than the loss that are weighed so.
        meet: the operation, on the way to the loss or to a gradient, in which samples are taken by their place, or a row is made of
            several; None if none is known.
        nonlinear: what in the backward pass is not linear in the gradient of the loss, with the user's line; None if it is linear.
        weighs_gradients: the loss of each part of the batch has a gradient of 1, and the gradients that are made of it are weighed.
            Otherwise the loss's gradient is weighed, which is the same where the backward pass is linear.
        local: the buffers to which the step gives values that follow from the samples it gets, from their number, or from random
            numbers; all others that it changes have the same values whatever part of the batch it gets.
        divided: parameters of which members of an axis have parts -> the axis, and which ones.
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
    divided: Mapping[str, tuple[str, Shard]] = field(default_factory=dict)

    def samples(self, leaf: int, part: Slice) -> Slice | None:
        """Which samples of a tensor of the batch the chunks of `part` get; None where they get it whole."""
        return part if self.batch_specs[leaf].shape and self.undivided is None else None

    @property
    def forward_only(self) -> bool:
        return self.rebuild is not None

    @cached_property
    def sums_over_batch(self) -> bool:
        """Is something in it summed over the whole batch, on the way?"""
        return any(output.partial for interface in self.interfaces.values() for output in interface.outputs)

    @cached_property
    def gathers_samples(self) -> bool:
        """Is something in it computed from the samples of the whole batch, gathered on the way?"""
        return any(region.joined for region in self.regions)

    @cached_property
    def makes_loss(self) -> bool:
        """Not a step without a backward pass, and not one whose loss is its own affair."""
        return any(output.kind == Kind.LOSS for interface in self.interfaces.values() for output in interface.outputs)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of the loss, as the step computes it; float64 where there is none."""
        for key, interface in self.interfaces.items():
            for output, specs in zip(interface.outputs, self.code[key].outputs, strict=True):
                if output.kind == Kind.LOSS:
                    return specs[0].dtype
        return torch.float64

    def goes_on(self, buffer: str) -> bool:
        """Of a buffer that the step changes: does each microbatch begin with what the one before left? Not if its new value is the
        same whatever part of the batch it is made of (a counter, a spectral norm, statistics of the whole batch): it moves once a
        step, as on one device. Nor if the value is made of gathered samples, once, when all microbatches have read the one before
        the step."""
        return buffer in self.local and buffer not in self._joined_buffers

    @cached_property
    def _joined_buffers(self) -> frozenset[str]:
        made = [(self.regions[region], out) for (region, _), each in self.interfaces.items() for out in each.outputs]
        return frozenset(name for region, out in made if region.joined and out.kind == Kind.BUFFER for name in out.names)

    def backward_passes_of(self, region: int) -> tuple[str, ...]:
        """What the backward pass of a region consists of: `BI`, `BW` or both; nothing where it has none."""
        backward = self.interfaces.get((region, "B"))
        made = {out.kind for out in backward.outputs} if backward else set()
        return tuple(part for part, kind in zip(SPLIT_BACKWARD, ("cotangent", "grad"), strict=True) if kind in made)

    def interface_of(self, key: PassKey) -> Interface:
        """The interface of any pass, also of a split backward."""
        return self._split_pass(key)[0] if key[1] in SPLIT_BACKWARD else self.interfaces[key]

    def code_of(self, key: PassKey) -> Code:
        """The code of any pass, also of a split backward."""
        return self._split_pass(key)[1] if key[1] in SPLIT_BACKWARD else self.code[key]

    def _split_pass(self, key: PassKey) -> tuple[Interface, Code]:
        if key not in self.split_passes:
            raise CaptureError(
                f"{key[1]} of region {self.regions[key[0]].label} has another structure for {self.size} samples than for the size "
                "captured first; name its B in orders, or choose microbatches of one size"
            )
        return self.split_passes[key]

    def whole(self, region: int, kind: str, index: int) -> tuple[int, str, int]:
        """The output of B that an output of BI or BW is. All others are themselves."""
        if kind in SPLIT_BACKWARD:
            out = self.interface_of((region, kind)).outputs[index]
            if out.kind != Kind.SAVED:
                return (region, "B", self.interfaces[region, "B"].outputs.index(out))
        return (region, kind, index)


@dataclass(frozen=True)
class ParamInfo:
    """One parameter.

    Attributes:
        name: its canonical name.
        spec: of the whole of it. Its elements are counted in the order of this spec's memory, in which parts are runs.
        aliases: further names of the same tensor (tied parameters).
        strides: in the module, where they are others than the spec's.
    """

    name: str
    spec: TensorSpec
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    strides: tuple[int, ...] | None = None

    def whole(self, flat: torch.Tensor) -> torch.Tensor:
        """All elements, in one dimension -> the tensor as the module has it."""
        found = view_as(flat, self.spec)
        if self.strides is None:
            return found
        return flat.new_empty_strided(self.spec.shape, self.strides).copy_(found)


class Step(Protocol):
    """A captured step: what the rest of the system needs to know of the user's module."""

    @property
    def size(self) -> int:
        """Samples in the batch it was captured with."""
        ...

    @property
    def params(self) -> Mapping[str, ParamInfo]: ...

    @property
    def buffers(self) -> Mapping[str, TensorSpec]: ...

    @property
    def divisions(self) -> tuple[Division, ...]:
        """What members of axes have parts of, axis by axis; nothing is divided without any."""
        ...

    @property
    def member(self) -> Step:
        """The same step as one member of these axes runs it."""
        ...

    def divided(self, divisions: Sequence[Division]) -> Step:
        """The same step, cut where members of axes change what they hold of a value."""
        ...

    def recomputing(self, recomputation: Recomputation) -> Step:
        """The same step, whose backward passes compute some of what they need again."""
        ...

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """The step's code for a batch of `size` samples; traced at the first call, then cached.

        Args:
            size: samples.
            degrees: for each call of `dispatch`, the number of parts into which the parameters of its region are divided; the
                code of the region then takes one part of them, and any number of rows. Empty: none is divided.
        """
        ...
