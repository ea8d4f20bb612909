"""Replace a linear layer and its cross entropy by operations that never hold the scores of all rows::

    nll_loss(log_softmax(view(mm(h, W.T))), target)
        -->  picked, sums = chunked_scores(view(h), W, target);  nll_loss(picked - sums of the one class left)

    mm(G, W), mm(G.T, h)  with  G = view(log_softmax_backward(nll_loss_backward(...)))
        -->  chunked_scores_backward(nll_loss_backward(...), view(h), W, target, sums), and the view's gradient

Views and slices between the product and the loss work on the rows of `h` instead. The `nll_loss` stays, so the
terms of the loss and their weights stay. `nll_loss2d`, which has the classes along dimension 1, also stays.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.losses.factor_guards import add_like
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.operation_families import NLL, PERMUTATIONS, RESHAPES, permutation
from lightning_piper.placements.chunked_scores import SCORES_BACKWARD, SCORES_OF
from lightning_piper.placements.vocabulary import IGNORED

aten = torch.ops.aten
_CASTS = {aten._to_copy.default, aten.clone.default}
# Operations that take a part of a dimension, and their gradients.
_TAKEN = {
    aten.slice.Tensor,
    aten.select.int,
    aten.slice_backward.default,
    aten.select_backward.default,
}
_NLL_BACKWARD = {aten.nll_loss_backward.default, aten.nll_loss2d_backward.default}


@dataclass(frozen=True)
class _Loss:
    """A cross entropy of a linear layer in a graph.

    Attributes:
        product: The product that makes the scores, `mm` or `addmm`.
        weight, bias: Of the linear layer. `weight` is `[classes, in]`.
        chain: The operations from the product to the softmax, in order.
        softmax: `_log_softmax`.
        scored: The value that `loss` reads: `softmax`, or a view of it.
        loss: `nll_loss_forward` or `nll_loss2d_forward`.
        backward: The gradient of `loss`; None without a backward pass.
        views: The views of `backward` that the gradient of the softmax reads, in order.
        back: The operations from the gradient of the softmax to the gradient of the product, in order.
        readers: The operations that make the gradients of the layer's input, of `weight` and of `bias` from the
            gradient of the product; None for a gradient that the graph does not have.
    """

    product: Node
    weight: Node
    bias: Node | None
    chain: tuple[Node, ...]
    softmax: Node
    scored: Node
    loss: Node
    backward: Node | None
    views: tuple[Node, ...]
    back: tuple[Node, ...]
    readers: tuple[Node | None, Node | None, Node | None]

    @property
    def classes(self) -> int:
        return int(self.weight.meta["val"].shape[0])

    @property
    def is_flat(self) -> bool:
        """Whether the loss has rows of scores. If not, the scores have more dimensions, with the classes along
        dimension 1."""
        return self.loss.target is aten.nll_loss_forward.default


def chunk_losses(graph: Graph, chunk: int) -> int:
    """Replace each cross entropy of a linear layer. The graph is changed in place.

    Args:
        chunk: Rows whose scores exist at once; see `placements.chunked_scores`.

    Returns:
        The number of replaced losses. A loss is left unchanged if something else reads its scores, if it has class
        weights or label smoothing, or if several products make its scores.
    """
    found = [loss for node in graph.nodes if (loss := _loss_of(node)) is not None]
    for loss in found:
        _Writer(graph, loss, chunk).write()
    return len(found)


def _loss_of(loss: Any) -> _Loss | None:
    """Return the cross entropy that ends with `loss`, if it can be replaced; otherwise None."""
    if loss.target not in NLL or loss.args[2] is not None:
        return None
    scored = loss.args[0]
    softmax = scored.args[0] if scored.target in RESHAPES else scored
    if softmax.target is not aten._log_softmax.default:
        return None
    rank, flat = softmax.meta["val"].ndim, loss.target is aten.nll_loss_forward.default
    if softmax.args[1] % rank != 1 or flat != (rank == 2) or (flat and scored is not softmax):
        return None
    if (forward := _from_product(softmax.args[0], turned=not flat)) is None:
        return None
    product, chain = forward
    bias, weight = product.args[0] if len(product.args) == 3 else None, product.args[-1]
    if weight.target is not aten.t.default or not _is_read_once([product, *chain], softmax):
        return None
    layer = (product, weight.args[0], bias, chain, softmax, scored, loss)
    backward = (_readers(softmax) | _readers(scored)) - {loss, scored}
    if not backward:
        return _Loss(*layer, None, (), (), (None, None, None))
    if (back := _from_loss(backward, turned=not flat)) is None:
        return None
    if (readers := _gradients(back[2][-1], product)) is None:
        return None
    return _Loss(*layer, *back, readers)


def _from_product(scores: Any, turned: bool) -> tuple[Any, tuple[Node, ...]] | None:
    """Return the product that makes these scores, and the operations after it; None if it is not a product, or if
    an operation after it does not keep the rows.

    Args:
        turned: Whether the classes are along dimension 1 of the scores.
    """
    chain: list[Node] = []
    while turned or scores.target not in (aten.mm.default, aten.addmm.default):
        if scores.op != "call_function":
            return None
        if turned and scores.target in PERMUTATIONS:
            rank = scores.meta["val"].ndim
            if permutation(scores) != [0, rank - 1, *range(1, rank - 1)]:
                return None
            turned = False
        elif not (scores.target in _CASTS if turned else _keeps_rows(scores)):
            return None
        chain.append(scores)
        scores = scores.args[0]
    return (scores, tuple(reversed(chain))) if not scores.kwargs else None


def _keeps_rows(node: Node) -> bool:
    """Return whether the operation works on rows of scores: it copies them, reshapes their dimensions, or takes
    some of them."""
    if node.target in _TAKEN:
        source: Any = node.args[0]
        back = node.target in (aten.slice_backward.default, aten.select_backward.default)
        rank = len(node.meta["val"].shape if back else source.meta["val"].shape)
        at = 2 if back else 1
        along: Any = node.args[at] if len(node.args) > at else 0
        return bool(along % rank != rank - 1)
    if node.target not in RESHAPES | _CASTS:
        return False
    source = node.args[0]
    return bool(source.meta["val"].shape[-1] == node.meta["val"].shape[-1])


def _is_read_once(chain: list[Node], last: Node) -> bool:
    """Return whether each node of the chain is read by the next one only, and the last one by `last` only."""
    return all(set(node.users) == {after} for node, after in zip(chain, [*chain[1:], last], strict=True))


def _readers(node: Node) -> set[Node]:
    """Return the operations that read a value, also through detached copies."""
    found: set[Node] = set()
    for user in node.users:
        found |= _readers(user) if user.target is aten.detach.default else {user}
    return found


def _from_loss(
    readers: Collection[Node], turned: bool
) -> tuple[Node, tuple[Node, ...], tuple[Node, ...]] | None:
    """Return the gradient of the loss, its views, and the operations from the gradient of the softmax to the gradient
    of the product, in order. None if the readers of the softmax are other operations.

    Args:
        turned: Whether the classes are along dimension 1 of the scores.
    """
    kinds = {node.target: node for node in readers}
    second = kinds.pop(aten._log_softmax_backward_data.default, None)
    if second is None or len(readers) != 2 or kinds.keys() - _NLL_BACKWARD:
        return None
    (first,) = kinds.values()
    views = [first]
    while set(views[-1].users) != {second}:
        if len(views[-1].users) != 1 or (after := next(iter(views[-1].users))).target not in RESHAPES:
            return None
        views.append(after)
    chain = [second]
    while len(chain[-1].users) == 1:
        after = next(iter(chain[-1].users))
        if turned and after.target in PERMUTATIONS:
            rank = after.meta["val"].ndim
            if permutation(after) != [0, *range(2, rank), 1]:
                return None
            turned = False
        elif not (after.target in _CASTS if turned else _keeps_rows(after)):
            break
        chain.append(after)
    return None if turned else (first, tuple(views[1:]), tuple(chain))


def _gradients(gradient: Node, product: Any) -> tuple[Node | None, Node | None, Node | None] | None:
    """Return the operations that make the gradients of the layer's input, weight and bias from the gradient of the
    product; None in place of a gradient that the graph does not have. None if something else reads it."""
    *_, hidden, turned = product.args
    found: list[Node | None] = [None, None, None]
    for user in gradient.users:
        if (
            user.target is aten.mm.default
            and user.args[0] is gradient
            and _source(user.args[1]) is _source(turned)
        ):
            index = 0
        elif user.target is aten.t.default and len(user.users) == 1:
            (user,) = user.users
            if user.target is not aten.mm.default or user.args[1] is not hidden:
                return None
            index = 1
        elif user.target is aten.sum.dim_IntList and user.args[1:] == ([0], True):
            index = 2
        else:
            return None
        if found[index] is not None:
            return None
        found[index] = user
    return found[0], found[1], found[2]


def _source(x: Any) -> Any:
    """Return the source of `x` before its transposed views."""
    while x.target is aten.t.default:
        x = x.args[0]
    return x


class _Writer:
    """Writes the replacement of one loss into its graph."""

    def __init__(self, graph: Graph, loss: _Loss, chunk: int) -> None:
        self.graph, self.loss, self.chunk = graph, loss, chunk
        hidden: Any = loss.product.args[-2]
        self.width = int(hidden.meta["val"].shape[1])

    def write(self) -> None:
        """Change the graph."""
        loss = self.loss
        target, _, reduction, ignored = loss.loss.args[1:5]
        old = [loss.product, *loss.chain, loss.softmax, loss.scored, *loss.softmax.users]
        with self.graph.inserting_before(loss.loss):
            ignoring = self.add(aten.eq.Scalar, (target, ignored), loss.softmax)
            index = self.add(aten.masked_fill.Scalar, (target, ignoring, 0), loss.softmax)
            # The class of the loss that is left: `column` has only the target's class.
            one = self.add(aten.where.Scalar, (ignoring, IGNORED, 0), loss.softmax)
            rows = self.replayed(loss.product.args[-2], loss.chain, loss.product)
            index = self.viewed(index, rows.meta["val"].shape[:-1], loss.softmax)
            scores = self.add(SCORES_OF, (rows, loss.weight, loss.bias, index, self.chunk), loss.product)
            picked, sums = (self.add(operator.getitem, (scores, i), loss.product) for i in range(2))
            column = self.add(aten.sub.Tensor, (picked, sums), loss.softmax)
            if loss.is_flat:
                column = self.add(aten.unsqueeze.default, (column, 1), loss.softmax)
            else:
                samples, _, *inner = loss.scored.meta["val"].shape
                column = self.viewed(column, (samples, 1, *inner), loss.softmax)
            column = self.cast(column, loss.softmax.meta["val"].dtype, loss.softmax)
        loss.loss.args = (column, one, None, reduction, IGNORED)
        if loss.backward is not None:
            old += self.write_backward(column, one, (rows, index, sums))
        for node in sorted(set(old), key=list(self.graph.nodes).index, reverse=True):
            if not node.users and node.op == "call_function":
                self.graph.erase_node(node)

    def write_backward(self, column: Node, one: Node, given: tuple[Node, Node, Node]) -> list[Node]:
        """Write the gradients. Return the operations that they replace."""
        loss, (rows, index, sums), backward = self.loss, given, self.loss.backward
        assert backward is not None
        grad, _, _, _, reduction, _, total = backward.args
        backward.args = (grad, column, one, None, reduction, IGNORED, total)
        backward.meta["val"] = self.value(backward)
        readers = [x for x in loss.readers if x is not None]
        first = min(loss.back[-1].users, key=list(self.graph.nodes).index)
        wanted = [x is not None for x in loss.readers]
        like = readers[0]
        with self.graph.inserting_before(first):
            if loss.is_flat:
                picked = self.add(aten.squeeze.dim, (backward, 1), like)
            else:
                picked = self.viewed(backward, sums.meta["val"].shape, like)
            picked = self.cast(picked, sums.meta["val"].dtype, like)
            of_sums = self.add(aten.neg.default, (picked,), like)
            args = (picked, of_sums, rows, loss.weight, loss.bias, index, sums, None, self.chunk, wanted)
            made = self.add(SCORES_BACKWARD, args, like)
            results = [
                self.add(operator.getitem, (made, i), like) if w else None for i, w in enumerate(wanted)
            ]
            if results[0] is not None:
                results[0] = self.replayed(results[0], loss.back[1:], like)
            if results[2] is not None:
                results[2] = self.add(aten.unsqueeze.default, (results[2], 0), like)
        old: list[Node] = []
        for reader, result in zip(loss.readers, results, strict=True):
            if reader is not None and result is not None:
                reader.replace_all_uses_with(result)
                old += [reader, *reader.all_input_nodes]
        return [*(node for node in old if _torch.is_backward(node)), *loss.views, *loss.back]

    def replayed(self, x: Any, chain: Iterable[Node], like: Node) -> Node:
        """Return `x` after the views and slices of a chain that works on scores, with the width of `x` instead of
        the number of classes. The width stays the last dimension."""
        for node in chain:
            if node.target in RESHAPES:
                x = self.add(node.target, (x, [*node.meta["val"].shape[:-1], self.width]), like)
            elif node.target is aten.clone.default:
                x = self.add(node.target, (x,), like, dict(node.kwargs))
            elif node.target in (aten.slice.Tensor, aten.select.int):
                x = self.add(node.target, (x, *node.args[1:]), like)
            elif node.target in (aten.slice_backward.default, aten.select_backward.default):
                shape: Any = node.args[1]
                x = self.add(node.target, (x, [*shape[:-1], self.width], *node.args[2:]), like)
        return x  # type: ignore[no-any-return]

    def viewed(self, x: Node, shape: Sequence[int], like: Node) -> Node:
        """Return the value in a shape."""
        if x.meta["val"].shape == torch.Size(shape):
            return x
        return self.add(aten.view.default, (x, [*shape]), like)

    def cast(self, x: Node, dtype: torch.dtype, like: Node) -> Node:
        """Return the value in a dtype."""
        if x.meta["val"].dtype is dtype:
            return x
        return self.add(aten._to_copy.default, (x,), like, {"dtype": dtype})

    def add(
        self, target: Any, args: tuple[Any, ...], like: Node, kwargs: dict[str, Any] | None = None
    ) -> Node:
        """Add an operation with the tags of `like`. Return its node."""
        made = add_like(self.graph, target, args, like, kwargs)
        made.meta["val"] = self.value(made)
        return made

    def value(self, node: Node) -> Any:
        """Return the fake value of an operation."""
        args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda x: x.meta["val"])
        tensors = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        with getattr(tensors[0], "fake_mode", None) or contextlib.nullcontext():
            target: Any = node.target
            return target(*args, **kwargs)
