"""Models as their users write them, of kinds that have once failed after the capture: fits with all devices
in one process give what a plain Trainer gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from tests.strategy.fitting import PROGRAM, Batches, distance, local, trainer, values

Batch = tuple[Tensor, Tensor]


class Module(L.LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Tagger(Module):
    """An LSTM. Batch: (sequences [n, 5, 4], classes [n])."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def training_step(self, *args: Any, **options: Any) -> Tensor:
        batch, _ = args
        with piper.annotate("PP", 0):
            h, _ = self.rnn(batch[0])
        with piper.annotate("PP", 1):
            return F.cross_entropy(self.head(h.mean(1)), batch[1])


class Normed(Module):
    """A layer whose weight torch computes from other parameters. Batch: (input [n, 4], target [n, 4])."""

    def __init__(self, norm: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = norm(nn.Linear(4, 4)), nn.Linear(4, 4)

    def training_step(self, batch: Batch, batch_idx: int, weight: float = 1.0) -> Tensor:
        with piper.annotate("PP", 0):
            h = torch.tanh(self.first(batch[0]))
        with piper.annotate("PP", 1):
            return weight * F.mse_loss(self.second(h), batch[1])


class Penalized(Normed):
    """A gradient penalty: the step differentiates twice with respect to a tensor of the batch."""

    def __init__(self) -> None:
        super().__init__(lambda layer: layer)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = batch[0].requires_grad_()
            h = torch.tanh(self.first(x))
            (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        with piper.annotate("PP", 1):
            return F.mse_loss(self.second(h), batch[1]) + slope.square().mean()


class Noised(Normed):
    """Noise that is made before the stages: the first stage works on noised inputs, and the last stage
    predicts the noise.
    """

    def __init__(self) -> None:
        super().__init__(lambda layer: layer)
        self.register_buffer("levels", torch.linspace(0.9, 0.1, 10))

    def training_step(self, batch: Batch, **options: Any) -> Tensor:
        noise = torch.randn_like(batch[0])
        level = self.levels[torch.randint(10, (len(noise), 1))]
        noised = level * batch[0] + (1 - level) * noise
        return super().training_step((noised, noise), 0)


class Sampled(Module):
    """A variational autoencoder, whose distributions read the values of their arguments unless they are told
    not to.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Linear(3, 4)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            mean, spread = self.encoder(batch[0]).chunk(2, -1)
            found = torch.distributions.Normal(mean, F.softplus(spread))
            z = found.rsample()
        with piper.annotate("PP", 1):
            return F.mse_loss(self.decoder(z), batch[0]) + 0.1 * (mean.square() - found.entropy()).mean()


def vectors() -> Batch:
    return torch.randn(8, 4), torch.randn(8, 4)


def sequences() -> Batch:
    return torch.randn(8, 5, 4), torch.randint(3, (8,))


def fitted(
    make: Callable[[], L.LightningModule],
    data: Callable[[], Batch],
    strategy: Any,
    dtype: torch.dtype,
    steps: int = 3,
) -> dict[str, Tensor]:
    torch.manual_seed(3)
    batches = [tuple(x.to(dtype) if x.is_floating_point() else x for x in data()) for _ in range(3)]
    module = make().to(dtype)
    fit, _ = trainer(strategy, max_steps=steps)
    fit.fit(module, Batches(batches))
    return values(module)


PLACED = PROGRAM[:2]
P = nn.utils.parametrizations


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (Tagger, sequences),
        (Penalized, vectors),
        (lambda: Normed(P.spectral_norm), vectors),
        (lambda: Normed(P.weight_norm), vectors),
        (lambda: Normed(P.orthogonal), vectors),
        (lambda: Normed(nn.utils.spectral_norm), vectors),
        (lambda: Normed(nn.utils.weight_norm), vectors),
        (lambda: Normed(lambda layer: nn.utils.prune.l1_unstructured(layer, "weight", 3)), vectors),
    ],
    ids=["lstm", "penalized", "spectral", "weight", "orthogonal", "old spectral", "old weight", "pruned"],
)
def test_a_plain_trainer_gives_the_same_bits(
    make: Callable[[], L.LightningModule], data: Callable[[], Batch]
) -> None:
    plain = fitted(make, data, "auto", torch.float64)
    found = fitted(make, data, local(PLACED), torch.float64)
    assert plain.keys() == found.keys() and all(torch.equal(plain[n], found[n]) for n in plain)
    fewer = fitted(make, data, "auto", torch.float64, steps=2)
    assert not all(torch.equal(fewer[n], found[n]) for n in plain)


@pytest.mark.long
def test_an_lstm_in_float32_is_not_the_one_of_onednn() -> None:
    """A plain Trainer uses oneDNN's RNN, a plan torch's own: they differ by rounding (3e-7 relative, measured
    on gradients).
    """
    plain = fitted(Tagger, sequences, "auto", torch.float32)
    found = fitted(Tagger, sequences, local(PROGRAM), torch.float32)
    assert distance(plain, found) < 5e-6
    with torch.no_grad():
        found["head.bias"] += 1e-4
    assert distance(plain, found) > 5e-6


@pytest.mark.parametrize("make", [Noised, Sampled])
def test_what_is_drawn_in_one_place_and_used_in_two(make: Callable[[], L.LightningModule]) -> None:
    """Stages give the bits that one device gives, which are not those of a plain Trainer."""
    one = fitted(make, vectors, local(({"op": "place", "filter": {}, "devices": [0]},)), torch.float64)
    two = fitted(make, vectors, local(PLACED), torch.float64)
    assert all(torch.equal(one[n], two[n]) for n in one)
    plain = fitted(make, vectors, "auto", torch.float64)
    assert not all(torch.equal(plain[n], two[n]) for n in plain)
