"""Compares pipelines of two processes with Schedule1F1B of torch.distributed.pipelining.

Both use the same model, cut, microbatches and threads. Ours runs under 1F1B and under the zero bubble
schedule (ZB-H1). All variants also run compiled (`PiperStrategy(compile=True)` and torch.compile).

Time: both systems live in the same processes and take turns step by step, so that disturbances of the machine
affect both. Memory: each system has its own pair of processes. torch's profiler counts live tensor bytes,
from before the model is built.

    python benchmarks/pipeline.py [--steps 20] [--cut 4,4] [--plain]
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from _compared import Step, compare_time, measure_memory
from _gpt import Config, Module, batch, loss_of, stages
from _launch import is_rank, launch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import lightning_piper as piper
from lightning_piper.capture.cutting.chunk_compiler import ChunkCompiler
from lightning_piper.runtime import Executor, ProcessTransport

MICROBATCHES, SEQUENCES = 8, 16


def ours(
    c: Config, rank: int, world: int, schedule: str = "one_f_one_b", compiled_code: bool = False
) -> Step:
    module = Module(c)
    program = getattr(piper.schedules, schedule)(stages=world, microbatches=MICROBATCHES)
    compiled = piper.compile(module, batch(c, 0, SEQUENCES), program)
    params = dict(module.named_parameters())
    owned = sorted(compiled.params_on(rank))
    for name, param in params.items():
        if name not in owned:
            param.data = torch.empty(0)
    device = torch.device("cpu")
    transport = ProcessTransport(compiled.plans, ranks=list(range(world)), device=device)
    compiler = ChunkCompiler({}, device) if compiled_code else None
    executor = Executor(compiled.plans[rank], compiled.step, params, {}, transport, device, compiler=compiler)
    optimizer = torch.optim.AdamW([params[name] for name in owned], lr=1e-3)

    def step(i: int) -> torch.Tensor:
        result = executor.step(list(batch(c, i, SEQUENCES)), seed=i)
        for name in list(result.grads):
            params[name].grad = result.grads.pop(name)
        optimizer.step()
        optimizer.zero_grad()
        return result.metrics[0]

    return step


def torch_1f1b(c: Config, rank: int, world: int, compiled_code: bool = False) -> Step:
    module = stages(c)[rank]
    if compiled_code:
        module.compile()
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


TORCH = "torch Schedule1F1B"
OURS = {"lightning_piper": "one_f_one_b", "lightning_piper, zero bubble": "zero_bubble"}
SYSTEMS = {name: (partial(ours, schedule=schedule), TORCH) for name, schedule in OURS.items()} | {
    TORCH: (torch_1f1b, "")
}
COMPILED = {
    f"{name}, compiled": (partial(build, compiled_code=True), f"{peer}, compiled" if peer else TORCH)
    for name, (build, peer) in SYSTEMS.items()
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cut", default="4,4", help="layers of each stage")
    parser.add_argument("--plain", action="store_true", help="nothing compiled")
    parser.add_argument("--memory", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    config = Config(cut=tuple(int(n) for n in args.cut.split(",")))
    if not is_rank():
        shared = ["--steps", str(args.steps), "--cut", args.cut, *(["--plain"] if args.plain else [])]
        launch(len(config.cut), *shared)
        for name in SYSTEMS:
            launch(len(config.cut), *shared, "--memory", name)
    elif args.memory:
        measure_memory(args.memory, partial(SYSTEMS[args.memory][0], config))
    else:
        systems = SYSTEMS | ({} if args.plain else COMPILED)
        compare_time(
            {name: (partial(build, config), peer) for name, (build, peer) in systems.items()}, args.steps
        )


if __name__ == "__main__":
    main()
