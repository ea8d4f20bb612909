"""A function of `FUNCTIONS` calls the same operations as the operation in its place, with the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from lightning_piper.ir._torch_functions import FUNCTIONS
from lightning_piper.ir.boxed_code import compile_boxed

aten = torch.ops.aten
DRAWN = torch.Generator().manual_seed(0)
X, Y = (torch.randn(4, 6, generator=DRAWN) for _ in range(2))
CUBE = torch.randn(2, 4, 6, generator=DRAWN)
IMAGES = torch.randn(2, 4, 5, 5, generator=DRAWN)
MASK, INDEX = X > 0, torch.tensor([[0, 1, 2, 0, 1, 2]])
ROW = torch.rand(6, generator=DRAWN)

UNARY = [(X,), (CUBE.abs().double(),)]
PAIRS = [(X, Y), (X, ROW), (X, 2), (X, 0.5), (X.bfloat16(), 0.5), (INDEX, 2.5), (INDEX, X[:1].double())]
COMPARED = [(X, 0), (X.double(), 0.5), (INDEX, 1)]
CALLS: dict[str, list[Any]] = {
    **{f"{name}.default": UNARY for name in (
        "abs", "cos", "detach", "erf", "exp", "neg", "reciprocal", "relu", "sigmoid", "sin", "tanh", "clone", "sum", "mean")},
    **{f"{name}.default": [(X.abs(),)] for name in ("log", "rsqrt", "sqrt")},
    **{f"{name}.Tensor": PAIRS for name in ("add", "sub", "mul", "div")},
    **{f"{name}.Tensor": [(X, Y), (X, ROW)] for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    **{f"{name}.Scalar": COMPARED for name in ("eq", "ge", "gt", "le", "lt", "ne")},
    **{f"{name}.default": [(X, Y), (X, ROW)] for name in ("maximum", "minimum")},
    **{f"{name}.default": [(MASK, Y > 0), (X, Y)] for name in ("logical_and", "logical_or")},
    **{f"{name}.Tensor": [(MASK, Y > 0)] for name in ("bitwise_and", "bitwise_or")},
    **{f"{name}.default": [(MASK,)] for name in ("bitwise_not", "logical_not")},
    "addmm.default": [(ROW, X, CUBE[0].mT @ CUBE[0]), (ROW, X, torch.eye(6), {"beta": 2, "alpha": 3})],
    "amax.default": [(X, [1]), (X, [0], True), (X,)],
    "amin.default": [(X, [1]), (X, [0], True), (X,)],
    "baddbmm.default": [(CUBE.mT @ CUBE, CUBE.mT, CUBE), (CUBE.mT @ CUBE, CUBE.mT, CUBE, {"beta": 0})],
    "bmm.default": [(CUBE, CUBE.mT)],
    "cat.default": [([X, Y],), ([X, Y], 1), ([X, Y], -1)],
    "clamp.default": [(X, 0), (X, None, 0.5), (X, -0.1, 0.1)],
    "convolution.default": [(IMAGES, IMAGES[:, :, :3, :3].contiguous(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)],
    "cumsum.default": [(X, 1), (MASK, 0, {"dtype": torch.int64})],
    "embedding.default": [(X, INDEX), (X, INDEX, 1, False, False)],
    "expand.default": [(ROW, [4, 6]), (ROW, [2, -1]), (ROW, [4, 6], {"implicit": True})],
    "gather.default": [(X, 0, INDEX)],
    "index_select.default": [(X, 0, INDEX[0])],
    "masked_fill.Scalar": [(X, MASK, 0), (X, MASK, -1e9)],
    "masked_fill.Tensor": [(X, MASK, torch.tensor(2.0))],
    "mean.dim": [(X, [0]), (X, [1], True), (X, None), (X, [-1], False, {"dtype": torch.float64})],
    "mm.default": [(X, Y.mT)],
    "native_dropout.default": [(X, 0.5, True)],
    "native_group_norm.default": [(IMAGES, torch.ones(4), None, 2, 4, 25, 2, 1e-5)],
    "native_layer_norm.default": [(X, [6], ROW, ROW, 1e-5), (X, [6], None, None, 1e-5)],
    "permute.default": [(CUBE, [2, 0, 1])],
    "pow.Tensor_Scalar": [(X, 2), (X, 3.0), (X.abs(), 0.5)],
    "pow.Tensor_Tensor": [(X.abs(), Y)],
    "repeat.default": [(X, [2, 1]), (ROW, [2, 2])],
    "reshape.default": [(X, [24]), (X.mT, [2, -1]), (X, [4, 6])],
    "scatter_add.default": [(X, 0, INDEX, Y[:1])],
    "select.int": [(X, 1, 2), (X, -1, -1)],
    "squeeze.dim": [(X[:1], 0), (X, 1)],
    "sum.dim_IntList": [(X, [0]), (X, [0, 1], True), (X, None), (MASK, [1], False, {"dtype": torch.int64})],
    "t.default": [(X,), (ROW,)],
    "transpose.int": [(CUBE, 0, 1), (CUBE, -1, -2)],
    "unsqueeze.default": [(X, 0), (X, -1)],
    "view.default": [(X, [24]), (X, [2, -1])],
    "where.self": [(MASK, X, Y), (MASK, X, torch.tensor(0.0))],
}  # fmt: skip
CALLS["sum.default"] = [*UNARY, (MASK,), (MASK, {"dtype": torch.float32})]
CALLS["clone.default"] = [*UNARY, (CUBE.mT, {"memory_format": torch.contiguous_format})]


class Dispatched(TorchDispatchMode):
    """Notes the operations that are called, with all arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.calls.append(tree_map_only(torch.Tensor, content, (str(function), args, kwargs, made)))
        return made


def content(x: torch.Tensor) -> tuple[Any, ...]:
    return x.dtype, x.stride(), x.tolist()


def called(function: Any, args: tuple[Any, ...]) -> list[Any]:
    options = args[-1] if isinstance(args[-1], dict) else {}
    torch.manual_seed(2)
    with Dispatched() as dispatched:
        function(*args[: len(args) - bool(options)], **options)
    return dispatched.calls


@pytest.mark.parametrize("operation", FUNCTIONS, ids=lambda x: str(x).removeprefix("aten."))
def test_a_function_calls_the_same_operation(operation):
    for args in CALLS[str(operation).removeprefix("aten.")]:
        assert called(FUNCTIONS[operation], args) == called(operation, args)


def test_a_function_that_calls_another_operation_is_noticed():
    assert called(torch.add, (X, Y)) != called(aten.sub.Tensor, (X, Y))
    assert called(torch.add, (X, Y, {"alpha": 2})) != called(aten.add.Tensor, (X, Y))


class Doubled(TorchFunctionMode):
    """A mode of the user that changes results."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {})) * 2


class Own(torch.Tensor):
    """A tensor of the user whose functions fail."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(function)


def test_generated_code_calls_operations_whatever_modes_and_subclasses_do():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.add.Tensor, (x, 1)),))
    run = compile_boxed(graph)
    (right,) = run([X])
    with Doubled():
        by_function, by_code = torch.add(X, 1), run([X])[0]
    assert by_function.equal(right * 2) and by_code.equal(right)
    found = run([X.as_subclass(Own)])[0]
    assert type(found) is torch.Tensor and found.equal(right)
    assert [n.target for n in graph.nodes if n.op == "call_function"] == [aten.add.Tensor]
