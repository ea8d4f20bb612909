"""Which backward passes are linear in the gradient of the loss, and the line of a nonlinear operation."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.capture import capture
from lightning_piper.capture.losses.linearity import Linearity, linearity

Back = Callable[[Tensor, Tensor], Tensor]


def passing(back: Back) -> Callable[[Tensor], Tensor]:
    """Return the identity, whose backward pass is `back(x, gradient)`."""

    class Passing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return back(*ctx.saved_tensors, grad)

    return Passing.apply  # type: ignore[no-any-return]


class Net(L.LightningModule):
    """Two layers, with a function between the layers, and hooks."""

    def __init__(self, between: Callable[[Tensor], Any] = lambda x: x, views: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
        self.between, self.views = between, views

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        h = self.between(self.first(batch[0]).sigmoid())
        if self.views:  # so that the step is traced, and a tracing run does not suffice
            z = torch.zeros_like(h)
            z[:, :3] = h[:, :3]
            h = z
        return F.cross_entropy(self.second(h), batch[1])


def found(module: L.LightningModule) -> Linearity:
    graph, names = capture(module, [torch.rand(4, 6), torch.tensor([0, 1, 2, 0])]).joint_graph()
    return linearity(graph, names.tangent)


def hooked(hook: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def between(x: Tensor) -> Tensor:
        x.register_hook(hook)
        return x

    return between


def first_row(grad: Tensor, value: float) -> Tensor:
    grad = grad.clone()
    grad[0] = value
    return grad


@torch.library.custom_op("piper_tests::halved", mutates_args=())
def _halved(grad: Tensor, x: Tensor) -> Tensor:
    """An operation that is in no table."""
    return grad * 0.5


@_halved.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(grad)


@torch.library.custom_op("piper_tests::pulled", mutates_args=())
def _pulled(grad: Tensor, x: Tensor) -> Tensor:
    return grad + x


@_pulled.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(grad)


LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "reversed": passing(lambda x, g: -0.3 * g),
    "masked": passing(lambda x, g: g * (x > 0.5)),
    "chosen": passing(lambda x, g: torch.where(x > 0.5, g, torch.zeros_like(g))),
    "softmax": passing(lambda x, g: (g - (g * x).sum(1, keepdim=True)) * x),
    "products": passing(
        lambda x, g: torch.baddbmm(g[:, None], g[:, None], x.T.matmul(x).expand(4, 8, 8))[:, 0]
    ),
    "sorted": passing(lambda x, g: torch.zeros_like(g).scatter(1, x.argsort(1), g)),
    "as_doubles": passing(lambda x, g: g.double().cumsum(1).flip(1).to(g.dtype)),
    "centered": hooked(lambda g: g - g.mean(0)),
    "without_nan": hooked(lambda g: torch.where(torch.isnan(g), torch.zeros_like(g), torch.nan_to_num(g))),
    "in_place": hooked(lambda g: g.mul_(0.5).masked_fill_(g.new_ones(8, dtype=torch.bool), 0)),
    "row": hooked(lambda g: first_row(g, 0.0)),
    "dropped": hooked(lambda g: F.dropout(g, 0.5)),
    "zeros": hooked(torch.zeros_like),
    "unlisted": hooked(lambda g: F.pixel_unshuffle(g.view(1, 1, 4, 8), 2).reshape(4, 8)),
    "opaque": passing(lambda x, g: torch.ops.piper_tests.halved(g, x)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, 1),  # its formula takes logarithms of gradients
    "matrix_exp": lambda x: (
        torch.matrix_exp(x @ x.T) @ x
    ),  # concatenates a gradient with a value that is not a gradient
    "checkpointed": lambda x: torch.utils.checkpoint.checkpoint(
        lambda y: (y @ y.T).tanh() @ y + y, x, use_reentrant=False
    ),
}
NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "clamped": hooked(lambda g: g.clamp(-1, 1)),
    "in_place": hooked(lambda g: g.clamp_(-1, 1)),
    "by_norm": hooked(lambda g: g * (1 / (g.norm() + 1e-6)).clamp(max=1)),
    "positive": hooked(lambda g: g * (g > 0)),
    "small_left_out": hooked(lambda g: torch.where(g.abs() < 1e-8, torch.zeros_like(g), g)),
    "shrunk": hooked(lambda g: F.softshrink(g, 1e-9)),
    "median": hooked(lambda g: g - g.median()),  # homogeneous, and odd
    "square": hooked(lambda g: g * g),
    "coarse": hooked(lambda g: g.to(torch.int8).to(g.dtype)),
    "noise": hooked(lambda g: g + 0.01 * torch.randn_like(g)),
    "row": hooked(lambda g: first_row(g, 1.0)),
    "decayed": passing(lambda x, g: g + 0.1 * x),
    "kept": passing(lambda x, g: x),  # without an operation
    "ones": passing(lambda x, g: torch.ones_like(g)),
    "opaque": passing(lambda x, g: torch.ops.piper_tests.pulled(g, x)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_no_alarm(name: str) -> None:
    assert found(Net(LINEAR[name])) == Linearity()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", NONLINEAR)
def test_what_is_not_linear_is_named_with_its_line(name: str, views: bool) -> None:
    broken = found(Net(NONLINEAR[name], views)).broken
    assert broken is not None
    if name != "kept":  # no operation has that line
        file, _, rest = broken.line.partition(":")
        number, _, code = rest.partition(" (")
        assert file == __file__
        assert linecache.getline(file, int(number)).strip() in code
        assert f'"{name}"' in code or name == "row", code


def test_a_constant_that_meets_the_gradient_in_torch_is_found() -> None:
    """A function hands on one part of a sum, a parameter's own gradient, or a part of what was split."""

    class Penalty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.y = y.detach()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, ctx.y

    def split(x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        return torch.cat([Penalty.apply(left, right), left], 1)

    assert found(Net(lambda x: Penalty.apply(x, x))).broken is not None
    assert found(Net(split)).broken is not None
    assert found(Net(lambda x: Penalty.apply(x, x.detach()))) == Linearity()  # nobody gets it
