"""Measures the executor's overhead in processor time: tiny stages in one process, compared with a plain loop over
the same graphs.

The loop calls each chunk's code with prepared arguments in plan order, and adds gradients as the plan does.
The difference between a step and the loop, divided by the number of the plan's instructions, is the
executor's cost for each instruction.

    python benchmarks/overhead.py [--rounds 300]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _chain import Chain
from torch import Tensor

import lightning_piper as piper
from lightning_piper.ir.nodes import Chunk
from lightning_piper.runtime import Executor, LocalTransport, run_local

STAGES, MICROBATCHES, WIDTH = 4, 8, 8


def plain_loop(compiled: piper.Compiled, params: dict[str, Tensor], batch: Tensor) -> Callable[[], None]:
    """Return a loop over the step's chunks with prepared arguments, and over the additions of gradients."""
    dag = compiled.dag
    values: dict[tuple[int, int], list[Tensor]] = {}
    calls: list[tuple[Callable[[list[Tensor]], tuple[Tensor, ...]], list[Tensor]]] = []
    total: dict[tuple[int, int], list[Tensor]] = {}
    adds: list[tuple[list[Tensor], list[Tensor]]] = []

    def made_by_chunk(ref: tuple[int, int]) -> tuple[int, int]:
        while ref not in values:  # follow transfers to the chunk
            ref = dag.nodes[ref[0]].inputs[0]
        return ref

    with torch.no_grad():
        order = sorted(
            dag.of_type(Chunk),
            key=lambda c: (c.kind == "B", c.slice, c.region if c.kind == "F" else -c.region),
        )
        for chunk in order:
            interface, code = dag.interface(chunk), dag.code_of(chunk)
            args = [x for ref in chunk.inputs for x in values[made_by_chunk(ref)]]
            args += [params[name].detach() for name in interface.params]
            args += [batch[chunk.slice.start : chunk.slice.stop] for _ in interface.batch]
            if interface.seeds_gradient:
                args.append(torch.tensor(len(chunk.slice) / dag.size, device=batch.device))
            calls.append((code.run, args))
            flat = iter(code.run(list(args)))
            for i, specs in enumerate(code.outputs):
                values[chunk.id, i] = [next(flat) for _ in specs]
                if interface.outputs[i].kind == "grad":
                    bundle = values[chunk.id, i]
                    if (chunk.region, i) in total:
                        adds.append((total[chunk.region, i], bundle))
                    else:
                        total[chunk.region, i] = [x.clone() for x in bundle]

    def loop() -> None:
        with torch.no_grad():
            for run, args in calls:
                run(list(args))
            for into, bundle in adds:
                for a, b in zip(into, bundle, strict=True):
                    a.add_(b)

    return loop


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=300)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    module, batch = Chain(STAGES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)
    split = piper.Split(filter={}, dim_name="MB", num_microbatches=MICROBATCHES)
    for program in ([split], piper.schedules.one_f_one_b(STAGES, MICROBATCHES)):
        compiled = piper.compile(module, batch, program)
        params = dict(module.named_parameters())
        transport = LocalTransport(compiled.plans)
        cpu = torch.device("cpu")
        executors = [
            Executor(compiled.plans[d], compiled.step, params, {}, transport, cpu)
            for d in sorted(compiled.plans)
        ]
        loop = plain_loop(compiled, params, batch)
        ours: list[float] = []
        plain: list[float] = []
        for i in range(rounds + 20):
            start = time.thread_time()
            run_local(executors, [batch], seed=i)
            middle = time.thread_time()
            loop()
            if i >= 20:
                ours.append(middle - start)
                plain.append(time.thread_time() - middle)
        count = sum(len(plan.instructions) for plan in compiled.plans.values())
        step, base = statistics.median(ours) * 1e6, statistics.median(plain) * 1e6
        print(
            f"{len(compiled.plans)} device(s) in one process: step {step:.0f} us, plain loop {base:.0f} us, "
            f"{count} instructions: {(step - base) / count:.2f} us an instruction"
        )


if __name__ == "__main__":
    main()
