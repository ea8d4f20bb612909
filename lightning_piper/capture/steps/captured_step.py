"""A captured training step, with its code for each batch size."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from lightning_piper.annotate import repeated_blocks
from lightning_piper.capture.cutting.graph_cut import GraphCut, cut
from lightning_piper.capture.joint.region_passes import PlaceholderNames
from lightning_piper.capture.joint.sizes import SizeSymbols, Specs
from lightning_piper.capture.joint.trace_text import TraceText, difference, text_of
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.losses.batch_dependence import copy_graph
from lightning_piper.capture.losses.loss_chunks import chunk_losses
from lightning_piper.capture.losses.loss_weights import WeightedStep, weigh
from lightning_piper.capture.metrics.sample_independence import sample_independent_arguments
from lightning_piper.capture.proxies.batch import BatchSpec
from lightning_piper.capture.python_state.state_reads import History, StateReads
from lightning_piper.capture.steps.aliases import refuse_sharing
from lightning_piper.capture.steps.code_structure import (
    Calls,
    calls_of,
    choices,
    public,
    same_calls,
    same_structure,
)
from lightning_piper.capture.steps.named_tensors import (
    has_sample_lists,
    laid_out,
    named_tensors,
    resized,
    sized,
)
from lightning_piper.capture.steps.settled_trace import TraceArguments, settled_trace
from lightning_piper.capture.steps.symbolic_step import SymbolicStep, SymbolicTraces
from lightning_piper.capture.tensor_sharding.placement_changes import return_copies
from lightning_piper.capture.tensor_sharding.propagation import Propagation, propagate_placements
from lightning_piper.capture.tracing.step_trace import TracedStep, trace
from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.errors import CaptureError
from lightning_piper.ir.division import Division
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import StepCode
from lightning_piper.ir.values import Kind, Sharded
from lightning_piper.placements.local_graph import localize

# If the step has code for this many numbers of samples, Piper tries a trace with symbols for the next number.
MANY_SIZES = 8
# A step keeps copies for at most this many sets of shapes. A further set replaces the oldest one. The number
# of samples is not a part of such a set.
MANY_SHAPES = 64
LATEST = 2  # the number of traces that a step keeps


class CapturedStep:
    """A captured training step that makes its code for each batch size; see `ir.regions.Step`. The arguments
    of the constructor are explained at `capture`.

    Attributes:
        name: Name of the captured method.
        module, context: The captured module, and the context that is entered around the step.
        batch_spec: Spec of the batch that the step was captured with.
        size: Number of samples in that batch.
        params, buffers: Specs by canonical name, the first name under which the module lists the tensor.
        canonical: Each name of a parameter or buffer -> its canonical name.
        reads: Everything that the step has read in Python. The capture is valid while `reads.hold()`.
        executed: Describes the part of the step that runs uncaptured; empty if the whole step is captured.
        divisions: For each axis of tensor-parallel ranks, the tensors that they shard. The step is cut at
            each change of placement. Empty if no tensors are sharded.
        recomputed: For some regions, the values that backward passes compute again instead of reading saved
            values.
        chunk: Rows whose scores exist at once in a cross entropy of a linear layer; 0: see
            `placements.chunked_scores`. None: such losses compute all scores at once.
    """

    name = TracedStep.name
    executed = ""
    divisions: tuple[Division, ...] = ()
    recomputed: tuple[Recomputation, ...] = ()
    chunk: int | None = None
    _whole: CapturedStep | None = None  # the step on whole tensors, if this is a `member`; otherwise None

    def __init__(
        self,
        module: nn.Module,
        batch_spec: BatchSpec,
        device: torch.device,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        history: History | None = None,
        whole_norms: bool = False,
    ) -> None:
        self._whole_norms = whole_norms
        self.batch_spec, self.size = batch_spec, batch_spec.size
        self.reads = StateReads(history)
        if self.reads.history.batch is None:
            self.reads.history.batch = batch_spec
        self.module, self.context, self._device = module, context, device
        self.params, self.buffers, self.canonical, self._sharing = named_tensors(module)
        # (number of samples, degrees) -> code
        self._codes: dict[tuple[int, tuple[int, ...]], StepCode] = {}
        # Number of samples -> passes on whole tensors of a step with `divisions`, and the placements of their values,
        # until the `member` has made its code from them.
        self._cuts: dict[int, tuple[GraphCut, list[Propagation]]] = {}
        self._calls: dict[int, Calls] = {}  # number of samples -> the calls of the traced graph
        # Number of samples -> the traced graph, and the specs of the Python numbers among its inputs.
        self._graphs: dict[int, tuple[torch.fx.Graph, Specs]] = {}
        # (number of samples, specs of Python numbers) -> the latest traces of the whole step. Its copies with
        # other divisions, recomputations or chunks share them.
        self._latest: dict[tuple[int, Specs], tuple[TracedGraph, Specs, TracedStep]] = {}
        # If True, no trace at another number of samples is possible: the batch has a list with one entry for
        # each sample, or such a trace has failed.
        self._sample_lists = has_sample_lists(batch_spec)
        self._blocks = repeated_blocks(module)
        # The copies that `resized` and `shaped` make share these attributes.
        # `_first`: one entry after the first trace: the copy that was traced, its number of samples, and the
        # trace's text and digest (`TracedStep.digest`).
        # `_shaped`: specs of the batch's tensors with one sample (`sized`) -> the copy for these shapes.
        # `_symbolic`: traces that serve many shapes.
        self._first: list[tuple[CapturedStep, int, TraceText, str | None]] = []
        self._shaped: dict[Specs, CapturedStep] = {}
        self._symbolic = SymbolicTraces()

    def resized(self, size: int) -> CapturedStep:
        """Return a copy of the step with another `size`: the number of samples in the batch of all replicas.
        Both steps share their traces and code."""
        other = copy.copy(self)
        other.size = size
        return other

    def shaped(self, batch_spec: BatchSpec) -> CapturedStep:
        """Return the step for batches with the shapes of `batch_spec`.

        This is `self` if only the number of samples differs. In a batch that cannot be cut, no tensor's shape
        may differ. Otherwise it is a copy with its own code, which
        later calls return again (see `MANY_SHAPES`). If the step's Python code allows it, one trace serves
        all shapes.

        Args:
            batch_spec: has the same structure as the spec of the step.
        """
        shapes = sized(batch_spec, 1)
        if shapes == self._specs(1):
            return self
        if shapes not in self._shaped:
            if len(self._shaped) == MANY_SHAPES:
                del self._shaped[next(iter(self._shaped))]
            other = self._shaped[shapes] = copy.copy(self)
            other.batch_spec, other._sample_lists = batch_spec, has_sample_lists(batch_spec)
            other._codes, other._cuts, other._calls, other._graphs, other._latest = {}, {}, {}, {}, {}
            vars(other).pop("member", None)  # the cached `member` has the shapes of `self`
        return self._shaped[shapes]

    def divided(self, divisions: Sequence[Division]) -> CapturedStep:
        """Return a copy of the step that is cut where the ranks of an axis change the placement of a value. If
        the step already has these divisions, return `self`.

        The code of the result works on whole tensors. Its `member` has the code of one rank with its shards.

        Raises:
            CaptureError: see `at`. The method makes the code for `size` samples.
        """
        if tuple(divisions) == self.divisions:
            return self
        other = copy.copy(self)
        other.divisions, other._codes, other._cuts, other._shaped = tuple(divisions), {}, {}, {}
        degrees = {each.axis: each.degree for each in divisions}
        # The code also divides biases, whose shards follow from their weights.
        parts = {name: (part, degrees[axis]) for name, (axis, part) in other.at(other.size).divided.items()}
        other.params = {
            name: laid_out(info, *parts[name]) if name in parts else info
            for name, info in self.params.items()
        }
        return other

    def recomputing(self, recomputation: Recomputation) -> CapturedStep:
        """Return a copy of the step whose backward passes also compute the values of `recomputation` again. If
        the step already has this recomputation, return `self`."""
        if recomputation in self.recomputed:
            return self
        other = copy.copy(self)
        other.recomputed = (*self.recomputed, recomputation)
        other._codes, other._cuts, other._shaped = {}, {}, {}
        other._symbolic = SymbolicTraces()
        return other

    def chunking_losses(self, chunk: int) -> CapturedStep:
        """Return a copy of the step that computes the scores of each cross entropy of a linear layer for `chunk`
        rows at a time (0: see `placements.chunked_scores`)."""
        other = copy.copy(self)
        other.chunk, other._codes, other._cuts, other._shaped = chunk, {}, {}, {}
        return other

    @cached_property
    def member(self) -> CapturedStep:
        """A copy of the step with the code of one rank, which works on shards of parameters and values along
        the axes of `divisions`."""
        other = copy.copy(self)
        other._whole, other._codes, other._shaped = self, {}, {}
        return other

    @property
    def traces(self) -> int:
        """The number of traces, at all sizes and shapes, from which Piper has made code of the step."""
        return self._symbolic.others + len(self._symbolic.steps)

    def holds(self) -> bool:
        """Return whether the step's Python state and the specs of the module's tensors have not changed since the capture."""
        tensors = self.params, self.buffers, self.canonical, self._sharing
        return self.reads.hold() and named_tensors(self.module) == tensors

    def _step(self, degrees: tuple[int, ...]) -> TracedStep:
        """Return a new module for one trace of the step. Subclasses return other kinds of steps."""
        return TracedStep(
            self.module, self.batch_spec, self.context, degrees, self.reads, self._blocks, self._whole_norms
        )

    def uncaptured(self) -> TracedStep:
        """Return a new module that runs the user's step uncaptured, with real values, on one device."""
        return TracedStep(self.module, self.batch_spec, self.context)

    @property
    def draws(self) -> bool:
        """Whether the captured code draws random numbers, such as dropout masks."""
        return any(interface.random for interface in self.at(self.size).interfaces.values())

    def inputs(self, leaves: Sequence[torch.Tensor], code: StepCode | None = None) -> list[torch.Tensor]:
        """Return the arguments of the code for a batch of these tensors: the tensors, followed by the current
        values of the Python numbers that were inputs of the trace, as tensors. If there is no code yet, all known
        numbers follow.

        Args:
            code: The code (default: the first one, whose numbers the code of every size reads).
        """
        code = code or next(iter(self._codes.values()), None)
        known = None if code is None else len(code.batch_specs) - len(leaves)
        return [*leaves, *self.reads.inputs.values(self._device)[:known]]

    def batch_specs_at(self, size: int) -> Specs:
        """Return the specs of `inputs` for `size` samples. There must be code for some number of samples."""
        first = next(iter(self._codes.values())).batch_specs
        return self._specs(size) + first[len(self.batch_spec.specs) :]

    def _trace(self, arguments: TraceArguments) -> tuple[TracedGraph, Specs, TracedStep]:
        """Trace the step; see `settled_trace`."""
        return settled_trace(self._step, self.reads, self._specs(arguments.size), self._device, arguments)

    def _trace_whole(self, size: int) -> tuple[TracedGraph, Specs, TracedStep]:
        """Return what `_trace` returns for whole parameters. The caller may change the graph: it is a copy of a
        trace that the step keeps for the next call."""
        found = self._latest.get((size, self.reads.inputs.specs()))
        if found is None:
            found = self._trace(TraceArguments(size))
            while len(self._latest) >= LATEST:
                del self._latest[next(iter(self._latest))]
            self._latest[size, self.reads.inputs.specs()] = found
        traced, specs, step = found
        return dataclasses.replace(traced, graph=copy_graph(traced.graph)), specs, step

    def _specs(self, size: int) -> Specs:
        return sized(self.batch_spec, size)

    @property
    def said(self) -> TraceText:
        """The first trace as text, operation by operation. It exists after the first call of `at`."""
        return self._first[0][2]

    @property
    def text(self) -> str:
        """The first trace as text without device indices, so that processes that run the same step have equal
        texts."""
        kind = self._device.type
        return re.sub(rf"{kind}:\d+", kind, "\n".join(self.said.lines))

    def retrace(self) -> None:
        """Trace the step once more and compare it with the first trace, because the guards may have missed
        something that the step reads.

        Raises:
            CaptureError: the step has changed; the message names the first operation that differs.
        """
        step, size, before, digest = self._first[0]
        with uncollected():
            traced, _, again = step._trace(TraceArguments(size, known=digest))
        is_same, now = digest is not None and again.digest == digest, text_of(traced)
        found = difference(before, before.with_logs_of(now) if is_same else now)
        if found is not None:
            raise CaptureError(
                f"{self.name} now differs from the captured step: {found}. It depends on something that "
                "changes between steps and that Piper cannot observe (a clock, a file, an iterator, a "
                "cache), so steps since the last comparison may have used an old value. Keep that value in an "
                "attribute of the module, a buffer or the batch. If all devices are replicas, "
                "PiperStrategy(capture='never') runs the step unchanged [PIPER-C004]"
            )

    def at(self, size: int, degrees: tuple[int, ...] = ()) -> StepCode:
        """Return the code for `size` samples: the code of an earlier call, or new code from a trace. See
        `ir.regions.Step` for `degrees`.

        If the batch must not be cut, there is only the code of the captured batch, whatever the `size`.

        Raises:
            CaptureError: the step cannot be captured, it changes memory that two tensors share, or the structure
                of the code differs from the first size.
            Exception: an error of the step itself.
        """
        if self.batch_spec.undivided is not None and size != self.batch_spec.size:
            return dataclasses.replace(self.at(self.batch_spec.size, degrees), size=size)
        if (size, degrees) not in self._codes:
            with uncollected():
                self._codes[size, degrees] = self._new_code(size, degrees)
        return self._codes[size, degrees]

    def _new_code(self, size: int, degrees: tuple[int, ...]) -> StepCode:
        """Return new code for `size` samples; see `at`."""
        known = None if degrees else self._by_substitution(size) or self._of_member(size)
        found = known or self._traced(size, degrees)
        refuse_sharing(self._sharing, found, self.params)
        if not self._codes and self._whole is None:
            return found
        first = next(iter(self._codes.values())) if self._whole is None else self._whole.at(size, degrees)
        try:
            same_structure(first, found)
        except CaptureError:
            # If the step has changed since the capture, even at the first size, this error is more precise.
            self.retrace()
            raise
        # Drop split passes that differ from those at the first size, for example because they read other
        # parameters. If a program asks for a dropped pass, `StepCode.code_of` raises an error.
        split = first.split_passes
        alike = {
            key: p
            for key, p in found.split_passes.items()
            if key in split and public(p[0]) == public(split[key][0])
        }
        return dataclasses.replace(found, split_passes=alike)

    def depends_on_size(self, size: int) -> bool:
        """Return whether the step's Python code computes another function for `size` samples than for the
        whole batch. Examples are `if len(x) > 100` and `h * math.log(len(x))`.

        The method makes the code for both sizes, and compares their traces. Return False if both sizes are
        equal, or if one of them has no trace of its own because a trace with symbols serves it or the batch
        must not be cut.
        """
        self.at(self.size), self.at(size)
        calls = {each: found for each in (size, self.size) if (found := self._calls.get(each)) is not None}
        # Two sizes do not show whether a number follows the size: 1.0 and 2.0 may be the number of samples
        # over a constant, or a choice of the code. A third size decides.
        if len(calls) == 2 and choices(calls) and (third := self._at_another_size(self.size, excluded=size)):
            calls[third[1]] = calls_of(third[0])
        return len(calls) > 1 and not same_calls(calls)

    def _at_another_size(
        self, size: int, known: bool = False, excluded: int = 0
    ) -> tuple[torch.fx.Graph, int] | None:
        """Return (graph of the step at another number of samples, that number). The graph may be of the
        forward pass only, and the caller must not change it.

        Return None if the step cannot be traced at another size, or if `known` is true and no such trace
        exists. The trace must have read the same Python numbers as the latest trace.

        Args:
            size: a size that the trace must not have.
            known: if True, do not make a new trace.
            excluded: another size that the trace must not have.
        """
        if self._sample_lists:
            return None
        numbers = self.reads.inputs.specs()
        self._graphs = {other: found for other, found in self._graphs.items() if found[1] == numbers}
        for other, (graph, _) in self._graphs.items():
            if other not in (size, excluded):
                return graph, other
        if known:
            return None
        # Code that uses half of the samples, or pairs of samples, also works at twice the size.
        other = 2 * size
        step, batch = self._step(()), tuple(resized(spec, other) for spec in self.batch_spec.specs) + numbers
        step.gradients = torch.no_grad  # the forward pass is enough
        forget = self.reads.inputs.remember()
        try:
            self._graphs[other] = trace(step, batch, self._device, {}).graph, numbers
            return self._graphs[other][0], other
        except Exception:  # the user's code does not work at another size
            self._sample_lists = True
            return None
        finally:
            forget()

    def _by_substitution(self, size: int) -> StepCode | None:
        """Return the code from a trace that has symbols for sizes. Return None if no such trace serves this
        size, if the batch must not be cut, if tensors are sharded (`divisions`), or if losses are computed in
        chunks.

        A new symbolic trace is made if dimensions other than the number of samples differ from the first
        trace, or if code exists for `MANY_SIZES` numbers of samples. The number of such traces is limited.
        """
        if self.batch_spec.undivided is not None or self.divisions or self.chunk is not None:
            return None
        numbers = self.reads.inputs.specs()
        found = self._symbolic.find(self._specs(size) + numbers, size)
        wanted = self._first and (
            self._first[0][0]._specs(1) != self._specs(1) or len(self._codes) >= MANY_SIZES
        )
        if found is None and wanted and self._symbolic.left > 0:
            self._symbolic.add(self._trace_symbolic(size))
            found = self._symbolic.find(self._specs(size) + numbers, size)
        return found

    def _of_member(self, size: int) -> StepCode | None:
        """Return the code of a `member` from the passes of the whole step. Return None if it needs a trace."""
        if self._whole is None:
            return None
        whole, found = self._whole.at(size), self._cuts.pop(size, None)
        if found is None:
            return None
        interfaces, code, split = found[0].of_member(found[1]).extracted()
        return dataclasses.replace(whole, interfaces=interfaces, code=code, split_passes=split)

    def _trace_symbolic(self, size: int) -> SymbolicStep | None:
        """Trace the step with symbols, and compare the trace with a trace with plain numbers: the first trace,
        or a new trace of the current shapes.

        Return the trace, already cut into code. Return None if the step cannot be traced with symbols, if the
        two traces differ, or if weights of the loss or arguments of metric objects depend on sizes. Also
        return None if the step itself raises an error.
        """
        first, samples, said, _ = self._first[0]
        free, hint = self._symbolic.free(self._specs(size), first._specs(size))
        symbols, forget = SizeSymbols(free), self.reads.inputs.remember()
        try:
            traced, specs, step = self._trace(TraceArguments(hint, fakes=symbols.fakes))
            made = SymbolicStep(traced, symbols, step.rebuild)
            text = made.text(first._specs(samples) + specs[len(self.batch_spec.specs) :])
            if text is None:  # the trace does not serve the first batch: compare with a new trace
                text, said = made.text(specs), text_of(self._trace(TraceArguments(hint))[0])
            if text is not None and (text.lines, text.specs) == (said.lines, said.specs):
                made.cut(self.canonical, specs, hint, partial(self._at_another_size, hint), self.recomputed)
                alike = first._codes[samples, ()]
                same = [(x.weighing, x.label) for x in made.terms] == [
                    (x.weighing, x.label) for x in alike.terms
                ]
                if same and not alike.metrics.whole:  # counted arguments of metric objects depend on sizes
                    return made
        except Exception:  # if the step itself is wrong, the trace with plain numbers raises the error
            pass
        forget()
        return None

    def _traced(self, size: int, degrees: tuple[int, ...]) -> StepCode:
        """Return the code from a new trace for this size. See `ir.regions.Step` for `degrees`.

        Raises:
            CaptureError: the step cannot be captured.
        """
        whole = self.at(size) if degrees else None
        parts = {} if whole is None else self._parts(whole, degrees)
        try:
            arguments = TraceArguments(size, parts, degrees)
            traced, specs, step = self._trace(arguments) if degrees else self._trace_whole(size)
        except CaptureError as error:
            if whole is None:
                raise
            raise CaptureError(
                f"{error}\nThis happens only with sharded experts. Between dispatch and combine, this code "
                "gets the experts of one device, and any number of rows: take the number of experts from sizes.shape[0]. "
                "Do not compute with the shape of a parameter. Elsewhere, take the number from your configuration "
                "[PIPER-C015]"
            ) from error
        self._symbolic.others += 1
        self._calls[size] = calls_of(traced.graph)
        if not self._first:
            self._first.append((self, size, text_of(traced), step.digest))
        counted = sample_independent_arguments(traced)  # must come before `weigh`, which changes the graph
        other_size = None if self.batch_spec.undivided is not None else partial(self._at_another_size, size)
        if len(self._graphs) < 2:  # another graph, because `weigh` changes `traced`
            numbers = specs[len(self.batch_spec.specs) :]
            graph = copy_graph(traced.graph) if degrees else self._latest[size, numbers][0].graph
            self._graphs[size] = graph, numbers
        weighed = weigh(traced, size, self.canonical, other_size)
        if self.chunk is not None and not chunk_losses(weighed.graph, self.chunk) and weighed.tangents:
            raise CaptureError(
                f"chunk_loss: {self.name} has no loss that the directive can compute in chunks. It replaces "
                "cross_entropy(scores, y) if one nn.Linear makes the scores, without an adapter such as LoRA. Slices, "
                "views, transposes and casts may follow the nn.Linear, and nothing else may read the scores. The "
                "loss must not have class weights or label smoothing. Write the loss in this form. Or remove "
                "chunk_loss: piper.linear_cross_entropy does not need it [PIPER-D026]"
            )
        divided, propagations = self._divide(weighed)
        found = cut(weighed, self.canonical, None if whole is None else whole.routed, self.recomputed)
        if propagations and self._whole is None and not found.routed:
            self._cuts[size] = found, propagations
        interfaces, code, split_passes = found.extracted()
        terms = {out.names[0]: out.term for out in weighed.plain if out.kind == Kind.ARGUMENT}
        return StepCode(
            size,
            found.regions,
            interfaces,
            code,
            weighed.logs,
            specs,
            split_passes,
            found.routed,
            step.rebuild,
            weighed.terms,
            dataclasses.replace(traced.metrics, terms=terms, whole=counted),
            self.batch_spec.undivided,
            weighed.assumed,
            weighed.unknown,
            weighed.meet,
            weighed.nonlinear,
            weighed.weight is not None,
            weighed.local,
            divided,
        )

    def joint_graph(self) -> tuple[torch.fx.Graph, PlaceholderNames]:
        """Return a new graph of the step at its `size`, and the meaning of its placeholders."""
        graph = self._trace_whole(self.size)[0].graph
        return graph, PlaceholderNames.of(graph, self.canonical)

    def _divide(self, weighed: WeightedStep) -> tuple[dict[str, tuple[str, Sharded]], list[Propagation]]:
        """Choose the placement of each value of the graph along the axes of `divisions`, and add changes of
        placement to the graph. In a `member`, also reduce the graph to one rank's shards.

        Returns:
            Canonical name of a sharded parameter -> (axis, shard), and the propagation along each axis. Both are
            empty without `divisions`.
        """
        names = PlaceholderNames.of(weighed.graph, self.canonical, weighed.tangents)
        propagations = propagate_placements(weighed.graph, self.divisions, names) if self.divisions else []
        for propagation in propagations if self._whole is not None else ():
            localize(weighed.graph, propagation.held, propagation.degree)
        return_copies(weighed.graph)
        shards = {n: (each.division.axis, part) for each in propagations for n, part in each.params.items()}
        return shards, propagations

    def _parts(self, code: StepCode, degrees: tuple[int, ...]) -> dict[str, int]:
        """Return name -> number of parts, for each parameter of experts that these degrees divide into more
        than one part. Each name of a tied parameter has an entry."""
        found: dict[str, int] = {}
        for routed in code.routed.values():
            degree = max(degrees[site] for site in routed.sites)
            if degree > 1:
                found |= dict.fromkeys(routed.params, degree)
        return {name: found[main] for name, main in self.canonical.items() if main in found}
