"""Replace operations that work along a sharded dimension by several operations that work on shards::

    log_softmax(x)  ->  low = x - max(x);  low - log(sum(exp(low)))         over all shards
    nll_loss(x, target)  ->  nll_loss of the one target column             x is sharded along the classes
    norm(x)  ->  sqrt(sum(x * x))                                           the elements of x are sharded
    embedding(x, index)  ->  rows(x, index, ids)                            x is sharded along rows
    chunked_scores(h, x, target)  ->  chunked_scores_part(h, x, target, ids)   x is sharded along rows

So no rank ever gathers the scores of a whole vocabulary. The new operations have their own placement rules
(`placements.rules`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from lightning_piper.capture.tensor_sharding.ring_attention import (
    attend,
    attend_backward,
    is_backward,
    ring_sharding,
)
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.division import Division
from lightning_piper.ir.values import Placement, Replicated, Sharded
from lightning_piper.placements.attention import ATTENTION, attended
from lightning_piper.placements.choice import by_keys
from lightning_piper.placements.chunked_scores import SCORES_BACKWARD, SCORES_OF, SCORES_OF_PART
from lightning_piper.placements.placement_changes import PlacementMap
from lightning_piper.placements.rule import shape_of, tensors_of
from lightning_piper.placements.vocabulary import IGNORED, PICKED, ROWS, ROWS_BACKWARD, SPREAD

aten = torch.ops.aten

# The replacement of an operation: the node with its result, or one node for each result. None: not replaced.
Written = Node | tuple[Node, ...] | None


class Decomposer:
    """A writer that replaces an operation along a sharded dimension by several operations.

    Each `Propagation` has one. The functions of this module and of `ring_attention` get it as `writer`. They
    call it to add an operation: `writer(aten.exp.default, x)` returns the node of exp(x).

    Args:
        held: the placements along the axis of `division`.
        gone: replaced operation -> its replacement. The writer adds entries.
        place: sets the placements of an operation along all axes.
        changed: takes (value, placement, reader), and returns the value with this placement for the reader.

    Attributes:
        dense: value that ring attention sends between ranks -> its contiguous copy, or the value itself.
    """

    def __init__(
        self,
        graph: Graph,
        division: Division,
        held: PlacementMap,
        gone: dict[Node, Written],
        place: Callable[[Node], None],
        changed: Callable[[Node, Placement, Node], Node],
    ) -> None:
        self.graph, self.degree, self.attention, self.held = graph, division.degree, division.attention, held
        self._place, self._changed = place, changed
        self._at: Any = None  # the operation that is being replaced
        self._gone = gone
        # (size, placement, metadata of the replaced operation) -> the node with the indices
        self._ids: dict[tuple[int, Placement, str], Node] = {}
        self.dense: dict[Node, Node] = {}
        # (node of the indices, number of rows of the table) of each replaced embedding
        self._rows: set[tuple[Node, int]] = set()

    @property
    def writes(self) -> bool:
        """Whether `write` is currently replacing an operation."""
        return self._at is not None

    def write(self, node: Node) -> bool:
        """Replace a node by several operations if it works along a sharded dimension. Return whether the node
        was replaced.

        The node is then erased from the graph, its readers read the replacements, and `gone` has an entry for
        it. `getitem` nodes that take its results are replaced in the same way.
        """
        if (written := _WRITTEN.get(node.target)) is None:
            return False
        before, self._at = self._at, node
        with self.graph.inserting_before(node):
            found = written(self, node)
        self._at = before
        if found is None:
            return False
        results = found if isinstance(found, tuple) else (found,)
        # The sequence number connects the node's backward operations to this forward operation.
        results[0].meta["seq_nr"] = node.meta.get("seq_nr")
        if isinstance(found, tuple):  # the readers are getitem nodes
            for user in list(node.users):
                user.replace_all_uses_with(found[user.args[1]])  # type: ignore[index]
                self.graph.erase_node(user)
                self._gone[user] = found[user.args[1]]  # type: ignore[index]
        else:
            node.replace_all_uses_with(found)
        self.graph.erase_node(node)
        self._gone[node] = found
        return True

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Write one operation before the operation that is being replaced, and place its results along all
        axes. Return its node.

        If the placement along an axis replaces this operation in turn, return the replacement: a node, or a
        tuple with one node for each result. For a `getitem` of such a tuple, write nothing and return the
        item.
        """
        if target is operator.getitem and isinstance(args[0], tuple):
            return args[0][args[1]]  # type: ignore[no-any-return]
        value = self._at.meta["val"]
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self._at.meta.items() if k not in ("val", "tensor_meta")}
        if not _torch.is_backward(self._at):
            made.meta["seq_nr"] = (made.name,)
        given_args, given_kwargs = torch.fx.node.map_arg((args, kwargs), lambda x: x.meta["val"])
        with (value[0] if isinstance(value, tuple | list) else value).fake_mode:
            made.meta["val"] = target(*given_args, **given_kwargs)
        self._place(made)
        stands: Any = self._gone.get(made, made)
        return stands  # type: ignore[no-any-return]

    def whole(self, x: Node) -> Node:
        """Return the value replicated on every rank: `x` itself, or a change of its placement. If `x` is a
        partial sum, the change comes before the operation that is being replaced, not later."""
        return x if self.held[x] == Replicated() else self._changed(x, Replicated(), self._at)

    def changed(self, x: Node, wanted: Placement) -> Node:
        """Return the value with the placement `wanted`. The operation that is being replaced counts as the
        reader of the change."""
        return self._changed(x, wanted, self._at)

    def ids(self, size: int, like: Node, part: Sharded | None = None) -> Node:
        """Return the indices 0 to `size` - 1 of a dimension, as a sharded vector on the device of `like`. So
        each rank has the indices of its own shard of the dimension.

        Operations in the same region share one vector.

        Args:
            part: the shard of the dimension, whose blocks and turn the indices follow (default: contiguous
                shards).
        """
        wanted = Sharded(0) if part is None else replace(part, dim=0)
        key, whole = ((size, held, str(self._at.meta.get("custom"))) for held in (wanted, Replicated()))
        if whole not in self._ids:
            self._ids[whole] = self(aten.arange.default, size, device=like.meta["val"].device)
        if key not in self._ids:
            self._ids[key] = self._changed(self._ids[whole], wanted, self._at)
        return self._ids[key]

    def apart(self, x: Node, dim: int) -> Node:
        """Return a view of `x` in which two dimensions replace the sharded dimension `dim`: [ranks, elements of
        one shard]."""
        shape = list(shape_of(x))
        return self(
            aten.view.default, x, [*shape[:dim], self.degree, shape[dim] // self.degree, *shape[dim + 1 :]]
        )


def _along(writer: Decomposer, x: Any, dim: Any) -> int | None:
    """Return the dimension `dim` of `x` as a number from 0 on, if an operation along this dimension must be
    replaced. Return None if `x` is not sharded along it, if its shards have several blocks, or if it is so
    small that gathering costs less.

    For each row, the new operations exchange one maximum of each rank, two sums in the forward pass and one
    sum in the backward pass. So they pay if the row has more than `degree` + 3 elements.
    """
    along = int(dim) % len(shape_of(x))
    return along if writer.held[x] == Sharded(along) and shape_of(x)[along] > writer.degree + 3 else None


def _softmax(writer: Decomposer, node: Node) -> Node | None:
    """Write a softmax, or its logarithm, along a sharded dimension. Return None, without a replacement, if
    `_along` returns None, or if the operation also changes the dtype."""
    x, along, raised = node.args
    if raised or (dim := _along(writer, x, along)) is None:
        return None
    # As in torch's kernel, subtract the maximum over all shards.
    parts = writer(aten.amax.default, writer.apart(x, dim), [dim + 1])  # type: ignore[arg-type]
    low = writer(aten.sub.Tensor, x, writer(aten.amax.default, parts, [dim], True))
    high = writer(aten.exp.default, low)
    total = writer(aten.sum.dim_IntList, high, [dim], True)
    if node.target is aten._softmax.default:
        return writer(aten.div.Tensor, high, total)
    return writer(aten.sub.Tensor, low, writer(aten.log.default, total))


def _softmax_backward(writer: Decomposer, node: Node) -> Node | None:
    """Write the gradient of `_softmax`. Return None if `_along` returns None, or if the operation also
    changes the dtype."""
    grad, made, along, dtype = node.args
    x: Any = made
    if dtype != x.meta["val"].dtype or (dim := _along(writer, x, along)) is None:
        return None
    if node.target is aten._softmax_backward_data.default:
        product = writer(aten.mul.Tensor, grad, x)
        return writer(
            aten.sub.Tensor,
            product,
            writer(aten.mul.Tensor, x, writer(aten.sum.dim_IntList, product, [dim], True)),
        )
    total = writer(aten.sum.dim_IntList, grad, [dim], True)
    return writer(aten.sub.Tensor, grad, writer(aten.mul.Tensor, writer(aten.exp.default, x), total))


def _vector_norm(writer: Decomposer, node: Node) -> Node | None:
    """Write the Euclidean norm of vectors whose elements are sharded: the root of a sum of squares, in at least
    float32. Return None for other norms, and if the elements are not sharded."""
    given: list[Any] = [*node.args, *(2, None, False, None)[len(node.args) - 1 :]]
    x, order, dims, kept, dtype = given
    size = len(shape_of(x))
    along = [int(d) % size for d in dims] if dims else list(range(size))
    held, own = writer.held[x], x.meta["val"].dtype
    if order != 2 or dtype or "dtype" in node.kwargs or not own.is_floating_point:
        return None
    if not isinstance(held, Sharded) or held.dim not in along:
        return None
    wide = torch.promote_types(own, torch.float32)
    raised = x if own == wide else writer(aten._to_copy.default, x, dtype=wide)
    squares = writer(aten.sum.dim_IntList, writer(aten.mul.Tensor, raised, raised), along, kept)
    root = writer(aten.sqrt.default, writer.whole(squares))
    return root if own == wide else writer(aten._to_copy.default, root, dtype=own)


def _argmax(writer: Decomposer, node: Node) -> Node | None:
    """Write the index of the first maximum along a sharded dimension. Return None if `_along` returns None,
    or if the operation works along all dimensions.

    The shards of the ranks follow one after another. So the first rank that has the maximum has the first
    index of it.
    """
    x: Any = node.args[0]
    if len(node.args) < 2 or node.args[1] is None or (dim := _along(writer, x, node.args[1])) is None:
        return None
    parts = writer.apart(x, dim)
    largest = writer(aten.amax.default, parts, [dim + 1], True)
    where = writer(aten.argmax.default, parts, dim + 1, True)
    member = writer(aten.argmax.default, largest, dim, True)
    first = writer(aten.mul.Tensor, member, shape_of(x)[dim] // writer.degree)
    found = writer(aten.add.Tensor, writer(aten.gather.default, where, dim, member), first)
    return writer(aten.view.default, found, list(shape_of(node)))


def _nll(writer: Decomposer, node: Node) -> Written:
    """Write the loss and its total weight, which are the two results of `nll_loss`.

    If classes are sharded, the column of the target is picked, and is the only class of the new loss. If rows
    are sharded and the loss is a sum or mean, the losses of the ranks are summed. Return None in all other
    cases, and if the user gives weights to the classes.
    """
    scores, target, weight, reduction, ignored = node.args
    x: Any = scores
    if weight is None and reduction and isinstance(writer.held[x], Sharded) and writer.held[x] != Sharded(1):
        rows = writer(operator.getitem, writer(node.target, x, target, None, 0, ignored), 0)
        counted = writer(
            aten._to_copy.default, writer(aten.ne.Scalar, target, ignored), dtype=x.meta["val"].dtype
        )
        loss, total = writer.whole(writer(aten.sum.default, rows)), writer(aten.sum.default, counted)
        return (writer(aten.div.Tensor, loss, total) if reduction == 1 else loss), total
    if weight is not None or len(shape_of(x)) < 2 or _along(writer, x, 1) is None:
        return None
    index, classes = _class_targets(writer, target, ignored)
    size = shape_of(x)[1]
    column = writer(PICKED, x, index, writer.ids(size, x), 1, size)
    return writer(node.target, column, classes, None, reduction, IGNORED)


def _nll_backward(writer: Decomposer, node: Node) -> Node | None:
    """Write the gradient of `_nll` for sharded classes. Return None in all other cases, and if the user
    gives weights to the classes."""
    grad, scores, target, weight, reduction, ignored, total = node.args
    x: Any = scores
    if weight is not None or len(shape_of(x)) < 2 or _along(writer, x, 1) is None:
        return None
    index, classes = _class_targets(writer, target, ignored)
    about = {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}
    column = writer(aten.zeros.default, list(shape_of(index)), **about)  # only its shape matters
    found = writer(node.target, grad, column, classes, None, reduction, IGNORED, total)
    return writer(SPREAD, found, index, writer.ids(shape_of(x)[1], x), 1)


def _attention(writer: Decomposer, node: Node) -> Written:
    """Write ring attention if the division asks for it and the attention allows it (`ring_sharding`).
    Otherwise, if causal attention will read sharded queries and gathered keys, write the same attention with
    a mask of positions instead of `is_causal`. Return None for all other attention, which needs no
    replacement."""
    if (part := ring_sharding(writer, node)) is not None:
        return attend_backward(writer, node, part) if is_backward(node) else attend(writer, node, part)
    q, k, _ = attended(node)
    causal = 7 if tensors_of(node)[0] is not q else 4
    if len(node.args) <= causal or not node.args[causal]:
        return None
    if not by_keys(node, writer.held, writer.degree, writer.attention):
        return None
    about = {"dtype": q.meta["val"].dtype, "device": q.meta["val"].device}
    held = writer.held[q]
    query = writer(
        aten.unsqueeze.default, writer.ids(shape_of(q)[2], q, held if isinstance(held, Sharded) else None), 1
    )
    seen = writer(aten.ge.Tensor, query, writer(aten.arange.default, shape_of(k)[2], device=about["device"]))
    here, hidden = (writer(aten.scalar_tensor.default, value, **about) for value in (0.0, -math.inf))
    mask = writer(aten.where.self, seen, here, hidden)
    args = (*node.args[:causal], False, *node.args[causal + 1 :])
    return writer(node.target, *args, **{**node.kwargs, "attn_mask": mask})


def _dropped(writer: Decomposer, node: Node) -> Written:
    """Write a dropout that draws the mask of the whole value on every rank, and uses only the rank's shard of
    the mask. So the mask is the same as on one device. Return None if the value is not sharded."""
    value, probability, train = node.args
    x: Any = value
    if not isinstance(writer.held[x], Sharded):
        return None
    about = {"dtype": x.meta["val"].dtype, "device": x.meta["val"].device}
    ones = writer(aten.ones.default, list(shape_of(x)), **about)
    mask = writer(operator.getitem, writer(node.target, ones, probability, train), 1)
    scale = 0.0 if probability == 1 else 1 / (1 - probability)  # type: ignore[operator]
    return writer(aten.mul.Tensor, writer(aten.mul.Tensor, x, mask), scale), mask


def _class_targets(writer: Decomposer, target: Any, ignored: Any) -> tuple[Node, Node]:
    """Return two tensors that are made from the target.

    - The class of each row, with a dimension of one element for the classes, or `IGNORED` if the row is
      ignored.
    - The target for a loss with a single class: 0, or `IGNORED` if the row is ignored.
    """
    nothing = writer(aten.eq.Scalar, target, ignored)
    index = writer(aten.where.ScalarSelf, nothing, IGNORED, target)
    return writer(aten.unsqueeze.default, index, 1), writer(aten.where.Scalar, nothing, IGNORED, 0)


def _embedding(writer: Decomposer, node: Node) -> Node | None:
    """Write the lookup of rows in a table whose rows are sharded. Return None if the rows are not sharded, or
    if the lookup has options other than a padding index."""
    table, index, *options = node.args
    x: Any = table
    if writer.held[x] != Sharded(0) or any(options[1:]):
        return None
    size = shape_of(x)[0]
    writer._rows.add((index, size))  # type: ignore[arg-type]
    return writer(ROWS, x, index, writer.ids(size, x), size)


def _embedding_backward(writer: Decomposer, node: Node) -> Node | None:
    """Write the gradient of a table for a lookup that `_embedding` has written. Return None for any other
    lookup."""
    grad, index, size, padding, _ = node.args
    if (index, size) not in writer._rows:
        return None
    return writer(ROWS_BACKWARD, grad, index, writer.ids(size, grad), padding)  # type: ignore[arg-type]


def _chunked_scores(writer: Decomposer, node: Node) -> Written:
    """Write both results of `chunked_scores` with sharded classes. Return None if the classes are not sharded.

    For each row, the ranks exchange the logarithms of their sums, and add up the score of the target.
    """
    hidden, weight, bias, target, chunk = node.args
    x: Any = weight
    if writer.held[x] != Sharded(0):
        return None
    size = shape_of(x)[0]
    shards, ids = writer.apart(x, 0), writer.ids(size, x)
    part = writer(SCORES_OF_PART, hidden, shards, bias, target, ids, chunk, size)
    sums = writer.whole(writer(operator.getitem, part, 1))
    # There is no rule for `logsumexp` if another axis shards the rows.
    largest = writer(aten.amax.default, sums, [0], True)
    high = writer(aten.exp.default, writer(aten.sub.Tensor, sums, largest))
    total = writer(aten.log.default, writer(aten.sum.dim_IntList, high, [0]))
    found = writer(aten.add.Tensor, total, writer(aten.squeeze.dim, largest, 0))
    return writer.whole(writer(operator.getitem, part, 0)), found


def _chunked_scores_backward(writer: Decomposer, node: Node) -> Written:
    """Write the gradients of `_chunked_scores` for sharded classes. Return None if the classes are not
    sharded, or if the node is already such a gradient."""
    *inputs, ids, chunk, wanted = node.args
    x: Any = node.args[3]
    if ids is not None or writer.held[x] != Sharded(0):
        return None
    made = writer(SCORES_BACKWARD, *inputs, writer.ids(shape_of(x)[0], x), chunk, wanted)
    return tuple(writer(operator.getitem, made, index) for index in range(3))


# operation -> the function that writes its replacement
_WRITTEN: dict[Any, Callable[[Decomposer, Node], Written]] = {
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.argmax.default: _argmax,
    aten.nll_loss_forward.default: _nll,
    aten.nll_loss2d_forward.default: _nll,
    aten.nll_loss_backward.default: _nll_backward,
    aten.nll_loss2d_backward.default: _nll_backward,
    SCORES_OF: _chunked_scores,
    SCORES_BACKWARD: _chunked_scores_backward,
    aten.native_dropout.default: _dropped,
    **dict.fromkeys(ATTENTION, _attention),
    aten.embedding.default: _embedding,
    aten.embedding_dense_backward.default: _embedding_backward,
}
