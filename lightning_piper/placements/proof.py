"""Proof of rules by execution: the joined results of an operation on shards equal its result on the whole.

Piper tries each rule that a program uses on random values. Their shapes are small, with the structure of the
operation's shapes. A process tries each combination of operation, arguments, small shapes, placements and
degree once. Whole numbers in float64 make sums and products exact. If the operation itself rounds (an
exponential, a norm), results must agree within `ROUNDING`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Interpreter, Node

from lightning_piper.common.operation_families import NLL, RESHAPES
from lightning_piper.errors import VerificationError
from lightning_piper.ir.values import Partial, Placement, Sharded
from lightning_piper.placements.attention import ATTENTION
from lightning_piper.placements.chunked_scores import CHUNKED, SCORES_OF_PART, with_classes
from lightning_piper.placements.local_graph import SHAPED, SPLIT, WrongShape, localize
from lightning_piper.placements.ring import ATTEND, ATTEND_BACKWARD, NUMBERS, PARTS
from lightning_piper.placements.rule import Rule, made_by, operation_key, shape_of, tensors_of
from lightning_piper.placements.views import regrouped
from lightning_piper.placements.vocabulary import LOOKUPS, SIZES

ROUNDING = 1e-12  # absolute and relative difference of results that agree
RUNS = 3  # `Sharded.blocks` in the small shapes, if a shard has more than one block
SMALL = 1 << 12  # the average number of elements of an operation's tensors up to which shapes stay unchanged

aten = torch.ops.aten
_proved: set[object] = set()  # (operation, arguments, input shapes and dtypes, rule, degree) of proved rules


def prove(node: Node, rule: Rule, degree: int) -> None:
    """Prove a rule by execution, unless it is proved already or all inputs are whole.

    Raises:
        VerificationError: The operation on shards gives a different result or other shapes.
    """
    if all(str(p) == "R" for p in rule.inputs):
        return
    asked = (operation_key(node, tensors_of(node)), rule, degree)
    if asked in _proved:
        return
    graph, inputs, rule = _single_operation(node, rule, degree)
    call = next(n for n in graph.nodes if n.op == "call_function")
    key = (operation_key(call, inputs), rule, degree)
    found = None
    if key not in _proved:
        try:
            found = difference(graph, inputs, rule, degree)
        except WrongShape as error:
            found = error.found
    if found is not None:
        placements = ", ".join(map(str, rule.inputs))
        raise VerificationError(
            f"the rule of {node.target} for {placements} is wrong: {found}. If you added the rule, correct "
            "its output placement. Otherwise, report this [PIPER-D019]"
        )
    _proved.update((asked, key))


def difference(graph: Graph, inputs: Sequence[Node], rule: Rule, degree: int) -> str | None:
    """Return a text that says how the results on shards differ from the results on the whole, or None if they
    agree.

    Args:
        graph: A graph that calls one operation on `inputs`. It is changed into the graph of one member.
        inputs: The graph's placeholders, in order.
        rule: The placements of inputs and outputs.
        degree: The number of members.
    """
    generator = torch.Generator().manual_seed(0)
    # First run the operation on whole values.
    values = [_given(x, generator) for x in inputs]
    call = next(n for n in graph.nodes if n.op == "call_function")
    _attend(call, inputs, values)
    _score(call, inputs, values)
    module = torch.nn.Module()
    whole = _tuple(
        Interpreter(torch.fx.GraphModule(module, graph), garbage_collect_values=False).run(*values)
    )
    # Then run it for each member on the member's parts.
    held: dict[Node, Any] = dict(zip(inputs, rule.inputs, strict=True))
    held[call] = rule.outputs if isinstance(call.meta["val"], list | tuple) else rule.outputs[0]
    localize(graph, held, degree)
    parts = [_parts(x, p, degree, generator) for x, p in zip(values, rule.inputs, strict=True)]
    runs = Interpreter(torch.fx.GraphModule(module, graph), garbage_collect_values=False)
    made = [_tuple(runs.run(*(part[i] for part in parts))) for i in range(degree)]
    for index, (result, placement) in enumerate(zip(whole, rule.outputs, strict=True)):
        if not isinstance(result, torch.Tensor) or placement is None:
            continue
        for joined in _joined([each[index] for each in made], placement):
            if joined.shape != result.shape:
                return f"output {index} has shape {list(joined.shape)} and not {list(result.shape)}"
            if not torch.allclose(
                joined.double(), result.double(), rtol=ROUNDING, atol=ROUNDING, equal_nan=True
            ):
                return (
                    f"output {index} differs by {(joined.double() - result.double()).abs().max().item():.3g}"
                )
    return None


def _single_operation(node: Node, rule: Rule, degree: int) -> tuple[Graph, list[Node], Rule]:
    """Return a graph of only this operation on small shapes, its inputs, and the rule for these shapes.

    Floating-point inputs are in float64. Arguments that are dtypes or shapes change accordingly. A view
    becomes a `reshape`.
    """
    sizes = _sizes(node, rule, degree)
    if sizes and node.target not in RESHAPES and not _has_fixed_runs(node, rule):
        pieces = _pieces(node)
        rule = Rule(
            tuple(_with_few_blocks(p, pieces) or p for p in rule.inputs),
            tuple(_with_few_blocks(p, pieces) for p in rule.outputs),
        )
    graph = Graph()
    inputs: list[Node] = []

    def given(x: Node) -> Node:
        """Return a placeholder for an input: small, and in float64 if the input has a floating-point
        dtype."""
        value = x.meta["val"]
        made = graph.placeholder(f"input_{len(inputs)}")
        dtype = torch.float64 if value.is_floating_point() else value.dtype
        shape = [sizes.get((x, d), size) for d, size in enumerate(value.shape)]
        made.meta = {
            "val": torch.empty(shape, dtype=dtype, device="meta"),
            "reads": (node.target, len(inputs)),
        }
        inputs.append(made)
        return made

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given)
    kwargs = {
        k: torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v
        for k, v in kwargs.items()
    }
    kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    args = tuple(torch.float64 if isinstance(v, torch.dtype) and v.is_floating_point else v for v in args)
    target: Any = aten.reshape.default if node.target in RESHAPES else node.target
    if (index := SHAPED.get(target)) is not None and sizes:
        args = (
            *args[:index],
            [sizes.get((node, d), size) for d, size in enumerate(shape_of(node))],
            *args[index + 1 :],
        )
    call = graph.call_function(target, args, kwargs)
    given_args, given_kwargs = torch.fx.node.map_arg((args, kwargs), lambda x: x.meta["val"])
    call.meta["val"] = target(*given_args, **given_kwargs)
    graph.output(call)
    return graph, inputs, rule


def _with_few_blocks(placement: Placement | None, pieces: int) -> Placement | None:
    """Return the placement for the small shapes: a shard with several blocks gets `RUNS` blocks.

    A shard with as many blocks as the operation has pieces stays unchanged. So does every other placement.
    """
    changes = isinstance(placement, Sharded) and placement.blocks not in (1, pieces)
    return Sharded(placement.dim, RUNS) if isinstance(placement, Sharded) and changes else placement


def _has_fixed_runs(node: Node, rule: Rule) -> bool:
    """Return whether a rule divides the runs of a dimension whose size must stay. Then all numbers of runs
    stay, because `RUNS` need not divide this size."""
    fixed = _fixed_sizes(node)
    return any(
        placement.blocks > 1
        and (shape[placement.dim] in fixed or _counts_heads(node, placement.dim, len(shape)))
        for placement, shape in _divided(node, rule)
    )


def _divided(node: Node, rule: Rule) -> list[tuple[Sharded, Sequence[int]]]:
    """Return (placement, shape of the whole tensor) of each input and output that a rule divides."""
    held: list[tuple[Placement | None, tuple[int, ...]]] = [
        *zip(rule.inputs, map(shape_of, tensors_of(node)), strict=True)
    ]
    outputs = zip(rule.outputs, made_by(node), strict=True)
    held += [(p, tuple(x.shape)) for p, x in outputs if isinstance(x, torch.Tensor)]
    return [(p, shape) for p, shape in held if isinstance(p, Sharded)]


def _pieces(node: Node) -> int:
    """Return into how many pieces an operation splits its input, or how many pieces it concatenates.

    For ring attention, return its number of runs. For other operations, return 1.
    """
    if node.target in SPLIT:
        return len(made_by(node))
    target: Any = node.target
    if target in PARTS:
        runs: Any = node.args[PARTS[target] + 1]
        return int(runs)
    return len(tensors_of(node)) if node.target is aten.cat.default else 1


def _sizes(node: Node, rule: Rule, degree: int) -> dict[tuple[Node, int], int]:
    """Return smaller sizes for large shapes: (tensor, dimension) -> size.

    Equal sizes stay equal, except the number of an attention's heads, which does not change. New sizes of
    divided dimensions are multiples of `degree`, and other new sizes are not, except the sizes of a view. A
    dimension without an entry keeps its size. The result is empty if the shapes are small already (`SMALL`).
    """
    tensors = [*tensors_of(node), node]
    known = [x for x in tensors if isinstance(x.meta.get("val"), torch.Tensor)]
    if sum(x.meta["val"].numel() for x in known) <= SMALL * len(known):
        return {}
    if node.target in RESHAPES:
        return _sizes_of_view(node, rule)
    dimensions = [
        (x, d, int(size))
        for x in known
        for d, size in enumerate(x.meta["val"].shape)
        if size > 1 and not _counts_heads(node, d, x.meta["val"].dim())
    ]
    blocks = [p.blocks for p in (*rule.inputs, *rule.outputs) if isinstance(p, Sharded)]
    runs = 1
    if any(count > 1 for count in blocks):
        runs = math.lcm(*blocks) if _has_fixed_runs(node, rule) else math.lcm(RUNS, _pieces(node))
    target: Any = node.target
    if target in PARTS:  # operations that cut sequences into parts themselves
        runs *= math.prod(node.args[PARTS[target] : PARTS[target] + 2])  # type: ignore[arg-type]
    distinct = sorted({size for _, _, size in dimensions})
    divided = set(distinct) if target in PARTS else {shape[p.dim] for p, shape in _divided(node, rule)}
    others = (n for n in itertools.count(2) if n % degree)
    small = {
        size: degree * runs * (2 + i) if size in divided else next(others) for i, size in enumerate(distinct)
    }
    small |= {size: size for size in _fixed_sizes(node)}
    return {(x, d): small[size] for x, d, size in dimensions}


def _counts_heads(node: Node, dim: int, rank: int) -> bool:
    """Return whether a dimension of an attention's tensor is its heads. Their number must stay, because the
    heads of queries are a multiple of the heads of keys."""
    return (node.target in ATTENTION or node.target in PARTS) and dim == 1 and rank > 2


def _fixed_sizes(node: Node) -> set[int]:
    """Return the sizes that must stay, because arguments or the number of outputs depend on them."""
    target: Any = node.target
    if target in SIZES:
        return {int(node.args[SIZES[target]])}  # type: ignore[arg-type]
    if target is SCORES_OF_PART:  # the number of classes, and their shards
        return {int(node.args[6]), *shape_of(node.args[1])[:2]}  # type: ignore[arg-type]
    if target in NORMS:
        return {int(size) for size in node.args[NORMS[target]]}  # type: ignore[union-attr, arg-type]
    if target is aten.unbind.int:  # the size is the number of outputs
        return {len(made_by(node))}
    if target not in ALONG:
        return set()
    tensors = [x for x in [*tensors_of(node), node] if isinstance(x.meta.get("val"), torch.Tensor)]
    dim = node.args[ALONG[target]] if len(node.args) > ALONG[target] else 0
    rank = max(len(shape_of(x)) for x in tensors)
    sizes = {shape_of(x)[int(dim) % rank] for x in tensors if len(shape_of(x)) == rank}  # type: ignore[arg-type]
    return {*sizes, *(int(x.shape[int(dim)]) for x in made_by(node) if x is not None and x.dim() == rank)}  # type: ignore[arg-type]


# Operation -> the position of the argument with the normalized sizes (NORMS), or with the dimension (ALONG).
NORMS = {
    aten.native_layer_norm.default: 1,
    aten.native_layer_norm_backward.default: 2,
    aten._fused_rms_norm.default: 1,
    aten._fused_rms_norm_backward.default: 2,
}
ALONG = {
    aten.slice.Tensor: 1,
    aten.select.int: 1,
    aten.slice_backward.default: 2,
    aten.select_backward.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
}


def _sizes_of_view(node: Node, rule: Rule) -> dict[tuple[Node, int], int]:
    """Return smaller sizes for a view, as `_sizes` does.

    Dimensions keep their sizes if the view regroups them with a divided dimension, or if it regroups several
    dimensions into several dimensions.
    """
    (source,) = tensors_of(node)
    divided = {p.dim for p in rule.inputs if isinstance(p, Sharded)}
    found: dict[tuple[Node, int], int] = {}
    for mine, theirs in regrouped(shape_of(source), shape_of(node)):
        if divided & set(mine) or (len(mine) > 1 and len(theirs) > 1):
            continue
        one, many, x, y = (mine, theirs, source, node) if len(mine) == 1 else (theirs, mine, node, source)
        found |= {(y, d): 2 for d in many}
        found[x, one[0]] = 2 ** len(many)
    return found


# Loss -> the position of the scores among its tensor inputs. Dimension 1 of the scores has the classes.
_CLASSES: dict[Any, int] = dict.fromkeys(NLL, 0) | {
    aten.nll_loss_backward.default: 1,
    aten.nll_loss2d_backward.default: 1,
}


def _bound(x: Node) -> int:
    """Return the upper bound (exclusive) of random integers for an input: the number of rows or classes if
    the input is the index of a lookup."""
    target, _ = x.meta["reads"]
    if target in LOOKUPS:
        return int(next(y for y in x.graph.nodes if y.meta.get("reads") == (target, 2)).meta["val"].shape[0])
    if target in _CLASSES:
        scores = next(y for y in x.graph.nodes if y.meta.get("reads") == (target, _CLASSES[target]))
        return int(shape_of(scores)[1])
    if target is aten.embedding.default:
        return int(next(iter(x.graph.nodes)).meta["val"].shape[0])
    if target is aten.embedding_dense_backward.default:
        return int(next(n for n in x.graph.nodes if n.op == "call_function").args[2])
    return 2


def _given(x: Node, generator: torch.Generator) -> torch.Tensor:
    """Return values for a placeholder: positions 0, 1, ... if it is the ids of an operation, otherwise
    random."""
    target, index = x.meta["reads"]
    if (target in LOOKUPS and index == 2) or index in NUMBERS.get(target, ()):
        return torch.arange(x.meta["val"].shape[0])
    drawn = _drawn(x.meta["val"], _bound(x), generator)
    if x.meta["reads"] == (aten.div.Tensor, 1):  # terms of a sum must not be divided by zero
        return drawn.where(drawn != 0, 1)
    return drawn


# Backward operation of attention -> its forward operation.
_FORWARD: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: aten._scaled_dot_product_flash_attention_for_cpu.default,
    ATTEND_BACKWARD: ATTEND,
}


def _attend(call: Node, inputs: Sequence[Node], values: list[torch.Tensor]) -> None:
    """If `call` is the backward of attention, replace its inputs `out` and `lse` in `values` by the outputs
    of the forward.

    With a random `lse`, the attention's weights, which are exponentials, could have any size.
    """
    forward: Any = _FORWARD.get(call.target)
    if forward is None:
        return
    given = dict(zip(inputs, values, strict=True))
    (_, q, k, v, out, norm, *others), kwargs = torch.fx.node.map_arg(
        (call.args, call.kwargs), lambda x: given[x]
    )
    made = forward(q, k, v, *others, **kwargs)
    for old, new in zip((out, norm), made, strict=True):
        values[next(i for i, x in enumerate(values) if x is old)] = new


def _score(call: Node, inputs: Sequence[Node], values: list[torch.Tensor]) -> None:
    """If `call` works on the scores of chunks, replace the inputs in `values` that must fit its weights."""
    if call.target not in CHUNKED:
        return
    given = dict(zip(inputs, values, strict=True))
    args = torch.fx.node.map_arg(call.args, lambda x: given[x])
    for old, new in zip(args, with_classes(call.target, args), strict=True):
        if old is not new:
            values[next(i for i, x in enumerate(values) if x is old)] = new


def _drawn(like: torch.Tensor, bound: int, generator: torch.Generator) -> torch.Tensor:
    if like.is_floating_point():
        return torch.randint(-3, 4, like.shape, generator=generator).to(like.dtype)
    return torch.randint(0, bound, like.shape, generator=generator).to(like.dtype)


def _parts(
    x: torch.Tensor, placement: Placement, degree: int, generator: torch.Generator
) -> list[torch.Tensor]:
    match placement:
        case Sharded():
            return placement.parts(x, degree)
        case Partial():
            terms = [_drawn(x, 2, generator) for _ in range(degree - 1)]
            return [*terms, x - sum(terms)]
    return [x] * degree


def _joined(parts: Sequence[torch.Tensor], placement: Placement) -> list[torch.Tensor]:
    """Return the tensors that must equal the whole value: the joined `parts`, their sum, or each of them."""
    match placement:
        case Sharded():
            return [placement.joined(parts)]
        case Partial():
            return [torch.stack(list(parts)).sum(0)]
    return list(parts)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,)
