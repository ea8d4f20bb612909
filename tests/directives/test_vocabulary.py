"""Sharded word tables and word scores: every loss and every lookup equals one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Place, ShardWeights
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute
from lightning_piper.verify.interpreter import interpret
from tests.groups import marked

WORDS, DIM = 16, 6


class Words(L.LightningModule):
    """Batch: words [n, 5], and the next words, some of which are padding."""

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], tied: bool = False, **embedding: Any
    ) -> None:
        super().__init__()
        self.embed, self.head, self.loss = (
            nn.Embedding(WORDS, DIM, **embedding),
            nn.Linear(DIM, WORDS, bias=not tied),
            loss,
        )
        if tied:
            self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        words, target = batch
        scores = self.head(self.embed(words).tanh())
        self.log("right", (scores.argmax(-1) == target).double().mean())
        return self.loss(scores.flatten(0, 1), target.flatten())


def mean(scores: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(scores, target, **options)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": mean,
    "sum": lambda x, y: mean(x, y, reduction="sum") / 10,
    "each": lambda x, y: mean(x, y, reduction="none").square().mean(),
    "another padding": lambda x, y: mean(x, y.clamp_min(0), ignore_index=0),
    "in single precision": lambda x, y: mean(x.float(), y),
    "smoothed": lambda x, y: mean(x, y, label_smoothing=0.1),
    "by class": lambda x, y: mean(x, y, weight=torch.arange(WORDS, dtype=x.dtype)),
    "of images": lambda x, y: mean(x.unflatten(0, (-1, 5)).transpose(1, 2).unsqueeze(-1), y.view(-1, 5, 1)),
    "distilled": lambda x, y: F.kl_div(
        x.log_softmax(-1), x.detach().roll(1, 1).softmax(-1), reduction="batchmean"
    ),
    "likelihood": lambda x, y: F.nll_loss(x.log_softmax(-1), y),
    "entropy": lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(-1).mean(),
}
GATHERED = {"by class", "distilled"}


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (samples, 6), generator=draw)
    return words[:, :5], words[:, 1:].masked_fill(torch.rand(samples, 5, generator=draw) < 0.2, -100)


def made(loss: str = "mean", **options: Any) -> Words:
    torch.manual_seed(0)
    return Words(LOSSES[loss], **options).double()


def over(degree: int, **params: int) -> list[Any]:
    devices = list(range(degree))
    params = params or {"embed.weight": 0, "head.weight": 0}
    return [
        Place(filter={}, devices=devices),
        ShardWeights(filter={}, devices=devices, axis="tp", params=params, stream="tp"),
    ]


def moved(program: Any) -> list[tuple[int, ...]]:
    """Return the shapes of exchanged values."""
    nodes = program.dag.of_type(Redistribute)
    return [node.outputs[0].tensors[0].shape for node in nodes if not isinstance(node, CutOut)]


@pytest.mark.parametrize("degree", marked([2, 4], [4]))
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_that_of_one_device(loss, degree):
    report = piper.verify(made(loss), batch(), over(degree))
    assert report.verdict == "verified", report
    scores = [shape for shape in moved(piper.compile(made(loss), batch(), over(degree))) if WORDS in shape]
    assert bool(scores) == (loss in GATHERED), scores  # else they are never put together


@pytest.mark.parametrize("options", [{"tied": True}, {"padding_idx": 3}, {"padding_idx": 9}])
def test_every_table_is_that_of_one_device(options):
    program = over(2, **({"embed.weight": 0} if options.get("tied") else {}))
    assert piper.verify(made(**options), batch(), program).verdict == "verified"
    assert (WORDS, DIM) not in moved(piper.compile(made(**options), batch(), program))  # nor is the table


def test_a_table_whose_gradient_is_scaled_is_not_divided():
    with pytest.raises(
        piper.PiperError, match=r"embedding.default cannot work on shards of embed.weight as S.0."
    ):
        piper.verify(made(scale_grad_by_freq=True), batch(), over(2))


@pytest.mark.parametrize(("where", "number"), [(0, WORDS), (0, -1), (1, WORDS), (1, -7)])
def test_a_word_that_there_is_not_is_refused(where, number):
    """As on one device."""
    module = made()
    program = piper.compile(module, batch(), over(2))
    wrong = batch()
    wrong[where][1, 2] = number
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        interpret(program.dag, dict(module.named_parameters()), wrong)


def test_few_classes_are_put_together():
    """Where parts need more exchanges than it takes to put all together."""

    class Few(Words):
        def __init__(self) -> None:
            super().__init__(LOSSES["mean"])
            self.head = nn.Linear(DIM, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.head(self.embed(batch[0]).mean(1)), batch[1][:, 0].clamp(0, 3))

    program = over(2, **{"head.weight": 0})
    assert piper.verify(Few().double(), batch(), program).verdict == "verified"
    assert (4, 4) in moved(piper.compile(Few().double(), batch(), program))
