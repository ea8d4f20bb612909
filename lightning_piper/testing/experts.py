"""A block for test models: a mixture of experts with several kinds of routing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.annotate import annotate
from lightning_piper.grouped_matmul import grouped_linear
from lightning_piper.routing import combine, dispatch

WIDTH = 4  # features
EXPERTS = 4


class RoutedBlock(nn.Module):
    """A block that adds a mixture of experts to its input.

    Args:
        kind: `experts` sends each token to two of four experts. `crowded` sends all tokens to expert 1.
            `places` lets each expert take one token of each sample. Other tokens for this expert are dropped.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.top = kind, 2 if kind == "experts" else 1
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        # Shared by all experts; its length is not EXPERTS, so that it is not divided.
        self.scale = nn.Parameter(torch.empty(WIDTH - 1))

    def extra_repr(self) -> str:
        return self.kind

    def forward(self, x: Tensor, exact: bool) -> Tensor:
        """Run the block on `x` of shape `[samples, positions, WIDTH]`.

        With `exact`, scores depend on signs only, so that numbers grow slowly.
        """
        tokens = x.reshape(-1, WIDTH)
        scores = self.router(tokens.sign() if exact else tokens)
        # Make all scores different, so that the choice does not depend on how a kernel breaks ties.
        order = scores.detach() * 8 + torch.arange(EXPERTS, device=x.device)
        if self.kind == "crowded":
            order = F.one_hot(torch.ones_like(order[:, 0], dtype=torch.int64), EXPERTS).to(x.dtype)
        chosen = order.topk(self.top).indices
        weights = (scores if exact else scores.softmax(-1)).gather(1, chosen)
        mixed = (
            self._placed(x, chosen, weights)
            if self.kind == "places"
            else self._sorted(tokens, chosen, weights)
        )
        return x + mixed.view_as(x)

    def _sorted(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Route without dropping tokens. The rows that go to the experts are sorted by expert.

        Args:
            tokens: `[tokens, WIDTH]`.
            chosen, weights: `[tokens, top]`: the experts of each token, and the weights of their results.
        """
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        counts = F.one_hot(flat, EXPERTS).sum(0)
        source = order // self.top
        with annotate("EP"):
            rows, sizes = dispatch(tokens[source], counts)
            rows = torch.relu(grouped_linear(rows, self.up, sizes))
            rows = torch.cat([rows[:, :1], rows[:, 1:] * self.scale], 1)
            rows = combine(grouped_linear(rows, self.down, sizes))
        return torch.zeros_like(tokens).index_add(0, source, rows * weights.reshape(-1)[order].unsqueeze(1))

    def _placed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Route with a capacity: of each sample, each expert takes the first token that is for it. Shapes are
        as in `_sorted`, with one expert for each token, but `x` is `[samples, positions, WIDTH]`."""
        samples, positions, _ = x.shape
        wanted = F.one_hot(chosen.view(samples, positions), EXPERTS)
        # [samples, positions, EXPERTS]: 1 where the expert takes the token
        seats = (wanted * (wanted.cumsum(1) == 1)).to(x.dtype)
        boxes = torch.einsum("spe,spw->esw", seats, x)
        with annotate("EP"):
            boxes = torch.relu(torch.bmm(dispatch(boxes), self.up.transpose(1, 2)))
            boxes = torch.cat([boxes[..., :1], boxes[..., 1:] * self.scale], -1)
            boxes = combine(torch.bmm(boxes, self.down.transpose(1, 2)))
        return torch.einsum("spe,esw->spw", seats * weights.view(samples, positions, 1), boxes)
