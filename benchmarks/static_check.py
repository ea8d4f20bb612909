"""Measures the time of the static check and of compiling plans as the training DAG grows. Both times should
grow linearly.

    python benchmarks/static_check.py [--microbatches 455]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from _chain import Chain

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.verify import check

STAGES, WIDTH = 8, 4


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--microbatches", type=int, default=455)
    first = parser.parse_args().microbatches
    module, before = Chain(STAGES, WIDTH), 0.0
    print(
        "microbatches   nodes   edges   program s   static check s   plans s   plan check s   check, times "
        "the row before"
    )
    for microbatches in (first, 2 * first, 4 * first):
        step = capture(module, torch.randn(microbatches, WIDTH))
        dag = build_dag(step)
        program = piper.schedules.one_f_one_b(STAGES, microbatches)
        rewriting = seconds(lambda dag=dag, program=program: complete(apply_program(dag, program)))
        checking = min(seconds(lambda dag=dag: check(dag)) for _ in range(7))
        start = time.perf_counter()
        plans = compile_plans(dag)
        planning = time.perf_counter() - start
        plan_check = seconds(lambda plans=plans: check_plans(plans))
        growth = f"{checking / before:.2f}" if before else ""
        print(f"{microbatches:12} {len(dag.nodes):7} {dag.graph.number_of_edges():7} {rewriting:11.2f} "
              f"{checking:16.2f} {planning:9.2f} {plan_check:14.2f}   {growth}", flush=True)  # fmt: skip
        before = checking


if __name__ == "__main__":
    main()
