"""Attention with a ring of keys between the members that have parts of a sequence."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_piper as piper
from lightning_piper import Place, Replicate, Split, schedules
from lightning_piper.compiler import Compiled
from lightning_piper.errors import CaptureError, DirectiveError, VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Sharded
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute
from lightning_piper.placements import ring
from lightning_piper.simulate import Link, Network, simulate
from lightning_piper.verify import Report
from lightning_piper.verify.static_check import check
from tests.groups import marked
from tests.ring import around, compiled_for, long, report_of, sequences, stages, words
from tests.tensors import PARAMS, VOCABULARY, decoder, divided, tensors

PAIRS = [[0, 1], [2, 3]]
PROGRAMS: dict[str, list[Any]] = {
    "two": around(2),
    "four": around(4),
    "microbatches": [around(4)[0], Split(filter={}, dim_name="MB", num_microbatches=4), around(4)[1]],
    "samples": [around(2)[0], Split(filter={}, dim_name="MB", num_microbatches=8), around(2)[1]],
    "1f1b": [*schedules.one_f_one_b(stages=2, microbatches=4, devices=PAIRS), sequences(PAIRS)],
    "zero bubble": [*schedules.zero_bubble(stages=2, microbatches=4, devices=PAIRS), sequences(PAIRS)],
    "zero1": [Place(filter={}, devices=PAIRS, axes=["data", "cp"]), sequences(None),
              Replicate(filter={}, devices=[0, 1, 2, 3], shard_optimizer=True)],
    "zero3": [Place(filter={}, devices=PAIRS, axes=["data", "cp"]), sequences(None),
              Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True)],
    "all": [*stages([[0, 1, 2, 3], [4, 5, 6, 7]]), Split(filter={}, dim_name="MB", num_microbatches=2),
            sequences([[0, 2], [1, 3], [4, 6], [5, 7]]),
            Replicate(filter={}, devices=[[0, 1, 2, 3], [4, 5, 6, 7]], shard_params=True)],
    "two of runs": around(2, runs=4),
    "four of runs": around(4, runs=2),
    "samples of runs": [around(2)[0], Split(filter={}, dim_name="MB", num_microbatches=8),
        around(2, runs=2)[1]],
    "1f1b of runs": [*schedules.one_f_one_b(stages=2, microbatches=4, devices=PAIRS),
        sequences(PAIRS, runs=2)],
    "zero3 of runs": [Place(filter={}, devices=PAIRS, axes=["data", "cp"]), sequences(None, runs=2),
                      Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True)],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "causal": {}, "all keys": {"causal": False}, "one head of keys": {"keys": 1}, "many": {"keys": 4},
    "dropout": {"dropout": 0.3}, "mask": {"causal": False, "mask": True},
}  # fmt: skip


def verified(report: Report) -> None:
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows), str(
        report
    )


@pytest.mark.parametrize("name", marked(PROGRAMS, ["zero bubble", "two of runs"]))
def test_it_equals_one_device(name):
    verified(report_of(PROGRAMS[name]))


@pytest.mark.parametrize(
    "name, degree",
    marked(
        [(name, 4) for name in MODELS] + [("causal", 2), ("mask", 2)],
        [("causal", 2), ("one head of keys", 4), ("dropout", 4)],
    ),
)
def test_every_attention_goes_round(name, degree):
    """Over four members keys go on from one that has not made them; over two they do not."""
    program = around(degree)
    verified(report_of(program, **MODELS[name]))
    assert exchanges(compiled_for(program, **MODELS[name]))["shift.cp"] == 2 * 6 * (degree - 1)


def exchanges(made: Compiled) -> Counter[str]:
    """Count the exchanges of each kind, among values that have heads."""
    nodes = made.dag.of_type(Redistribute)
    return Counter(
        n.label for n in nodes if not isinstance(n, CutOut) and len(n.outputs[0].tensors[0].shape) == 4
    )


@pytest.mark.parametrize("degree", [2, 4])
def test_keys_travel_three_times(degree):
    """Of each attention: keys and values forth, once more on the way back, and their gradients; nothing else
    of it.
    """
    assert exchanges(compiled_for(around(degree))) == {"shift.cp": 2 * 3 * 2 * (degree - 1)}
    dag = compiled_for(around(degree)).dag
    turns = Counter(str(n.after) for n in dag.of_type(Redistribute) if n.label == "shift.cp")
    assert turns == {"S(2)": 4 * (degree - 1)} | {f"S(2)+{i}": 8 for i in range(1, degree)}


def test_what_came_is_not_kept_for_the_way_back():
    dag = compiled_for(around(4)).dag
    for node in dag.of_type(Redistribute):
        if node.label == "shift.cp":
            (reader,) = dag.users(node)
            assert isinstance(reader, Chunk) and (
                node.outputs[0].kind == "cotangent"
            ) is reader.kind.startswith("B")


def test_lengths_that_cannot_be_divided_are_refused():
    with pytest.raises(
        CaptureError,
        match=r"whose dimension 1 cannot be sharded evenly over the 4 devices along 'cp'\. Pad it",
    ):
        piper.verify(long(), words(length=18), around(4))


# Keys in a ring see each model. Gathered keys and exchanged heads take turns over the models.
RUNS = [("ring", name) for name in MODELS] + [
    (("keys", "heads")[i % 2], name) for i, name in enumerate(MODELS)
]


@pytest.mark.parametrize(("attention", "name"), marked(RUNS, [("ring", "causal"), ("ring", "many")]))
def test_every_attention_takes_parts_of_runs(attention, name):
    verified(report_of(around(2, attention=attention, runs=4), **MODELS[name]))


def test_weights_are_divided_beside_parts_of_runs():
    """Queries have parts of heads then, and sums become parts of each run."""
    program = [Place(filter={}, devices=[0, 1]), divided([0, 1], values={"LAYER=*": (1, 3)})]
    verified(piper.verify(decoder(dropout=0.3), tensors(8), program))
    whole = [divided([0, 1], params=PARAMS | VOCABULARY, values={"*": (1, 3)}, attention="ring")]
    verified(piper.verify(decoder(), tensors(8), [*program[:1], *whole]))


IN_TWO = [{"*": 1, "PP=1,LAYER=2": (1, 2)}, {"PP=0,LAYER=1": (1, 2), "*": 1}]


@pytest.mark.parametrize("values", marked(IN_TWO, IN_TWO[1:]), ids=str)
def test_runs_of_positions_are_not_taken_for_samples(values):
    """Of which there are as many in a microbatch."""
    program = [
        around(2)[0],
        Split(filter={}, dim_name="MB", num_microbatches=4),
        dataclasses.replace(around(2)[1], values=values),
    ]
    verified(report_of(program, keys=1))


def test_runs_that_cannot_be_divided_are_refused():
    with pytest.raises(
        CaptureError,
        match=r"whose dimension 1 cannot be sharded evenly in each of its 4 runs over the 2 devices along "
        r"'cp'\. Pad it",
    ):
        piper.verify(long(), words(length=12), around(2, runs=4))
    for wrong in ((1, 0), (1, 2, 3), "1", (-1, 2)):
        with pytest.raises(DirectiveError, match="Give names or patterns with dimensions"):
            report_of([around(2)[0], dataclasses.replace(around(2)[1], values={"*": wrong})])


def test_keys_that_are_whole_do_not_go_round():
    """Where queries, keys and values are not parts of sequences alike, what moves less is done, and said."""
    module = long()
    original = F.scaled_dot_product_attention

    def whole(q, k, v, *args, **kwargs):
        return original(q, module.embed.weight.new_ones(k.shape), v, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", whole)
        with pytest.warns(
            UserWarning,
            match=r"test_ring.py:\d+ \(return original.*attention='ring' .*because keys and values are not "
            r"sharded like",
        ):
            verified(piper.verify(module, words(), around(2)))
            assert "shift.cp" not in exchanges(piper.compile(module, words(), around(2)))


# The operations by themselves


def drawn(heads: int = 4, keys: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    shapes = [(2, heads, 24, 8), (2, keys, 24, 8), (2, keys, 24, 8)]
    return tuple(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)  # type: ignore[return-value]


def together(
    q: Tensor, k: Tensor, v: Tensor, degree: int, runs: int, causal: bool, mask: Tensor | None = None
) -> list[Tensor]:
    """Return the merged results of all partial attentions, and their gradients for a gradient of ones."""
    ids = torch.arange(q.shape[2])
    about = (ids, ids, mask, causal, None, degree, runs)
    out, lse = ring.ATTEND(q, k, v, *about, 0)
    for turn in range(1, degree):
        out, lse = ring.MERGE(out, lse, *ring.ATTEND(q, k, v, *about, turn))
    terms = [
        ring.ATTEND_BACKWARD(torch.ones_like(q), q, k, v, out.to(q.dtype), lse, *about, turn)
        for turn in range(degree)
    ]
    return [out, *(sum(column) for column in zip(*terms, strict=True))]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("degree", "runs"), [(1, 1), (2, 1), (4, 1), (4, 3), (3, 2)])
def test_partial_attentions_make_the_whole_one(degree, runs, causal):
    q, k, v = (x.requires_grad_() for x in drawn())
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    grads = torch.autograd.grad(whole, (q, k, v), torch.ones_like(whole))
    found = together(*(x.detach() for x in (q, k, v)), degree, runs, causal)
    exact = (whole.detach(), *grads)
    assert (
        max(float((x - y).abs().max()) for x, y in zip(found, exact, strict=True)) < 1e-14
    )  # 3e-15 measured


@pytest.mark.parametrize("degree", [1, 4])
def test_a_query_that_sees_nothing_gets_nothing(degree):
    q, k, v = drawn()
    mask = torch.zeros(24, 24, dtype=torch.float64)
    mask[5], mask[7, 6:] = -math.inf, -math.inf
    out, *grads = together(q, k, v, degree, 1, True, mask)
    assert (
        not out[:, :, 5].any()
        and not grads[0][:, :, 5].any()
        and all(x.isfinite().all() for x in (out, *grads))
    )
    seen = F.scaled_dot_product_attention(
        q, k, v, mask + torch.full((24, 24), -math.inf).triu(1), enable_gqa=True
    )
    assert torch.allclose(out[:, :, 6:], seen[:, :, 6:], rtol=0, atol=1e-14)


def test_low_precision_is_put_together_in_float32():
    """Members add no rounding of their own: the result is as near as that of one attention."""
    q, k, v = drawn(dtype=torch.bfloat16)
    exact = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), enable_gqa=True)
    one = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    out, lse = ring.ATTEND(q, k, v, *(torch.arange(24),) * 2, None, False, None, 4, 1, 0)
    assert out.dtype == lse.dtype == torch.float32
    found = together(q, k, v, 4, 1, False)[0].to(torch.bfloat16)
    far, near = (float((x.double() - exact).abs().max()) for x in (found, one))
    assert 0 < far < 1.5 * near


def test_keys_that_nobody_sees_are_left_out():
    """Of contiguous parts the last of four members has 1.6 times as many pairs to compute as they have on
    average; of parts of four runs, 1.18 times as many, and less to do than the third one before.
    """
    found = {}
    for runs in (1, 4):
        parts = [
            Sharded(0, runs).parts(torch.arange(64), 4),
            *(Sharded(0, runs, turn).parts(torch.arange(64), 4) for turn in range(4)),
        ]
        found[runs] = [
            sum(ring.work(parts[0][i].tolist(), keys[i].tolist(), True) for keys in parts[1:])
            for i in range(4)
        ]
    assert found == {1: [256, 512, 768, 1024], 4: [448, 512, 576, 640]}


# On the way while others work


def attending(made: Any) -> list[Chunk]:
    """Return the forward chunks that run an attention."""
    code = made.step.at(made.step.size).code
    return [
        c
        for c in made.dag.of_type(Chunk)
        if c.kind == "F" and any("atten" in str(n.target) for n in code[c.key].graph.nodes)
    ]


def beside_attention(program: Any) -> list[bool]:
    """Return for each exchange of keys and values in the forward pass whether its device runs an attention
    meanwhile.
    """
    made = compiled_for(program)
    chunks = {c.id for c in attending(made)}
    keys = {n.id for n in made.dag.of_type(Redistribute) if not isinstance(n, CutOut)
            and n.outputs[0].kind == "activation" and len(n.outputs[0].tensors[0].shape) == 4}  # fmt: skip
    found = simulate(
        made.dag, made.plans, lambda chunk: 4 if chunk.id in chunks else 1, Network(Link(latency=2))
    )
    work = [s for s in found.timeline if s.device == 0 and s.node in chunks]
    moves = [s for s in found.timeline if s.device == 0 and s.node in keys]
    assert len(moves) == len(keys)
    assert len(work) == len(chunks)
    return [any(w.start < s.end and s.start < w.end for w in work) for s in moves]


@pytest.mark.parametrize("degree", [2, 4])
def test_keys_are_on_their_way_while_others_are_attended_to(degree):
    """Of one microbatch, which has nothing else to do while keys are gathered."""
    shifts = beside_attention(around(degree))
    assert len(shifts) == 4 * (degree - 1) and all(shifts)
    assert not any(beside_attention(around(degree, attention="keys")))


def test_a_member_has_room_for_two_parts_of_the_keys():
    """The part that is attended to, and the next one."""
    made = compiled_for(around(4))
    chunks = attending(made)
    for node in made.dag.of_type(Redistribute):
        if node.label == "shift.cp" and node.outputs[0].kind == "activation":
            (reader,), source = made.dag.users(node), made.dag.nodes[node.inputs[0][0]]
            assert isinstance(reader, Chunk) and isinstance(source, Chunk)
            assert len([c for c in chunks if source.region < c.region < reader.region]) == 1


# Seeded faults


def test_gradients_that_are_not_brought_back_are_found():
    dag = compiled_for(around(4)).dag
    for node in [n for n in dag.of_type(Redistribute) if n.label == "shift.cp"]:
        broken = dag.copy()
        for reader in dag.users(node):
            broken.substitute(broken.nodes[reader.id], (node.id, 0), node.inputs[0])
        with pytest.raises(
            VerificationError, match=r"as S\(2\).*, but its code takes S\(2\).*: change the placement first"
        ):
            check(broken)


@pytest.mark.parametrize("turn", [0, 2, 3, 5])
def test_a_shift_by_another_number_is_found(turn):
    dag = compiled_for(around(4)).dag
    node = next(n for n in dag.of_type(Redistribute) if n.after == Sharded(2, turn=1))
    broken = dag.copy()
    broken.change(broken.nodes[node.id], after=Sharded(2, turn=turn))
    with pytest.raises(VerificationError):
        check(broken)
