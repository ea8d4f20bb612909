"""Bugs of expert parallelism: in the rewrite, in the plans, and where tokens travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_piper.capture.cutting import extraction
from lightning_piper.directives import shard_experts
from lightning_piper.directives.rewrites import sharded_parameters
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind
from lightning_piper.ops.communication import all_to_all
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.communication.reduce import AllReduce, ReduceScatter
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.instructions import Instruction
from lightning_piper.runtime import step_outputs
from property_tests.mutations.plans import _drop, _plan_bug
from property_tests.mutations.table import Function, Seeded, Wrap, mutation
from property_tests.mutations.zero import _bypass

SCENARIO, TWICE, EVEN = "experts", "experts twice", "places"
TRAVEL = all_to_all.Travel

# The rewrite


def _applied(change: Callable[[TrainingDAG], Iterable[object]]) -> Wrap:
    """The DAG after a shard, changed."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def apply(self: Any, dag: TrainingDAG) -> None:
            original(self, dag)
            seeded.hits += len(list(change(dag)))

        return apply

    return wrap


def _rewrite_bug(
    name: str, what: str, change: Callable[[TrainingDAG], Iterable[object]], scenario: str = SCENARIO
) -> None:
    mutation(name, what, "rewrite", (shard_experts.ShardExperts, "apply"), scenario=scenario)(
        _applied(change)
    )


def _moves(dag: TrainingDAG, direction: str) -> list[AllToAll]:
    return [node for node in dag.of_type(AllToAll) if node.direction == direction]


def _with_counts_of(dag: TrainingDAG, other: Callable[[AllToAll, AllToAll], bool]) -> Iterable[object]:
    """Let rows travel by the counts of another exchange."""
    for node in [n for n in dag.of_type(AllToAll) if len(n.inputs) == 3]:
        for counts in _moves(dag, "counts"):
            if (counts.id, 0) != node.inputs[2] and other(node, counts):
                dag.rewire(node, inputs=(node.inputs[0], counts.inputs[0], (counts.id, 0)))
                yield node
                break


def _other_order(dag: TrainingDAG) -> Iterable[object]:
    """Sent by one group, back in the order of another."""
    for node in _moves(dag, "combine"):
        dag.change(node, mesh=dataclasses.replace(node.mesh, group_ranks=node.mesh.group_ranks[::-1]))
        yield node


def _retyped(dag: TrainingDAG) -> Iterable[object]:
    """A value at its experts is passed off as one at its source."""
    for node in _moves(dag, "dispatch"):
        dag.change(node, outputs=(dataclasses.replace(node.outputs[0], others=()),))
        yield node


def _owned_twice(dag: TrainingDAG) -> Iterable[object]:
    for region, mesh in dag.meshes.items():
        lines = mesh.lines(mesh.axes[-1])
        dag.meshes[region] = dataclasses.replace(mesh, group_ranks=lines[0] * len(lines))
        yield region


def _sum_bypassed(dag: TrainingDAG) -> Iterable[object]:
    return _bypass(dag, [n for n in dag.of_type(ReduceScatter) if n.outputs[0].others])


def _router_bypassed(dag: TrainingDAG) -> Iterable[object]:
    return _bypass(
        dag,
        [
            node
            for node in dag.of_type(AllReduce)
            if any(name.endswith("router.weight") for name in node.outputs[0].names)
        ],
    )


def _first_term_twice(dag: TrainingDAG) -> Iterable[object]:
    for total in dag.of_type(Accumulate):
        if total.outputs[0].others and len(total.inputs) > 1:
            dag.rewire(total, inputs=(total.inputs[0], *total.inputs[:-1]))
            yield total


def _last_term_lost(dag: TrainingDAG) -> Iterable[object]:
    for total in dag.of_type(Accumulate):
        if total.outputs[0].others and len(total.inputs) > 1:
            dag.rewire(total, inputs=total.inputs[:-1])
            yield total


def _update_lost(dag: TrainingDAG) -> Iterable[object]:
    updates = [node for node in dag.of_type(Update) if dag.value(node.inputs[0]).others]
    dag.remove(updates)
    return updates


def _whole_copies(dag: TrainingDAG) -> Iterable[object]:
    """Experts are read from the device's own copy of all of them."""
    for chunk in dag.of_type(Chunk):
        if chunk.region in dag.meshes and any(chunk.params):
            dag.rewire(chunk, params=())
            yield chunk


def _said_to_be_summed(dag: TrainingDAG) -> Iterable[object]:
    for node in dag.of_type(Pack):
        if node.outputs[0].others:
            dag.change(
                node,
                outputs=(
                    dataclasses.replace(node.outputs[0], placement=dag.value(node.inputs[0]).placement),
                ),
            )
            yield node


def _stays(direction: str) -> Callable[[TrainingDAG], Iterable[object]]:
    return lambda dag: _bypass(dag, _moves(dag, direction))


_rewrite_bug(
    "rows stay at their source", "experts get the rows of their own device alone", _stays("dispatch")
)
_rewrite_bug("rows stay at their experts", "what experts made is not brought back", _stays("combine"))
_rewrite_bug(
    "gradients stay at their experts",
    "what experts made of gradients is not brought back",
    lambda dag: _bypass(dag, [x for x in _moves(dag, "combine") if x.outputs[0].kind == Kind.COTANGENT]),
)
_rewrite_bug("places stay at their experts", "full boxes are not brought back", _stays("combine"), EVEN)
_rewrite_bug(
    "counts stay at their source", "experts are told the counts of their own device", _stays("counts")
)
_rewrite_bug("counts of another layer", "rows travel by the counts of another region",
             lambda dag: _with_counts_of(dag, lambda node, counts: counts.region != node.region))  # fmt: skip
_rewrite_bug("counts of another microbatch", "rows travel by the counts of other samples",
             lambda dag: _with_counts_of(dag, lambda node, counts: counts.region == node.region))  # fmt: skip
_rewrite_bug("back in another order", "rows come back as if other devices owned the experts", _other_order)
_rewrite_bug(
    "rows at experts called rows of the source",
    "dispatched rows are passed off as those of the device",
    _retyped,
)
_rewrite_bug(
    "experts owned twice", "two groups are the same, and some devices own nothing", _owned_twice, TWICE
)
_rewrite_bug("experts not summed", "who own the same experts keep their own sums", _sum_bypassed, TWICE)
_rewrite_bug(
    "router not summed", "each replica keeps its own gradient of the router", _router_bypassed, TWICE
)
_rewrite_bug(
    "experts of a microbatch twice", "a microbatch counts twice in the experts' gradient", _first_term_twice
)
_rewrite_bug(
    "experts of a microbatch lost", "a microbatch does not count in the experts' gradient", _last_term_lost
)
_rewrite_bug("experts not updated", "no optimizer gets the experts' gradient", _update_lost)
_rewrite_bug("experts from the whole copy", "a device reads all experts where it owns some", _whole_copies)
_rewrite_bug("experts' sums unfinished", "an owner's sum is passed off as a part of one", _said_to_be_summed)


@mutation(
    "experts summed over all",
    "gradients of different experts are added up",
    "rewrite",
    (sharded_parameters, "buckets_of"),
    scenario=TWICE,
)
def _experts_summed_over_all(original: Function, seeded: Seeded) -> Function:
    def buckets_of(params: Any, size: int, mesh: Mesh, **about: Any) -> Any:
        seeded.hit()
        return original(params, size, Mesh.flat(len(mesh.group_ranks)), **about)

    return buckets_of


@mutation("parts of one device", "a captured region of experts counts the rows of one device only", "rewrite",
          (extraction, "_arrived"), scenario=SCENARIO, recapture=True)  # fmt: skip
def _parts_of_one_device(original: Function, seeded: Seeded) -> Function:
    def arrived(graph: Any, env: Any, node: Any) -> Any:
        made = original(graph, env, node)
        if made.target is torch.ops.aten.sum.dim_IntList:
            seeded.hit()
            made.target, made.args, made.kwargs = torch.ops.aten.select.int, (made.args[0], 0, 0), {}
        return made

    return arrived


# Parts of parameters


@mutation(
    "parts exchanged",
    "an owner has the experts of another one",
    "executor",
    (Bucket, "part_of"),
    scenario=SCENARIO,
)
def _parts_exchanged(original: Function, seeded: Seeded) -> Function:
    def part_of(self: Bucket, replica: int) -> int:
        part = int(original(self, replica))
        seeded.hits += self.degree > 1
        return self.degree - 1 - part

    return part_of


@mutation("summed with another's experts", "an owner sums with those who own other "
                                           "experts", "executor", (Bucket, "shard_group"),
          scenario=TWICE)  # fmt: skip
def _summed_with_others(original: Function, seeded: Seeded) -> Function:
    def shard_group(self: Bucket, replica: int) -> tuple[int, ...]:
        right = tuple(original(self, replica))
        if self.degree == 1:
            return right
        seeded.hit()
        return self.mesh.line(self.mesh.axes[-1], replica)

    return shard_group


@mutation("mean over owners", "experts' gradients are divided by the number of devices", "executor",
          (step_outputs.StepOutputs, "_deliver_flat"), scenario=SCENARIO)  # fmt: skip
def _mean_over_owners(original: Function, seeded: Seeded) -> Function:
    def deliver_flat(self: Any, instruction: ins.Deliver, bucket: Bucket, taken: Function, copy: bool) -> Any:
        def less() -> Any:
            seeded.hits += bucket.degree > 1
            return tuple(x / bucket.degree for x in taken())

        return original(self, instruction, bucket, less, copy)

    return deliver_flat


# On their way

_CUT, _JOIN = (TRAVEL, "parts"), (TRAVEL, "_joined")


def _on_the_way(
    target: tuple[Any, str], name: str, what: str, change: Callable[..., Any], scenario: str = SCENARIO
) -> None:
    """`change(exchange, what it made, its argument)` gives what is made instead."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def wrong(self: Any, *args: Any) -> Any:
            right = original(self, *args)
            found = change(self, right, *args)
            seeded.hits += found is not right
            return right if found is None else found

        return wrong

    mutation(name, what, "executor", target, scenario=scenario)(wrap)


def _last_row(self: Any, parts: list[torch.Tensor], x: torch.Tensor) -> Any:
    full = [i for i, part in enumerate(parts) if part.shape[0]]
    if self._direction == "counts" or self._even or not full:
        return parts
    found = [part.clone() for part in parts]
    found[full[-1]][-1] = 0
    return found


def _by_arrival(self: Any, joined: torch.Tensor, parts: Any, x: torch.Tensor) -> Any:
    return torch.cat(list(parts)) if self._direction == "dispatch" and not self._even else joined


def _boxes_in_reverse(self: Any, joined: torch.Tensor, parts: Any, x: torch.Tensor) -> Any:
    return torch.cat(list(parts)[::-1]) if self._direction == "combine" and self._even else joined


_on_the_way(_CUT, "a token lost", "the last row on its way arrives as zeros", _last_row)
_on_the_way(
    _JOIN, "rows in order of arrival", "an owner's rows are sorted by device, not by expert", _by_arrival
)
_on_the_way(
    _JOIN,
    "boxes back in reverse",
    "the owners' boxes are joined from the last to the first",
    _boxes_in_reverse,
    EVEN,
)


@mutation("counts of the other device", "the counts of each device are taken for the "
                                        "other's", "executor", _JOIN,
          scenario=SCENARIO)  # fmt: skip
def _counts_of_the_other(original: Function, seeded: Seeded) -> Function:
    def join(self: Any, parts: Any, x: torch.Tensor) -> Any:
        turned = self._direction == "counts" and not torch.equal(parts[0], parts[-1])
        seeded.hits += turned
        return original(self, list(parts)[::-1] if turned else parts, x)

    return join


@mutation("splits exchanged", "rows are cut by what arrives, and received by what "
                              "leaves", "executor", (all_to_all, "Sizes"),
          scenario=SCENARIO)  # fmt: skip
def _splits_exchanged(original: Function, seeded: Seeded) -> Function:
    def sizes(source: Any, arrived: Any) -> Any:
        seeded.hits += source != arrived
        return original(arrived, source)

    return sizes


@mutation("back without the order of dispatch", "rows come back by device, as they lie at their "
                                                "experts", "executor", _CUT,
          scenario=SCENARIO)  # fmt: skip
def _back_without_order(original: Function, seeded: Seeded) -> Function:
    def cut(self: Any, x: torch.Tensor) -> Any:
        if self._direction != "combine" or self._even:
            return original(self, x)
        seeded.hit()
        return list(x.split([sum(run) for run in self._sizes[self._counts].arrived]))

    return cut


# Plans


def _other_way(device: int, instructions: list[Instruction]) -> list[Instruction]:
    directions = {"dispatch": "combine", "combine": "dispatch"}
    return [
        dataclasses.replace(x, direction=directions.get(x.direction, x.direction))
        if isinstance(x, ins.AllToAllInstruction)
        else x
        for x in instructions
    ]


def _other_members(device: int, instructions: list[Instruction]) -> list[Instruction]:
    return [
        dataclasses.replace(x, members=x.members[::-1]) if isinstance(x, ins.AllToAllInstruction) else x
        for x in instructions
    ]


_plan_bug(
    "all_to_all dropped",
    "the plan lacks its last exchange of tokens",
    _drop(ins.AllToAllInstruction),
    scenario=SCENARIO,
)
_plan_bug(
    "other way",
    "rows are sent back where they should be sent out, and the reverse",
    _other_way,
    scenario=SCENARIO,
)
_plan_bug("owners in reverse", "the experts are taken to be owned by the devices in the opposite "
                               "order", _other_members,
          scenario=SCENARIO)  # fmt: skip
