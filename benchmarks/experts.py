"""Measures on two processes whether an overlap group hides the exchange of tokens, and the cost of dividing
experts.

The program is DualPipeV on one pipeline rank. Both stages are on both processes, and each process has half of
the samples and half of the experts. In an overlap group, a forward pass of one stage and a backward pass of
the other stage take turns. `in order` runs the same passes in the same order, one after the other.

The channel delays every message of an exchange by a given time. With `in order`, the step waits for all of
these delays. In a group, one pass computes while the tokens of the other pass travel. The remaining delay
comes from the passes at both ends, which have no partner. `replicas` is the same model with whole experts on
both processes.

All variants run in the same processes and take turns step by step, with and without the delay. The table has
medians, without the optimizer.

    python benchmarks/experts.py [--delay 0.01] [--steps 12] [--microbatches 8]
"""

from __future__ import annotations

import argparse
import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from _launch import is_rank, join, launch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.ops import AllToAll
from lightning_piper.runtime import Executor, ProcessTransport, shards_of
from lightning_piper.runtime.collectives import Members, bind_collective
from lightning_piper.runtime.process import ProcessEndpoint

CPU = torch.device("cpu")
WIDTH, HIDDEN, EXPERTS, TOP, CONTEXT = 256, 512, 8, 2, 64
GROUP = [0, 1]


class Layer(nn.Module):
    """A dense layer and a mixture of experts, both with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(x)
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP)
        order = chosen.flatten().argsort(stable=True)
        counts = nn.functional.one_hot(chosen, EXPERTS).sum((0, 1))
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(tokens[order // TOP], counts)
            hidden = nn.functional.gelu(piper.grouped_linear(rows, self.up, sizes))
            rows = piper.combine(piper.grouped_linear(hidden, self.down, sizes))
        mixed = torch.zeros_like(tokens).index_add(
            0, order // TOP, rows * weights.flatten()[order].unsqueeze(1)
        )
        return x + mixed.view_as(x)


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for i, layer in enumerate(self.layers):
            with piper.annotate("PP", i):
                x = layer(x)
                if i == 1:
                    return x.square().mean()
        raise ValueError("there are two layers")


def programs(microbatches: int) -> dict[str, list[piper.Directive]]:
    overlapped = piper.schedules.dualpipev(stages=2, microbatches=microbatches, devices=[GROUP])
    plain = [
        in_order(directive) if isinstance(directive, piper.Order) else directive for directive in overlapped
    ]
    replicate = piper.Replicate(filter={}, devices=GROUP)
    shard = piper.ShardExperts(filter={"EP": "*"}, devices=GROUP)
    return {
        "replicas": [*plain, replicate],
        "in order": [*plain, replicate, shard],
        "overlap groups": [*overlapped, replicate, shard],
    }


def in_order(order: piper.Order) -> piper.Order:
    """Return an order that runs the passes of each group one after the other."""
    flat = [one for group in order.filters for one in (group if isinstance(group, list | tuple) else [group])]
    return dataclasses.replace(order, filters=flat)


class Channel:
    """A channel that sends messages with a delay, in the order in which they were posted."""

    def __init__(self) -> None:
        self.delay = 0.0
        self._posted: queue.Queue[tuple[float, Late]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, send: Callable[[], Any]) -> Late:
        late = Late(send)
        self._posted.put((time.monotonic() + self.delay, late))
        return late

    def _run(self) -> None:
        while True:
            due, late = self._posted.get()
            time.sleep(max(due - time.monotonic(), 0.0))
            late.leave()


class Late:
    """The work of a message that may not have been sent yet."""

    def __init__(self, send: Callable[[], Any]) -> None:
        self._send, self._left = send, threading.Event()

    def leave(self) -> None:
        self._work = self._send()
        self._left.set()

    def wait(self) -> None:
        self._left.wait()
        self._work.wait()


class LateMembers(Members):
    def __init__(self, members: Members, channel: Channel) -> None:
        super().__init__(members.messages, members.ranks, members.ranks[members.own], members.native)
        self._channel = channel

    def exchange(self, sent: list[Tensor], received: list[Tensor]) -> list[Any]:
        works: list[Any] = [
            self.group.recv([received[i]], self.ranks[i], 0) for i in self.others if received[i].numel()
        ]
        for i in self.others:
            if sent[i].numel():
                works.append(self._channel.post(lambda i=i: self.group.send([sent[i]], self.ranks[i], 0)))  # type: ignore[misc]
        return works


class SlowTransport(ProcessTransport):
    """A transport whose exchanges of tokens go through `channel`."""

    def __init__(self, plans: Any, channel: Channel) -> None:
        super().__init__(plans, range(2), CPU)
        self.slow = channel

    def endpoint(self, plan: Any, device: torch.device) -> ProcessEndpoint:
        super().endpoint(plan, device)
        return _Endpoint(self, device)


class _Endpoint(ProcessEndpoint):
    def collective(self, instruction: Any, exchange: Any, slots: Any) -> Any:
        if exchange.kind != "all_to_all":
            return super().collective(instruction, exchange, slots)
        transport: Any = self._transport
        members = LateMembers(transport.members(instruction.group), transport.slow)
        start, finish = bind_collective(exchange, instruction.into, slots, members)
        assert finish is not None
        self._finish[instruction.node] = finish
        return start


def measure(delay: float, steps: int, microbatches: int) -> None:
    rank, _ = join()
    channel = Channel()
    batch = torch.randn(4 * microbatches, CONTEXT, WIDTH, generator=torch.Generator().manual_seed(1))
    local_batch = batch.chunk(2)[rank]
    runs: dict[str, Executor] = {}
    exchanges = 0
    for name, program in programs(microbatches).items():
        module = Model()
        compiled = piper.compile(module, batch, program)
        exchanges = len(list(compiled.dag.of_type(AllToAll)))
        plan, params = compiled.plans[rank], dict(module.named_parameters())
        transport = SlowTransport(compiled.plans, channel)
        runs[name] = Executor(plan, compiled.step, params, {}, transport, CPU, shards_of(plan, params, CPU))
    times: dict[tuple[str, float], list[float]] = {}
    for i in range(steps + 2):
        for name, executor in runs.items():
            for late in (0.0, delay):
                channel.delay = late
                dist.barrier()
                start = time.perf_counter()
                executor.step([local_batch], seed=i)
                dist.barrier()
                if i >= 2:
                    times.setdefault((name, late), []).append(time.perf_counter() - start)
    if rank == 0:
        medians = {key: statistics.median(found) * 1e3 for key, found in times.items()}
        print(
            f"{exchanges} exchanges a step, each {delay * 1e3:.0f} ms late: {exchanges * delay * 1e3:.0f} "
            "ms one after another"
        )
        print(f"{'ms a step':16} {'as it is':>9} {'late':>9} {'more':>9}")
        for name in runs:
            quick, slow = medians[name, 0.0], medians[name, delay]
            late_figures = "" if name == "replicas" else f" {slow:9.1f} {slow - quick:9.1f}"
            print(f"{name:16} {quick:9.1f}{late_figures}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--delay", type=float, default=0.01, help="seconds")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    args = parser.parse_args()
    if is_rank():
        measure(args.delay, args.steps, args.microbatches)
        return
    launch(
        2, "--delay", str(args.delay), "--steps", str(args.steps), "--microbatches", str(args.microbatches)
    )


if __name__ == "__main__":
    main()
