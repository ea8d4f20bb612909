"""Autograd gradient injection: a loss whose `backward` returns the plan's gradients.

Lightning zeroes gradients after the training step and then calls `backward` on the step's loss. The plan's
gradients wait here until then. So everything around `backward` (accumulation, loss scaling, hooks, users'
overrides) works as usual.

If a plan accumulates gradients locally until the last batch of an accumulation, Piper multiplies the total by
the factor of the last batch. So the earlier batches must have had the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.holdings._torch_foreach import scale
from lightning_piper.holdings.gradients import mark
from lightning_piper.holdings.remote_gradient import RemoteGradient

_SKIPPED = (
    "PiperStrategy: backward did not run on the loss of an earlier batch of this gradient accumulation, but its "
    "gradients are already in the sum. Call backward on every loss that training_step returns [PIPER-X005]"
)


def _factors_differ(factors: Sequence[float]) -> str:
    return (
        "PiperStrategy: backward multiplied the losses of one gradient accumulation by different factors "
        f"({', '.join(f'{factor:g}' for factor in factors)}), but Piper has already added their gradients. "
        "Use one factor for all batches of an accumulation [PIPER-X005]"
    )


class GradientInjection:
    """A factory for losses whose `backward` puts the gradients of a plan into the `.grad` of parameters.

    Args:
        params: The parameters that the plan updates, by name.
        device: Device of the losses.
        absent: The parameters whose gradients are on other processes, by name. `backward` gives them
            placeholder gradients (`gradients.mark`).
    """

    def __init__(
        self,
        params: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        absent: Mapping[str, torch.nn.Parameter] | None = None,
    ) -> None:
        self.hold(params, absent or {})
        # Gives the loss a gradient function even if a process does not have any parameters.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # Steps whose gradients the plan accumulates locally, one for each batch so far.
        self._kept: list[_PendingGradients] = []
        self._last: _PendingGradients | None = None  # the gradients of the last loss
        # parameters whose `grad` is a placeholder for a gradient on other processes
        self._marked: dict[str, torch.nn.Parameter] = {}
        self._begins = False  # whether the next `backward` is the first one of an accumulation

    def hold(
        self, params: Mapping[str, torch.nn.Parameter], absent: Mapping[str, torch.nn.Parameter]
    ) -> None:
        """Replace the parameters. The class explains the arguments. Of `params`, only those that require
        gradients count."""
        self.absent = absent
        self.trained = {name: x for name, x in params.items() if x.requires_grad}

    def begin(self) -> None:
        """Begin an accumulation. The next `backward` removes placeholder gradients of parameters that no
        longer get gradients on other processes."""
        self._begins = True

    def mark(self) -> None:
        """Give placeholder gradients to the parameters that get gradients on other processes in this step.

        The first `backward` of an accumulation removes the placeholders of parameters that no longer get
        gradients on other processes. A placeholder stays if the local shard still has its old gradient:
        `zero_grad(set_to_none=False)` keeps zeros, with which the optimizer updates the parameter.
        """
        for name in self._marked.keys() - self.absent.keys() if self._begins else ():
            param = self._marked[name]
            grad = param.grad
            if isinstance(grad, RemoteGradient):
                if grad.shard is not None and grad.shard.grad is not None:
                    continue
                param.grad = None
            del self._marked[name]
        self._begins = False
        mark(self.absent, self.trained)
        self._marked.update(self.absent)

    def loss(
        self,
        value: torch.Tensor,
        grads: Mapping[str, torch.Tensor],
        scale: float = 1.0,
        kept: bool = False,
        closing: float | None = None,
        nonlinear: str | None = None,
    ) -> torch.Tensor:
        """Return a loss of this value whose derivatives are `grads`. The loss owns `grads` from now on.

        Args:
            value: Value of the loss, without scaling.
            grads: Parameter name -> gradient times `scale`. A parameter without an entry gets no gradient.
            scale: The factor that `backward` is expected to pass; `grads` are multiplied by the actual factor
                divided by `scale`.
            kept: Whether the plan accumulates this batch's gradients locally, and returns the sum in a later
                batch.
            closing: The last `backward` of an accumulation multiplies `grads` and all gradients in `.grad` by
                this factor; None in earlier batches.
            nonlinear: The reason why gradients are not proportional to the factor; None if they are. With
                a reason, `backward` must pass `scale`.

        Raises:
            PiperError: `backward` did not run on the loss of a batch whose gradients are accumulated locally.
        """
        if any(waiting.factor is None for waiting in self._kept):
            raise PiperError(_SKIPPED)
        # Skip parameters without a gradient. Their hooks would be called with None, which torch never does.
        found = [(x, grad) for name, x in self.trained.items() if (grad := grads.get(name)) is not None]
        waiting = self._last = _PendingGradients(
            value, [grad for _, grad in found], scale, self, closing, nonlinear
        )
        if kept:
            self._kept.append(waiting)
        result: torch.Tensor = _HandOut.apply(waiting, self._anchor, *(x for x, _ in found))  # type: ignore[no-untyped-call]
        return result

    def keeps(self) -> bool:
        """Return whether the plan has accumulated gradients of earlier batches locally."""
        return bool(self._kept)

    def settle(self) -> float | torch.Tensor:
        """Return the factor that `backward` passed for the losses of the locally accumulated gradients,
        divided by the expected factor; 1.0 if there are no such gradients. Forget these losses, because the
        caller sums their gradients.

        Raises:
            PiperError: `backward` did not run on one of the losses, or passed different factors.
        """
        kept, self._kept = self._kept, []
        factors = [w.factor / w.scale for w in kept if w.factor is not None]
        if len(factors) < len(kept):
            raise PiperError(_SKIPPED)
        if any(factor != factors[0] for factor in factors):
            raise PiperError(_factors_differ([float(factor) for factor in factors]))
        return factors[0] if factors else 1.0

    def factor(self, read: bool) -> float | None:
        """Return the factor that `backward` passed to the last loss, divided by the expected factor. None if
        `backward` did not run, or if the factor is in GPU memory and must not be read.

        Args:
            read: Whether to read the factor even from GPU memory, which makes the host wait.
        """
        last = self._last
        if last is None or last.factor is None or not (read or last.number is not None):
            return None
        return (float(last.factor) if last.number is None else last.number) / last.scale

    def check(self, last: _PendingGradients) -> None:
        """Check that `last` and the batches whose gradients the plan returns with `last` had the same factor.
        Then forget these batches.

        Do nothing if the plan accumulates the gradients of `last` locally, or if there are no such batches.

        Raises:
            PiperError: The factors differ.
        """
        if not self._kept or last in self._kept:
            return
        kept, self._kept = self._kept, []
        assert last.factor is not None
        found = [(float(w.factor), w.scale) for w in [*kept, last] if w.factor is not None]
        if len(set(found)) > 1:
            raise PiperError(_factors_differ([factor / scale for factor, scale in found]))


class _PendingGradients:
    """The gradients of one step that wait for `backward`.

    Attributes:
        factor: The factor that `backward` passed; None before `backward` ran.
        number: The factor as a number; None if it is in GPU memory.
    """

    def __init__(
        self,
        value: torch.Tensor,
        grads: list[torch.Tensor],
        scale: float,
        injection: GradientInjection,
        closing: float | None,
        nonlinear: str | None,
    ) -> None:
        self.value, self.scale, self._closing, self._nonlinear = value, scale, closing, nonlinear
        self.factor: torch.Tensor | None = None
        self.number: float | None = None
        self._grads: list[torch.Tensor] | None = grads
        self._injection = injection

    def take(self, factor: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients, multiplied in place by the factor that `backward` passed, divided by `scale`.
        Also set placeholder gradients, and with `closing` multiply the gradients in `.grad`.

        Raises:
            ExecutionError: The gradients were taken before.
            PiperError: The factors of an accumulation differ, or the gradients do not scale with the factor.
        """
        if self._grads is None:
            raise ExecutionError(
                "backward ran twice on the loss of one training step, but its gradients can be returned only "
                "once. Call backward once [PIPER-X005]"
            )
        grads, self._grads = self._grads, None
        self.factor = factor
        self._injection.check(self)
        if self._nonlinear is not None:
            self._check_factor(factor, self._nonlinear)
        self._injection.mark()
        # Reading a value on a GPU would make the host wait for it. Multiplying by one does not.
        self.number = factor.item() if factor.device.type == "cpu" else None
        if self.number != self.scale:
            scale(grads, factor.double() / self.scale)
        if self._closing is not None:
            scale(
                [*grads, *(x.grad for x in self._injection.trained.values() if x.grad is not None)],
                self._closing,
            )
        return grads

    def _check_factor(self, factor: torch.Tensor, nonlinear: str) -> None:
        """Check that `backward` passed the expected factor. The gradients were computed with the expected
        factor and are not proportional to it.

        Raises:
            PiperError: `backward` passed a different factor.
        """
        ratio = float(factor) / self.scale
        if abs(ratio - 1) > 4 * torch.finfo(factor.dtype).eps:
            raise PiperError(
                f"PiperStrategy: backward multiplied the loss of training_step by {ratio:g}. The gradients "
                "are already computed and cannot be scaled by this factor, because this operation is not "
                f"linear: {nonlinear}. Multiply the loss in training_step instead [PIPER-X005]"
            )


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, waiting: _PendingGradients, anchor: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.waiting = waiting
        return waiting.value

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = incoming
        return (None, None, *ctx.waiting.take(factor))
