"""From the plan's gradients to autograd: a loss whose `backward` hands them out.

Lightning zeroes gradients after the training step and calls `backward` on what the step returned. So the step's gradients wait
here until then, and everything around `backward` (accumulation, loss scaling, hooks, users' overrides) works as always.

Where gradients are kept back until the last batch of an accumulation, they are multiplied with that batch's factor, all of them.
So the batches before must have had the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.holdings._torch_foreach import scale
from lightning_piper.holdings.elsewhere import Elsewhere
from lightning_piper.holdings.gradients import mark


class GradientInjection:
    """Makes losses whose `backward` puts the gradients of a plan into the `.grad` of parameters.

    Args:
        params: by name; those that the plan updates.
        device: of the losses.
        absent: those whose gradients are on other processes; `backward` marks them so (`gradients.mark`).
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        absent: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        self.hold(params, absent or {})
        # Gives the loss a gradient function also where a process has no parameters at all.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._kept: list[_Waiting] = []  # of the batches whose gradients are kept back
        self._last: _Waiting | None = None
        self._marked: dict[str, torch.nn.Parameter] = {}  # whose gradients were said to be on other processes

    def hold(self, params: Mapping[str, torch.nn.Parameter], absent: Mapping[str, torch.nn.Parameter]) -> None:
        """The process holds these parameters from now on, as in the constructor."""
        self.absent = absent
        self.trained = {name: x for name, x in params.items() if x.requires_grad}

    def begin(self) -> None:
        """An accumulation begins: where a parameter has had a gradient on other processes and gets none now, it has none here."""
        for name in self._marked.keys() - self.absent.keys():
            param = self._marked.pop(name)
            if isinstance(param.grad, Elsewhere):
                param.grad = None

    def mark(self) -> None:
        """What this step gives gradients to on other processes, has them there."""
        mark(self.absent, self.trained)
        self._marked.update(self.absent)

    def loss(self, value: torch.Tensor, grads: Mapping[str, torch.Tensor], scale: float = 1.0, kept: bool = False,
             closing: float | None = None, nonlinear: str | None = None) -> torch.Tensor:  # fmt: skip
        """A loss of this value whose derivatives are `grads`, which belong to it from now on.

        Args:
            value: of the loss, not scaled.
            grads: parameter name -> gradient, times `scale`. Some may be missing.
            scale: the factor that `backward` is expected to bring; `grads` are multiplied with what it brings, over `scale`.
            kept: the plan has kept gradients of this batch back, and hands them out with those of a later one.
            closing: factor on the gradients accumulated so far and on these.
            nonlinear: what makes gradients that are not multiples of the factor, if anything does: `backward` must bring `scale`.

        Raises:
            PiperError: `backward` did not run on the loss of a batch whose gradients are kept back.
        """
        if any(waiting.factor is None for waiting in self._kept):
            raise PiperError(
                "PiperStrategy: backward did not run on the loss of an earlier batch of this gradient accumulation, but its "
                "gradients are in the sum already; call backward on every loss that the training step returns"
            )
        # Of the others, users' hooks would be called with None, which torch never does.
        found = [(x, grad) for name, x in self.trained.items() if (grad := grads.get(name)) is not None]
        waiting = self._last = _Waiting(value, [grad for _, grad in found], scale, self, closing, nonlinear)
        if kept:
            self._kept.append(waiting)
        result: torch.Tensor = _HandOut.apply(waiting, self._anchor, *(x for x, _ in found))  # type: ignore[no-untyped-call]
        return result

    def keeps(self) -> bool:
        """Are gradients of the batches so far kept back?"""
        return bool(self._kept)

    def settle(self) -> float | torch.Tensor:
        """The gradients that are kept back are handed out otherwise. Returns the factor that `backward` brought for them.

        Raises:
            PiperError: `backward` did not run on one of the losses, or brought different factors.
        """
        kept, self._kept = self._kept, []
        factors = [w.factor / w.scale for w in kept if w.factor is not None]
        if len(factors) < len(kept) or any(factor != factors[0] for factor in factors):
            raise PiperError(
                "PiperStrategy: backward did not run on all losses of this gradient accumulation with one factor, but the "
                "gradients of its batches are in one sum. Call backward on every loss that the training step returns"
            )
        return factors[0] if factors else 1.0

    def factor(self, read: bool) -> float | None:
        """What `backward` brought to the last loss, over what it was expected to bring; None if it did not run.

        Args:
            read: also from the memory of a GPU, for which the host must wait.
        """
        if self._last is None or self._last.factor is None or not (read or self._last.factor.device.type == "cpu"):
            return None
        return float(self._last.factor) / self._last.scale

    def check(self, last: _Waiting) -> None:
        """The batches whose gradients come with those of `last` had the same factor."""
        if not self._kept or last in self._kept:
            return
        kept, self._kept = self._kept, []
        assert last.factor is not None
        found = [(float(w.factor), w.scale) for w in [*kept, last] if w.factor is not None]
        if len(set(found)) > 1:
            shown = ", ".join(f"{factor / scale:g}" for factor, scale in found)
            raise PiperError(
                f"PiperStrategy: backward multiplied the losses of one gradient accumulation by different factors ({shown}), but "
                "gradients are summed over replicas once, with the last batch; use one factor for all batches of an accumulation"
            )


class _Waiting:
    """The gradients of one step. `factor`: what `backward` brought."""

    def __init__(self, value: torch.Tensor, grads: list[torch.Tensor], scale: float, injection: GradientInjection,
                 closing: float | None, nonlinear: str | None) -> None:  # fmt: skip
        self.value, self.scale, self._closing, self._nonlinear = value, scale, closing, nonlinear
        self.factor: torch.Tensor | None = None
        self._grads: list[torch.Tensor] | None = grads
        self._injection = injection

    def take(self, factor: torch.Tensor) -> list[torch.Tensor]:
        if self._grads is None:
            raise ExecutionError(
                "backward ran twice on the loss of one training step; its gradients are handed out only once: call it once"
            )
        grads, self._grads = self._grads, None
        self.factor = factor
        self._injection.check(self)
        if self._nonlinear is not None:
            self._check_factor(factor, self._nonlinear)
        self._injection.mark()
        # Looking at a value on a GPU would make the host wait for it; multiplying by one does not.
        if factor.device.type != "cpu" or factor.item() != self.scale:
            scale(grads, factor.double() / self.scale)
        if self._closing is not None:
            scale([*grads, *(x.grad for x in self._injection.trained.values() if x.grad is not None)], self._closing)
        return grads

    def _check_factor(self, factor: torch.Tensor, nonlinear: str) -> None:
        """Gradients were made with the factor that `backward` was expected to bring, and another one would have made others."""
        ratio = float(factor) / self.scale
        if abs(ratio - 1) > 4 * torch.finfo(factor.dtype).eps:
            raise PiperError(
                f"PiperStrategy: backward multiplied the loss of training_step by {ratio:g}. Its gradients are made already, and "
                f"do not follow that factor, because this is not linear: {nonlinear}. Multiply the loss in training_step, or give "
                "PiperStrategy(capture='never')"
            )


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, anchor: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.waiting = waiting
        return waiting.value

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = incoming
        return (None, None, *ctx.waiting.take(factor))
