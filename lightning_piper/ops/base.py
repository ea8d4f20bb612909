"""`Operation`: everything that Piper uses of one kind of node, and the registry of all operations::

    function               what it gives                                      who calls it
    static rule            what a node may read, and what it outputs          verify.static_check
    reference semantics    what a node makes, in plain tensor arithmetic      verify.interpreter
    lowering               the instructions of a node on one device           plan.lowering
    binding                the function that runs an instruction              runtime.executor

The static rule and the reference semantics share no code, because each checks the other. All four are
functions in a file of `lightning_piper.ops`, or in a file of another package that registers its operation.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.common.user_lines import defined_at
from lightning_piper.errors import ExecutionError, PiperError, VerificationError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import Channel, Collective, Instruction, Read
from lightning_piper.ops.reference import Bundle as Held
from lightning_piper.ops.reference import Reference

ENTRY_POINTS = "lightning_piper.operations"

Bundle = tuple[torch.Tensor, ...]
# bundles by slot number; an empty slot is None, and a pending slot belongs to the transport
Slots = list[Any]
Bound = Callable[[], object]  # runs an instruction, with everything that it needs


class Exchange(ABC):
    """A member's side of a collective, which sends a part to each member and joins the received parts.

    One object serves one instruction in every step. Data of the current step goes from method to method as
    `state`.

    Attributes:
        kind: The operation of torch.distributed that does the same, which a transport may use instead of
            sending parts. `all_reduce`: The state is the list of tensors, and their sums are the value.
            `reduce_scatter`: The state begins with the flat tensor, and the parts are its equal chunks.
            `all_gather`: The receive buffers are equal parts of one flat tensor, in order. `all_to_all`: No
            further condition. None: Members send their parts to each other.
    """

    kind: str | None = None

    @abstractmethod
    def bring(self) -> Any:
        """Return the state, from the inputs in their slots. Empty each slot at its last read."""

    @abstractmethod
    def parts(self, state: Any) -> Sequence[Any]:
        """Return one part for each member, in the order of the members."""

    def room(self, state: Any, parts: Sequence[Any]) -> list[torch.Tensor]:
        """Return the buffers that receive the members' parts, one for each member.

        The transport copies the device's own part to its buffer, unless the part already is the buffer.
        """
        return [torch.empty_like(part) for part in parts]

    @abstractmethod
    def join(self, state: Any, received: Sequence[Any]) -> Bundle:
        """Return the value, made from the parts of all members.

        A received tensor may be the sender's tensor and not a copy. Do not change it.
        """


def parts_of(exchange: Exchange, state: Any, members: int) -> Sequence[Any]:
    """Return `Exchange.parts`, after a check that there is one part for each member.

    Raises:
        ExecutionError: The exchange did not give one part for each member.
    """
    parts = exchange.parts(state)
    found = len(parts) if hasattr(parts, "__len__") else None
    if found != members:
        kind = f"{type(exchange).__module__}.{type(exchange).__qualname__}"
        returned = f"{shown(parts)}, which is not a list" if found is None else counted(found, "part")
        raise ExecutionError(
            f"parts() of {kind} returns {returned}, for {counted(members, 'member')}. Return a list with one part for "
            f"each member, in their order{defined_at(exchange.parts)} [PIPER-D019]"
        )
    return parts


class Endpoint(Protocol):
    """A device's side of a transport for one plan.

    The methods whose argument is an instruction return the function that runs the instruction, or None if
    there is nothing to do.
    """

    hands_over: bool  # a received tensor may be the sender's tensor and not a copy

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """Return a flat tensor for a bucket's gradients, with zeros in the gaps. Its memory may be memory
        that other processes read, so that a send needs no copy."""
        ...

    def send(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def wait_send(self, instruction: Any) -> Bound | None: ...

    def irecv(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def collective(self, instruction: Collective, exchange: Exchange, slots: Slots) -> Bound | None: ...

    def wait(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def reset(self) -> None:
        """Clear the state that a failed step left."""
        ...


class Planning(Protocol):
    """A device's plan during its construction.

    Attributes:
        dag: The finished DAG.
        device: The device that the plan is for.
        group_rank: The position of the device in its groups. It selects the device's shards and communication
            partners.
        replica: The replica that the device belongs to, which selects its local batch.
        shards: Each bucket of parameters with a shard on the device -> whether the device keeps the whole
            bucket's memory.
    """

    dag: TrainingDAG
    device: int
    group_rank: int
    replica: int
    shards: dict[Bucket, bool]

    def has(self, ref: Ref) -> bool:
        """Return whether the device makes the value."""
        ...

    def is_read(self, ref: Ref) -> bool:
        """Return whether a node on the device reads the value."""
        ...

    def read(self, ref: Ref, reader: Node) -> Read:
        """Return the read of a value by `reader`, with the slot that holds the value.

        At the first read on the device, emit the instructions that bring the value into the slot. Raise an
        error if the device does not have the value.
        """
        ...

    def new_slot(self, ref: Ref | None, source: str, stream: str) -> int:
        """Return a new slot for a value that this device makes. `Deliver` explains `source`."""
        ...

    def bind(self, ref: Ref, slot: int) -> None:
        """Bind a value to the slot that holds it."""
        ...

    def source(self, slot: int) -> str:
        """Return the source of a slot's content; see `Deliver`."""
        ...

    def emit(self, instruction: Instruction) -> None: ...

    def start(
        self,
        node: Node,
        kind: type[Collective],
        reads: tuple[Read, ...],
        stream: str | None = None,
        **fields: Any,
    ) -> None:
        """Start a collective. A reader of the collective's value waits for the value.

        Args:
            stream: The logical stream that issues the collective (default: the node's). The collective begins
                after the earlier work of this stream, and uses memory of this stream.
        """
        ...

    def stream_of(self, slot: int) -> str:
        """Return the stream that makes the content of a slot."""
        ...

    def wait_for_earlier(self, node: Node) -> None:
        """Note that the sum of `node` is in flight. If too many sums are in flight, wait for the earliest,
        because each of them holds a whole bucket."""
        ...

    def add_up(self, node: Node) -> int:
        """Emit what is missing of the sum of a node's inputs, and return the slot of the sum.

        The plan adds the inputs from the first to the last.
        """
        ...

    def offer_chunk_outputs(self) -> None:
        """Offer the values from the last call of `chunk_made` to the sums that add them."""
        ...

    def chunk_made(self, refs: Sequence[Ref]) -> None:
        """Note the outputs of a chunk. `offer_chunk_outputs` offers them to sums before the next chunk runs."""
        ...

    def arrives(self, ref: Ref) -> None:
        """Note that a value from another device is on its way.

        Sums may add the value after the next chunk, because it can arrive while this chunk runs.
        """
        ...

    def sent(self, node: Node, channel: Channel, source: Read) -> None:
        """Note that a message was sent on a channel.

        The sender frees the sent tensors when it knows that the message has arrived.
        """
        ...

    def received(self, irecv: Any) -> None:
        """Note that the device has waited for the receive that `irecv` starts."""
        ...


@dataclass(frozen=True)
class Binding:
    """A set of resources that an executor binds its instructions to.

    Attributes:
        slots: The values of the plan by slot number.
        device: The torch device of all tensors.
        own: The logical device.
        endpoint: The device's side of the transport.
        shards: The flat tensor of the device for each bucket with a shard on it.
        chunks: Binds the code of chunks (`runtime.chunks.ChunkBinder`).
        step_outputs: Receives the outputs of the step (`runtime.step_outputs.StepOutputs`).
        early_updates: Receives complete gradients during the step (`ops.early_update.GradientReceiver`). None: no
            update is computed before the step ends.
        common: State that the instructions of one operation share, under a name of their own.
    """

    slots: Slots
    device: torch.device
    own: int
    endpoint: Endpoint
    shards: Mapping[Bucket, torch.Tensor]
    chunks: Any
    step_outputs: Any
    early_updates: Any = None
    common: dict[str, Any] = field(default_factory=dict)


def nothing(plan: Planning, node: Any) -> None:
    """Emit nothing: the lowering of a node that is produced at its first read, or that runs nothing."""


@dataclass(frozen=True)
class Operation:
    """A kind of node, with all functions that Piper calls for it.

    Attributes:
        node: The type of the node.
        check: The static rule. It yields the problems of a node, and adds the node's values to the facts.
        interpret: The reference semantics: the values that a node makes, `[group rank][output]`.
        lower: Emits the instructions of a node at its position in the global order.
        produce: Emits the instructions that bring a node's value into a slot, at the first read on a device.
            None if `lower` makes the value or the node has no value.
        bind: Kind of instruction -> the function that binds an instruction of this kind. The function returns
            None if there is nothing to do.
        adds_up: Whether the node sums its inputs over slices. The plan then adds each term as it becomes
            available (`Planning.add_up`).
        alike: Whether, on all ranks of a group, `lower` and `produce` emit the same instructions, apart from
            device names and the indices of parts, shards and replicas. Piper then checks the plans of one
            rank for all ranks; otherwise it checks the plans of every rank.
    """

    node: type[Node]
    check: Callable[[Facts, Any], Iterable[str]]
    interpret: Callable[[Reference, Any], list[list[Held]]]
    lower: Callable[[Planning, Any], None] = nothing
    produce: Callable[[Planning, Any, Ref], None] | None = None
    bind: Mapping[type[Instruction], Callable[[Any, Binding], Bound | None]] = field(default_factory=dict)
    adds_up: bool = False
    alike: bool = False


# type of a node -> its operation; type of an instruction -> the function that binds it
OPERATIONS: dict[type[Node], Operation] = {}
BINDERS: dict[type[Instruction], Callable[[Any, Binding], Bound | None]] = {}
INSTRUCTIONS: dict[str, type[Instruction]] = {}  # by `op`


def register_operation(operation: Operation) -> Operation:
    """Register a kind of node and its instructions.

    Raises:
        PiperError: Another operation has registered the node type or the `op` of an instruction, or an
            instruction has no `op`.
    """
    known = OPERATIONS.get(operation.node)
    if known is not None and known is not operation:
        raise PiperError(
            f"operation: node {operation.node.__qualname__} is registered already. Register each kind of "
            "node once [PIPER-D019]"
        )
    for kind in operation.bind:
        op = getattr(kind, "op", None)
        if not isinstance(op, str) or not op:
            raise PiperError(
                f"operation: instruction {kind.__qualname__} has no op. Give it a class attribute op = 'name'"
                " [PIPER-D019]"
            )
        taken = INSTRUCTIONS.get(op)
        if taken is not None and taken is not kind:
            raise PiperError(
                f"operation: op {op!r} is taken by {taken.__module__}.{taken.__qualname__}. Choose another "
                "name [PIPER-D019]"
            )
    OPERATIONS[operation.node] = operation
    BINDERS.update(operation.bind)
    INSTRUCTIONS.update({kind.op: kind for kind in operation.bind})
    return operation


def operation_of(node: Node) -> Operation:
    """Return the operation of a node. If its kind is unknown, first load the entry points `ENTRY_POINTS`.

    Raises:
        VerificationError: No operation is registered for the node.
    """
    if type(node) not in OPERATIONS:
        for point in entry_points(group=ENTRY_POINTS):
            register_operation(point.load())
    if type(node) not in OPERATIONS:
        kind = type(node).__qualname__
        raise VerificationError(
            f"%{node.id} {node.label} is a {kind}, a kind of node that has no operation. Register an Operation for it "
            "with register_operation [PIPER-D019]"
        )
    return OPERATIONS[type(node)]


@contextlib.contextmanager
def noting_operation(node: Node, part: str) -> Iterator[None]:
    """Name the node and the operation's function in a note on each error, except for `PiperError`."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        error.add_note(f"raised by the {part} of {_kind(node)}, for %{node.id} {node.label}")
        raise


def problems_with(facts: Facts, node: Node) -> list[str]:
    """Return the problems that the static rule of a node's operation finds.

    Raises:
        VerificationError: The rule yields something other than sentences.
    """
    with noting_operation(node, "static rule"):
        found = operation_of(node).check(facts, node)
        problems = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]
    for problem in problems:
        if problem is found or not isinstance(problem, str):
            raise VerificationError(
                f"the static rule of {_kind(node)} gives {shown(problem)}. Let it yield sentences, or give "
                f"[]{defined_at(operation_of(node).check)} [PIPER-D019]"
            )
    return problems


def made_by(run: Reference, node: Node, outputs: Sequence[int]) -> list[list[Held]]:
    """Return the values that the reference semantics of a node's operation make, `[group rank][output]`.

    Args:
        outputs: The outputs that are read.

    Raises:
        VerificationError: One of these outputs is missing, or is not a list of tensors.
    """
    with noting_operation(node, "reference semantics"):
        made = operation_of(node).interpret(run, node)
    for group_rank in run.group_ranks if outputs else ():
        for i in outputs:
            with contextlib.suppress(TypeError, IndexError):
                bundle = made[group_rank][i]
                if isinstance(bundle, list | tuple) and all(isinstance(x, torch.Tensor) for x in bundle):
                    continue
            raise VerificationError(
                f"the reference semantics of {_kind(node)} give no list of tensors for group rank {group_rank}, output "
                f"{i}. Return a list of tensors for each group rank (there "
                f"{'is' if len(run.group_ranks) == 1 else 'are'} {len(run.group_ranks)}) and each output (there "
                f"{'is' if len(node.outputs) == 1 else 'are'} {len(node.outputs)})"
                f"{defined_at(operation_of(node).interpret)} [PIPER-D019]"
            )
    return made


def _kind(node: Node) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"


def about(node: Node) -> dict[str, Any]:
    """Return the fields that every instruction of `node` has."""
    return {
        "node": node.id,
        "label": node.label,
        "stream": node.stream,
        "origin": node.origin,
        "placed_by": node.placed_by,
    }


def bucket_of(node: Node) -> Bucket:
    """Return the bucket of a node's output.

    Raises:
        VerificationError: The output is not in a bucket.
    """
    bucket = node.outputs[0].bucket
    if bucket is None:
        raise VerificationError(
            f"%{node.id} {node.label} makes {node.outputs[0].label}, which lies in no bucket. If you wrote "
            "a directive or an operation, give this output a bucket. Otherwise, report this [PIPER-V002]"
        )
    return bucket


def take(instruction: Instruction, slots: Slots) -> Callable[[], Bundle]:
    """Return a function that reads the instruction's only bundle, and empties the slot at its last read."""
    (read,) = instruction.reads
    slot, last = read.slot, read.last

    def taken() -> Bundle:
        bundle: Bundle = slots[slot]
        if last:
            slots[slot] = None
        return bundle

    return taken
