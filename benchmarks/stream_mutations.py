"""Seeds faults of streams and memory, and reports which of them the check of plans or the simulated
accelerator finds.

    python benchmarks/stream_mutations.py --sites 3     # runs this many of each kind and program, and all
    that the check misses
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch
from accelerator import CPU, PROGRAMS, Program

from lightning_piper.accelerators.communicators import Issued
from lightning_piper.accelerators.simulated_device import Host, Stream
from lightning_piper.errors import VerificationError
from lightning_piper.ops.host import HostPool
from lightning_piper.plan import Plan, check_plans
from lightning_piper.plan.instructions import (
    Add,
    Deliver,
    Instruction,
    Record,
    Run,
    SendInstruction,
    WaitEvent,
    WaitSend,
    WaitWork,
)
from lightning_piper.runtime import process, streams
from lightning_piper.testing.simulated import Over, Values, first_difference, run_steps

ORDERS = [*range(12), 32, 33, 34, 35]  # in some orders one stream runs last, and some orders are random
Edit = Callable[[list[Instruction], int], None]


def drop(plan: list[Instruction], i: int) -> None:
    del plan[i]


def on(stream: str) -> Edit:
    return lambda plan, i: plan.__setitem__(i, replace(plan[i], stream=stream))


def unshare(plan: list[Instruction], i: int) -> None:
    plan[i] = replace(plan[i], shared=())  # type: ignore[call-arg]


def before_its_instruction(plan: list[Instruction], i: int) -> None:
    plan.insert(i - 1, plan.pop(i))


def earlier_event(plan: list[Instruction], i: int) -> None:
    plan[i] = replace(plan[i], event=max(plan[i].event - 1, 0))  # type: ignore[attr-defined,call-arg]


def retire_at_once(plan: list[Instruction], i: int) -> None:
    done = plan.pop(i)
    place = next(k for k, x in enumerate(plan) if isinstance(x, SendInstruction) and x.node == done.node)
    plan.insert(place + 1, replace(done, stream="elsewhere"))


def waiting(x: Instruction) -> bool:
    return isinstance(x, WaitEvent) and x.event > 0


# name -> (sites, edit)
PLANS: dict[str, tuple[Callable[[Instruction], bool], Edit]] = {
    "record dropped": (lambda x: isinstance(x, Record), drop),
    "record before its instruction": (lambda x: isinstance(x, Record), before_its_instruction),
    "await dropped": (lambda x: isinstance(x, WaitEvent), drop),
    "await of an earlier event": (waiting, earlier_event),
    "await on another stream": (lambda x: isinstance(x, WaitEvent), on("elsewhere")),
    "shared by nobody": (lambda x: isinstance(x, WaitEvent) and bool(x.shared), unshare),
    "work waited for on another stream": (lambda x: isinstance(x, WaitWork), on("elsewhere")),
    "retired on another stream": (lambda x: isinstance(x, WaitSend), on("elsewhere")),
    "retired at once": (lambda x: isinstance(x, WaitSend), retire_at_once),
    "chunk on another stream": (lambda x: isinstance(x, Run), on("elsewhere")),
    "sum on another stream": (lambda x: isinstance(x, Add), on("elsewhere")),
    "handed out on another stream": (lambda x: isinstance(x, Deliver), on("elsewhere")),
}
CHOSEN = (
    "1F1B, 2 stages",
    "zero bubble",
    "ZBV",
    "replicas",
    "ZeRO-2",
    "ZeRO-3",
    "experts",
    "stored on the host",
    "second passes",
)


def patched(
    target: object, name: str, wrong: object
) -> Callable[[], contextlib.AbstractContextManager[object]]:
    return lambda: mock.patch.object(target, name, wrong)


def _send_without_keeping(
    self: process.ProcessEndpoint, instruction: object, slots: list[object]
) -> Callable[[], None]:
    bound = _SEND(self, instruction, slots)  # type: ignore[arg-type]

    def send() -> None:
        bound()
        sent = self._sent[instruction.node]  # type: ignore[attr-defined]
        sent[:] = [(works, None, None) for works, *_ in sent]  # type: ignore[misc]
        for works, *_ in sent:
            for work in works:
                assert isinstance(work, Issued)
                work._kept = None

    return send


def _taken_without(what: str) -> Callable[..., object]:
    def take(self: streams._DeviceArrival, bundle: tuple[torch.Tensor, ...], device: torch.device) -> object:
        with mock.patch.object(Stream if what == "wait_event" else type(self._api), what, lambda *a: None):
            return _TAKE(self, bundle, device)

    return take


_SEND, _TAKE = process.ProcessEndpoint.send, streams._DeviceArrival.take
_FETCH = HostPool.fetch


def _room_at_once(self: HostPool, stored: object, last: bool) -> object:
    found = _FETCH(self, stored, last)  # type: ignore[arg-type]
    for free in self._free.values():
        free[:] = [(room, None) for room, _ in free]
    return found


# name -> (program that it breaks, transport, patch)
EXECUTORS: dict[str, tuple[str, Over, Callable[[], contextlib.AbstractContextManager[object]]]] = {
    "a step does not wait for the caller": ("1F1B, 2 stages", "one device", patched(
        streams.DeviceStreams, "begin", lambda self: None)),
    "the caller does not wait for a step": ("1F1B, 2 stages", "one device", patched(
        streams.DeviceStreams, "end", lambda self, results: None)),
    "side streams do not wait for the caller": ("ZeRO-1", "devices", patched(
        streams.DeviceStreams, "begin", lambda self: None)),
    "a message is read before it is there": ("1F1B, 2 stages", "one device", patched(
        streams._DeviceArrival, "take", _taken_without("wait_event"))),
    "a message's memory is not recorded": ("replicas", "one device", patched(
        streams._DeviceArrival, "take", _taken_without("record_stream"))),
    "what is sent is not kept": ("1F1B, 2 stages", "devices",
        patched(process.ProcessEndpoint, "send", _send_without_keeping)),
    "streams of each executor's own": ("accumulated over sizes", "devices", patched(
        Host, "stream", lambda self, name: self._pools["stream"].next())),
    "room on the host is given back at once": ("stored on the host", "devices",
        patched(HostPool, "fetch", _room_at_once)),
}  # fmt: skip


def mutants(program: Program, where: Callable[[Instruction], bool], edit: Edit) -> Iterator[Program]:
    """Yield the program with the fault at one site after the other."""
    batches, held = program
    plans = batches[0].plans
    for device, plan in plans.items():
        for i in [i for i, x in enumerate(plan.instructions) if where(x)]:
            changed = list(plan.instructions)
            edit(changed, i)
            other: dict[int, Plan] = {**plans, device: replace(plan, instructions=tuple(changed))}
            yield [replace(batch, plans=other) for batch in batches], held


def found_by_check(program: Program) -> bool:
    try:
        check_plans(program[0][0].plans)
    except VerificationError:
        return True
    return False


def found_by_running(program: Program, expected: list[Values]) -> bool:
    batches, held = program
    try:
        return first_difference(batches, held, ORDERS, "devices", expected=expected) is not None
    except Exception:  # the plan cannot be bound, or does not run to its end
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=2)
    options = parser.parse_args()
    print(f"{'fault':<46} {'program':<24} {'sites':>5} {'by the check':>12} {'run':>4} {'by running':>10}")
    rows = missed = 0
    for name in CHOSEN:
        program = PROGRAMS[name](CPU)
        expected = run_steps(*program, None)
        for kind, (where, edit) in PLANS.items():
            every = list(mutants(program, where, edit))
            if not every:
                continue
            static = [found_by_check(one) for one in every]
            step = max(1, len(every) // options.sites)
            ran = {
                k: found_by_running(every[k], expected)
                for k in range(len(every))
                if k % step == 0 or not static[k]
            }
            rows += 1
            missed += sum(not static[k] and not ran.get(k) for k in range(len(every)))
            print(
                f"{kind:<46} {name:<24} {len(every):>5} {sum(static):>12} {len(ran):>4} "
                f"{sum(ran.values()):>10}",
                flush=True,
            )
    for kind, (name, over, patch) in EXECUTORS.items():
        program = PROGRAMS[name](CPU)
        expected = run_steps(*program, None)
        with patch():  # An exception is not a find: the fault could not be seeded.
            caught = first_difference(*program, ORDERS, over, expected=expected) is not None
        rows += 1
        missed += not caught
        print(f"{kind:<46} {name:<24} {1:>5} {'-':>12} {1:>4} {caught:>10}", flush=True)
    print(f"{rows} kinds of faults, {missed} that nothing finds")


if __name__ == "__main__":
    main()
