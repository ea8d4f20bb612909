"""`dispatch` and `combine`: the boundaries of the experts of a mixture-of-experts layer.

    with piper.annotate("EP"):
        rows, sizes = piper.dispatch(tokens, counts)      # tokens sorted by expert, counts[e] for expert e
        rows = self.experts(rows, sizes)
        out = piper.combine(rows)                         # in the order of `tokens` again

On one device, `dispatch` and `combine` are identities. A `shard_experts` directive divides the experts among its
devices, and sends tokens to their experts and back at these two calls. Then `rows` are the tokens of all
devices for this device's experts, sorted by expert, and `sizes` is the number of rows of each of these
experts. So code between the two calls must take sizes from the tensors that it receives (`sizes.shape[0]`,
`weight.shape[0]`), and must compute each row from this row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch

from lightning_piper.common.limits import kind_of
from lightning_piper.errors import CaptureError

# A placeholder for the number of rows of a tensor of tokens, which is known only when the step runs. It is a
# prime, and larger than any size in a model. So a size in a captured graph is a multiple of it only if it was
# computed from the number of rows.
ROWS = 1_000_003

# The kinds of exchanges: counts, rows to their experts, and rows back to their source.
COUNTS, DISPATCH, COMBINE = "counts", "dispatch", "combine"
_BACK = {DISPATCH: COMBINE, COMBINE: DISPATCH}  # kind of an exchange -> kind of the exchange of its gradients


class _Sites:
    """A record of the calls of `dispatch` in one run of the step.

    Attributes:
        degrees: For each of the first calls, the number of devices that divide its experts. The experts of
            further calls are not divided.
        calls: For each call, the shape of its tokens, and whether it has a capacity instead of counts.
    """

    def __init__(self, degrees: Sequence[int]) -> None:
        self.degrees = degrees
        self.calls: list[tuple[torch.Size, bool]] = []

    def degree(self, site: int) -> int:
        return self.degrees[site] if site < len(self.degrees) else 1


_sites: _Sites | None = None  # record of the current capture; None outside of a capture


@contextmanager
def exchanging(degrees: Sequence[int]) -> Iterator[None]:
    """Return a context that records exchanges in the current capture. A capture enters the context for each
    traced run of a step.

    Args:
        degrees: For each call of `dispatch`, the number of devices that divide its experts.
    """
    global _sites
    before, _sites = _sites, _Sites(degrees)
    try:
        yield
    finally:
        _sites = before


@overload
def dispatch(tokens: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def dispatch(tokens: torch.Tensor, counts: None = None) -> torch.Tensor: ...
def dispatch(tokens: torch.Tensor, counts: torch.Tensor | None = None) -> Any:
    """Send tokens to their experts.

    Args:
        tokens: With `counts` (dropless): `[T, ...]`, sorted by expert. Without `counts` (capacity):
            `[E, C, ...]`, C places for each of E experts.
        counts: `[E]`, integers that add up to T: the number of tokens for each expert.

    Returns:
        The tokens for this device's experts. With `counts`: `(rows, sizes)`, where `sizes` has the number of
            rows of each of these experts. With capacity: `[experts here, places, ...]`, where `places` is C
            times the number of devices that divide the experts. On one device, the arguments themselves.

    Raises:
        CaptureError: An argument is not a tensor, its shape or dtype does not fit, or the experts cannot be
            divided evenly over the devices.
    """
    if not isinstance(tokens, torch.Tensor):
        raise CaptureError(f"dispatch: tokens is {kind_of(tokens)}. Give a tensor [PIPER-C014]")
    if not isinstance(counts, torch.Tensor | None):
        raise CaptureError(
            f"dispatch: counts is {kind_of(counts)}. Give a tensor of one integer for each expert [PIPER-C014]"
        )
    least = 2 if counts is None else 1
    if tokens.ndim < least:
        form = (
            "[E, C, ...], the capacity slots of each expert"
            if counts is None
            else "[T, ...], one row for each token"
        )
        raise CaptureError(f"dispatch: tokens has the shape {list(tokens.shape)}. Give {form} [PIPER-C014]")
    if counts is not None and (
        counts.ndim != 1 or counts.is_floating_point() or counts.is_complex() or counts.dtype is torch.bool
    ):
        raise CaptureError(
            f"dispatch: counts has the dtype {counts.dtype} and the shape {list(counts.shape)}. Give one integer for each "
            "expert, [E] [PIPER-C014]"
        )
    if _sites is None:
        return tokens if counts is None else (tokens, counts)
    site = len(_sites.calls)
    _sites.calls.append((tokens.shape, counts is None))
    degree, experts = _sites.degree(site), tokens.shape[0] if counts is None else counts.shape[0]
    if experts % degree:
        raise CaptureError(
            f"dispatch: {experts} experts cannot be divided evenly over {degree} devices. Use a multiple of "
            f"{degree} experts [PIPER-C014]"
        )
    if counts is None:
        return _route(
            tokens, None, [experts // degree, tokens.shape[1] * degree, *tokens.shape[2:]], DISPATCH, site
        )
    rows = tokens.shape[0] if degree == 1 else ROWS
    arrived = _route(tokens, counts, [rows, *tokens.shape[1:]], DISPATCH, site)
    return arrived, _route(counts, None, [experts // degree], COUNTS, site)


def combine(outputs: torch.Tensor) -> torch.Tensor:
    """Return the experts' outputs for the tokens of the last `dispatch`, in the order of these tokens.

    Args:
        outputs: `[rows, ...]`, one for each row that `dispatch` returned. With capacity
            `[experts here, places, ...]`.

    Returns:
        `[T, ...]`, or `[E, C, ...]`.

    Raises:
        CaptureError: `outputs` is not a tensor, or a captured step has no `dispatch` before this call.
    """
    if not isinstance(outputs, torch.Tensor):
        raise CaptureError(f"combine: outputs is {kind_of(outputs)}. Give a tensor [PIPER-C014]")
    if _sites is None:
        return outputs
    if not _sites.calls:
        raise CaptureError(
            "combine: there was no dispatch before it. Call piper.dispatch on the tokens of these outputs "
            "first [PIPER-C014]"
        )
    site = len(_sites.calls) - 1
    shape, even = _sites.calls[site]
    leading = 2 if even else 1
    here = list(shape) if _sites.degree(site) > 1 else list(outputs.shape)
    returned: torch.Tensor = _route(outputs, None, [*here[:leading], *outputs.shape[leading:]], COMBINE, site)
    return returned


@torch.library.custom_op("lightning_piper::route", mutates_args=())
def _route(
    x: torch.Tensor, counts: torch.Tensor | None, shape: Sequence[int], direction: str, site: int
) -> torch.Tensor:
    """Return a copy of `x`. In a captured graph, this operation is the placeholder of an exchange.

    Args:
        counts: The number of rows for each expert; None if the exchange sends equal parts, or returns rows.
        shape: The shape of the received tensor.
        direction: The kind of the exchange.
        site: The number of the `dispatch` call in the step.
    """
    return x.clone(memory_format=torch.contiguous_format)


@_route.register_fake
def _(
    x: torch.Tensor, counts: torch.Tensor | None, shape: Sequence[int], direction: str, site: int
) -> torch.Tensor:
    return x.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, _, direction, site = inputs
    ctx.shape, ctx.direction, ctx.site = x.shape, direction, site


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return _route(gradient, None, ctx.shape, _BACK[ctx.direction], ctx.site), None, None, None, None


_route.register_autograd(_backward, setup_context=_remember)

ROUTE = torch.ops.lightning_piper.route.default
