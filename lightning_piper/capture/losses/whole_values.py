"""Compute some logged values once per batch, from values that weights can combine.

Examples are the root of a mean, a ratio of two sums, a mean over classes of ratios, and statistics of a
matrix of counts. Weights cannot combine such a value from parts of the batch, but they can combine the values
from which it is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.losses.combination import OTHER, ROWS
from lightning_piper.capture.losses.loss_terms import LossTerms
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.boxed_code import compile_boxed
from lightning_piper.ir.regions import Computed

MANY = 2**16  # the most numbers from which logged values are computed, because every device receives them


def sources_of(value: Node, found: LossTerms, is_known: Callable[[Node], bool]) -> list[Node] | None:
    """Return the tensors from which `value` is computed, and which weights can combine from parts of the
    batch. Return None if `value` also depends on other values, such as samples, or if these tensors have more
    than `MANY` numbers. If `value` is computed from constants alone, the list is empty.

    Args:
        is_known: returns whether weights can combine a node's values on parts of the batch.
    """
    sources: dict[Node, None] = {}
    seen: set[Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not _is_constant(node):
            reduction = found.of(node).reduction
            if reduction == ROWS:
                return None
            if reduction != OTHER and isinstance(node.meta.get("val"), torch.Tensor) and is_known(node):
                sources[node] = None
                continue
        if not _is_computed(node) or not _has_known_numbers(node, found):
            return None
        stack += reversed(node.all_input_nodes)
    return list(sources) if sum(node.meta["val"].numel() for node in sources) <= MANY else None


def is_unweighted(value: Node, found: LossTerms) -> bool:
    """Return whether `value` is computed from one of `LossTerms.unweighted`, so that weights do not combine it.

    A part of the batch has fewer samples than the whole batch. If the samples of a part change a
    buffer, the next part reads a different value of the buffer.
    """
    found.of(value)
    seen, stack = {value}, [value]
    while stack and found.unweighted:
        node = stack.pop()
        if node in found.unweighted:
            return True
        reduced = [x for x in node.all_input_nodes if x not in seen and found.of(x).reduction != ROWS]
        seen.update(reduced)
        stack += reduced
    return False


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or (node.op == "call_function" and not node.all_input_nodes)


def _is_computed(node: Node) -> bool:
    """Return whether the node always computes the same result from the same tensors: it is a constant, an
    element of a list, or an operation of torch that is neither random nor in place."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return not (_torch.is_random(node) or target._schema.is_mutable)


def _has_known_numbers(node: Node, found: LossTerms) -> bool:
    """Return whether each number of the node that depends on the number of samples has an expression, such as
    a multiple or a fraction of the number of samples."""
    if not found.dependence.is_made_of_size(node):
        return True
    if node.op == "get_attr":
        return found.dependence.literal(node) is not None
    if any(isinstance(x, list | tuple) for x in node.args):
        return False
    numbers = [(i, x) for i, x in enumerate(node.args) if isinstance(x, int | float)]
    return all(found.dependence.number(x, node, i) is not None for i, x in numbers)


def computation(
    value: Node,
    sources: Sequence[Node],
    names: tuple[str, ...],
    constants: torch.nn.Module | None,
    follows: Callable[[Node], bool],
) -> Computed:
    """Return the computation of the value from the sources, as code and as text.

    Piper compares the text (`Computed.text`) between steps of different sizes. So in an operation whose
    numbers depend on the number of samples, the word "samples" replaces all numbers. `SymbolicStep` searches
    for this word.

    Args:
        names: names of the sources.
        constants: the module that holds the graph's constant tensors.
        follows: returns whether numbers among a node's arguments depend on the number of samples.
    """
    graph, made, said = torch.fx.Graph(), dict[Node, Node](), list[str]()
    for i, node in enumerate(sources):
        made[node] = graph.placeholder(f"of_{i}")
    stack = [value]
    while stack:
        node = stack[-1]
        missing = [x for x in node.all_input_nodes if x not in made] if node not in made else []
        if not missing:
            stack.pop()
            if node not in made:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)
                made[node] = graph.create_node(node.op, node.target, args, kwargs)
                if follows(node):
                    args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _without_size)
                said.append(f"{made[node]} = {node.target}{args}{kwargs}")
        stack += missing
    graph.output((made[value],))
    run, like = compile_boxed(graph, constants), [node.meta["val"] for node in sources]
    given = [(x.dtype, tuple(x.shape)) for x in like]

    def of(values: Sequence[torch.Tensor]) -> torch.Tensor:
        # A weighted sum of integers may have a rounding error, even if the integer is the same on every part.
        rounded = [
            x if dtype.is_floating_point else x.round() for x, (dtype, _) in zip(values, given, strict=True)
        ]
        (result,) = run(
            [x.to(dtype).reshape(shape) for x, (dtype, shape) in zip(rounded, given, strict=True)]
        )
        return result

    return Computed(names, of, "\n".join(said))


def _without_size(argument: Any) -> Any:
    """Replace a number in a node's arguments by the word "samples"."""
    return "samples" if isinstance(argument, int | float) else argument
