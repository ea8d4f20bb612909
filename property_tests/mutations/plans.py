"""Bugs of the compiler from the DAG to plans: instructions lost, exchanged, or saying something else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.plan import compilation as compiler
from lightning_piper.plan import instructions as ins
from lightning_piper.plan.accumulation import Accumulation
from lightning_piper.plan.instructions import Instruction, Read
from property_tests.mutations.table import Function, Seeded, Wrap, mutation

# (device, its instructions) -> the instructions it gets instead
Edit = Callable[[int, list[Instruction]], list[Instruction]]


def _edited(edit: Edit) -> Wrap:
    """The finished plan of each device, with its instructions edited."""

    def wrap(original: Function, seeded: Seeded) -> Function:
        def plan(device: int, *fields: Any, **more: Any) -> Any:
            right = original(device, *fields, **more)
            changed = tuple(edit(device, list(right.instructions)))
            seeded.hits += changed != right.instructions
            return replace(right, instructions=changed)

        return plan

    return wrap


def _plan_bug(name: str, what: str, edit: Edit, scenario: str | None = None) -> None:
    mutation(name, what, "plan", (compiler, "Plan"), scenario=scenario)(_edited(edit))


def _places(instructions: list[Instruction], kind: type[Instruction]) -> list[int]:
    return [i for i, x in enumerate(instructions) if isinstance(x, kind)]


# One instruction of each kind dropped


def _drop(kind: type[Instruction]) -> Edit:
    """The last one: what it leaves behind is not covered up by others that follow."""

    def edit(device: int, instructions: list[Instruction]) -> list[Instruction]:
        found = _places(instructions, kind)
        return instructions[: found[-1]] + instructions[found[-1] + 1 :] if found else instructions

    return edit


for _kind in (
    ins.Run,
    ins.SendInstruction,
    ins.WaitSend,
    ins.Irecv,
    ins.WaitWork,
    ins.AllReduceInstruction,
    ins.CutInstruction,
    ins.ConcatInstruction,
    ins.Add,
    ins.Merge,
    ins.Deliver,
    ins.ReportInstruction,
    ins.Record,
    ins.WaitEvent,
):
    _plan_bug(f"{_kind.op} dropped", f"the plan lacks its last {_kind.op}", _drop(_kind))


# Instructions in the wrong place


def _overtake(kind: type[Instruction], *, by: type[Instruction] | None = None, number: int = 0) -> Edit:
    """The instruction that follows (of its own kind, or `by`) goes before the `number`-th."""

    def edit(device: int, instructions: list[Instruction]) -> list[Instruction]:
        first = _places(instructions, kind)[number:]
        later = [i for i in _places(instructions, by or kind) if first and i > first[0]]
        if later:
            instructions.insert(first[0], instructions.pop(later[0]))
        return instructions

    return edit


def _first_receive_at_once(device: int, instructions: list[Instruction]) -> list[Instruction]:
    """The first stage waits for a gradient before it has sent anything."""
    waits = _places(instructions, ins.WaitWork)
    if device == 0 and waits:
        node = instructions[waits[0]].node
        moved = [
            x for x in instructions if x.node == node and isinstance(x, ins.Irecv | ins.WaitWork | ins.Record)
        ]
        return moved + [x for x in instructions if x not in moved]
    return instructions


_plan_bug(
    "posts exchanged",
    "two receives of one channel are posted in another order than the sends",
    _overtake(ins.Irecv),
)
_plan_bug(
    "sends exchanged",
    "two messages of one channel are sent in another order than they are expected",
    _overtake(ins.SendInstruction),
)
_plan_bug(
    "retired before sent",
    "a sent value is let go before it is sent",
    _overtake(ins.SendInstruction, by=ins.WaitSend),
)
_plan_bug("receives that deadlock", "every device waits for another one", _first_receive_at_once)
_plan_bug(
    "event awaited too early",
    "a stream waits for an event before it is recorded",
    _overtake(ins.Record, by=ins.WaitEvent),
)


def _further_streams_do_not_wait(device: int, instructions: list[Instruction]) -> list[Instruction]:
    return [
        x
        for x in instructions
        if not isinstance(x, ins.WaitEvent) or x.stream in ("compute", "send", "recv", "metrics")
    ]


_plan_bug(
    "further streams do not wait", "only the usual streams wait for events", _further_streams_do_not_wait
)


# Lifetimes of slots


def _first_read_is_the_last(device: int, instructions: list[Instruction]) -> list[Instruction]:
    seen: set[int] = set()
    for i, x in enumerate(instructions):
        for read in x.reads:
            if not read.last and read.slot not in seen:
                instructions[i] = replace(
                    x, reads=tuple(replace(r, last=r.last or r.slot == read.slot) for r in x.reads)
                )
                return instructions
            seen.add(read.slot)
    return instructions


def _never_last(device: int, instructions: list[Instruction]) -> list[Instruction]:
    return [
        replace(x, reads=tuple(Read(r.slot) for r in x.reads)) if isinstance(x, ins.Run) else x
        for x in instructions
    ]


def _delivered_twice(device: int, instructions: list[Instruction]) -> list[Instruction]:
    return [y for x in instructions for y in ([x, x] if isinstance(x, ins.Deliver) else [x])]


_plan_bug(
    "freed before use", "a value that is read twice is let go after the first time", _first_read_is_the_last
)
_plan_bug("never freed", "what chunks read stays in its slot", _never_last)
_plan_bug("delivered twice", "a gradient reaches the optimizer twice", _delivered_twice)


# Instructions that say something else


def _every(kind: type[Instruction], change: Callable[[Any], dict[str, Any]]) -> Edit:
    def edit(device: int, instructions: list[Instruction]) -> list[Instruction]:
        return [replace(x, **change(x)) if isinstance(x, kind) else x for x in instructions]

    return edit


def _exchange(kind: type[Instruction], *fields: str) -> Edit:
    """The first two instructions of a kind that are alike but for some fields exchange these."""

    def edit(device: int, instructions: list[Instruction]) -> list[Instruction]:
        for i, j in itertools.combinations(_places(instructions, kind), 2):
            a, b = instructions[i], instructions[j]
            mine, theirs = ({f: getattr(x, f) for f in fields} for x in (a, b))
            same_code = not (isinstance(a, ins.Run) and isinstance(b, ins.Run)) or (
                a.key == b.key and len(a.slice) == len(b.slice)
            )
            if mine != theirs and same_code:
                instructions[i], instructions[j] = replace(a, **theirs), replace(b, **mine)
                break
        return instructions

    return edit


def _last_reads_exchanged(run: ins.Run) -> dict[str, Any]:
    reads = run.reads[: run.inputs]
    return {"reads": (*reads[::-1], *run.reads[run.inputs :])}


_plan_bug("wrong channel", "a message goes out on the channel that leads back",
          _every(ins.SendInstruction, lambda x: {"channel": x.channel[::-1]}))  # fmt: skip
_plan_bug(
    "reduced alone",
    "a device sums the metrics over itself",
    _every(ins.AllReduceInstruction, lambda x: {"members": x.members[:1]}),
)
_plan_bug("messages mistaken", "two receives expect each other's message", _exchange(ins.Irecv, "message"))
_plan_bug("batches of two microbatches exchanged", "a forward takes its samples from another microbatch",
          _exchange(ins.Run, "slice"))  # fmt: skip
_plan_bug(
    "chunk reads in reverse",
    "what a chunk reads reaches it in another order",
    _every(ins.Run, _last_reads_exchanged),
)
_plan_bug("buffers of the module read", "chunks ignore what the chunk before left in the buffers",
          _every(ins.Run, lambda x: {"state": (None,) * len(x.state)}), scenario="batch norm")  # fmt: skip
_plan_bug(
    "plan cuts the wrong rows",
    "a piece begins and ends one row too late",
    _every(ins.CutInstruction, lambda x: {"start": x.start - 1, "stop": x.stop - 1} if x.start else {}),
)
_plan_bug("plan joins in the wrong order", "pieces are joined from the last to the first",
          _every(ins.ConcatInstruction, lambda x: {"reads": x.reads[::-1]}))  # fmt: skip
_plan_bug(
    "microbatches weigh the same",
    "the loss is the mean over microbatches of uneven sizes",
    _every(ins.Merge, lambda x: {"weights": tuple(1 / x.metrics.count(m) for m in x.metrics)}),
)
_plan_bug("plan merges a maximum as a sum", "`reduce_fx` is lost on the way to the plan",
          _every(ins.Merge, lambda x: {"folds": ("sum",) * len(x.folds)}))  # fmt: skip
_plan_bug(
    "gradients under wrong names",
    "a gradient is handed out as another parameter's",
    _exchange(ins.Deliver, "names"),
)


# Sums


@mutation("sum in reverse", "terms are added from the last to the first", "plan", (Accumulation, "offer"))
def _sum_in_reverse(original: Function, seeded: Seeded) -> Function:
    def offer(self: Any, index: int) -> None:
        self._there.add(index)
        if len(self._there) == len(self._node.inputs) and not self._added:
            seeded.hits += len(self._there) > 2
            for ref in reversed(self._node.inputs):
                self._add(self._plan.read(ref, self._node))
                self._added += 1

    return offer


@mutation(
    "sum in the first term",
    "a sum is added up in its first term, which is not its own",
    "plan",
    (Accumulation, "_add"),
)
def _sum_in_the_first_term(original: Function, seeded: Seeded) -> Function:
    def add(self: Any, term: Read) -> None:
        if self._added != 1:
            original(self, term)
            return
        seeded.hit()
        self._added = 2  # as if a sum had been made
        original(self, term)
        self._added = 1

    return add


@mutation("term added twice", "the last term of a sum is added twice", "plan", (Accumulation, "_add"))
def _term_added_twice(original: Function, seeded: Seeded) -> Function:
    def add(self: Any, term: Read) -> None:
        original(self, term)
        if self._added == 2:
            original(self, term)
            seeded.hit()

    return add


@mutation("sum not completed", "a sum ends with the first term", "plan", (Accumulation, "complete"))
def _sum_not_completed(original: Function, seeded: Seeded) -> Function:
    def complete(self: Any) -> int:
        if self._added < len(self._node.inputs):
            seeded.hit()
            if not self._added:
                self.offer(0)
        return self.total

    return complete


@mutation(
    "order of the plan ignores the DAG",
    "a chunk comes before what it reads",
    "plan",
    (compiler, "global_order"),
)
def _order_of_the_plan_ignores_the_dag(original: Function, seeded: Seeded) -> Function:
    def global_order(*args: Any) -> list[Node]:
        found: list[Node] = original(*args)
        backward = next(node for node in found if isinstance(node, Chunk) and node.kind == "B")
        found.remove(backward)
        seeded.hit()
        return [backward, *found]

    return global_order
