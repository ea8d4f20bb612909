"""`recompute`: backward passes make again what forward passes would have kept for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from lightning_piper.directives.base import Contract, Directive, register
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import AGAIN, Filter, matches
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.recomputation import Recomputation
from lightning_piper.ir.regions import Step
from lightning_piper.ir.values import Kind
from lightning_piper.limits import shown
from lightning_piper.ops.host import Fetch


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Recompute(Directive):
    """Keep less of a forward pass than its backward pass needs, and compute the rest again.

        F -> saved -> B      --recompute-->      F     F' -> saved -> B        (F' waits for the gradient that B waits for)

    Attributes:
        filter: selects chunks (default: everything); the backward passes of their regions and slices are served.
        keep: None: nothing but what the region reads. A second forward pass makes the rest, a chunk of its own with the tag PASS=R:
            it reads the same inputs, buffers and random numbers, gathers sharded parameters for itself, and runs when the
            gradient is there that the backward pass waits for; or where an `order` names it.
            Patterns of names of operations (`["*mm", "*attention*"]`): what they make is kept, and the backward pass itself
            computes the rest again. Random numbers are kept.
            A fraction between 0 and 1: of the memory that kept values may take; 1 is what takes the least time, 0 the region's
            inputs alone, and torch's min-cut partitioner chooses (what it calls `activation_memory_budget`).

    It comes behind `place`, `split` and `shard`, and before the `order` that names second passes. The bits do not change.
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
        advice = "give patterns of names of operations, or a fraction between 0 and 1"
        if isinstance(self.keep, int | float) and not isinstance(self.keep, bool):
            if not (math.isfinite(self.keep) and 0 <= self.keep <= 1):
                self.refuse("keep", shown(self.keep), advice)
        elif not isinstance(self.keep, list | tuple) or not self.keep or not all(isinstance(x, str) and x for x in self.keep):
            self.refuse("keep", shown(self.keep), advice + "; leave it out to keep nothing but what a region reads")

    def prepare(self, step: Step, program: Sequence[Directive]) -> Step:
        if self.keep is None:
            return step
        keep = tuple(self.keep) if isinstance(self.keep, list | tuple) else float(self.keep)  # type: ignore[arg-type]
        return step.recomputing(Recomputation(self.filter, keep))

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> None:
        """Nothing: without backward passes, nothing is kept."""

    def apply(self, dag: TrainingDAG) -> None:
        chosen = {(chunk.region, chunk.slice) for chunk in self.select(dag, "filter", self.filter)}
        if self.keep is not None:
            self._check_whole(dag, chosen)
            return
        second: dict[int, Chunk] = {}  # of each forward
        for chunk in [c for c in dag.of_type(Chunk) if c.kind != "F" and (c.region, c.slice) in chosen]:
            self._recompute(dag, chunk, second)
        if not second:
            self.refuse("filter", "no backward pass of what it selects reads anything that is kept", "select a region that trains")

    def _recompute(self, dag: TrainingDAG, backward: Chunk, second: dict[int, Chunk]) -> None:
        served = [(ref, forward) for ref in dict.fromkeys(backward.inputs) if (forward := self._kept_by(dag, backward, ref))]
        keeping = {forward.id for ref, forward in served if any(spec.numel for spec in dag.value(ref).tensors)}
        for ref, forward in served:
            if forward.id not in keeping | second.keys():
                continue
            if forward.id not in second:
                again = second[forward.id] = dag.duplicate(forward)
                dag.change(again, tags={**forward.tags, "PASS": AGAIN})
                for source in {other[0] for other in backward.inputs} - {forward.id}:
                    if dag.nodes[source].devices == again.devices:
                        dag.order(dag.nodes[source], again, dag.origin)
            dag.substitute(backward, ref, (second[forward.id].id, ref[1]))

    def _kept_by(self, dag: TrainingDAG, backward: Chunk, ref: Ref) -> Chunk | None:
        """The forward pass that keeps a value for a backward pass."""
        forward = dag.nodes[dag.source(ref)[0]]
        if not isinstance(forward, Chunk) or forward.kind != "F" or dag.value(ref).kind != Kind.SAVED:
            return None
        if isinstance(copy := dag.nodes[ref[0]], Fetch):
            found = f"what {forward.label} keeps is offloaded by directive {copy.origin}"
            self.refuse("filter", found, "recompute before the offload")
        if forward.tags.get("PASS") == AGAIN:
            self.refuse("filter", f"{backward.label} is served by {forward.label} already", "recompute each region once")
        return forward

    def _check_whole(self, dag: TrainingDAG, chosen: set[Any]) -> None:
        """All microbatches run one code."""
        selected = {region for region, _ in chosen}
        for chunk in dag.of_type(Chunk):
            if chunk.region in selected and (chunk.region, chunk.slice) not in chosen:
                self.refuse(
                    "filter", f"{chunk.label} runs the same code as others of its region, and is not selected",
                    "with keep, name whole regions, without MB and the like",
                )  # fmt: skip
        for region in selected:
            if not matches(self.filter, dag.regions[region].tags):
                found = f"region {dag.regions[region].label} is selected by tags that it does not have itself"
                self.refuse("filter", found, "with keep, name whole regions by their own tags, without PASS and MB")
