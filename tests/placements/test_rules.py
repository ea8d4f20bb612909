"""The rules of operations, each proved by execution on parts, and wrong rules, which the execution finds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import lightning_piper as piper
from lightning_piper.errors import VerificationError
from lightning_piper.ir.values import Partial, Replicated, Sharded
from lightning_piper.placements import proof
from lightning_piper.placements.rule import Rule
from lightning_piper.placements.rules import rules_for
from lightning_piper.placements.views import regrouped, regrouping
from tests.groups import marked

aten = torch.ops.aten
R, P = Replicated(), Partial()


def traced(function: Any, *shapes: Any) -> list[Node]:
    """Return the operations of a function of tensors."""
    inputs = [x if isinstance(x, torch.Tensor) else torch.randn(x) for x in shapes]
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [
        node
        for node in graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    ]


def backward(function: Any) -> Any:
    def both(*inputs: torch.Tensor) -> Any:
        given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
        out = function(*given)
        return torch.autograd.grad(
            out.sum() if out.ndim == 0 else (out * out).sum(), [x for x in given if x.requires_grad]
        )

    return both


WORDS = torch.randint(0, 8, (4, 8))
CASES: dict[str, list[Any]] = {
    "linear": [backward(F.linear), (4, 8, 16), (32, 16), (32,)],
    "products": [backward(lambda x, y: (x @ y).tanh()), (4, 8, 16), (4, 16, 8)],
    "gelu": [backward(lambda x, y: F.gelu(x) * y + x / 2), (4, 8), (8,)],
    "norm": [backward(lambda x, w, b: F.layer_norm(x, (16,), w, b)), (4, 8, 16), (16,), (16,)],
    "rms": [backward(lambda x, w: F.rms_norm(x, (16,), w)), (4, 8, 16), (16,)],
    "attention": [backward(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        *[(4, 8, 8, 16)] * 3],
    "fewer keys": [
        backward(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)),
        (4, 16, 8, 16), (4, 8, 8, 16), (4, 8, 8, 16),
    ],
    "softmax": [backward(lambda x: x.softmax(-1).log_softmax(1)), (4, 8, 16)],
    "safe softmax": [backward(lambda x: torch.ops.aten._safe_softmax(x, -1)), (4, 8, 16)],
    "filled": [lambda x: (x.new_zeros((2, 4)), torch.zeros_like(x) + x, x.new_full((2,), 3.0)), (4, 8, 16)],
    "lookup": [backward(lambda x, w: F.embedding(x, w)), WORDS, (8, 16)],
    "views": [backward(lambda x: x.unflatten(-1, (4, 4)).transpose(1, 2).flatten(2).permute(2, 0, 1)),
        (4, 8, 16)],
    "pieces": [backward(lambda x: torch.cat([p.sin() for p in x.chunk(2, -1)], 1)[:, 2:].select(2, 1)),
        (4, 8, 16)],
    "cache": [lambda x: torch.ops.aten.slice.Tensor(torch.cat([torch.empty(0), x], -2), 1, 0, 8).sin(),
        (4, 8, 16)],
    "sums": [backward(lambda x: x.sum(1) * x.mean((0, 1)) + x.sum()), (4, 8, 16)],
    "shapes": [backward(lambda x: x.unsqueeze(1).expand(4, 4, 8).clone() + x.sum(0, keepdim=True)), (4, 8)],
    "in order": [backward(lambda x: x.flip(1).cumsum(1).unsqueeze(1).sin().squeeze(1)), (4, 8, 16)],
    "squeezed": [lambda x: x.squeeze(0).unsqueeze(0).squeeze(0), (4, 8, 16)],
    "norms": [
        lambda x: torch.linalg.vector_norm(x, 2, 1, True) * torch.linalg.vector_norm(x, 1, (0, -1)).unsqueeze(-1),
        (4, 8, 16)],
    "largest": [lambda x: x.amax(1) + x.argmax(1, keepdim=True), (4, 8, 16)],
    "words": [lambda t, i: torch.ops.lightning_piper.rows(t, i, torch.arange(8), 8), (8, 16), WORDS],
    "words back": [lambda g, i: torch.ops.lightning_piper.rows_backward(g, i, torch.arange(8), 2),
        (4, 8, 16), WORDS],
    "picked": [lambda x, i: torch.ops.lightning_piper.picked(x, i[:, :1], torch.arange(8), 1, 8), (4, 8),
        WORDS],
    "picked back": [lambda g, i: torch.ops.lightning_piper.spread(g, i[:, :1], torch.arange(8), 1), (4, 1),
        WORDS],
    "scores": [backward(lambda h, w, b, i: piper.linear_cross_entropy(h, w, i, linear_bias=b, chunk=5)),
        (4, 8, 16), (8, 16), (8,), WORDS],
    "scores of classes": [
        lambda h, w, b, i: torch.ops.lightning_piper.chunked_scores_part(h, w, b, i, torch.arange(16), 5, 16),
        (4, 8, 16), (4, 4, 16), (16,), WORDS],
    "scores of classes back": [
        lambda g, h, w, i: torch.ops.lightning_piper.chunked_scores_backward(
            g, g.sin(), h, w, None, i, g.cos(), torch.arange(16), 5, [True, True, False]),
        (4, 8), (4, 8, 16), (16, 16), WORDS],
    "many scores of classes": [
        lambda h, w, i: torch.ops.lightning_piper.chunked_scores_part(h, w, None, i, torch.arange(512), 5, 512),
        (16, 32, 64), (4, 128, 64), torch.randint(512, (16, 32))],
    "large": [backward(F.linear), (64, 128, 256), (512, 256), (512,)],
    "large norm": [backward(lambda x, w, b: F.layer_norm(x, (256,), w, b)), (64, 128, 256), (256,), (256,)],
    "large pieces": [backward(lambda x: torch.cat([p.sin() for p in x.chunk(2, -1)], 1)[:, 2:].select(2, 1)),
        (64, 128, 256)],
    "large views": [backward(lambda x: x.unflatten(-1, (4, 64)).transpose(1, 2).flatten(0, 1).exp()),
        (64, 128, 256)],
}  # fmt: skip


@pytest.mark.parametrize("degree", marked([2, 4], [2]))
@pytest.mark.parametrize("name", CASES)
def test_every_rule_is_what_execution_gives(name, degree):
    function, *shapes = CASES[name]
    count = 0
    for node in traced(function, *shapes):
        for rule in rules_for(node, degree)[1:]:
            if node.target is not aten.native_dropout.default:
                proof.prove(node, rule, degree)
                count += 1
    assert count >= (1 if "words" in name or "picked" in name else 3 if "of classes" in name else 4)


@pytest.mark.parametrize(
    "function",
    [lambda x: torch.ops.aten._safe_softmax(x, -1), lambda x: x.new_zeros((2, 4)), torch.zeros_like],
)
def test_these_operations_work_on_shards(function):
    """Without a rule, an operation would gather its input, and no weight before it could be sharded."""
    rules = rules_for(traced(function, (4, 8, 16))[0], 2)
    assert any(rule.inputs == (Sharded(1),) for rule in rules)


@pytest.mark.parametrize("runs", [2, 4])
def test_a_sequence_in_runs_may_be_as_long_as_what_is_cut(runs):
    """A learned sink is one more column of the scores, which a slice removes. The slice has to be tried on as many
    columns, and as many as there are queries."""
    (cut,) = (
        n
        for n in traced(lambda x: x[..., :-1].sin(), (8, 8, 16, 17))
        if n.target is aten.slice.Tensor and n.args[1] == 3
    )
    rule = Rule((Sharded(2, runs),), (Sharded(2, runs),))
    assert rule in rules_for(cut, 2, {runs})
    proof.prove(cut, rule, 2)
    with pytest.raises(VerificationError, match="is wrong: "):
        proof.prove(cut, replace(rule, outputs=(Sharded(2),)), 2)


@pytest.mark.parametrize(
    ("function", "shapes", "rule"),
    [
        # A sum over members that no node makes.
        (torch.mm, [(4, 8), (8, 4)], Rule((Sharded(1), Sharded(0)), (R,))),
        (torch.mm, [(4, 8), (8, 4)], Rule((Sharded(0), R), (P,))),
        (lambda x: x.sum(0), [(4, 8)], Rule((Sharded(0),), (R,))),
        (
            lambda x: x.mean(0, keepdim=True),
            [(4, 8)],
            Rule((Sharded(0),), (P,)),
        ),  # means of parts are not terms of the mean
        (torch.tanh, [(4, 8)], Rule((P,), (P,))),
        (torch.add, [(4, 8), (8,)], Rule((P, R), (P,))),  # a bias added on every member
        (torch.mul, [(4, 8), (4, 8)], Rule((P, P), (P,))),
        (lambda x: x.view(4, 2, 4), [(4, 8)], Rule((Sharded(1),), (Sharded(2),))),
        (
            lambda x: torch.softmax(x, 1),
            [(4, 8)],
            Rule((Sharded(1),), (Sharded(1),)),
        ),  # a local maximum, and a local sum
        (lambda x: x.flip(0), [(4, 8)], Rule((Sharded(0),), (Sharded(0),))),  # parts in the wrong order
    ],
)
def test_a_wrong_rule_is_found(function, shapes, rule):
    node = traced(function, *shapes)[0]
    with pytest.raises(VerificationError, match="is wrong: "):
        proof.prove(node, rule, 2)


def test_the_biases_gradient_of_a_norm_is_a_term():
    """Forgetting to sum it over parts of a sequence is the best known silent bug of this family."""
    norm = next(n for n in traced(*CASES["norm"]) if n.target is aten.native_layer_norm_backward.default)
    (_, *rules) = rules_for(norm, 2)
    rule = next(rule for rule in rules if rule.inputs[0] == Sharded(1))
    assert rule.outputs == (Sharded(1), P, P)
    with pytest.raises(VerificationError, match="output 1 differs"):
        proof.prove(norm, replace(rule, outputs=(Sharded(1), R, P)), 2)


sizes = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=3)


@given(before=sizes, after=sizes)
def test_a_view_divides_what_it_can(before, after):
    x = torch.empty(before)
    if x.numel() != torch.Size(after).numel() or x.numel() < 2:
        return
    node = traced(lambda x: x.view(after), x)[0]
    for mine, theirs in regrouped(before, after):
        count = [
            torch.Size(shape[d] for d in dims).numel() for shape, dims in ((before, mine), (after, theirs))
        ]
        assert count[0] == count[1]
    for rule in rules_for(node, 2)[1:]:
        proof.prove(node, rule, 2)


VIEWS = [((2, 2), (4,)), ((2, 8), (16,)), ((8, 4), (2, 4, 4)), ((16,), (4, 4)), ((2, 4, 2), (8, 2))]


@pytest.mark.parametrize("before, after", VIEWS)
def test_parts_of_runs_stay_parts_of_runs(before, after):
    """Members have the same elements before and after, and equal parts of both."""
    x = torch.arange(math.prod(before)).view(before)
    pairs = list(regrouping(before, after, 2, {1, 2}))
    assert pairs
    for one, other in pairs:
        assert before[one.dim] % (2 * one.blocks) == 0
        for mine, theirs in zip(one.parts(x, 2), other.parts(x.view(after), 2), strict=True):
            assert torch.equal(mine.flatten(), theirs.flatten()) and len(mine.flatten()) == x.numel() // 2
