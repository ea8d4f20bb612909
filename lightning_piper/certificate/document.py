"""`certificate_of`: the certificate of a compiled program, as a JSON object.

Its `program` is the step on one device. Its `types` are the types of values, which instructions name by index. Its
`devices` have the rank of each device, and the device's instructions in order, each with a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_piper.certificate.claims import Claims, merged
from lightning_piper.certificate.program import (
    bucket_of,
    code_key,
    code_name,
    codes_of,
    mesh_of,
    placement_text,
    program_of,
    text_of,
)
from lightning_piper.certificate.schedule import IssueTime, moments
from lightning_piper.directives.base import Directive
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.redistribute import Redistribute
from lightning_piper.ops.communication.total import OverBatch
from lightning_piper.plan.instructions import Add, Instruction, Run, WaitSend
from lightning_piper.plan.plan import Plan

FORMAT = "lightning-piper certificate 1"
# Fields of instructions that no rule needs.
_UNUSED = {"label", "origin", "placed_by", "key", "samples", "degrees", "member", "whole", "source"}


def certificate_of(
    dag: TrainingDAG, plans: Mapping[int, Plan], directives: Sequence[Directive]
) -> dict[str, Any]:
    """Return the certificate of a finished DAG and the plans of all its devices.

    Args:
        dag: The finished DAG, which the static check has accepted.
        plans: The plans of all devices.
        directives: The program.

    Raises:
        VerificationError: The plans wait for each other.
    """
    document = _Document(dag, plans)
    devices = document.devices()
    return {
        "format": FORMAT,
        "directives": [directive.to_json() for directive in directives],
        "program": program_of(dag),
        "mesh": mesh_of(dag.mesh),
        "member_axes": list(dag.member_axes),
        "experts": {
            str(region): {"mesh": mesh_of(mesh), "axes": list(dag.routed_axes(mesh))}
            for region, mesh in dag.meshes.items()
        },
        "divided": {
            name: {
                "axes": list(axes),
                "mesh": mesh_of(dag.mesh_of(name)),
                "tensor": str(dag.spec_of(name)),
                "held": placement_text(dag.code.divided[name][1]) if name in dag.code.divided else "S(0)",
            }
            for name, axes in dag.divided.items()
        },
        "buckets": [bucket_of(bucket) for bucket in document.buckets],
        "codes": codes_of(dag),
        "types": [json.loads(text) for text in document.types],
        "devices": devices,
    }


class _Document:
    """The part of a certificate that is made instruction by instruction.

    Attributes:
        buckets: Bucket -> its index.
        types: Type as JSON -> its index.
    """

    def __init__(self, dag: TrainingDAG, plans: Mapping[int, Plan]) -> None:
        self._dag, self._plans = dag, plans
        self.buckets: dict[Bucket, int] = {}
        self.types: dict[str, int] = {}
        for node in dag.nodes.values():
            for value in node.outputs:
                if value.bucket is not None:
                    self.buckets.setdefault(value.bucket, len(self.buckets))
        self._claims = Claims(dag, self.buckets)
        self._known: dict[tuple[int, int, int], int] = {}  # node, output, rank -> type

    def devices(self) -> dict[str, Any]:
        times = moments(self._plans)
        return {
            str(device): {
                "rank": plan.group_rank,
                "replica": plan.replica,
                "channels": [list(channel) for channel in plan.channels],
                "instructions": self._instructions(plan, times[device]),
            }
            for device, plan in self._plans.items()
        }

    def _instructions(self, plan: Plan, times: Sequence[IssueTime]) -> list[dict[str, Any]]:
        held: dict[int, int] = {}  # slot -> type of its content
        found = []
        for instruction, moment in zip(plan.instructions, times, strict=True):
            made = self._made(plan, instruction, held)
            held |= {
                slot: each
                for slot, each in zip(instruction.writes, made, strict=True)
                if slot is not None and each is not None
            }
            found.append(
                self._fields(instruction)
                | {"time": moment.time}
                | ({} if moment.number is None else {"number": moment.number})
                | {"makes": made}
            )
        return found

    def _made(self, plan: Plan, instruction: Instruction, held: Mapping[int, int]) -> list[int | None]:
        """Return the type of each slot that an instruction writes; None for a slot that is not read later."""
        if isinstance(instruction, Add):
            return [self._sum(instruction, held)]
        return [
            None if slot is None else self._type(instruction.node, i, plan.group_rank)
            for i, slot in enumerate(instruction.writes)
            if not isinstance(instruction, WaitSend)
        ]

    def _type(self, node: int, output: int, rank: int) -> int:
        key = (node, output, rank)
        if key not in self._known:
            self._known[key] = self._index(self._claims.type_of((node, output), rank))
        return self._known[key]

    def _sum(self, instruction: Add, held: Mapping[int, int]) -> int:
        """Return the type of a running sum after one of its steps."""
        slots = [read.slot for read in instruction.reads]
        if instruction.in_place:
            slots = [*(slot for slot in instruction.writes if slot is not None), *slots]
        terms = [json.loads(list(self.types)[held[slot]]) for slot in slots]
        made = dict(terms[0])
        if instruction.bucket is not None:
            bucket = instruction.bucket
            names = [name for name, i in zip(bucket.names, instruction.take, strict=True) if i is not None]
            made |= {"names": names, "bucket": self.buckets[bucket], "tensors": [str(bucket.whole)]}
            made |= {"held": {axis: "S(0)" for axis in bucket.along}}
            if bucket.degree > 1 and bucket.terms == 1:  # the only shard is the whole bucket
                made |= {"shard": [0, 1]}
        made["shares"] = merged([share for term in terms for share in term["shares"]])
        return self._index(made)

    def _index(self, made: Mapping[str, Any]) -> int:
        return self.types.setdefault(json.dumps(made, sort_keys=True), len(self.types))

    def _fields(self, instruction: Instruction) -> dict[str, Any]:
        """Return an instruction's fields as JSON."""
        found: dict[str, Any] = {"op": instruction.op}
        for field in dataclasses.fields(instruction):
            value = getattr(instruction, field.name)
            if field.name == "reads":
                found["reads"] = [[read.slot, read.last] for read in value]
            elif isinstance(value, Bucket):
                found[field.name] = self.buckets[value]
            elif isinstance(value, Replicated | Sharded | Partial):
                found[field.name] = placement_text(value)
            elif field.name not in _UNUSED:
                found[field.name] = text_of(value)
        node = self._dag.nodes[instruction.node]
        if isinstance(instruction, Run) and isinstance(node, Chunk):
            found["pass"] = f"{instruction.key[0]}.{instruction.key[1]}"
            found["code"] = code_name(code_key(self._dag, node))
        if isinstance(node, AllToAll):
            found["region"] = node.region
        if isinstance(node, OverBatch | Redistribute | AllToAll):
            found["axis"] = node.axis
        return found
