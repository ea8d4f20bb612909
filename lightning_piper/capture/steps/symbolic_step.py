"""Trace a step once for batches of many shapes: sizes are symbols, and each batch gives them values.

The trace is one joint graph, as `trace` makes it, whose tensors have symbolic shapes. Operations that compute
numbers from sizes are removed. If another operation reads such a number, its argument becomes a
`SymbolicSize`, an index into a list of numbers. So the graph is cut into code only once. For each batch,
Piper computes the numbers from the batch's shapes, and passes them to the code after the tensors.

During the trace, torch records each comparison of sizes as a condition. The trace serves all shapes that meet
these conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from lightning_piper.capture.cutting.graph_cut import cut
from lightning_piper.capture.joint.concrete_sizes import concretize
from lightning_piper.capture.joint.sizes import (
    Dims,
    NotSymbolic,
    Outputs,
    SizeNumbers,
    SizeSymbols,
    Specs,
    fill_sizes,
    indexed_spec,
    spec_at,
    take_numbers,
)
from lightning_piper.capture.joint.trace_text import TraceText, tensors_of, text_of
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.losses.batch_dependence import Ask
from lightning_piper.capture.losses.loss_weights import weigh
from lightning_piper.ir.metric_calls import MetricLog
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Code, Computed, Logged, Rebuild, Run, StepCode
from lightning_piper.ir.terms import Term
from lightning_piper.ir.values import Kind, TensorSpec
from lightning_piper.routing import ROUTE

MANY_TRACES = 6  # `SymbolicTraces.left` at the beginning


class SymbolicTraces:
    """The symbolic traces of one step.

    Attributes:
        steps: the traces, latest first.
        left: number of symbolic traces that may still be made. It is limited because each takes as long as
            several traces without symbols, and each new shape may need one.
        others: number of traces without symbols from which code was made.
    """

    def __init__(self) -> None:
        self.steps: list[SymbolicStep] = []
        self.left, self.others = MANY_TRACES, 0
        # dimensions, other than the samples, in which batches have differed
        self._changing: Dims = frozenset()

    def find(self, specs: Specs, size: int) -> StepCode | None:
        """Return the code for `size` samples and these specs, from the latest trace that serves such batches.
        Return None if no trace serves them.

        Args:
            specs: specs of the batch's tensors, then of the Python numbers among the inputs.
        """
        return next((code for step in self.steps if (code := step.at(specs, size)) is not None), None)

    def free(self, specs: Specs, first: Specs) -> tuple[Dims, int]:
        """Return the dimensions that become symbols, and the number of samples for the trace.

        Symbols are the first dimensions, and the dimensions in which batches have differed so far, unless
        their size is 0 or 1. The number of samples is the current batch's, or the next larger number that no
        other symbolic dimension has. Otherwise torch could take both for the same symbol.

        Args:
            specs: specs of the current batch.
            first: specs of the first traced batch, resized to the same number of samples.
        """
        dims = {(leaf, dim): size for leaf, spec in enumerate(specs) for dim, size in enumerate(spec.shape)}
        before = {(leaf, dim): size for leaf, spec in enumerate(first) for dim, size in enumerate(spec.shape)}
        self._changing |= {at for at, size in dims.items() if size != before[at]}
        # torch treats a size of 0 or 1 as a constant.
        free = frozenset(at for at, size in dims.items() if size > 1 and (at[1] == 0 or at in self._changing))
        others = {dims[at] for at in free if at[1]}
        size = next(spec.shape[0] for spec in specs if spec.shape)
        while size > 1 and size in others:
            size += 1
        return free, size

    def add(self, step: SymbolicStep | None) -> None:
        """Add a trace, and reduce `left` by 1. None stands for a trace that has failed, and reduces `left` by
        3, because further traces would probably also fail. So `left` may become negative."""
        self.left -= 1 if step is not None else 3
        if step is not None:
            self.steps.insert(0, step)


class SymbolicStep:
    """A step's code for batches of many shapes. Call `text`, then `cut` once, then `at` for each batch.

    Args:
        traced: the trace with symbols for sizes. This class changes its graph.
        symbols: the symbols of the trace.
        rebuild: builds the step's return value from its result tensors, see `StepCode.rebuild`.

    Raises:
        NotSymbolic: the step needs a trace with plain numbers, for example because it dispatches rows to
            experts.
    """

    def __init__(self, traced: TracedGraph, symbols: SizeSymbols, rebuild: Rebuild | None) -> None:
        if any(node.target is ROUTE for node in traced.graph.nodes):
            raise NotSymbolic("rows are sent, and their number is open")
        kwargs = [event.kwargs for event in traced.metrics.events if isinstance(event, MetricLog)]
        if any(isinstance(x, torch.SymInt) for found in kwargs for x in found.values()):
            raise NotSymbolic("a metric object is logged with a size")
        self._traced, self._symbols, self._rebuild = traced, symbols, rebuild
        self._numbers = SizeNumbers(symbols)
        take_numbers(traced.graph, self._numbers)
        # each log, with: name of its argument -> index of the expression of the argument's value
        self._logs = [
            (log, {k: self._numbers.of(x) for k, x in log.kwargs.items() if isinstance(x, torch.SymInt)})
            for log in traced.logs
        ]
        # name of a logged value -> how it is computed; filled by `cut`
        self._computed: dict[str, Computed | None] = {}
        # returns whether the trace is valid for values of the symbols
        self._holds = symbols.conditions()

    def text(self, specs: Specs) -> TraceText | None:
        """Return the trace as text for a batch of these specs, so that it can be compared with a trace of
        that batch. Return None if this trace does not serve the batch.

        Call it before `cut`, which changes the graph.
        """
        values = self._values(specs)
        if values is None:
            return None
        known, numbers = self._numbers.at(values)
        traced = replace(self._traced, logs=self._logs_at(known))
        return text_of(traced, partial(fill_sizes, numbers=numbers), self._specs_at(values))

    def _specs_at(self, values: Sequence[int]) -> Callable[[torch.Tensor], TensorSpec]:
        """Return a function that returns the spec of a tensor of the trace at these values of the symbols."""
        sizes = SizeNumbers(self._symbols)
        for node in self._traced.graph.nodes:
            for tensor in tensors_of(node):
                indexed_spec(sizes, TensorSpec.of(tensor))
        known = sizes.at(values)[0]
        return lambda tensor: spec_at(indexed_spec(sizes, TensorSpec.of(tensor)), known)

    def cut(
        self,
        canonical: Mapping[str, str],
        specs: Specs,
        size: int,
        beside: Ask,
        recomputed: Sequence[Recomputation],
    ) -> None:
        """Cut the trace into regions and their code. Afterwards, `at` gives the code the sizes of a batch.
        Call it once, after `text`.

        Args:
            canonical: each name of a parameter or buffer -> its canonical name.
            specs, size: the specs of the traced batch, and its number of samples.
            beside: Returns a trace at another size, to find out which numbers follow the size.
            recomputed: For some regions, the values that backward passes compute again.

        Raises:
            NotSymbolic: weights of the loss, or logged values, depend on sizes.
        """
        values = self._values(specs)
        assert values is not None
        known, numbers = self._numbers.at(values)
        traced = replace(self._traced, logs=self._logs_at(known))
        with concretize(traced.graph, numbers, self._specs_at(values)):
            weighed = weigh(traced, size, canonical, beside)
        if any(
            term.denominator is not None and ("samples" in term.label or "sizes" in term.label)
            for term in weighed.terms
        ):
            raise NotSymbolic("weights are calculated with sizes")
        terms = {out.names[0]: out.term for out in weighed.plain if out.kind == Kind.ARGUMENT}
        self.terms, self._metrics = weighed.terms, replace(traced.metrics, terms=terms)
        if any(
            said in log.computed.text
            for log in weighed.logs
            if log.computed is not None
            for said in ("samples", "sizes")
        ):
            raise NotSymbolic("logged values are calculated with sizes")
        self._computed = {log.name: log.computed for log in weighed.logs}
        self._assumed, self._unknown, self._meet, self._local = (
            weighed.assumed,
            weighed.unknown,
            weighed.meet,
            weighed.local,
        )
        self._nonlinear, self._weighs_gradients = weighed.nonlinear, weighed.weight is not None
        found = cut(weighed, canonical, recomputed=recomputed)
        self._regions, (interfaces, codes, split) = found.regions, found.extracted()
        self._passes = {key: (interfaces[key], code, self._specs(code)) for key, code in codes.items()}
        self._split = {key: (*found, self._specs(found[1])) for key, found in split.items()}
        self._holds = self._symbols.conditions()

    def at(self, specs: Specs, size: int) -> StepCode | None:
        """Return new code for a batch of these specs and `size` samples: the graphs of the trace, with the
        numbers of this batch. Return None if the trace does not serve the batch."""
        values = self._values(specs)
        if values is None:
            return None
        known, numbers = self._numbers.at(values)

        def code(symbolic: Code, outputs: Outputs) -> Code:
            def made() -> tuple[Run, torch.fx.Graph]:
                run: Callable[..., tuple[torch.Tensor, ...]] = symbolic.run
                return partial(run, sizes=numbers), symbolic.graph

            *specs, inputs = (tuple(spec_at(spec, known) for spec in bundle) for bundle in outputs)
            return Code(cache(made), tuple(specs), inputs, numbers)

        passes = {key: code(symbolic, outputs) for key, (_, symbolic, outputs) in self._passes.items()}
        split = {
            key: (interface, code(symbolic, outputs))
            for key, (interface, symbolic, outputs) in self._split.items()
        }
        interfaces = {key: interface for key, (interface, _, _) in self._passes.items()}
        return StepCode(
            size,
            self._regions,
            interfaces,
            passes,
            self._logs_at(known),
            specs,
            split,
            rebuild=self._rebuild,
            terms=tuple(_numbered_term(term, numbers) for term in self.terms),
            metrics=self._metrics,
            assumed=self._assumed,
            unknown=self._unknown,
            meet=self._meet,
            local=self._local,
            nonlinear=self._nonlinear,
            weighs_gradients=self._weighs_gradients,
        )

    def _logs_at(self, known: Sequence[Any]) -> tuple[Logged, ...]:
        """Return the logs with numbers instead of symbols in their arguments.

        Args:
            known: the value of each expression of `_numbers`.
        """
        return tuple(
            replace(
                log,
                kwargs={**log.kwargs, **{k: known[i] for k, i in sizes.items()}},
                computed=self._computed.get(log.name),
            )
            for log, sizes in self._logs
        )

    def _values(self, specs: Specs) -> tuple[int, ...] | None:
        """Return the symbols' values for a batch of these specs. Return None if the trace does not serve the
        batch."""
        values = self._symbols.values(specs)
        return values if values is not None and self._holds(*values) else None

    def _specs(self, code: Code) -> Outputs:
        """Return the symbolic specs of the code's outputs, followed by the symbolic specs of its inputs."""
        return tuple(
            tuple(indexed_spec(self._numbers, spec) for spec in specs)
            for specs in (*code.outputs, code.inputs)
        )


def _numbered_term(term: Term, numbers: Sequence[Any]) -> Term:
    """Return a term whose denominator is computed with these values of `sizes`."""
    if term.denominator is None:
        return term
    run: Callable[..., tuple[torch.Tensor, ...]] = term.denominator.run
    return replace(term, denominator=replace(term.denominator, run=partial(run, sizes=numbers)))
