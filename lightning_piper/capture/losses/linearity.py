"""Decide whether a backward pass is linear in the gradient of the loss.

The pass is linear if a loss gradient of 0 gives gradients of 0, and the sum of two loss gradients gives the
sum of their gradients. Only then may the loss gradient of a part of the batch be scaled by the part's weight.

    penalty(grad, x):  grad + x / n              x / n does not depend on the loss gradient: a constant enters
    hook(grad):        grad.clamp(max=0.3)       clamp is not linear

The analysis follows the loss gradient through the joint graph, operation by operation. A table lists which
arguments an operation multiplies, and which of these products it adds. The operation is linear if each
product has exactly one linear factor. The derivative formulas of torch itself need no table, because a
derivative is linear by definition. An operation that a hook or the `backward` of an autograd function calls
has the mark `source.CALLED_KEY`. If the table does not contain a marked operation, the operation is run on
random inputs (`linear_trial.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from lightning_piper.capture.joint.operations import is_zero
from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.joint.remainder_operation import REMAINDER_BACKWARD
from lightning_piper.capture.losses.linear_trial import LINEAR, STILL, try_linearity
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.user_code.source import CALLED_KEY
from lightning_piper.common.user_lines import shown_line

ZERO = "zero"  # the state of a value that is certainly zero
# Operations that are linear in their first argument
_FIRST = """
    view reshape _unsafe_view _reshape_alias expand permute t transpose squeeze unsqueeze select slice split split_with_sizes unbind
    unsafe_split chunk narrow diagonal as_strided alias detach clone contiguous _to_copy to lift_fresh_copy view_as flatten
    flip roll rot90 repeat tile sum mean cumsum neg div true_divide tril triu trace gather index _unsafe_index index_select take
    unfold im2col col2im pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
    replication_pad2d replication_pad3d real imag view_as_real view_as_complex _conj conj _conj_physical resolve_conj
    _neg_view resolve_neg _fft_r2c _fft_c2r _fft_c2c embedding avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
    upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d grid_sampler_2d grid_sampler_3d native_dropout triangular_solve
    cholesky_solve convert_element_type broadcast_in_dim diag_embed diag nan_to_num cat stack
"""  # `nan_to_num` keeps finite numbers; each tensor that `cat` or `stack` joins counts as one product
# Operations whose result is a sum of parts, each linear in one of the first two arguments. In `slice_scatter` they are
# the elements that stay and the elements that are put in.
_SUM = "add sub rsub lerp slice_scatter select_scatter diagonal_scatter as_strided_scatter addcdiv"
# Operations that multiply two arguments
_PRODUCT = "mul multiply mm bmm mv dot vdot inner outer ger matmul cross linalg_cross kron tensordot"
_Products = tuple[tuple[int, ...], ...]
# Operations whose result does not depend on the values of their first argument
_OVERWRITING = ("copy", "fill")
# For each operation, the products whose sum it computes. Each product is a tuple of the positions of its
# factors. The operation may read further arguments if these do not depend on the loss gradient.
_PRODUCTS: dict[str, _Products] = {
    **dict.fromkeys(_FIRST.split(), ((0,),)),
    **dict.fromkeys(_SUM.split(), ((0,), (1,))),
    **dict.fromkeys(_PRODUCT.split(), ((0, 1),)),
    **dict.fromkeys(["addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"], ((0,), (1, 2))),
    **dict.fromkeys(["convolution", "linear", "conv1d", "conv2d", "conv3d"], ((0, 1), (2,))),
    "where": ((1,), (2,)),
    **dict.fromkeys(["index_put", "_unsafe_index_put", "masked_fill", "masked_scatter", "constant_pad_nd"],
        ((0,), (2,))),
    **dict.fromkeys(["scatter", "scatter_add", "index_add", "index_copy", "index_fill"], ((0,), (3,))),
    **dict.fromkeys(_OVERWRITING, ((1,),)),
    "linalg_solve_triangular": ((1,),),
    "linalg_lu_solve": ((2,),),
}  # fmt: skip


@dataclass(frozen=True)
class Nonlinearity:
    """A place where a backward pass is not linear.

    Attributes:
        operation: the operation that is not linear, or that adds a constant.
        line: the line of the user's code that calls it.
    """

    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.line})"


@dataclass(frozen=True)
class Linearity:
    """A summary of how a backward pass depends on the gradient of the loss.

    Attributes:
        broken: where the pass is not linear; None if it is linear.
        opaque: whether a part of the pass is the user's uncaptured code, which the analysis cannot inspect.
    """

    broken: Nonlinearity | None = None
    opaque: bool = False


def linearity(graph: torch.fx.Graph, tangent: Node | None) -> Linearity:
    """Follow the gradient of the loss through a joint graph, and return how the backward pass depends on it.
    A graph without a backward pass counts as linear.

    Args:
        tangent: the placeholder of the gradient of the loss. None if the graph does not have a backward pass.
    """
    if tangent is None:
        return Linearity()
    following = _LossGradientStates(tangent)
    for node in graph.nodes:
        if node.op in ("call_function", "get_attr"):
            following.enter(node)
    output = graph.output_node()
    results = zip(output.args[0], output.meta["desc"], strict=True)  # type: ignore[arg-type]
    for gradient in dict.fromkeys(
        x for x, desc in results if isinstance(desc, _torch.GradAOTOutput) and x is not None
    ):
        found = following.of(gradient)
        if found == STILL:  # the gradient of a parameter is a constant
            found = _named(gradient)
        if isinstance(found, Nonlinearity):
            return Linearity(found, following.opaque)
    return Linearity(None, following.opaque)


_Found = str | Nonlinearity


class _LossGradientStates:
    """How each node depends on the loss gradient.

    The state of a node is `LINEAR`, `ZERO`, `STILL` (independent of the loss gradient), or a `Nonlinearity`.
    Nodes that are `STILL` are not stored.

    Attributes:
        opaque: see `Linearity`.
    """

    def __init__(self, tangent: Node) -> None:
        self._found: dict[Node, _Found] = {tangent: LINEAR}
        # nodes inside of a derivative formula of torch, which is linear as a whole -> the formula's sequence
        # number
        self._inside: dict[Node, Any] = {}
        self.opaque = False

    def of(self, value: Any) -> _Found:
        """Return the state of an argument, which is a node or a constant."""
        if isinstance(value, Node):
            return self._found.get(value, STILL)
        return ZERO if value is None or (isinstance(value, int | float) and value == 0) else STILL

    def enter(self, node: Node) -> None:
        """Determine and record how a node depends on the gradient of the loss. Nodes must be entered in the order
        of the graph."""
        inputs = [self._found[x] for x in node.all_input_nodes if x in self._found]
        found: _Found = STILL
        broken = next((x for x in inputs if isinstance(x, Nonlinearity)), None)
        if LINEAR in inputs and not _reads_only_shapes(node):
            found = broken or self._by_operation(node)
        elif broken is not None and not _reads_only_shapes(node):
            found = broken
        elif _is_zero(node) or (ZERO in inputs and self._by_table(node) == ZERO):
            found = ZERO
        if found != STILL:
            self._found[node] = found

    def _by_operation(self, node: Node) -> _Found:
        """Return the state of a node that reads a linear input. Set `opaque` if the node is uncaptured
        code."""
        if node.target is operator.getitem:
            return self._found[node.all_input_nodes[0]]
        if node.target is REMAINDER_BACKWARD:
            self.opaque = True
            return LINEAR
        # `called`: a hook or a custom `backward` calls the operation. `number` identifies torch's derivative
        # formula to which the operation belongs.
        called, number = CALLED_KEY in node.meta, _torch.sequence_number(node)
        # An input belongs to the same formula, and the table does not contain the operation of that input.
        if (
            not called
            and number is not None
            and any(self._inside.get(x) == number for x in node.all_input_nodes)
        ):
            self._inside[node] = number
            return LINEAR
        if (known := self._by_table(node)) is not None and (called or known != STILL):
            return _named(node) if known == STILL else known
        # The formula is linear as a whole, although the table does not contain this operation.
        if not called and known is None and _is_of_torch(node):
            self._inside[node] = number
            return LINEAR
        if not called and known == STILL:
            return self._merged(node)
        made = try_linearity(node, {x for x in node.all_input_nodes if self.of(x) == LINEAR})
        return made or (_named(node) if called else LINEAR)

    def _by_table(self, node: Node) -> str | None:
        """Return the state of a node according to the table: `LINEAR`, `ZERO`, or `STILL` if the node is not
        linear according to the table. Return None if `_products` returns None for the node."""
        products = _products(node)
        if products is None:
            return None
        arguments: list[Any] = _arguments(node)
        read = arguments if _name(node) not in _OVERWRITING else [None, *arguments[1:]]
        free = [x for i, x in enumerate(read) if not any(i in factors for factors in products)]
        if any(self._is_linear(x) for each in free for x in _flat(each)):
            return STILL
        found = set()
        for factors in products:
            for values in _each(arguments, factors):
                states = [self.of(x) for x in values]
                found.add(ZERO if ZERO in states else LINEAR if states.count(LINEAR) == 1 else STILL)
        return STILL if STILL in found else LINEAR if LINEAR in found else ZERO

    def _is_linear(self, value: Any) -> bool:
        return self.of(value) == LINEAR

    def _merged(self, node: Node) -> _Found:
        """Find a constant that an operation of a derivative formula of torch adds to the gradient, but that
        the formula does not compute itself.

        Returns:
            A `Nonlinearity` that names the constant's origin. `LINEAR` if no such constant is added.
        """
        for factors in _products(node) or ():
            for values in _each(_arguments(node), factors):
                nodes = [x for x in values if isinstance(x, Node)]
                if all(self.of(x) == STILL for x in values) and not all(
                    _is_of_formula(x, node) for x in nodes
                ):
                    return _named(nodes[0])
        return LINEAR


def _products(node: Node) -> _Products | None:
    """Return the products whose sum an operation computes, as positions of its arguments.

    For a backward operation of torch, such as `convolution_backward`, each gradient that it reads is a product,
    and so is its first argument if that is a tensor. Return None if the table does not contain the operation, or
    if the result is rounded to integers or to 8 bits.
    """
    target: Any = node.target
    name = _name(node)
    if not name or target.namespace not in ("aten", "prims"):
        return None
    schema = _torch.arguments_of(target)
    # A backward operation of torch is linear in each gradient that it reads.
    if "_backward" in name and "double" not in name:
        return tuple(
            (i,)
            for i, x in enumerate(schema)
            if (x.name.startswith("grad") or i == 0) and "Tensor" in str(x.type)
        )
    if name in ("div", "true_divide") and node.kwargs.get("rounding_mode") is not None:
        return None
    made = node.meta.get("val")
    if isinstance(made, torch.Tensor) and (
        made.dtype.itemsize == 1 or not (made.is_floating_point() or made.is_complex())
    ):
        return None  # rounding to integers or to 8 bits is too coarse to be linear
    return _PRODUCTS.get(name)


def _name(node: Node) -> str:
    """Return the name of a torch operation, without its overload. Return "" for any other node."""
    target: Any = node.target
    return str(target.overloadpacket.__name__) if isinstance(target, torch._ops.OpOverload) else ""


def _arguments(node: Node) -> list[Any]:
    """Return the arguments in the order of the operation's schema, with None for arguments that are not
    given."""
    target: Any = node.target
    schema = _torch.arguments_of(target)[len(node.args) :]
    return [*node.args, *(node.kwargs.get(x.name) for x in schema)]


def _each(arguments: list[Any], factors: tuple[int, ...]) -> Iterator[list[Any]]:
    """Iterate over the products at these positions of the arguments. Each product is the list of its factors.

    Usually this is one product. If the first factor is a list of tensors that are added or joined, each tensor
    is a product.
    """
    values = [arguments[i] if i < len(arguments) else None for i in factors]
    if isinstance(values[0], list | tuple):
        yield from ([x] for x in values[0])
    else:
        yield values


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for x in value:
            yield from _flat(x)
    else:
        yield value


def _is_of_formula(node: Node, reader: Node) -> bool:
    """Return whether the node belongs to the same derivative formula of torch as its reader. A node computed
    from an operation that a hook or a custom `backward` called does not."""
    same = _torch.sequence_number(node) == _torch.sequence_number(reader)
    return same and _torch.is_backward(node) and CALLED_KEY not in _origin(node).meta


def _reads_only_shapes(node: Node) -> bool:
    """Return whether the operation reads only the shape and dtype of its first argument, not its values."""
    name = _name(node)
    return name.endswith("_like") or name.startswith(("new_", "sym_"))


def _is_zero(node: Node) -> bool:
    """Return whether the node is certainly a tensor of zeros. A constant counts only if it is on the CPU and not
    empty."""
    if node.op == "get_attr":
        value = getattr(node.graph.owning_module, str(node.target), None)
        if (
            not isinstance(value, torch.Tensor)
            or _torch.is_traced(value)
            or value.device.type != "cpu"
            or not value.numel()
        ):
            return False
        with _torch.with_data():
            return not bool(value.count_nonzero())
    filled = {"full_like": 1, "new_full": 2, "full": 1, "scalar_tensor": 0}.get(_name(node))
    if filled is not None:
        return len(node.args) > filled and bool(node.args[filled] == 0)
    return _name(node) == "_efficientzerotensor" or is_zero(node)


def _is_of_torch(node: Node) -> bool:
    """Return whether torch or Piper defines the operation."""
    target: Any = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace in (
        "aten",
        "prims",
        "lightning_piper",
    )


def _origin(node: Node) -> Node:
    """Return the nearest node that a hook or a custom `backward` called: this node, or a node of the backward
    pass from which this node is computed. If there is no such node, return this node."""
    stack, seen = [node], {node}
    while stack:
        top = stack.pop()
        if CALLED_KEY in top.meta:
            return top
        new = [x for x in top.all_input_nodes if x not in seen and _torch.is_backward(x)]
        seen.update(new)
        stack += new
    return node


def _named(node: Node) -> Nonlinearity:
    """Return a `Nonlinearity` with the name and the user's line of the operation that `_origin` finds."""
    node = _origin(node)
    file, _, number = str(node.meta.get(CALLED_KEY, "")).rpartition(":")
    operation = str(node.target).removesuffix(".default")
    if node.op == "placeholder":
        operation = "a parameter or a value of the batch that the step returns as a gradient"
    return Nonlinearity(operation, shown_line(file, int(number)) if file else own_line(node))
