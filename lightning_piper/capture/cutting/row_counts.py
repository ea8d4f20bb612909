"""Make the code of passes for experts work with any number of rows.

The router decides how many tokens reach a device's experts, but a captured graph has fixed sizes. So the step
is traced with `routing.ROWS` rows. Sizes that do not follow from the number of rows are not multiples of
`ROWS`. In the code of passes, the actual number of rows replaces `ROWS` in every multiple of `ROWS`. The
number of rows of a pass is called open if it is known only when the pass runs.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.joint.region_passes import RegionPass, reads_of
from lightning_piper.capture.torch_private._torch import operands
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import PassKey, Routed
from lightning_piper.ir.values import TensorSpec
from lightning_piper.placements.placement_changes import unchanged
from lightning_piper.routing import COMBINE, COUNTS, DISPATCH, ROUTE, ROWS

aten = torch.ops.aten


def direction_of(node: Node) -> str | None:
    """Return the kind of an exchange in a joint graph: `COUNTS`, `DISPATCH` or `COMBINE`. Return None for all
    other operations."""
    return str(node.args[3]) if node.target is ROUTE else None


def arrives(node: Node, p: RegionPass) -> str:
    """Return the role of the input `node` in the exchanges of a pass (`Interface.arrives`): `COUNTS`,
    `DISPATCH` or `COMBINE`.

    Return "" if an operation other than an exchange reads the input, if the pass outputs it unchanged, or if
    the input has several roles.
    """
    own, directions = set(p.nodes), set()
    for user in node.users:
        if user in own:
            directions.add(COUNTS if user.target is ROUTE and node is user.args[1] else direction_of(user))
    if any(node in made for _, made in p.outputs):
        directions.add(None)
    return (next(iter(directions)) or "") if len(directions) == 1 else ""


def leaves(nodes: Iterable[Node]) -> str:
    """Return the role of a pass's output in exchanges (`Interface.leaves`): `COMBINE` if the output has only
    combined rows, and "" if it has other values or is empty.

    Args:
        nodes: the values of the output.
    """
    return COMBINE if {direction_of(unchanged(node)) for node in nodes} == {COMBINE} else ""


def routed_of(
    passes: Mapping[PassKey, RegionPass], params: Mapping[Node, str], shared: Collection[Node]
) -> dict[int, Routed]:
    """Return index of a region -> `Routed`, for each region whose forward pass has a `dispatch`. Other regions
    are missing.

    Args:
        passes: the passes F and B of all regions, with their nodes.
        params: placeholder of the graph -> name of the parameter.
        shared: nodes that every pass computes itself.

    Raises:
        CaptureError: one region dispatches to groups with different numbers of experts, or both with and
            without counts.
    """
    found: dict[int, Routed] = {}
    for (region, kind), p in passes.items():
        sent = [node for node in p.nodes if kind == "F" and direction_of(node) == DISPATCH]
        if not sent:
            continue
        # For each dispatch: (whether it has no counts, so that every expert has the same number of rows; the
        # number of experts).
        forms = {
            (counts is None, _value(x if counts is None else counts).shape[0])
            for x, counts in (n.args[:2] for n in sent)
        }
        if len(forms) > 1:
            counts = sorted({count for _, count in forms})
            groups = (
                "in two forms, with counts and without"
                if len(counts) == 1
                else f"to groups of {' and of '.join(map(str, counts))} experts"
            )
            raise CaptureError(
                f"{own_line(sent[-1])}: one annotated region dispatches tokens {groups}. Annotate each group of "
                "experts separately [PIPER-C015]"
            )
        ((even, count),) = forms
        held = reads_of([*p.nodes, *passes[region, "B"].nodes], [], shared)
        divided = tuple(
            name for node, name in params.items() if node in held and _value(node).shape[:1] == (count,)
        )
        found[region] = Routed(tuple(int(n.args[4]) for n in sent), count, divided, even)  # type: ignore[arg-type]
    return found


def rows_of(p: RegionPass) -> int | None:
    """Return the number of rows that a forward pass sends to experts, at the traced batch size. Return None
    if it sends no rows, or if the number of arriving rows is fixed. If it has several dispatches, the first
    one with an open number of rows counts."""
    sent = [n for n in p.nodes if direction_of(n) == DISPATCH and _value(n).shape[0] == ROWS]
    return int(_value(sent[0].args[0]).shape[0]) if sent else None


def refuse_joined_rows(p: RegionPass) -> None:
    """Check that the operations of a forward pass keep a dimension of rows, because no device has all rows if
    the experts are sharded.

    This check sees shapes only. `refuse_row_dependence` also finds operations that mix rows but keep the
    shape.

    Raises:
        CaptureError: an operation between dispatch and combine reads rows, but its result does not have a
            dimension of rows. Or it calculates with the number of rows.
    """
    for node in p.nodes:
        _refuse_arithmetic(node)
        if direction_of(node) is None and any(_open(x) for x in node.all_input_nodes) and not _open(node):
            made = node.all_input_nodes[0] if node.target is operator.getitem else node
            raise CaptureError(
                f"{own_line(made)}: the result of {made.target} between dispatch and combine does not have a row "
                "for each token. With sharded experts, no device has the rows of all tokens. Work on "
                "each row by itself there, and do everything else outside of dispatch and combine"
                " [PIPER-C015]"
            )


def resize(graph: Graph, given: Mapping[Node, torch.Tensor]) -> None:
    """Replace each multiple of `ROWS` in the arguments of a graph's operations by a computation from the size
    of an input. For example, `view(x, [2000006, 8])` becomes `view(x, [2 * rows, 8])`.

    Args:
        graph: the graph of a pass, which is changed in place.
        given: input node of the graph -> its traced value. If an argument has a multiple of `ROWS`, a
            dimension of an input must also have one.
    """
    measure: Node | None = None  # the node that computes the number of rows
    for node in list(graph.nodes):
        if node.op != "call_function" or not _mentions_rows((node.args, node.kwargs)):
            continue
        if measure is None:
            measure = _measured(graph, given)
        with graph.inserting_before(node):
            made: dict[int, Node] = {}

            def size(value: Any, made: dict[int, Node] = made, rows: Node = measure) -> Any:
                if type(value) is not int or value == 0 or value % ROWS:
                    return value
                if value not in made:
                    times = value // ROWS
                    made[value] = rows if times == 1 else graph.call_function(_times, (rows, times))
                return made[value]

            node.args, node.kwargs = map_aggregate(node.args, size), map_aggregate(node.kwargs, size)


def _measured(graph: Graph, given: Mapping[Node, torch.Tensor]) -> Node:
    """Add nodes that compute the number of rows from the shape of the first input with a multiple of `ROWS`
    in its shape, and return the node with the number."""
    for node, value in given.items():
        for dim, size in enumerate(value.shape):
            if size and size % ROWS == 0:
                last = [n for n in graph.nodes if n.op == "placeholder"][-1]
                with graph.inserting_after(last):
                    total = graph.call_function(aten.sym_size.int, (node, dim))
                if size == ROWS:
                    return total
                with graph.inserting_after(total):
                    return graph.call_function(_per, (total, size // ROWS))
    raise AssertionError("a pass with open rows is given none")


def _times(rows: int, factor: int) -> int:
    return rows * factor


def _per(total: int, factor: int) -> int:
    return total // factor


def _refuse_arithmetic(node: Node) -> None:
    """Raise a `CaptureError` if a number among the operands of the node follows from the number of rows.

    Such a number is a multiple of `ROWS` other than 0, or 1 divided by such a multiple (as in a mean).
    """
    for number in operands(node):
        if number and (number % ROWS == 0 or (abs(number) < 1 and round(1 / number) % ROWS == 0)):
            raise CaptureError(
                f"{own_line(node)}: {node.target} between dispatch and combine calculates with the number "
                "of rows. With sharded experts, each device has a different number of rows. Do this outside of "
                "dispatch and combine [PIPER-C015]"
            )


def _mentions_rows(arguments: Any) -> bool:
    """Return whether the nested arguments have an integer that is a multiple of `ROWS` other than 0."""
    found: list[Any] = []
    map_aggregate(arguments, found.append)
    return any(type(value) is int and value and value % ROWS == 0 for value in found)


def spec_of(value: torch.Tensor, rows: int | None) -> TensorSpec:
    """Return the spec of a traced tensor.

    Args:
        rows: None if the number of arriving rows is fixed. Otherwise the number of dispatched rows. The spec
            assumes that as many rows arrive, so `rows` replaces `ROWS` in its shape and strides.
    """
    spec = TensorSpec.of(value)
    if rows is None:
        return spec

    def at_source(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(n // ROWS * rows if n and n % ROWS == 0 else n for n in sizes)

    return TensorSpec(at_source(spec.shape), spec.dtype, at_source(spec.stride))


def _open(node: Node) -> bool:
    """Return whether a result of the node has a dimension that follows from the open number of rows: its size
    is a multiple of `ROWS` other than 0."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return any(isinstance(v, torch.Tensor) and any(n and n % ROWS == 0 for n in v.shape) for v in values)


def _value(node: Any) -> torch.Tensor:
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
