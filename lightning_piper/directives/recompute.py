"""`recompute`: activation checkpointing. Backward passes recompute values that forward passes would have
saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_piper.common.limits import shown
from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, Filter, matches
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Step
from lightning_piper.ir.values import Kind
from lightning_piper.ops.host import Fetch


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Directive):
    """Save less of a forward pass than its backward pass needs, and recompute the missing values.

        F -> saved -> B      --recompute-->      F     F' -> saved -> B        (F' waits for the gradient that B waits for)

    Attributes:
        filter: Selects chunks (default: all chunks). The backward passes of their regions and slices
            recompute.
        keep: The values to save in addition to the region's inputs.
            None: no values. A second forward pass, a chunk of its own with the tag PASS=R, makes all values
            that the backward pass needs. It reads the same inputs, buffers and random numbers, and gathers
            sharded parameters itself. It runs when the gradient that the backward pass waits for has arrived,
            or where an `order` names it.
            A list of patterns of operation names, such as `["*mm", "*attention*"]`: the outputs of these
            operations, and random numbers. The backward pass itself recomputes the other values.
            A fraction between 0 and 1: the share of memory that saved values may take. With 1 the step takes
            the least time, with 0 it saves the region's inputs only. torch's min-cut partitioner chooses the
            values (its `activation_memory_budget`).

    Piper applies this directive after `place`, `split` and `shard_experts`, and before an `order` that
    names second passes. The bits do not change.

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """

    op: ClassVar[str] = "recompute"
    contract: ClassVar[Contract] = "bitwise"

    filter: Filter = dataclasses.field(default_factory=dict)
    keep: Sequence[str] | float | None = None

    def check_fields(self) -> None:
        self.check_filter("filter", self.filter)
        if self.keep is None:
            return
        advice = 'give a list of patterns of operation names, such as ["*mm"], or a fraction from 0 to 1'
        if isinstance(self.keep, int | float) and not isinstance(self.keep, bool):
            if not (math.isfinite(self.keep) and 0 <= self.keep <= 1):
                self.refuse("keep", f"{shown(self.keep)} is not usable", f"{advice} [PIPER-D003]")
        elif (
            not isinstance(self.keep, list | tuple)
            or not self.keep
            or not all(isinstance(x, str) and x for x in self.keep)
        ):
            self.refuse("keep", f"{shown(self.keep)} is not usable", f"{advice} [PIPER-D003]")

    def prepare(self, step: Step, program: Sequence[Directive]) -> Step:
        if self.keep is None:
            return step
        keep = tuple(self.keep) if isinstance(self.keep, list | tuple) else float(self.keep)  # type: ignore[arg-type]
        return step.recomputing(Recomputation(self.filter, keep))

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Do nothing, because a step without backward passes saves nothing."""

    def apply(self, dag: TrainingDAG) -> None:
        """Add second forward passes. With `keep`, only check the filter, because `prepare` has already
        changed the code of the passes. Raise an error if no backward pass of the selected regions reads saved
        values.
        """
        chosen = {(chunk.region, chunk.slice) for chunk in self.select(dag, "filter", self.filter)}
        if not chosen:
            return  # the step does not have the pass, or a smaller batch does not have the microbatch
        if self.keep is not None:
            self._check_whole(dag, chosen)
            return
        second: dict[int, Chunk] = {}  # id of a forward pass -> its second forward pass
        for chunk in [c for c in dag.of_type(Chunk) if c.kind != "F" and (c.region, c.slice) in chosen]:
            self._recompute(dag, chunk, second)
        if not second:
            self.refuse(
                "filter",
                "the selected regions save nothing for a backward pass, so there is nothing to recompute",
                f"{'remove the directive' if self.written_for is None else 'leave recompute out'} [PIPER-D013]",
            )

    def _recompute(self, dag: TrainingDAG, backward: Chunk, second: dict[int, Chunk]) -> None:
        """Make a backward pass read saved values from a second forward pass. If `second` does not have this
        pass yet, make it and add it to `second`."""
        served = [
            (ref, forward)
            for ref in dict.fromkeys(backward.inputs)
            if (forward := self._kept_by(dag, backward, ref))
        ]
        # A forward pass whose saved values have no elements is not repeated.
        keeping = {
            forward.id for ref, forward in served if any(spec.numel for spec in dag.value(ref).tensors)
        }
        for ref, forward in served:
            if forward.id not in keeping | second.keys():
                continue
            if forward.id not in second:
                again = second[forward.id] = dag.duplicate(forward)
                dag.change(again, tags={**forward.tags, "PASS": AGAIN})
                # The second forward pass waits for the other inputs of the backward pass, such as a gradient.
                for source in {other[0] for other in backward.inputs} - {forward.id}:
                    if dag.nodes[source].devices == again.devices:
                        dag.order(dag.nodes[source], again, dag.origin)
            dag.substitute(backward, ref, (second[forward.id].id, ref[1]))

    def _kept_by(self, dag: TrainingDAG, backward: Chunk, ref: Ref) -> Chunk | None:
        """Return the forward pass that saves a value for a backward pass; None if no forward pass saves the
        value. Raise an error if an earlier directive offloads or recomputes the value.
        """
        forward = dag.nodes[dag.source(ref)[0]]
        if not isinstance(forward, Chunk) or forward.kind != "F" or dag.value(ref).kind != Kind.SAVED:
            return None
        if isinstance(copy := dag.nodes[ref[0]], Fetch):
            found = f"directive {copy.origin} offloads the values that {forward.label} saves"
            self.refuse("filter", found, "move this directive before the offload [PIPER-D007]")
        if forward.tags.get("PASS") == AGAIN:
            found = (
                f"an earlier directive already recomputes the values of {backward.label} ({forward.label})"
            )
            self.refuse("filter", found, "recompute each region only once [PIPER-D013]")
        return forward

    def _check_whole(self, dag: TrainingDAG, chosen: set[Any]) -> None:
        """Raise an error if the filter selects only some microbatches of a region, or uses tags other than
        the region's annotations. All microbatches of a region run the same code.
        """
        selected = {region for region, _ in chosen}
        for chunk in dag.of_type(Chunk):
            if chunk.region in selected and (chunk.region, chunk.slice) not in chosen:
                self.refuse(
                    "filter",
                    f"{chunk.label} is not selected, but runs the same code as selected chunks of its region",
                    "with keep, select whole regions: leave PASS and the tags of microbatches out of the filter [PIPER-D013]",
                )
        for region in selected:
            if not matches(self.filter, dag.regions[region].tags):
                found = (
                    f"the filter selects chunks of region {dag.regions[region].label} by PASS, or by a tag of "
                    "microbatches"
                )
                self.refuse(
                    "filter",
                    found,
                    "with keep, select whole regions: leave PASS and the tags of microbatches out of the filter [PIPER-D013]",
                )
