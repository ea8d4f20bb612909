"""The static check of backward passes in halves: what it accepts, and what it reports for graphs that were
tampered with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest

from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ir.values import Slice
from lightning_piper.ops.update import Accumulate
from lightning_piper.passes import complete
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.dags import b, bi, build, bw, chunk, f, order, place, run, split

# Stage 1 has microbatches 0 and 1 in halves and 2 whole. Stage 2 has 0 whole, and 1 and 2 in halves.
MIXED = [
    *place(0, 1, 2), split(3),
    order(bi(1, 0), bi(1, 1), bw(1, 0), b(1, 2), bw(1, 1)),
    order(f(2, 0), b(2, 0), bi(2, 1), bi(2, 2), bw(2, 2), bw(2, 1)),
]  # fmt: skip


def base() -> TrainingDAG:
    dag = build("gpt", *MIXED)
    complete(dag)
    return dag


def total(dag: TrainingDAG, stage: int) -> Accumulate:
    return next(a for a in dag.of_type(Accumulate) if a.tags.get("PP") == stage)


def place_of(dag: TrainingDAG, node: Chunk, label: str) -> int:
    """The index of the node's output whose label begins with `label`."""
    return next(i for i, value in enumerate(node.outputs) if value.label.startswith(label))


def change(dag: TrainingDAG, node: Chunk, old: str, new: Ref) -> None:
    """Let a chunk read `new` instead of the value `old`, such as `saved:BW of F[PP=1,MB=0]`."""
    (found,) = [
        ref for ref in node.inputs if f"{dag.value(ref).label} of {dag.nodes[ref[0]].label}".startswith(old)
    ]
    dag.rewire(node, inputs=tuple(new if ref == found else ref for ref in node.inputs))


def weights_dropped(dag: TrainingDAG) -> None:
    gone = chunk(dag, "BW[PP=1,MB=1]")
    for reader in dag.users(gone):
        dag.rewire(reader, inputs=tuple(ref for ref in reader.inputs if ref[0] != gone.id))
    dag.remove([gone])


def weights_left_out_of_the_sum(dag: TrainingDAG) -> None:
    gone, sum_ = chunk(dag, "BW[PP=1,MB=1]"), total(dag, 1)
    dag.rewire(sum_, inputs=tuple(ref for ref in sum_.inputs if ref[0] != gone.id))


def weights_counted_twice(dag: TrainingDAG) -> None:
    half, sum_ = chunk(dag, "BW[PP=1,MB=1]"), total(dag, 1)
    dag.rewire(sum_, inputs=(*sum_.inputs, next(ref for ref in sum_.inputs if ref[0] == half.id)))


def weights_computed_and_counted_twice(dag: TrainingDAG) -> None:
    half, sum_ = chunk(dag, "BW[PP=1,MB=0]"), total(dag, 1)
    again = dag.add(dataclasses.replace(half, id=-1))
    place_ = next(ref[1] for ref in sum_.inputs if ref[0] == half.id)
    dag.rewire(sum_, inputs=(*sum_.inputs, (again.id, place_)))


def counted_whole_and_as_a_half(dag: TrainingDAG) -> None:
    """Add a whole backward pass of microbatch 1, which already has its halves."""
    whole, half, sum_ = chunk(dag, "B[PP=1,MB=2]"), chunk(dag, "BI[PP=1,MB=1]"), total(dag, 1)
    saved = dict(zip(dag.interface(half).inputs, half.inputs, strict=True))
    weights = chunk(dag, "BW[PP=1,MB=1]")
    saved |= dict(zip(dag.interface(weights).inputs, weights.inputs, strict=True))
    inputs = tuple(saved[source] for source in dag.interface(whole).inputs)
    again = dag.add(dataclasses.replace(whole, id=-1, slice=half.slice, inputs=inputs))
    place_ = next(ref[1] for ref in sum_.inputs if ref[0] == whole.id)
    dag.rewire(sum_, inputs=(*sum_.inputs, (again.id, place_)))


def handed_over_of_another_microbatch(dag: TrainingDAG) -> None:
    other = chunk(dag, "BI[PP=2,MB=2]")
    change(dag, chunk(dag, "BW[PP=2,MB=1]"), "saved:BW of BI", (other.id, place_of(dag, other, "saved")))


def saved_of_another_microbatch(dag: TrainingDAG) -> None:
    other = chunk(dag, "F[PP=2,MB=2]")
    change(dag, chunk(dag, "BW[PP=2,MB=1]"), "saved:BW of F", (other.id, place_of(dag, other, "saved:BW")))


def handed_over_of_another_region(dag: TrainingDAG) -> None:
    other = chunk(dag, "BI[PP=2,MB=1]")
    change(dag, chunk(dag, "BW[PP=1,MB=1]"), "saved:BW of BI", (other.id, place_of(dag, other, "saved")))


def saved_for_the_other_half(dag: TrainingDAG) -> None:
    forward = chunk(dag, "F[PP=2,MB=1]")
    change(
        dag, chunk(dag, "BI[PP=2,MB=1]"), "saved:BI of F", (forward.id, place_of(dag, forward, "saved:BW"))
    )


def gradient_of_another_microbatch(dag: TrainingDAG) -> None:
    half, whole = chunk(dag, "BI[PP=1,MB=1]"), chunk(dag, "B[PP=1,MB=2]")
    (arrived,) = [ref for ref in whole.inputs if dag.value(ref).kind == "cotangent"]
    change(dag, half, "cotangent", arrived)


def what_is_handed_over_summed(dag: TrainingDAG) -> None:
    half, inputs, sum_ = chunk(dag, "BW[PP=1,MB=1]"), chunk(dag, "BI[PP=1,MB=1]"), total(dag, 1)
    ref = (inputs.id, place_of(dag, inputs, "saved"))
    dag.rewire(sum_, inputs=tuple(ref if x[0] == half.id else x for x in sum_.inputs))


def samples_of_another_microbatch(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "BW[PP=1,MB=1]"), slice=Slice(0, 2))


def first_half_gone(dag: TrainingDAG) -> None:
    """Remove a first half in stage 2, so that stage 1 and the sum read the one of another microbatch."""
    gone, other = chunk(dag, "BI[PP=2,MB=1]"), chunk(dag, "BI[PP=2,MB=2]")
    for reader in dag.users(gone):
        dag.rewire(
            reader, inputs=tuple((other.id, ref[1]) if ref[0] == gone.id else ref for ref in reader.inputs)
        )
    dag.remove([gone])


EDITS: list[tuple[Callable[[TrainingDAG], None], str, bool]] = [
    (weights_dropped, r"BW\[PP=1\]: samples 2:3 are missing", True),
    (weights_left_out_of_the_sum, r"gradient of layers.0.* \(update .*\): of grad .*, samples 2:3 are "
                                  r"missing", True),
    (weights_counted_twice, r"gradient of layers.0.*: samples 2:3 count 2 times", True),
    (weights_computed_and_counted_twice, r"gradient of layers.0.*: samples 0:2 count 2 times", True),
    (counted_whole_and_as_a_half, r"gradient of layers.0.*: samples 2:3 count 2 times", True),
    (handed_over_of_another_microbatch,
     r"BW\[PP=2,MB=1\] %\d+ on device 2 \(directive 5, order\) works on samples 2:3 but reads saved BW of "
     r"BI\[PP=2\] of samples 3:",
     True),
    (saved_of_another_microbatch, r"BW\[PP=2,MB=1\] .* works on samples 2:3 but reads saved BW of F\[PP=2\] "
                                  r"of samples 3:4", True),
    (handed_over_of_another_region,
     r"BW\[PP=1,MB=1\] .* reads saved BW of BI\[PP=2\], but its region reads saved BW of BI\[PP=1\]: let "
     r"it read saved BW of", False),
    (saved_for_the_other_half,
     r"BI\[PP=2,MB=1\] .* reads saved BW of F\[PP=2\], but its region reads saved BI of F\[PP=2\]", False),
    (gradient_of_another_microbatch, r"BI\[PP=1,MB=1\] .* works on samples 2:3 but reads cotangent .* of "
                                     r"samples 3:4", True),
    (what_is_handed_over_summed, r"accumulate .* adds saved BW of BI\[PP=1\] to grad layers.0", False),
    (samples_of_another_microbatch, r"BW\[PP=1,MB=1\] .* works on samples 0:2 but reads", False),
    (first_half_gone, r"BI\[PP=2\]: samples 2:3 are missing", True),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "says", "runs"), EDITS, ids=[edit.__name__ for edit, _, _ in EDITS])
def test_a_tampered_graph_is_refused(edit: Callable[[TrainingDAG], None], says: str, runs: bool) -> None:
    """`runs`: it can still be executed (pieces have one size), and computes something else."""
    dag = base()
    check(dag, final=True)
    clean = run("gpt", dag)
    edit(dag)
    with pytest.raises(VerificationError, match=says):
        check(dag, final=True)
    if runs:
        assert compare(clean, run("gpt", dag), {}).verdict == "differs"


@pytest.mark.parametrize("stage", [0, 1])
def test_every_mixture_of_halves_and_wholes_passes(stage: int) -> None:
    clean = run("mlp", build("mlp", split(3)))
    for kinds in itertools.product(("B", "BI"), repeat=3):
        groups = [{"PP": stage, "MB": mb, "PASS": kind} for mb, kind in enumerate(kinds)]
        dag = build("mlp", *place(0, 1), split(3), order(*groups))
        complete(dag)
        check(dag, final=True)
        assert dag.microbatches() == (Slice(0, 2), Slice(2, 3), Slice(3, 4))
        assert compare(clean, run("mlp", dag), {}).verdict == "bitwise equal"


def test_a_graph_without_halves_speaks_of_whole_passes() -> None:
    dag = build("gpt", split(2))
    gone = chunk(dag, "B[PP=1,MB=1]")
    dag.change(gone, slice=Slice(0, 2))
    with pytest.raises(VerificationError, match=r"\n  B\[PP=1\]: samples 2:4 are missing"):
        check(dag)
