"""1F1B on two processes, against torch.distributed.pipelining's Schedule1F1B: same model, cut, microbatches and threads.

Time: both systems live in the same processes and take turns step by step, so that whatever else the machine does hits both.
Memory: one pair of processes for each system; live tensor bytes by torch's profiler, from before the model is built.

    python benchmarks/pipeline.py [--steps 20] [--cut 4,4]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _gpt import Config, Module, batch, loss_of, stages
from _launch import is_rank, join, launch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile

import lightning_piper as piper
from lightning_piper.runtime import Executor, ProcessTransport

MICROBATCHES, SEQUENCES = 8, 16
Step = Callable[[int], torch.Tensor | None]  # step number -> loss on the last rank


def ours(c: Config, rank: int, world: int) -> Step:
    module = Module(c)
    program = piper.schedules.one_f_one_b(stages=world, microbatches=MICROBATCHES)
    compiled = piper.compile(module, batch(c, 0, SEQUENCES), program)
    params = dict(module.named_parameters())
    owned = sorted(compiled.params_on(rank))
    for name, param in params.items():
        if name not in owned:
            param.data = torch.empty(0)
    device = torch.device("cpu")
    transport = ProcessTransport(compiled.plans, ranks=list(range(world)), device=device)
    executor = Executor(compiled.plans[rank], compiled.step, params, {}, transport, device)
    optimizer = torch.optim.AdamW([params[name] for name in owned], lr=1e-3)

    def step(i: int) -> torch.Tensor:
        result = executor.step(list(batch(c, i, SEQUENCES)), seed=i)
        for name in list(result.grads):
            params[name].grad = result.grads.pop(name)
        optimizer.step()
        optimizer.zero_grad()
        return result.metrics[0]

    return step


def torch_1f1b(c: Config, rank: int, world: int) -> Step:
    module = stages(c)[rank]
    stage = PipelineStage(module, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    last = rank == world - 1

    def step(i: int) -> torch.Tensor | None:
        tokens, targets = batch(c, i, SEQUENCES)
        losses: list[torch.Tensor] | None = [] if last else None
        inputs = [tokens] if rank == 0 else []
        schedule.step(*inputs, target=targets if last else None, losses=losses, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).detach().double().mean() if losses else None

    return step


SYSTEMS = {"lightning_piper": ours, "torch Schedule1F1B": torch_1f1b}


def compare_time(c: Config, steps: int) -> None:
    rank, world = join()
    systems = {name: build(c, rank, world) for name, build in SYSTEMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    worst = 0.0
    for i in range(steps + 3):
        losses = {}
        order = list(systems) if i % 2 else list(reversed(systems))
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            loss = systems[name](i)
            mine = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            if i >= 3:
                seconds[name].append(mine.item())
            losses[name] = None if loss is None else loss.item()
        if rank == world - 1:
            a, b = losses.values()
            assert a is not None and b is not None
            worst = max(worst, abs(a - b) / abs(b))
    if rank == world - 1:
        median = {name: statistics.median(values) for name, values in seconds.items()}
        ours_, peer = median.values()
        pairs = [a / b for a, b in zip(*seconds.values(), strict=True)]
        print(f"{'':20} median ms a step   min ms")
        for name, values in seconds.items():
            print(f"{name:20} {median[name] * 1e3:16.1f} {min(values) * 1e3:8.1f}")
        paired = statistics.median(pairs)
        print(f"ratio of medians {ours_ / peer:.3f}, median of paired ratios {paired:.3f}, {steps} pairs of steps")
        print(f"largest relative difference of the losses over {steps + 3} AdamW steps: {worst:.1e}")
    dist.barrier()
    dist.destroy_process_group()


def measure_memory(c: Config, name: str) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        rank, world = join()
        step = SYSTEMS[name](c, rank, world)
        for i in range(3):
            step(i)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    live = peak = 0
    for event in sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: float(e["ts"])):
        live += int(event["args"]["Bytes"])
        peak = max(peak, live)
    peaks: list[float] = [0.0] * world
    dist.all_gather_object(peaks, peak / 2**20)
    if rank == 0:
        print(f"{name:20} peak live tensor MB by rank: {', '.join(f'{p:.1f}' for p in peaks)}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cut", default="4,4", help="layers of each stage")
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = Config(cut=tuple(int(n) for n in args.cut.split(",")))
    if not is_rank():
        shared = ["--steps", str(args.steps), "--cut", args.cut]
        launch(len(config.cut), *shared)
        for name in SYSTEMS:
            launch(len(config.cut), *shared, "--memory", name)
    elif args.memory:
        measure_memory(config, args.memory)
    else:
        compare_time(config, args.steps)


if __name__ == "__main__":
    main()
