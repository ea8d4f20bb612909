"""`Operation`: all that the system knows of one kind of node, and the table of them.

    static rule            what a node may read, and what it hands on         verify.static
    reference semantics    what it makes, in plain tensor arithmetic          verify.interpreter
    lowering               its instructions on one device                     plan.lower
    binding                an instruction with everything it needs            runtime.executor

The first two share no code: one is the check of the other. All four are functions of a file in `lightning_piper.ops`, or of
somebody else's file, which registers its operation.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from lightning_piper.errors import ExecutionError, PiperError, VerificationError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Node, Ref
from lightning_piper.limits import shown
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.instruction import Channel, Collective, Instruction, Read
from lightning_piper.ops.reference import Bundle as Held
from lightning_piper.ops.reference import Reference

ENTRY_POINTS = "lightning_piper.operations"

Bundle = tuple[torch.Tensor, ...]
Slots = list[Any]  # of bundles; a slot without value is None, a pending one belongs to the transport
Bound = Callable[[], object]  # an instruction with everything it needs


class Exchange(ABC):
    """What one member does in a collective: it brings a part for each member, and joins those that it gets. Made once for each
    instruction; what a step needs goes from one method to the next in `state`.

    Attributes:
        kind: where an operation of torch.distributed does the same, its name: a transport may take that one. `all_reduce`: the
            state is the tensors, and what they are when all are summed is the value. `reduce_scatter`: the state begins with the
            flat tensor, of which the parts are equal ones. `all_gather`: all rooms are equal parts of one flat tensor, in order.
            `all_to_all`: nothing more. None: parts go from each member to the others.
    """

    kind: str | None = None

    @abstractmethod
    def bring(self) -> Any:
        """Begin: take what is read out of its slots. Returns the state."""

    @abstractmethod
    def parts(self, state: Any) -> Sequence[Any]:
        """One part for each member, in their order."""

    def room(self, state: Any, parts: Sequence[Any]) -> list[torch.Tensor]:
        """Where what each member sends is received. The own part may be its own room; else it is copied there."""
        return [torch.empty_like(part) for part in parts]

    @abstractmethod
    def join(self, state: Any, received: Sequence[Any]) -> Bundle:
        """The value, from what each member sent; the tensors may be the senders' own, and are not to be changed."""


def parts_of(exchange: Exchange, state: Any, members: int) -> Sequence[Any]:
    """What `Exchange.parts` gives.

    Raises:
        ExecutionError: it is not one part for each member.
    """
    parts = exchange.parts(state)
    found = len(parts) if hasattr(parts, "__len__") else shown(parts)
    if found != members:
        kind = f"{type(exchange).__module__}.{type(exchange).__qualname__}"
        raise ExecutionError(f"parts() of {kind} gives {found} parts for {members} members; give one for each, in their order")
    return parts


class Endpoint(Protocol):
    """One device's side of a transport for one plan. Each method binds an instruction; None if there is nothing to do."""

    hands_over: bool  # received tensors may be the sender's own

    def flat(self, bucket: Bucket) -> torch.Tensor:
        """A new flat tensor of a bucket of gradients, with zeros in the gaps, where it is best sent from."""
        ...

    def send(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def wait_send(self, instruction: Any) -> Bound | None: ...

    def irecv(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def collective(self, instruction: Collective, exchange: Exchange, slots: Slots) -> Bound | None: ...

    def wait(self, instruction: Any, slots: Slots) -> Bound | None: ...

    def reset(self) -> None:
        """Forget what a step that failed has left behind."""
        ...


class Planning(Protocol):
    """The plan of one device while it is made.

    Attributes:
        dag: the finished DAG.
        device: whose plan it is.
        place: of this device, in the groups that it is in: which shard of a bucket it has, and whom it communicates with.
        replica: which replica this device is a part of, and so which local batch is its own.
        shards: the buckets of parameters that it has one shard of, and whether it keeps the whole of each.
    """

    dag: TrainingDAG
    device: int
    place: int
    replica: int
    shards: dict[Bucket, bool]

    def has(self, ref: Ref) -> bool:
        """Is the value made on this device?"""
        ...

    def is_read(self, ref: Ref) -> bool:
        """Does anything on this device read it?"""
        ...

    def read(self, ref: Ref, reader: Node) -> Read:
        """The slot of a value; what brings it there comes directly before the first reader."""
        ...

    def new_slot(self, ref: Ref | None, source: str, stream: str) -> int:
        """A slot for a value that is made here; `source` as in `Deliver`."""
        ...

    def bind(self, ref: Ref, slot: int) -> None:
        """The value is what the slot holds."""
        ...

    def source(self, slot: int) -> str: ...

    def emit(self, instruction: Instruction) -> None: ...

    def start(self, node: Node, kind: type[Collective], reads: tuple[Read, ...], stream: str | None = None, **fields: Any) -> None:
        """Start a collective; whoever reads its value waits for it.

        Args:
            stream: that issues it; None: the node's. It begins behind what this one has issued, and takes memory of this one.
        """
        ...

    def stream_of(self, slot: int) -> str:
        """The stream that makes what is in a slot."""
        ...

    def wait_for_earlier(self, node: Node) -> None:
        """Of sums like the one that was started, wait for all but the last ones: each holds a whole bucket."""
        ...

    def add_up(self, node: Node) -> int:
        """The slot of the sum of a node's inputs, added from the first to the last as they come."""
        ...

    def add_what_was_made(self) -> None:
        """Add what the last chunk made to the sums that it is a term of."""
        ...

    def chunk_made(self, refs: Sequence[Ref]) -> None:
        """These may be terms of sums, after the next chunk."""
        ...

    def arrives(self, ref: Ref) -> None:
        """This may be a term of a sum once it is there: it has the time of a chunk."""
        ...

    def sent(self, node: Node, channel: Channel, source: Read) -> None:
        """A message was handed to a channel: the sender frees it once it is known to have arrived."""
        ...

    def received(self, irecv: Any) -> None:
        """The receive that `irecv` starts was waited for here."""
        ...


@dataclass(frozen=True)
class Binding:
    """What instructions of one executor are bound to.

    Attributes:
        slots: where values lie.
        device: where tensors are.
        own: the logical device.
        endpoint: of the transport.
        shards: for each bucket of which the device has a shard, the flat tensor that it keeps.
        chunks: binds a chunk's code (`runtime.chunks.ChunkBinder`).
        step_outputs: takes what the step hands out (`runtime.step_outputs.StepOutputs`).
        common: what the instructions of one operation share, by a name of theirs.
    """

    slots: Slots
    device: torch.device
    own: int
    endpoint: Endpoint
    shards: Mapping[Bucket, torch.Tensor]
    chunks: Any
    step_outputs: Any
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def outbox(self) -> Any:
        """`step_outputs`, by the name that it had before."""
        warnings.warn("Binding.outbox is Binding.step_outputs now; outbox ends with 0.3", DeprecationWarning, stacklevel=2)
        return self.step_outputs


def nothing(plan: Planning, node: Any) -> None:
    """The lowering of a node that comes to be when it is first read, or that runs nothing."""


@dataclass(frozen=True)
class Operation:
    """One kind of node.

    Attributes:
        node: its type.
        check: the static rule: yields what is wrong with a node, and enters what its values are into the facts.
        interpret: the reference semantics: what a node makes, `[place][output]`.
        lower: emits the instructions of a node, at its place in the global order.
        produce: emits those that bring a value of a node into a slot, when it is first read on a device; None where `lower` has
            made it, or nothing reads it.
        bind: for each kind of instruction that it has, what runs it; the function returns None where there is nothing to do.
        adds_up: it makes the sum of its inputs over slices, which is taken term by term as they come (`Planning.add_up`).
        alike: at all places of a group, `lower` and `produce` make the same instructions, but for the names of devices and which
            part, shard or replica is meant. Then plans are checked at one place that stands for all; else at every place.
    """

    node: type[Node]
    check: Callable[[Facts, Any], Iterable[str]]
    interpret: Callable[[Reference, Any], list[list[Held]]]
    lower: Callable[[Planning, Any], None] = nothing
    produce: Callable[[Planning, Any, Ref], None] | None = None
    bind: Mapping[type[Instruction], Callable[[Any, Binding], Bound | None]] = field(default_factory=dict)
    adds_up: bool = False
    alike: bool = False


OPERATIONS: dict[type[Node], Operation] = {}
BINDERS: dict[type[Instruction], Callable[[Any, Binding], Bound | None]] = {}
INSTRUCTIONS: dict[str, type[Instruction]] = {}  # by `op`


def register_operation(operation: Operation) -> Operation:
    """Make a kind of node, and its instructions, known.

    Raises:
        PiperError: the node or an instruction's `op` is taken by another one.
    """
    known = OPERATIONS.get(operation.node)
    if known is not None and known is not operation:
        raise PiperError(f"operation: node {operation.node.__qualname__} is registered already; register each kind of node once")
    for kind in operation.bind:
        op = getattr(kind, "op", None)
        if not isinstance(op, str) or not op:
            raise PiperError(f"operation: instruction {kind.__qualname__} has no op; give it a class attribute op = 'name'")
        taken = INSTRUCTIONS.get(op)
        if taken is not None and taken is not kind:
            raise PiperError(f"operation: op {op!r} is taken by {taken.__module__}.{taken.__qualname__}; choose another name")
    OPERATIONS[operation.node] = operation
    BINDERS.update(operation.bind)
    INSTRUCTIONS.update({kind.op: kind for kind in operation.bind})
    return operation


def operation_of(node: Node) -> Operation:
    """The operation of a node. Installed packages (entry points of group `lightning_piper.operations`) are asked for what is not
    known.

    Raises:
        VerificationError: nobody registered it.
    """
    if type(node) not in OPERATIONS:
        for point in entry_points(group=ENTRY_POINTS):
            register_operation(point.load())
    if type(node) not in OPERATIONS:
        kind = type(node).__qualname__
        raise VerificationError(f"%{node.id} {node.label} is a {kind}, which is no operation; register_operation makes it one")
    return OPERATIONS[type(node)]


@contextlib.contextmanager
def asked(node: Node, part: str) -> Iterator[None]:
    """What an operation's own code raises gets a note that says whose it is: `part` of the operation, and for which node."""
    try:
        yield
    except PiperError:
        raise
    except Exception as error:
        error.add_note(f"raised by the {part} of {_kind(node)}, for %{node.id} {node.label}")
        raise


def problems_with(facts: Facts, node: Node) -> list[str]:
    """What the static rule of a node's operation finds.

    Raises:
        VerificationError: it gives something else than sentences.
    """
    with asked(node, "static rule"):
        found = operation_of(node).check(facts, node)
        problems = list(found) if isinstance(found, Iterable) and not isinstance(found, str) else [found]
    for problem in problems:
        if problem is found or not isinstance(problem, str):
            raise VerificationError(f"the static rule of {_kind(node)} gives {shown(problem)}; let it yield sentences, or give []")
    return problems


def made_by(run: Reference, node: Node, outputs: Sequence[int]) -> list[list[Held]]:
    """What the reference semantics of a node's operation make, `[place][output]`.

    Args:
        outputs: those that are read.

    Raises:
        VerificationError: one of them is not there, or is no list of tensors.
    """
    with asked(node, "reference semantics"):
        made = operation_of(node).interpret(run, node)
    for place in run.places if outputs else ():
        for i in outputs:
            with contextlib.suppress(TypeError, IndexError):
                bundle = made[place][i]
                if isinstance(bundle, list | tuple) and all(isinstance(x, torch.Tensor) for x in bundle):
                    continue
            raise VerificationError(
                f"the reference semantics of {_kind(node)} give no list of tensors for place {place}, output {i}; let them "
                f"return one for each of {len(run.places)} places and each of {len(node.outputs)} outputs"
            )
    return made


def _kind(node: Node) -> str:
    return f"{type(node).__module__}.{type(node).__qualname__}"


def about(node: Node) -> dict[str, Any]:
    """The fields of every instruction that belongs to `node`."""
    return {"node": node.id, "label": node.label, "stream": node.stream, "origin": node.origin, "placed_by": node.placed_by}


def bucket_of(node: Node) -> Bucket:
    """The bucket of what a node makes.

    Raises:
        VerificationError: it lies in none.
    """
    bucket = node.outputs[0].bucket
    if bucket is None:
        raise VerificationError(f"%{node.id} {node.label} makes {node.outputs[0].label}, which lies in no bucket")
    return bucket


def take(instruction: Instruction, slots: Slots) -> Callable[[], Bundle]:
    """A function that gives the only bundle that the instruction reads, and empties its slot if that is its last read."""
    (read,) = instruction.reads
    slot, last = read.slot, read.last

    def taken() -> Bundle:
        bundle: Bundle = slots[slot]
        if last:
            slots[slot] = None
        return bundle

    return taken
