"""Shows that an overlap group hides a slow message, that the plain order does not, and that the simulator
predicts both.

Device 0 has the first and the last region, device 1 the region between them, like experts after an
all-to-all. The channel delays the message that brings microbatch 0 back to device 0. In the plain order,
device 0 waits for it. If both microbatches are in one group, device 0 runs the other microbatch in the
meantime, so a shorter delay takes no time.

The simulator's prediction uses durations that were recorded without the delay.

    python benchmarks/overlap.py [--delay 0.02] [--steps 15]
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from _launch import is_rank, join, launch
from torch import nn

import lightning_piper as piper
from lightning_piper.compiler import Compiled
from lightning_piper.ir import Chunk
from lightning_piper.ops import Send
from lightning_piper.profile.measured_trace import Measured
from lightning_piper.profile.recorder import StepRecorder
from lightning_piper.runtime import Executor, ProcessTransport
from lightning_piper.runtime.messages import Messages, PendingWork
from lightning_piper.runtime.process import ProcessEndpoint
from lightning_piper.simulate import simulate

CPU = torch.device("cpu")
WIDTH, LAYERS, SAMPLES = 512, (12, 2, 12), 512


class Around(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)))
            for count in LAYERS
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = batch
        for i, part in enumerate(self.parts):
            with piper.annotate("PP", i):
                x = part(x)
                if i == 2:
                    return x.square().mean()
        raise ValueError("there are three parts")


def passes(kind: str, mb: int) -> dict[str, Any]:
    """Return the filter of the passes of kind `kind` ("F" or "B") of microbatch `mb` on device 0."""
    return {"PP": [0, 2], "MB": mb, "PASS": kind}


HEAD = [
    piper.Place(filter={"PP": [0, 2]}, devices=[0]),
    piper.Place(filter={"PP": 1}, devices=[1]),
    piper.Split(filter={}, dim_name="MB", num_microbatches=2),
]
ORDERS = {
    "plain": [passes("F", 0), passes("F", 1), passes("B", 0), passes("B", 1)],
    "overlap group": [[passes("F", 0), passes("F", 1)], [passes("B", 0), passes("B", 1)]],
}


class Late(Messages):
    """Messages that are sent with a delay."""

    def __init__(self, messages: Messages, transport: SlowTransport) -> None:
        super().__init__(messages.group)
        self._messages, self._transport = messages, transport

    def send(self, x: torch.Tensor, ranks: Sequence[int]) -> list[PendingWork]:
        if not self._transport.delay:
            return self._messages.send(x, ranks)
        return [_Leaving(self._transport.delay, lambda: self._messages.send(x, ranks))]


class _Leaving:
    """The work of a message that is sent after `delay` seconds, by the function `post`."""

    def __init__(self, delay: float, post: Callable[[], list[PendingWork]]) -> None:
        self._post, self._works = post, list[PendingWork]()
        self._timer = threading.Timer(delay, self._leave)
        self._timer.start()

    def _leave(self) -> None:
        self._works = self._post()

    def wait(self) -> None:
        self._timer.join()
        for work in self._works:
            work.wait()


class SlowTransport(ProcessTransport):
    """A transport that delays one message by `delay` seconds. `slow` is the node that sends it."""

    def __init__(self, plans: Any, slow: int) -> None:
        super().__init__(plans, range(2), CPU)
        self.slow, self.delay, self.sending = slow, 0.0, -1

    def endpoint(self, plan: Any, device: torch.device) -> ProcessEndpoint:
        super().endpoint(plan, device)
        return _Endpoint(self, device)

    def channel(self, channel: Any, end: int) -> Any:
        messages, peer = super().channel(channel, end)
        return (Late(messages, self) if self.sending == self.slow else messages), peer


class _Endpoint(ProcessEndpoint):
    def send(self, instruction: Any, slots: Any) -> Any:
        transport: Any = self._transport
        transport.sending = instruction.node
        try:
            return super().send(instruction, slots)
        finally:
            transport.sending = -1


def slow_message(compiled: Compiled) -> int:
    """Return the send that brings microbatch 0 from the middle region back to device 0."""
    for node in compiled.dag.of_type(Send):
        maker = compiled.dag.nodes[node.inputs[0][0]]
        if isinstance(maker, Chunk) and (maker.tags["PP"], maker.tags["MB"], maker.kind) == (1, 0, "F"):
            return node.id
    raise ValueError("no such message")


def measure(order: str, delay: float, steps: int) -> None:
    rank, _ = join()
    module, batch = Around(), torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    compiled = piper.compile(module, batch, [*HEAD, piper.Order(filters=ORDERS[order])])
    transport = SlowTransport(compiled.plans, slow_message(compiled))
    executor = Executor(
        compiled.plans[rank], compiled.step, dict(module.named_parameters()), {}, transport, CPU
    )
    recorder = StepRecorder(executor, CPU)
    recorder.attach()
    recorded: dict[bool, list[Measured]] = {False: [], True: []}
    for i in range(2 * (steps + 2)):
        transport.delay = delay if i % 2 else 0.0
        dist.barrier()
        executor.step([batch], seed=i)
        times: list[Any] = [None, None]
        dist.all_gather_object(times, recorder.take()())
        if i >= 4:
            recorded[bool(i % 2)].append(
                Measured(compiled.dag, compiled.plans, dict(enumerate(times)), serial=True)
            )
    if rank == 0:
        quick, slow = (statistics.median(m.trace.end for m in recorded[late]) for late in (False, True))
        table = _durations([m.durations() for m in recorded[False]])
        message = f"%{transport.slow}"
        base, predicted = (
            float(
                simulate(
                    compiled.dag, compiled.plans, {**table, message: table.get(message, 0.0) + more}
                ).step_time
            )
            for more in (0.0, delay)
        )
        figures = [f"{x * 1e3:9.1f}" for x in (quick, slow, slow - quick, base, predicted)]
        print(f"{order:14}", *figures, f"{predicted / slow - 1:+9.1%}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _durations(tables: list[Any]) -> dict[str, Any]:
    return {key: statistics.median(table[key] for table in tables) for key in tables[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.02, help="seconds")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--order", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if is_rank():
        measure(args.order, args.delay, args.steps)
        return
    print(f"{'ms a step':14}  recorded:                     predicted:")
    print(f"{'':14}", *(f"{head:>9}" for head in ("as it is", "slowed", "more", "as it is", "slowed", "off")))
    for order in ORDERS:
        launch(2, "--order", order, "--delay", str(args.delay), "--steps", str(args.steps))


if __name__ == "__main__":
    main()
