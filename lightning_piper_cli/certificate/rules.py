"""A table of rules: the placement of an operation's result, from the placements of the tensors that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Placement:
    """The part of a value that a member holds: `kind` R, P or S. S: part i - turn of each of `runs` equal runs along `dim`."""

    kind: str = "R"
    dim: int = 0
    runs: int = 1
    turn: int = 0

    @staticmethod
    def of(text: str) -> Placement:
        if text[0] != "S":
            return Placement(text)
        inner, _, turn = text[2:].partition(")")
        dim, _, runs = inner.partition(",")
        return Placement("S", int(dim), int(runs or 1), int(turn.removeprefix("+") or 0))


def shape_of(tensor: str) -> list[int]:
    return [int(n) for n in tensor.partition("[")[2][:-1].split(",") if n]


def with_shape(tensor: str, shape: Iterable[int]) -> str:
    return f"{tensor.partition('[')[0]}[{','.join(map(str, shape))}]"


def changed(tensor: str, before: str, after: str, degree: int) -> str:
    """Return what a member has of a tensor after a change of its placement over `degree` members."""
    shape = shape_of(tensor)
    if before[0] == "S":
        shape[int(before[2:-1].split(",")[0].split(")")[0])] *= degree
    if after[0] == "S":
        shape[int(after[2:-1].split(",")[0].split(")")[0])] //= degree
    return with_shape(tensor, shape)


R, P = Placement(), Placement("P")
Held = Any  # a placement, or a list for an operation with several results


@dataclass
class Call:
    """An operation whose inputs are not all whole.

    Attributes:
        held, shapes: Placement and whole shape of each tensor that it reads.
        args: Its arguments.
        made: Whole shape of each result.
        stated: The placement that the certificate states for the result, if any.
    """

    op: str
    held: list[Placement]
    shapes: list[list[int]]
    args: list[Any]
    made: list[list[int]]
    stated: Placement | None
    degree: int

    @property
    def first(self) -> Placement:
        return self.held[0]

    def argument(self, index: int, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else default

    def dims(self, index: int, default: Any = None) -> set[int]:
        found, rank = self.argument(index, default), len(self.shapes[0])
        return {d % rank for d in (found if isinstance(found, list) else [found])} if rank else set()


Rule = Callable[[Call], Held]  # gives None if the operation cannot read these placements


def elementwise(call: Call) -> Held:
    """The same part of each input that is not broadcast along the divided dimension makes this part of the result."""
    rank = len(call.made[0])
    parts = {
        replace(p, dim=p.dim - len(s)) for p, s in zip(call.held, call.shapes, strict=True) if p.kind == "S"
    }
    if len(parts) != 1 or P in call.held:
        return None
    (part,) = parts
    for held, shape in zip(call.held, call.shapes, strict=True):
        if held.kind == "R" and len(shape) >= -part.dim and shape[part.dim] > 1:
            return None
    return replace(part, dim=part.dim + rank)


def linear(call: Call) -> Held:
    """A linear operation of one input also maps terms of a sum to terms of the sum."""
    return P if call.first == P and set(call.held[1:]) <= {R} else elementwise(call)


def added(call: Call) -> Held:
    return P if call.held == [P, P] else elementwise(call)


def multiplied(call: Call) -> Held:
    return P if call.held in ([P], [P, R], [R, P]) else elementwise(call)


def product_of(call: Call) -> Held:
    """`mm` and `bmm`: rows of the first factor, columns of the second, or terms along the dimension of the sum."""
    batch = len(call.made[0]) - 2
    a, b = call.held
    if (a.kind, b.kind) in (("P", "R"), ("R", "P")):
        return P
    if b == R and a.kind == "S" and a.dim == batch:
        return a
    if a == R and b.kind == "S" and b.dim == batch + 1:
        return b
    if a.kind == b.kind == "S" and (a.runs, a.turn) == (b.runs, b.turn):
        if batch and a.dim == b.dim == 0:
            return a
        return P if (a.dim, b.dim) == (batch + 1, batch) else None
    return None


def addmm(call: Call) -> Held:
    """`bias + a @ b`: only rows or columns, because each member would add the bias to its term."""
    bias, a, b = call.held
    made = product_of(replace(call, held=[a, b], shapes=call.shapes[1:]))
    if made is None or made == P:
        return None
    return elementwise(replace(call, held=[bias, made], shapes=[call.shapes[0], call.made[0]]))


def reshape(call: Call) -> Held:
    """Two placements divide the same elements in the same way if they have as many runs of elements."""
    if call.first.kind != "S":
        return call.first
    p, to = call.first, call.made[0]
    runs = math.prod(call.shapes[0][: p.dim]) * p.runs
    found = [
        Placement("S", d, runs // before, p.turn)
        for d in range(len(to))
        if runs % (before := math.prod(to[:d])) == 0 and to[d] % (runs // before * call.degree) == 0
    ]
    return next((each for each in found if call.stated in (None, each)), None)


def moves(order: Callable[[Call, int], Sequence[int | None]], sums: bool = True) -> Rule:
    """Return the rule of an operation that moves dimensions. `order` gives the place of each dimension in the result, or
    None for a dimension that must not be divided."""

    def rule(call: Call) -> Held:
        made = P if sums and call.first == P else None
        if set(call.held[1:]) - {call.first}:
            return None
        if call.first.kind == "S" and (to := order(call, len(call.shapes[0]))[call.first.dim]) is not None:
            made = replace(call.first, dim=to)
        return made if made is None or len(call.made) == 1 else [made] * len(call.made)

    return rule


def permuted(call: Call, rank: int) -> list[int | None]:
    order = list(range(rank))
    if call.op == "aten.t.default":
        order.reverse()
    elif call.op == "aten.transpose.int":
        a, b = (d % rank for d in call.args[1:3])
        order[a], order[b] = order[b], order[a]
    else:
        order = [d % rank for d in call.args[1]]
    return [order.index(d) for d in range(rank)]


def but(index: int, default: Any = None, gone: bool = False) -> Callable[[Call, int], list[int | None]]:
    """Return an `order` in which the dimensions of argument `index` must not be divided, and are gone if `gone`."""

    def order(call: Call, rank: int) -> list[int | None]:
        dims = call.dims(index, default)
        return [None if d in dims else d - (gone and sum(x < d for x in dims)) for d in range(rank)]

    return order


def inserted(call: Call, rank: int) -> list[int | None]:
    at = call.argument(1 if call.op == "aten.unsqueeze.default" else 2) % (rank + 1)
    return [d + (d >= at) for d in range(rank)]


def expanded(call: Call, rank: int) -> list[int | None]:
    more = len(call.made[0]) - rank
    return [d + more if n > 1 else None for d, n in enumerate(call.shapes[0])]


def stacked(call: Call, rank: int) -> list[int | None]:
    at = call.argument(1, 0) % (rank + 1)
    return [d + (d >= at) for d in range(rank)]


def summed(call: Call) -> Held:
    """A sum over a divided dimension makes a term of the sum."""
    dims = (
        call.dims(1)
        if call.op != "aten.sum.default" and call.argument(1)
        else set(range(len(call.shapes[0])))
    )
    p = call.first
    if p.kind != "S" or p.dim in dims:
        return P if p == P or call.op.startswith("aten.sum") else None
    return p if call.argument(2, False) else replace(p, dim=p.dim - sum(d < p.dim for d in dims))


def normed(call: Call) -> Held:
    """Layer norm, forward and backward: rows may be divided; the gradients of weights are then terms of a sum."""
    backward = call.op == "aten.native_layer_norm_backward.default"
    rows = 4 if backward else 1
    good = set(call.held[:rows]) == {call.first} and set(call.held[rows:]) <= {R} and call.first.kind == "S"
    return [call.first, *[P if backward else call.first] * 2] if good else None


def lookup(call: Call) -> Held:
    """`embedding`: columns of the table, or rows of the indices."""
    table, index = call.held
    if index == R and table.kind == "S" and table.dim == 1:
        return replace(table, dim=len(call.shapes[1]))
    return index if table == R and index.kind == "S" else None


def lookup_backward(call: Call) -> Held:
    grad, index = call.held
    if index == R:
        last = grad.kind == "S" and grad.dim == len(call.shapes[1])
        return P if grad == P else replace(grad, dim=1) if last else None
    return P if grad == index and not call.argument(4, False) else None


def attention(call: Call) -> Held:
    """Samples or heads of all inputs may be divided."""
    good = set(call.held) == {call.first} and call.first.kind == "S" and call.first.dim < 2
    return [call.first] * len(call.made) if good else None


def losses_of_rows(call: Call) -> Held:
    """An NLL loss that is not reduced over rows: rows of scores and labels."""
    rows, labels, *weight = call.held
    good = rows == labels and rows.kind == "S" and rows.dim == 0 and set(weight) <= {R} and call.args[3] == 0
    return [rows, R] if good else None


def rows_of_losses(call: Call) -> Held:
    """The gradient of an NLL loss: rows of scores and labels, and of the losses unless the loss is one number."""
    grad, rows, labels, *others = call.held
    good = rows == labels and rows.kind == "S" and rows.dim == 0 and set(others) <= {R}
    return rows if good and grad == (rows if call.shapes[0] else R) else None


def piece_of_table(call: Call) -> Held:
    """Lookups in a part of a table, by the indices `ids` of its rows."""
    first, index, ids = call.held
    d = 0 if call.op == "lightning_piper.rows.default" else call.args[3]
    if ids != Placement("S", 0) or index != R:
        return None
    forward = call.op in ("lightning_piper.rows.default", "lightning_piper.picked.default")
    if forward:
        return P if first == Placement("S", d) else None
    return Placement("S", d if call.op == "lightning_piper.spread.default" else 0) if first == R else None


RULES: dict[str, Rule] = {
    "aten.mm.default": product_of,
    "aten.bmm.default": product_of,
    "aten.addmm.default": addmm,
    "aten.reshape.default": reshape,
    "aten.add.Tensor": added,
    "aten.sub.Tensor": added,
    "aten.mul.Tensor": multiplied,
    "aten.embedding.default": lookup,
    "aten.embedding_dense_backward.default": lookup_backward,
    "aten.native_layer_norm.default": normed,
    "aten.native_layer_norm_backward.default": normed,
    "aten.nll_loss_forward.default": losses_of_rows,
    "aten.nll_loss_backward.default": rows_of_losses,
    "aten.select.int": moves(but(1, 0, gone=True)),
    "aten.unbind.int": moves(but(1, 0, gone=True)),
    "aten.split.Tensor": moves(but(2, 0)),
    "aten.slice.Tensor": moves(but(1, 0)),
    "aten.slice_backward.default": moves(but(2, 0)),
    "aten.cat.default": moves(but(1, 0)),
    "aten.stack.default": moves(stacked),
    "aten.expand.default": moves(expanded),
    "aten.select_backward.default": moves(inserted),
    "aten.unsqueeze.default": moves(inserted),
}
for _names, _rule in (
    ("t.default transpose.int permute.default", moves(permuted)),
    (
        "neg.default clone.default alias.default detach.default _to_copy.default mul.Scalar div.Scalar div.Tensor",
        linear,
    ),
    ("_softmax.default _safe_softmax.default _log_softmax.default", moves(but(1, 0), sums=False)),
    ("_softmax_backward_data.default _log_softmax_backward_data.default", moves(but(2, 0), sums=False)),
    ("sum.default sum.dim_IntList mean.dim amax.default", summed),
    (
        "tanh.default relu.default gelu.default gelu_backward.default tanh_backward.default sigmoid.default "
        "threshold_backward.default silu.default silu_backward.default pow.Tensor_Scalar exp.default log.default cos.default "
        "sin.default sqrt.default rsqrt.default where.self masked_fill.Scalar native_dropout_backward.default eq.Scalar "
        "ne.Scalar gt.Scalar add.Scalar maximum.default clamp.default eq.Tensor logical_and.default",
        elementwise,
    ),
    (
        "_scaled_dot_product_flash_attention_for_cpu.default _scaled_dot_product_flash_attention_for_cpu_backward.default",
        attention,
    ),
):
    RULES |= {f"aten.{name}": _rule for name in _names.split()}
for _name in ("rows", "rows_backward", "picked", "spread"):
    RULES[f"lightning_piper.{_name}.default"] = piece_of_table
