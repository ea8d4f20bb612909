"""Rows of `python_state`: tensors, hooks and parts of the module that are changed between steps."""

from __future__ import annotations

import copy
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize, prune

from tests.strategy.python_state import Net


class ForwardHook(Net):
    """Registered in the middle, and removed."""

    microbatches = 2

    def change(self, step: int) -> None:
        if step == 2:
            self.handle = self.first.register_forward_hook(lambda module, args, out: out * 2)
        elif step == 4:
            self.handle.remove()


class ForwardPreHook(Net):
    captures = 2

    def change(self, step: int) -> None:
        if step == 2:
            self.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


class HookOfAllModules(Net):
    def change(self, step: int) -> None:
        if step == 3:
            self.handle = register_module_forward_hook(
                lambda module, args, out: out * 2 if isinstance(module, nn.Linear) else out
            )

    def on_train_end(self) -> None:
        self.handle.remove()


class HookReadsANumber(Net):
    """The hook is there from the start; what it reads changes."""

    def build(self) -> None:
        self.gain = 1.0
        self.first.register_forward_hook(lambda module, args, out: out * self.gain)

    def change(self, step: int) -> None:
        self.gain += 0.25


class Negated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class ParametrizedLate(Net):
    refused = r"first\.weight"

    def change(self, step: int) -> None:
        if step == 2:
            parametrize.register_parametrization(self.first, "weight", Negated())


class Parametrized(Net):
    captures = 1
    alone = True

    def on_fit_start(self) -> None:
        if not self.still:
            parametrize.register_parametrization(self.first, "weight", Negated())


class PrunedLate(Net):
    refused = r"first\.weight"
    ways = ("local", "DP2")  # elsewhere the hook has no values to sort

    def change(self, step: int) -> None:
        if step == 2:
            prune.l1_unstructured(self.first, "weight", amount=0.5)


class Pruning(Net):
    """Prunes after each epoch."""

    refused = r"first\.weight"
    ways = ("local", "DP2")

    def build(self) -> None:
        self.callbacks = [ModelPruning("l1_unstructured", [(self.first, "weight")], amount=0.5)]


class BufferReplaced(Net):
    captures = 1

    def build(self) -> None:
        self.register_buffer("average", torch.ones(5))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.average

    def change(self, step: int) -> None:
        self.average = self.average * 0.5 + 1


class BufferInPlace(Net):
    captures = 1
    alone = True

    def build(self) -> None:
        self.register_buffer("average", torch.ones(5))

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.average

    def change(self, step: int) -> None:
        self.average.mul_(0.5).add_(1)  # type: ignore[operator]


class BufferIsNone(Net):
    """A buffer that comes later."""

    refused = "average"

    def build(self) -> None:
        self.register_buffer("average", None)

    def hidden(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return h if self.average is None else h * self.average

    def change(self, step: int) -> None:
        if step == 2:
            self.average = torch.full((5,), 0.5, dtype=torch.float64)


class Target:
    """Follows the first layer, and says what the loss aims at."""

    captures = 1

    def build(self) -> None:
        self.target = copy.deepcopy(self.first).requires_grad_(False)

    def hidden(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.target(x)
        return torch.tanh(self.first(x)) + torch.tanh(aim)

    def pairs(self) -> Any:
        return zip(self.target.parameters(), self.first.parameters(), strict=True)


class TargetReplaced(Target, Net):
    microbatches = 2
    refused_in_pieces = r"target\.weight.*sharded"

    def change(self, step: int) -> None:
        for t, o in self.pairs():
            t.data = 0.5 * t.data + 0.5 * o.data


class TargetInPlace(Target, Net):
    refused_in_pieces = r"target\.weight.*sharded"
    alone = True

    def change(self, step: int) -> None:
        for t, o in self.pairs():
            t.data.mul_(0.5).add_(o.data, alpha=0.5)


class TargetCopied(Target, Net):
    refused_in_pieces = r"target\.weight.*sharded"
    alone = True

    def change(self, step: int) -> None:
        with torch.no_grad():
            for t, o in self.pairs():
                t.copy_(o)


class TargetLoaded(Target, Net):
    refused_in_pieces = r"target\.weight.*sharded"
    alone = True

    def change(self, step: int) -> None:
        self.target.load_state_dict(self.first.state_dict())


class Scaled(Net):
    """A constraint on a parameter."""

    refused_in_pieces = r"first\.weight.*sharded"
    captures = 1
    alone = True

    def change(self, step: int) -> None:
        with torch.no_grad():
            for p in self.first.parameters():
                p.mul_(0.5)


class DataReplaced(Net):
    refused_in_pieces = r"first\.weight.*sharded"
    captures = 1

    def change(self, step: int) -> None:
        for p in self.first.parameters():
            p.data = p.data.clamp(-0.1, 0.1)


class ParameterReplaced(Net):
    refused = r"first\.weight"

    def change(self, step: int) -> None:
        if step == 2:
            self.first.weight = nn.Parameter(torch.ones(5, 4, dtype=torch.float64))


class PartReplaced(Net):
    captures = 2

    def build(self) -> None:
        self.act: nn.Module = nn.Tanh()

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        if step == 2:
            self.act = nn.ReLU()


class ListOfParts(Net):
    """A part that a hook appends."""

    captures = 2

    def build(self) -> None:
        self.acts = nn.ModuleList([nn.Tanh()])

    def hidden(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for act in self.acts:
            h = act(h)
        return h  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        if step == 2:
            self.acts.append(nn.Sigmoid())


class LayerReplaced(Net):
    """With parameters of its own, which no optimizer has."""

    refused = r"first"

    def change(self, step: int) -> None:
        if step == 2:
            self.first = nn.Linear(4, 5, dtype=torch.float64)


class ForwardReplaced(Net):
    captures = 2

    def build(self) -> None:
        self.act = nn.Tanh()

    def hidden(self, x: Tensor) -> Tensor:
        return self.act(self.first(x))  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        if step == 2:
            self.act.forward = torch.relu  # type: ignore[method-assign]


class Frozen(Net):
    refused = r"requires_grad of parameter 'first\.(weight|bias)' changed"

    def change(self, step: int) -> None:
        if step == 2:
            self.first.requires_grad_(False)


class BatchNorm(Net):
    """Its statistics are those of one device only where a device sees the whole batch."""

    ways = ("local", "PP2")
    captures = 2

    def build(self) -> None:
        self.norm = nn.BatchNorm1d(5)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))  # type: ignore[no-any-return]

    def change(self, step: int) -> None:
        self.norm.train(step % 2 == 0)


class TrainingFlag(Net):
    captures = 2

    def build(self) -> None:
        self.part = nn.Identity()

    def factor(self, batch_idx: int) -> Any:
        return 1.0 if self.part.training else 0.5

    def change(self, step: int) -> None:
        self.part.train(step % 2 == 0)


class GradientHook(Net):
    """Of a parameter, registered in the middle."""

    refused_in_pieces = r"first\.weight.*gradient hook"
    captures = 1
    alone = True

    def change(self, step: int) -> None:
        if step == 2:
            self.first.weight.register_hook(lambda grad: grad * 2)


class BackwardHook(Net):
    captures = 2

    def change(self, step: int) -> None:
        if step == 2:
            self.second.register_full_backward_hook(lambda module, given, taken: (given[0] * 2,))


class LossOfAFunctional(Net):
    """A part of the module that is held twice, in a list of its own: changed there."""

    def build(self) -> None:
        self.parts = [nn.Dropout(0.0)]

    def hidden(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x), self.parts[0].p, self.parts[0].training)

    def change(self, step: int) -> None:
        self.parts[0].p = float(step % 2)
