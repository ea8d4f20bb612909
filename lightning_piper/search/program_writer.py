"""Write the program of a candidate: the annotations and the directives that a user would write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_piper.annotate import annotate_modules
from lightning_piper.directives import Directive, Offload, Order, Place, Recompute, Replicate, ShardWeights
from lightning_piper.directives.program import to_json
from lightning_piper.schedules.searched_schedules import SEARCHED
from lightning_piper.search.space import Candidate

# In written programs: the tag of stages, the dimension of microbatches, and the tensor axis.
TAG, MICROBATCH, TENSOR = "PP", "MB", "tp"
# For each ZeRO level, the arguments of `Replicate`.
LEVELS: tuple[Mapping[str, Any], ...] = (
    {},
    {"shard_optimizer": True},
    {"shard_grads": True},
    {"shard_params": True},
)
Params = Mapping[
    str, int | Sequence[int]
]  # parameter -> dimension, or (dimension, runs), as in `ShardWeights`


@dataclass(frozen=True)
class Written:
    """A program, with the annotations that it needs.

    Attributes:
        stages: Names of the modules of each stage, as groups of `annotate_modules`. Empty if there is one
            stage.
        directives: The directives of the program.
        replicas: Number of replicas among which the program divides the batch.
    """

    stages: tuple[tuple[str, ...], ...]
    directives: tuple[Directive, ...]
    replicas: int

    def annotate(self, module: nn.Module) -> list[RemovableHandle]:
        """Tag the modules of the stages. Return the handles of `annotate_modules`, or an empty list if there
        is one stage."""
        return annotate_modules(module, TAG, self.stages) if self.stages else []

    def to_json(self) -> dict[str, Any]:
        """Return the program as JSON data with the keys "version", "annotate" and "directives"."""
        return {
            "version": 1,
            "annotate": {TAG: [list(stage) for stage in self.stages]},
            "directives": to_json(self.directives),
        }

    def __str__(self) -> str:
        """Return the program as Python code."""
        lines = (
            [f"piper.annotate_modules(module, {TAG!r}, {[list(stage) for stage in self.stages]!r})"]
            if self.stages
            else []
        )
        return "\n".join(
            [*lines, "directives = [", *(f"    {shown(directive)}," for directive in self.directives), "]"]
        )


def shown(directive: Directive) -> str:
    """Return a directive as Python code: its class, and the fields that differ from their defaults. Example:
    `piper.Place(filter={'PP': 0}, devices=[0])`."""
    given = directive.to_json()
    del given["op"]
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"piper.{type(directive).__name__}({fields})"


def write(
    candidate: Candidate,
    stages: Sequence[Sequence[str]],
    params: Params | None = None,
    unnamed: int | None = None,
) -> Written:
    """Return the program of a candidate.

    Args:
        candidate: The candidate that a search has chosen.
        stages: Names of the modules of each stage.
        params: Parameters that are sharded along the tensor axis, as in `ShardWeights` (default: none).
        unnamed: The stage of the work outside of all modules in `stages`; None if all work is in them.
    """
    layout = candidate.layout
    groups = [_devices(candidate, rank) for rank in range(layout.ranks)]
    schedule = SEARCHED[layout.schedule]
    each = {} if schedule.argument is None else {schedule.argument: layout.per_rank}
    built = schedule.builder(
        layout.stages, layout.microbatches, devices=groups, tag=TAG, dim_name=MICROBATCH, **each
    )
    if layout.stages == 1:
        built = _untagged(built) if layout.microbatches > 1 else [Place(filter={}, devices=groups[0])]
    orders = [directive for directive in built if isinstance(directive, Order)]
    placed = [directive for directive in built if not isinstance(directive, Order)]
    if unnamed is not None and layout.stages > 1:
        where = next(p for p in placed if isinstance(p, Place) and p.filter == {TAG: unnamed})
        placed.insert(0, Place(filter={TAG: "-"}, devices=where.devices))
    more: list[Directive] = []
    if layout.tensor > 1 and params is not None:
        lines = [
            group[i : i + layout.tensor] for group in groups for i in range(0, len(group), layout.tensor)
        ]
        more.append(ShardWeights(filter={}, devices=lines, axis=TENSOR, stream=TENSOR, params=params))
    if layout.replicas > 1:
        everywhere = groups if len(groups) > 1 else groups[0]
        for level in sorted(set(candidate.levels)):
            size = layout.shard_size if level and layout.groups > 1 else None
            more += [
                Replicate(filter=f, devices=everywhere, shard_size=size, **LEVELS[level])
                for f in _at(candidate, level, unnamed)
            ]
    again, away = candidate.recomputed, candidate.offloaded
    if again:
        more.append(Recompute(filter=_of_stages(candidate, 0, again)))
    if away:
        more.append(Offload(filter=_of_stages(candidate, again, again + away)))
    named = tuple(map(tuple, stages)) if layout.stages > 1 else ()
    return Written(named, (*placed, *more, *orders), layout.replicas)


def _untagged(built: Sequence[Directive]) -> list[Directive]:
    """Return the directives of a schedule of one stage without the tag of stages, which one stage does not
    need."""

    def plain(condition: Any) -> dict[str, Any]:
        return {name: value for name, value in condition.items() if name != TAG}

    found: list[Directive] = []
    for directive in built:
        if isinstance(directive, Place):
            directive = replace(directive, filter={})
        elif isinstance(directive, Order):
            directive = replace(directive, filters=[plain(each) for each in directive.filters])
        found.append(directive)
    return found


def _of_stages(candidate: Candidate, start: int, stop: int) -> dict[str, Any]:
    return {} if candidate.layout.stages == 1 else {TAG: list(range(start, stop))}


def _at(candidate: Candidate, level: int, unnamed: int | None) -> list[dict[str, Any]]:
    """Return filters that together select the stages at this ZeRO level, and untagged work if it belongs to
    one of them. If all stages have this level, return one filter that selects everything."""
    if len(set(candidate.levels)) == 1:
        return [{}]
    stages = [stage for stage, own in enumerate(candidate.levels) if own == level]
    return [{TAG: stages}, *([{TAG: "-"}] if unnamed in stages else [])]


def _devices(candidate: Candidate, rank: int) -> list[int]:
    """Return the devices of one rank of all pipelines. Replicas follow each other, and the devices of one
    replica are in the order of the tensor axis."""
    layout = candidate.layout
    firsts = [layout.device(replica, rank) for replica in range(layout.replicas)]
    return [first + member for first in firsts for member in range(layout.tensor)]
