"""Measures the cost of recording: alternating steps with and without a recorder.

Two stages of a GPT under 1F1B on two processes show the cost as a share of a step. A chain of tiny layers in
one process shows the cost of an instruction, which nothing hides there. The numbers are first quartiles,
because other programs cause the slower steps.

    python benchmarks/recording.py [--rounds 100]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _chain import Chain
from _gpt import Config, Module
from _launch import is_rank, join, launch

import lightning_piper as piper
from lightning_piper.profile.recorder import StepRecorder
from lightning_piper.runtime import Executor, LocalTransport, ProcessTransport, run_local

MICROBATCHES = 8
CPU = torch.device("cpu")


def in_turn(
    step: Callable[[int], object], executors: list[Executor], rounds: int
) -> tuple[list[float], list[float]]:
    """Run steps, alternately without and with recording. Return the seconds of each step without recording,
    and of each step with recording."""
    recorders = [StepRecorder(executor, CPU) for executor in executors]
    plain: list[float] = []
    recorded: list[float] = []
    for i in range(2 * rounds + 10):
        on = (i // 2 + i) % 2 == 1  # off, on, on, off: a drift of the machine affects both equally
        for recorder in recorders:
            (recorder.attach if on else recorder.detach)()
        start = time.perf_counter()
        step(i)
        if i >= 10:
            (recorded if on else plain).append(time.perf_counter() - start)
        for recorder in recorders:
            if on:
                recorder.take()
    return plain, recorded


def report(what: str, plain: list[float], recorded: list[float], instructions: int) -> None:
    base, step = (statistics.quantiles(times, n=4)[0] for times in (plain, recorded))
    print(
        f"{what}: step {base * 1e3:.3f} ms, recorded {step * 1e3:.3f} ms ({(step / base - 1):+.2%}), "
        f"{(step - base) / instructions * 1e6:+.2f} us for each of {instructions} instructions"
    )


def on_processes(rounds: int) -> None:
    rank, size = join()
    config = Config(cut=(2, 2), d=128, seq=64, vocab=512)  # some tens of milliseconds for each step
    module = Module(config)
    tokens = torch.randint(
        config.vocab, (2 * MICROBATCHES, config.seq), generator=torch.Generator().manual_seed(0)
    )
    batch = (tokens, tokens.roll(-1, 1))
    compiled = piper.compile(module, batch, piper.schedules.one_f_one_b(size, MICROBATCHES))
    transport = ProcessTransport(compiled.plans, ranks=list(range(size)), device=CPU)
    executor = Executor(
        compiled.plans[rank], compiled.step, dict(module.named_parameters()), {}, transport, CPU
    )
    plain, recorded = in_turn(lambda i: executor.step(list(batch), seed=i), [executor], rounds)
    if rank == 0:
        report(
            f"{size} processes, GPT, 1F1B, {MICROBATCHES} microbatches",
            plain,
            recorded,
            len(executor.plan.instructions),
        )


def in_one_process(rounds: int) -> None:
    torch.set_num_threads(1)
    module, batch = Chain(4, 8), torch.randn(2 * MICROBATCHES, 8)
    compiled = piper.compile(module, batch, piper.schedules.one_f_one_b(4, MICROBATCHES))
    transport, params = LocalTransport(compiled.plans), dict(module.named_parameters())
    executors = [
        Executor(plan, compiled.step, params, {}, transport, CPU) for plan in compiled.plans.values()
    ]
    plain, recorded = in_turn(lambda i: run_local(executors, [batch], seed=i), executors, 5 * rounds)
    count = sum(len(plan.instructions) for plan in compiled.plans.values())
    report("1 process, 4 tiny stages (the worst case)", plain, recorded, count)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    rounds = parser.parse_args().rounds
    if is_rank():
        on_processes(rounds)
        return
    in_one_process(rounds)
    launch(2, "--rounds", str(rounds))


if __name__ == "__main__":
    main()
