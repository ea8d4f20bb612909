"""Samples gathered from the whole batch: whatever divides the batch, the results computed from them are those
of one device.
"""

from __future__ import annotations

import networkx as nx
import pytest

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.errors import VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples
from lightning_piper.passes import run_pipeline
from lightning_piper.plan.order import global_order
from lightning_piper.testing import Spec, case, run_interpreter
from lightning_piper.testing.suite import check_program
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.verify.test_mutations import changes
from tests.verify.test_totals import PROGRAMS, place, split

ONE = Spec(("linear", "gathered", "residual"), (0, 0, 1))
SEVERAL = Spec(("gathered", "tied", "dropout", "gathered", "conv", "tied"), (0, 1, 1, 1, 0, 1))
LOSSES = Spec(("gathered", "auxiliary", "gathered", "synced"), (0, 1, 1, 1), loss="terms")
LAST = Spec(("linear", "residual", "gathered"), (0, 0, 1), loss="sum")
STAGES = Spec(("linear", "residual", "gathered", "tied"), (0, 1, 2, 3))

ORDERED = {
    "1F1B": (LAST, schedules.one_f_one_b(2, 4)),
    "1F1B, gathered in both stages": (SEVERAL, schedules.one_f_one_b(2, 4)),
    "zero bubble": (LAST, schedules.zero_bubble(2, 4)),
    "zb_h2": (ONE, schedules.zb_h2(2, 4)),
    "interleaved": (STAGES, schedules.interleaved_one_f_one_b(4, 2, 4)),
    "zbv": (STAGES, schedules.zbv(4, 8)),
    "dualpipe": (ONE, schedules.dualpipe(2, 4)),
    "1F1B in replicas": (
        LAST,
        [
            *schedules.one_f_one_b(2, 2, devices=[[0, 2], [1, 3]]),
            piper.Replicate(filter={}, devices=[[0, 2], [1, 3]], shard_params=True),
        ],
    ),
    "recomputed": (ONE, [*schedules.one_f_one_b(2, 2), piper.Recompute(filter={})]),
    "offloaded": (ONE, [*place(0, 1), split(2), piper.Offload(filter={})]),
}


OTHERS = [pytest.param(spec, marks=pytest.mark.long) for spec in (SEVERAL, LOSSES)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("spec", [ONE, LAST, *OTHERS], ids=["one", "last", "several", "losses"])
def test_as_on_one_device(spec: Spec, name: str) -> None:
    dag = check_program(case(spec, 8), PROGRAMS[name])
    for kind in (GatherSamples, ScatterSamples):
        assert sum(1 for _ in dag.of_type(kind)) >= spec.blocks.count("gathered")


@pytest.mark.parametrize("name", ORDERED)
def test_all_forward_passes_come_first(name: str) -> None:
    spec, program = ORDERED[name]
    dag = check_program(case(spec, 8), program)
    order = {node.id: k for k, node in enumerate(global_order(dag))}
    for gather in dag.of_type(GatherSamples):
        before, after = nx.ancestors(dag.graph, gather.id), nx.descendants(dag.graph, gather.id)
        assert max(order[i] for i in before) < min(order[i] for i in after)
        assert any(isinstance(dag.nodes[i], Chunk) and dag.nodes[i].tags["PASS"] != "F" for i in after)


@pytest.mark.parametrize("spec, name", [(LAST, "replicas in stages"), (ONE, "microbatches, then replicas")])
def test_no_single_change_goes_unnoticed(spec: Spec, name: str) -> None:
    """Such as a part that reads its own rows, or rows that come twice."""
    one = case(spec, 8)
    dag = run_pipeline(one.step, PROGRAMS[name])
    clean, refused, unnoticed = run_interpreter(one, dag), 0, []
    for what, change in changes(dag):
        copy = dag.copy()
        change(copy)
        try:
            check(copy, final=True)
        except VerificationError:
            refused += 1
            continue
        if compare(clean, run_interpreter(one, copy), dict.fromkeys(clean.grads, 1e-12)).verdict == "differs":
            unnoticed.append(what)
    assert unnoticed == [] and refused > 100
