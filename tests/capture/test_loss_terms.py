"""How the values of the loss and of logs on parts of the batch give their values on the whole batch, found in
the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import CaptureError, annotate
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.capture.eager.eager_reference import Outcome, is_lost, mixed, run_eagerly
from lightning_piper.capture.losses import loss_weights
from lightning_piper.capture.losses.denominators import (
    ONE,
    SAMPLES,
    ConstantExpression,
    ElementwiseExpression,
    over,
    simplified,
    times,
)
from lightning_piper.directives import accumulating
from lightning_piper.ir.values import Slice
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.trial import largest_difference
from tests.groups import marked

SIZE, CLASSES = 12, 5
PARTS = (Slice(0, 6), Slice(6, 9), Slice(9, 12))
BOUND = 1e-13  # of float64; the largest measured distance is 4e-15

Loss = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Model(L.LightningModule):
    """Batch: input, labels (some ignored, and all of the last ones ignored), weights of samples, and a mask
    of ones and zeros.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(6, 6), nn.Linear(6, CLASSES), loss
        self.register_buffer("classes", torch.rand(CLASSES) + 0.5)
        self.log_variance, self.log_variances = (
            nn.Parameter(torch.tensor(0.3)),
            nn.Parameter(torch.tensor([0.1, 0.2, -0.3])),
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y, w, mask = batch
        with annotate("PP", 0):
            h = self.first(x).tanh()
        with annotate("PP", 1):
            return self.loss(self, self.second(h), y, (w, mask))  # type: ignore[arg-type]


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SIZE, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, CLASSES, (SIZE,), generator=generator)
    y[[0, 6]] = -100
    y[9:] = -100  # a microbatch without a label
    mask = torch.rand(SIZE, generator=generator) < 0.6
    mask[9:] = False
    return [x, y, torch.rand(SIZE, dtype=torch.float64, generator=generator) + 0.1, mask]


def captured(loss: Loss) -> tuple[CapturedStep, dict[str, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Model(loss)
    step = capture(module, batch())
    return step, {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}


def ce(m: Any, p: Tensor, y: Tensor, r: Any, **more: Any) -> Tensor:
    return F.cross_entropy(p, y, **more)


def each(p: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(p, y, reduction="none")


def number(p: Tensor) -> Tensor:
    """Return the number of samples as a tensor."""
    return torch.full((), float(len(p)), dtype=torch.float64)


def chunks(p: Tensor, y: Tensor) -> Tensor:
    """Return a vector with a sum for each two samples."""
    sums = [F.cross_entropy(a, b, reduction="sum") for a, b in zip(p.split(2), y.split(2), strict=True)]
    return torch.stack(sums)


def three(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
    return torch.stack([ce(m, p, y, r), p.square().sum(), p.mean()])


def in_place(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
    loss = p.new_zeros(1)
    loss += ce(m, p, y, r)
    loss += p.square().sum()
    return loss


def logging(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
    mask = r[1]
    loss = F.cross_entropy(p, y)
    right = p.argmax(-1) == y
    m.log("loss", loss)
    m.log("accuracy", right.double().mean())
    m.log("masked accuracy", (right & mask).double().sum() / mask.sum())
    m.log("labels", (y != -100).sum().double())
    m.log("labels, at least one", (y != -100).sum().clamp(min=1).double())
    m.log("largest", p.max())
    m.log("smallest", p.min(), reduce_fx="sum")
    m.log("sum of two", loss + 0.5 * p.square().mean())
    m.log("penalty", m.second.weight.square().sum())
    m.log("minus the largest", -2 * p.max() + 1)
    m.log("the largest, taken from 0", p.new_zeros(()) - p.max())
    m.log("any", (p > 1).any())
    m.log("largest label", y.max(0).values.double(), reduce_fx="max")
    return loss


# Loss -> how its terms are weighted. `r` has weights of samples and a mask.
LOSSES: dict[str, tuple[Loss, list[str]]] = {
    "labels": (lambda m, p, y, r: ce(m, p, y, r), ["ratio"]),
    "labels with class weights": (lambda m, p, y, r: ce(m, p, y, r, weight=m.classes), ["ratio"]),
    "smoothed labels": (lambda m, p, y, r: ce(m, p, y, r, label_smoothing=0.1, weight=m.classes),
        ["ratio", "ratio"]),
    "a sum": (lambda m, p, y, r: ce(m, p, y, r, reduction="sum"), ["sum"]),
    "a sum over samples by their number": (lambda m, p, y, r: each(p, y).sum() / len(p), ["samples"]),
    "a sum times a constant": (lambda m, p, y, r: ce(m, p, y, r, reduction="sum") * 0.25, ["sum"]),
    "a mean of squares": (lambda m, p, y, r: F.mse_loss(p[:, 0], r[0]), ["samples"]),
    "half of it": (lambda m, p, y, r: 0.5 * F.mse_loss(p[:, 0], r[0]), ["samples"]),
    "divided by twelve": (lambda m, p, y, r: F.mse_loss(p[:, 0], r[0]) / 12, ["samples"]),
    "absolute values": (lambda m, p, y, r: F.l1_loss(p[:, 0], r[0]), ["samples"]),
    "binary": (lambda m, p, y, r: F.binary_cross_entropy_with_logits(p[:, 0], r[1].double()), ["samples"]),
    "a distance of distributions": (lambda m, p, y,
        r: F.kl_div(p.log_softmax(-1), torch.softmax(r[0][:, None].expand(-1, 5), -1),
                                                                reduction="batchmean"), ["samples"]),
    "a prior": (lambda m, p, y, r: -0.5 * torch.mean(torch.sum(1 + p - p.pow(2) - p.exp(), dim=1)),
        ["samples"]),
    "a loop over positions": (
        lambda m, p, y, r: sum((p[:, c] * r[1]).sum() for c in range(3)) / r[1].sum(), ["ratio"],
    ),
    "a loop that begins with a tensor": (
        lambda m, p, y, r: (sum(((p[:, c] * r[1]).sum() for c in range(3)), p.new_zeros(())) / r[1].sum()),
        ["ratio"],
    ),
    "a masked mean": (lambda m, p, y, r: (each(p, y) * r[1]).sum() / r[1].sum(), ["ratio"]),
    "a masked mean, at least one": (lambda m, p, y, r: (each(p, y) * r[1]).sum() / r[1].sum().clamp(min=1),
        ["ratio"]),
    "a masked mean of means": (lambda m, p, y, r: (each(p, y) * r[1]).mean() / r[1].double().mean(),
        ["ratio"]),
    "a masked mean with a margin": (lambda m, p, y, r: (each(p, y) * r[1]).sum() / (r[1].sum() + 0.5),
        ["ratio"]),
    "times the reciprocal": (lambda m, p, y, r: (each(p, y) * r[1]).sum() * r[1].sum().double().reciprocal(),
        ["ratio"]),
    "weights of samples": (lambda m, p, y, r: (each(p, y) * r[0]).sum() / r[0].sum(), ["ratio"]),
    "weights that add up to one": (lambda m, p, y, r: (r[0] / r[0].sum() * each(p, y)).sum(), ["ratio"]),
    "a sum over classes": (lambda m, p, y,
        r: sum(((p[:, c] * r[1]).sum() / (r[1] & (y != c)).sum() for c in range(3)),
                                                  p.new_zeros(())), ["ratio"] * 3),
    "rows over their number": (lambda m, p, y, r: (each(p, y) / len(p)).sum(), ["samples"]),
    "a number over rows": (lambda m, p, y, r: (each(p, y) * r[1] / r[1].numel()).sum(), ["samples"]),
    "pairs of samples": (lambda m, p, y, r: each(p, y).sum() / (len(p) / 2), ["samples"]),
    "one sample less": (lambda m, p, y, r: p.square().sum() / (len(p) - 1), ["ratio"]),
    "one sample less, upside down": (lambda m, p, y, r: p.square().sum() * (1 / (len(p) - 1)) + p.mean(),
        ["ratio", "samples"]),
    "a tensor of their number": (lambda m, p, y, r: each(p, y).sum() / torch.tensor(len(p)), ["samples"]),
    "a tensor of ones": (lambda m, p, y, r: each(p, y).sum() / torch.ones(len(p)).sum(), ["ratio"]),
    "a penalty over their number": (lambda m, p, y, r: p.square().sum() + m.second.weight.norm() / len(p),
        ["sum", "ratio"]),
    "weights that add up to their number": (lambda m, p, y,
        r: (r[0] / r[0].sum() * len(p) * each(p, y)).mean(), ["ratio"]),
    "rows with weights, added": (lambda m, p, y,
        r: (lambda w: (w * each(p, y) + w * p.square().mean(1)).sum())(r[0] / r[0].sum()),
                                 ["ratio"]),
    "rows with weights, some chosen": (lambda m, p, y,
        r: (r[0] / (r[0].sum() + 1e-8) * each(p, y)).masked_fill(y == 1, 0).sum(),
                                       ["ratio"]),
    "a product of vectors": (lambda m, p, y, r: each(p, y) @ r[0] / r[0].sum(), ["ratio"]),
    "a product of tensors": (lambda m, p, y, r: torch.einsum("b,b->", each(p, y), r[0] / r[0].sum()),
        ["ratio"]),
    "one number in each row": (lambda m, p, y, r: each(p, y).sum().expand(len(p)).mean(), ["sum"]),
    "a masked mean, the larger number": (lambda m, p, y,
        r: (each(p, y) * r[1]).sum() / torch.maximum(r[1].sum(), torch.tensor(1)),
                                         ["ratio"]),
    "a masked mean, if any": (lambda m, p, y,
        r: torch.where(r[1].sum() > 0, (each(p, y) * r[1]).sum() / r[1].sum().clamp(min=1),
                                                             0.0), ["ratio"]),
    "a masked mean, Python's larger number": (lambda m, p, y,
        r: (each(p, y) * r[1]).sum() / max(r[1].sum().item(), 1), ["ratio"]),
    "what is not padded": (lambda m, p, y, r: (each(p, y) * r[1]).sum() / (r[1].numel() - (~r[1]).sum()),
        ["ratio"]),
    "three terms and weights": (lambda m, p, y, r: three(m, p, y, r) @ m.classes[:3],
                                ["ratio", "sum", "samples"]),
    "declared": (lambda m, p, y, r: piper.mean(each(p, y) * r[1], r[1].sum()), ["ratio"]),
    "declared by a number": (lambda m, p, y, r: piper.mean(each(p, y) * r[1], 7), ["sum"]),
    "two terms": (lambda m, p, y, r: ce(m, p, y, r) + 0.1 * p.logsumexp(-1).square().mean(),
        ["ratio", "samples"]),
    "two terms, divided": (lambda m, p, y, r: (ce(m, p, y, r) - 3 * p.square().sum()) / 2, ["ratio", "sum"]),
    "three terms, stacked": (lambda m, p, y,
        r: torch.stack([ce(m, p, y, r), p.square().sum(), m.second.weight.norm()]).sum(),
                             ["ratio", "sum", "samples"]),
    "a penalty beside": (lambda m, p, y, r: ce(m, p, y, r) + 0.1 * m.second.weight.square().sum(), ["ratio"]),
    "a penalty beside a sum": (lambda m, p, y,
        r: p.square().sum() + 0.1 * m.second.weight.square().sum() + 2, ["sum", "samples"]),
    "a learned weight": (lambda m, p, y, r: ce(m, p, y, r) * (-m.log_variance).exp() + m.log_variance,
        ["ratio"]),
    "a learned weight beside": (lambda m, p, y,
        r: p.square().sum() * (-m.log_variance).exp() + ce(m, p, y, r) + m.log_variance,
                                ["sum", "ratio", "samples"]),
    "learned weights": (lambda m, p, y,
        r: ((-m.log_variances).exp() * three(m, p, y, r) + m.log_variances).sum(),
                        ["ratio", "sum", "samples"]),
    "learned weights, divided by": (lambda m, p, y,
        r: (three(m, p, y, r) / (2 * m.log_variances.exp()) - m.log_variances).sum(),
                                    ["ratio", "sum", "samples"]),
    "a product with learned weights": (lambda m, p, y, r: three(m, p, y, r) @ m.log_variances.softmax(0),
                                       ["ratio", "sum", "samples"]),
    "a term twice": (lambda m, p, y, r: (lambda a: a + 0.5 * (a + p.square().sum()))(ce(m, p, y, r)),
        ["ratio", "sum"]),
    "a sum in place": (in_place, ["ratio", "sum"]),
    "a detached term": (lambda m, p, y, r: ce(m, p, y, r) + p.square().sum().detach(), ["ratio", "sum"]),
    "at least four samples": (lambda m, p, y, r: p.square().sum() / number(p).clamp(min=4.0), ["ratio"]),
    "at most four samples": (lambda m, p, y, r: p.square().sum() / number(p).clamp(max=4.0), ["ratio"]),
    "a mean, times at most four": (lambda m, p, y, r: p.square().mean() * number(p).clamp(max=4.0),
        ["ratio"]),
    "rows over at least four": (lambda m, p, y, r: (p.square() / number(p).clamp(min=4.0)).sum(), ["ratio"]),
    "samples, or four": (lambda m, p, y, r: p.square().sum() / torch.maximum(number(p), torch.tensor(4.0)),
        ["ratio"]),
    "samples, if many": (lambda m, p, y, r: p.square().sum() / torch.where(number(p) > 4, number(p), 1.0),
        ["ratio"]),
    "a root of the number": (lambda m, p, y, r: p.square().sum() / number(p).sqrt(), ["ratio"]),
    "a root of a Python number": (lambda m, p, y, r: p.square().sum() / len(p) ** 0.5, ["ratio"]),
    "a square of a Python number": (lambda m, p, y, r: p.square().sum() / len(p) ** 2, ["ratio"]),
    "whole thirds": (lambda m, p, y, r: p.square().sum() / (number(p) // 3), ["ratio"]),
    "truncated": (lambda m, p, y, r: p.square().sum() / ((number(p) + 1) / 3).long(), ["ratio"]),
    "a truncated count": (lambda m, p, y, r: (each(p, y) * r[1]).sum() / (r[1].sum() * 0.7 + 1).long(),
        ["ratio"]),
    "a multiple of the number": (lambda m, p, y, r: p.square().sum() / (number(p) * 3), ["samples"]),
    "equal weights": (lambda m, p, y, r: (p.square().sum(1) * p.new_full((len(p),), 1 / len(p))).sum(),
        ["samples"]),
    "equal weights, a product": (lambda m, p, y, r: p.square().sum(1) @ torch.full_like(r[0], 1 / len(p)),
        ["samples"]),
    "chunks, stacked": (lambda m, p, y, r: chunks(p, y).sum(), ["sum"]),
    "chunks, stacked, over labels": (lambda m, p, y, r: chunks(p, y).sum() / (y != -100).sum(), ["ratio"]),
    "added in part": (lambda m, p, y, r: torch.add(ce(m, p, y, r), p.square().sum(), alpha=0.3),
        ["ratio", "sum"]),
    "with a number that changes": (lambda m, p, y, r: ce(m, p, y, r) / 6 * (m.current_epoch + 1.0),
        ["ratio"]),
    "logged": (logging, ["ratio"]),
}  # fmt: skip

# Losses that divide by 0 on a part of `batch()`, in which nothing counts
NOTHING_COUNTS = {
    name
    for name in LOSSES
    if name.startswith(
        (
            "a masked",
            "a loop",
            "a sum over cl",
            "times the rec",
            "declared",
            "logged",
            "chunks, stacked, over",
        )
    )
    or name in ("smoothed labels", "what is not padded")
}


def distance(a: Outcome, b: Outcome) -> float:
    pairs = [(x[n], y[n]) for x, y in ((a.metrics, b.metrics), (a.grads, b.grads)) for n in x]
    assert a.metrics.keys() == b.metrics.keys() and a.grads.keys() == b.grads.keys()
    return float(
        torch.stack([(x - y).abs().max() / x.abs().max().clamp(min=1e-3) for x, y in pairs]).double().max()
    )


OFTEN = (
    "labels with class weights", "a sum", "a masked mean of means", "two terms", "rows over their number",
    "pairs of samples",
    "one sample less", "a learned weight beside", "a penalty beside a sum", "with a number that changes",
    "logged", "at least four samples", "at most four samples", "truncated", "equal weights",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.long) for name in LOSSES]
)
def test_parts_give_the_whole_batch(name: str) -> None:
    loss, weighings = LOSSES[name]
    step, tensors = captured(loss)
    code = step.at(SIZE)
    of_loss = [
        out.term for interface in code.interfaces.values() for out in interface.outputs if out.kind == "loss"
    ]
    assert [code.terms[term or 0].weighing for term in of_loss] == weighings
    assert len(code.regions) == 2  # what is put in to take terms apart belongs to the region of its reader
    whole = run_eagerly(step, tensors, batch(), [Slice(0, SIZE)])
    assert distance(whole, interpret(accumulating(step, PARTS), tensors, batch())) < BOUND
    lost = is_lost(step, tensors, batch(), PARTS)
    assert not lost or name in NOTHING_COUNTS
    if not mixed(step) and not lost:
        assert distance(whole, run_eagerly(step, tensors, batch(), PARTS)) < BOUND


@pytest.mark.parametrize("name", ["a sum", *(pytest.param(name, marks=pytest.mark.long) for name in (
    "labels", "a masked mean", "weights of samples", "two terms"))])  # fmt: skip
def test_shares_of_the_samples_would_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with n_i/N for everything the result is another one."""

    own = loss_weights._LossWeighting._term
    monkeypatch.setattr(loss_weights._LossWeighting, "_term", lambda self, denominator: own(self, SAMPLES))
    step, tensors = captured(LOSSES[name][0])
    whole = run_eagerly(step, tensors, batch(), [Slice(0, SIZE)])
    far = distance(whole, interpret(accumulating(step, PARTS), tensors, batch()))
    assert not far < 1e-3, "it is far off, or no number at all"


@pytest.mark.parametrize("name", ["at least four samples", "at most four samples"])
def test_two_values_would_not_show_how_a_denominator_follows_the_number(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the values for one and two samples take the first for a constant, and the second for a
    multiple of the number."""
    from lightning_piper.capture.losses import loss_weights

    judged = ONE if name == "at least four samples" else SAMPLES
    monkeypatch.setattr(loss_weights, "simplified", lambda denominator: judged)
    step, tensors = captured(LOSSES[name][0])
    whole = run_eagerly(step, tensors, batch(), [Slice(0, SIZE)])
    assert distance(whole, interpret(accumulating(step, PARTS), tensors, batch())) > 0.4


def test_products_and_quotients_of_the_number_of_samples_are_simplified() -> None:
    two, n = ConstantExpression(2), SAMPLES
    clamped = ElementwiseExpression(torch.ops.aten.clamp.default, (n, two))
    inverted = ElementwiseExpression(torch.ops.aten.reciprocal.default, (n,))
    assert simplified(times(over(two, n), times(n, n))) == simplified(over(ONE, inverted)) == SAMPLES
    assert simplified(over(times(two, n), n)) == simplified(two) == ONE
    for other in (clamped, times(n, n), over(ONE, n), over(clamped, n), ConstantExpression(0), inverted):
        assert simplified(other) is other


PYTHON_NUMBERS: dict[str, tuple[Callable[[int], float], str]] = {
    "at least eight": (
        lambda n: max(n, 8),
        "proportional to the number of samples with 12 samples and not known with 3 samples",
    ),
    "at most four": (
        lambda n: min(n, 4),
        "constant with 12 samples and proportional to the number of samples with 3 samples",
    ),
    "a half": (
        lambda n: n // 2,
        "proportional to the number of samples with 12 samples and not known with 3 samples",
    ),
    "a root of half": (
        lambda n: (n // 2) ** 0.5,
        "constant with 12 samples and proportional to the number of samples with 3 samples",
    ),
    "a logarithm": (
        lambda n: math.log(n + 1),
        "constant with 12 samples and proportional to the number of samples with 3 samples",
    ),
    "a cube": (lambda n: n**3, ""),
}


@pytest.mark.parametrize("name", PYTHON_NUMBERS)
def test_a_number_that_another_size_contradicts_is_refused(name: str) -> None:
    """Two sizes suggest what `max(len(x), 8)` is. If a third one contradicts them, its share of the samples
    would be a wrong weight. A number that already two sizes do not explain counts as assumed."""
    of, said = PYTHON_NUMBERS[name]
    step, _ = captured(lambda m, p, y, r: p.square().sum() / of(len(p)))
    assert step.at(SIZE).assumed == (not said)
    if said:
        with pytest.raises(CaptureError, match=rf"cannot follow: it is {said}\."):
            step.at(3)
    else:
        assert step.at(3).assumed


@pytest.mark.parametrize(
    "name, loss",
    {
        "a summand": lambda m, p, y, r: torch.add(p.mean(), p.square().sum(), alpha=1 / len(p)),
        "rows": lambda m, p, y, r: torch.add(p, p.square(), alpha=1 / len(p)).sum(),
        "a denominator": lambda m, p, y, r: p.sum() / torch.add(r[1].sum(), r[0].sum(), alpha=len(p)),
        "rows and a number": lambda m, p, y, r: p.sum() / (r[0] + 1 / len(p)).sum(),
        "places": lambda m, p, y, r: p.sum() / torch.arange(len(p)).sum(),
        "a shape": lambda m, p, y, r: p.sum() / torch.tensor(p.shape).prod(),
        "a mean of chunks": lambda m, p, y, r: chunks(p, y).mean(),
    }.items(),
)
def test_other_ways_to_follow_the_number_are_not_taken_for_known(name: str, loss: Loss) -> None:
    assert captured(loss)[0].at(SIZE).assumed


@pytest.mark.parametrize(
    "name, loss",
    {
        "a summand": lambda m, p, y, r: torch.add(p.mean(), p.square().sum(), alpha=0.3),
        "rows": lambda m, p, y, r: torch.add(p, p.square(), alpha=0.3).sum(),
        "a denominator": lambda m, p, y, r: p.sum() / torch.add(r[1].sum(), r[0].sum(), alpha=0.3),
        "rows and a number": lambda m, p, y, r: p.sum() / (r[0] + 0.3).sum(),
        "places": lambda m, p, y, r: p.sum() / torch.ones(len(p)).sum(),
        "a shape": lambda m, p, y, r: p.sum() / torch.tensor(p.shape[1:]).prod(),
    }.items(),
)
def test_constants_in_these_ways_are_known(name: str, loss: Loss) -> None:
    """The control."""
    step, tensors = captured(loss)
    assert not step.at(SIZE).assumed
    whole = run_eagerly(step, tensors, batch(), [Slice(0, SIZE)])
    assert distance(whole, interpret(accumulating(step, PARTS), tensors, batch())) < 1e-7  # float32 counts


def test_a_part_whose_denominator_is_zero_is_refused() -> None:
    step, _ = captured(lambda m, p, y, r: p.square().sum() / (number(p) // 5))
    assert [term.label for term in step.at(SIZE).terms] == ["floor_divide(samples, 5)"]
    with pytest.raises(CaptureError, match=r"and floor_divide\(samples, 5\) = 0 with 3 samples\."):
        step.at(3)
    step.at(6)


NOT_SEEN: dict[str, Loss] = {
    "a root": lambda m, p, y, r: F.mse_loss(p[:, 0], r[0]).sqrt(),
    "a product of means": lambda m, p, y, r: p.mean() * p.square().mean(),
    "a denominator from parameters": lambda m, p, y, r: (p * (p > 0)).sum() / (p > 0).sum(),
    "pairs of a batch's halves": lambda m, p, y, r: (torch.sub(*p.chunk(2))).square().mean(),
    "rows and a penalty, joined": lambda m, p, y, r: torch.cat(
        [p.square().mean(1), m.second.weight.square().sum(1)]
    ).mean(),
    "a Dice loss": lambda m, p, y, r: (
        1 - 2 * (p.sigmoid()[:, 0] * r[1]).sum() / (p.sigmoid()[:, 0].sum() + r[1].sum())
    ),
    "the largest": lambda m, p, y, r: p.max(),
    "minus twice the smallest": lambda m, p, y, r: -2 * p.amin(),
}


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("a root", "the largest") else pytest.param(name, marks=pytest.mark.long)
        for name in NOT_SEEN
    ],
)
def test_what_is_no_sum_of_means_is_verified_except(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Model(NOT_SEEN[name])
    report = piper.verify(module, batch(), [piper.Split(filter={}, dim_name="MB", num_microbatches=3)])
    assert report.verdict == "verified except" and report.couplings


def inside(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
    """Return the gradient of a mean. On a part of the batch, this gradient is as large as on the whole batch."""
    loss = p.square().mean()
    (grad,) = torch.autograd.grad(loss, p, create_graph=True)
    return loss + grad.relu().sum()


SCALED: dict[str, tuple[Loss, str]] = {
    "rows over their number, chosen": (lambda m, p, y, r: torch.relu(p / len(p)).sum(), "samples"),
    "rows over their number, multiplied": (
        lambda m, p, y, r: ((p / len(p)) @ m.second.weight).sum(),
        "samples",
    ),
    "a gradient of a mean": (inside, "samples"),
    "rows over another number": (lambda m, p, y, r: torch.relu(p / 7.3).sum(), "sum"),
}


@pytest.mark.parametrize("name", SCALED)
def test_the_sum_of_rows_that_were_scaled_by_their_number_is_no_sum_of_parts(name: str) -> None:
    loss, weighing = SCALED[name]
    step, _ = captured(loss)
    code = step.at(SIZE)
    of_loss = [
        out.term for interface in code.interfaces.values() for out in interface.outputs if out.kind == "loss"
    ]
    assert [code.terms[term or 0].weighing for term in of_loss] == [weighing]
    report = piper.verify(Model(loss), batch(), [piper.Split(filter={}, dim_name="MB", num_microbatches=3)])
    assert report.verdict == "verified"


def test_a_part_of_one_sample_has_no_variance() -> None:
    step, _ = captured(lambda m, p, y, r: p.square().sum() / (len(p) - 1))
    assert [term.label for term in step.at(SIZE).terms] == ["add(samples, -1)"]
    with pytest.raises(
        CaptureError,
        match=rf"it is add\(samples, -1\) with {SIZE} samples and constant with 1 sample\..* use larger microbatches",
    ):
        step.at(1)


def test_a_number_that_turns_out_to_follow_the_size_is_refused() -> None:
    """A fifth of 12 is not asked for: many a constant is 2.4. A part of the batch shows what it is."""
    step, _ = captured(lambda m, p, y, r: p.square().sum() / (len(p) / 5))
    assert [term.label for term in step.at(SIZE).terms] == ["sum"]
    with pytest.raises(
        CaptureError,
        match=r"denominator .* cannot follow: it is constant with 12 samples and proportional to .* with 6 samples",
    ):
        step.at(6)
    constant, _ = captured(lambda m, p, y, r: p.square().sum() / 2.4)
    assert [term.label for term in constant.at(6).terms] == ["sum"]


def test_a_part_in_which_nothing_counts_weighs_nothing() -> None:
    step, tensors = captured(LOSSES["a masked mean"][0])
    found = interpret(accumulating(step, PARTS), tensors, batch())
    assert all(bool(x.isfinite().all()) for x in [*found.metrics.values(), *found.grads.values()])
    empty = batch()
    empty[3][:] = False
    nothing = interpret(accumulating(step, PARTS), tensors, empty)
    alone = run_eagerly(step, tensors, empty, [Slice(0, SIZE)])
    assert all(bool(x.isnan().all()) for x in [*nothing.metrics.values(), *alone.metrics.values()]), (
        "as on one device"
    )


def one_label() -> list[Tensor]:
    """The batch, with one label that counts in the second part and none in the last part."""
    found = batch()
    found[3][:] = torch.tensor([True, True, False, True, True, False] + [True] + [False] * 5)
    return found


def all_of(p: Tensor) -> Tensor:
    """Return a sum that is not 0 on any part, whatever the mask."""
    return p.square().sum()


def logging_counts(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
    count = r[1].sum().double()
    m.log("root", count.sqrt())
    m.log("logarithm", count.log1p())
    m.log("one less, root", (count - 1).clamp(min=0).sqrt())
    m.log("share", all_of(p) / (count - 1))
    return all_of(p) / count


# Losses whose factors or conditions are lost on the second part, on the last part, or on both.
LOST: dict[str, Loss] = {
    "a count": lambda m, p, y, r: all_of(p) / r[1].sum(),
    "one less": lambda m, p, y, r: all_of(p) / (r[1].sum() - 1),
    "a reciprocal": lambda m, p, y, r: all_of(p) * (r[1].sum() - 1).double().reciprocal(),
    "a product of counts": lambda m, p, y, r: all_of(p) / (r[1].sum() * (r[1].sum() - 1)),
    "two divisions": lambda m, p, y, r: all_of(p) / r[1].sum() / (r[1].sum() - 1),
    "a logarithm": lambda m, p, y, r: all_of(p) / r[1].sum().double().log(),
    "a root that is NaN": lambda m, p, y, r: all_of(p) / (r[1].sum().double() - 1).sqrt(),
    "a difference of counts": lambda m, p, y, r: all_of(p) / (r[1].sum() - (r[1] & (y < 0)).sum()),
    "one less than a mean": lambda m, p, y, r: all_of(p) / (1 - (~r[1]).double().mean()),
    "in rows": lambda m, p, y, r: (p.square() / (r[1].sum() - 1)).sum(),
    "beside another": lambda m, p, y, r: all_of(p) / (r[1].sum() - 1) + p.mean(),
    "classes": lambda m, p, y, r: sum(all_of(p[:, c]) / (r[1] & (y != c)).sum() for c in range(3)),
    "if any": lambda m, p, y, r: torch.where(r[1].sum() > 0, all_of(p) / r[1].sum(), 0.0),
    "if any mask": lambda m, p, y, r: torch.where(r[1].any(), all_of(p) / r[1].sum(), 0.0),
    "otherwise 0 times a sum": lambda m, p, y, r: torch.where(
        r[1].any(), all_of(p) / r[1].sum(), 0.0 * p.sum()
    ),
    "if several": lambda m, p, y, r: torch.where(r[1].sum() > 1, all_of(p) / (r[1].sum() - 1), 0.0),
    "times a condition": lambda m, p, y, r: all_of(p) / r[1].sum().clamp(min=1) * (r[1].sum() > 1),
    "without NaN": lambda m, p, y, r: torch.nan_to_num(all_of(p) / (r[1].sum() - 1)),
    "logged": logging_counts,
}


@pytest.mark.parametrize("name", marked(LOST, ["one less", "a root that is NaN", "if several", "logged"]))
def test_a_factor_of_a_part_that_is_0_or_not_finite_loses_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, tensors = captured(LOST[name])
    assert not step.at(SIZE).assumed and is_lost(step, tensors, one_label(), PARTS)
    whole = run_eagerly(step, tensors, one_label(), [Slice(0, SIZE)])
    assert distance(whole, interpret(accumulating(step, PARTS), tensors, one_label())) < BOUND
    assert largest_difference(step, tensors, one_label(), 3, whole=True) is None, (
        "the trial on a few samples agrees"
    )
    monkeypatch.setattr(loss_weights, "guard_factors", lambda *args: None)
    step, _ = captured(LOST[name])
    found = interpret(accumulating(step, PARTS), tensors, one_label())
    assert not distance(whole, found) < 1e-3


def test_a_condition_that_the_whole_batch_does_not_meet_gives_0() -> None:
    empty = one_label()
    empty[3][:] = False
    for name in (
        "if any",
        "if any mask",
        "otherwise 0 times a sum",
        "if several",
        "times a condition",
        "without NaN",
    ):
        step, tensors = captured(LOST[name])
        for slices in (PARTS, (Slice(0, SIZE),)):
            whole = run_eagerly(step, tensors, empty, [Slice(0, SIZE)])
            found = interpret(accumulating(step, slices), tensors, empty)
            if name == "without NaN":  # all of it divided by -1 label
                assert distance(whole, found) < BOUND
            else:
                assert [float(x) for x in found.metrics.values()] == [0.0] == [*whole.metrics.values()]


def test_a_logged_quotient_by_0_is_infinite_as_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts would be infinite with both signs, and their sum NaN."""

    def logged(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
        m.log("share", (r[0] - 0.6).sum() / (r[1].sum() * 0.0))
        return p.mean()

    def share() -> float:
        step, tensors = captured(logged)
        parts = interpret(accumulating(step, PARTS), tensors, batch())
        return float(parts.metrics["share"])

    step, tensors = captured(logged)
    whole = float(run_eagerly(step, tensors, batch(), [Slice(0, SIZE)]).metrics["share"])
    assert math.isinf(whole) and share() == whole
    monkeypatch.setattr(loss_weights, "guards_of", lambda expression: [])
    assert math.isnan(share())


@pytest.mark.long
def test_a_loss_of_many_summands() -> None:
    """More than Python's frames can be deep, of two kinds."""

    def many(m: Any, p: Tensor, y: Tensor, r: Any) -> Tensor:
        loss = p.new_zeros(())
        for k in range(600):
            loss = loss + (p.square().mean() if k % 2 else p.square().sum()) / (k + 1)
        return loss

    step, _ = captured(many)
    assert sorted(term.label for term in step.at(SIZE).terms) == ["samples", "sum"]


def test_a_loss_of_too_many_terms_adds_none_of_them() -> None:
    """It is weighted as one mean over samples."""

    def many(terms: int) -> Loss:
        return lambda m, p, y, r: sum((each(p, y) * r[1]).sum() / (r[1].sum() + k) for k in range(1, terms))  # type: ignore[call-overload]

    step, _ = captured(many(40))
    assert step.at(SIZE).assumed and [term.label for term in step.at(SIZE).terms] == ["samples"]
    few, _ = captured(many(4))
    assert not few.at(SIZE).assumed and len(few.at(SIZE).terms) == 3, "the 0 of Python's sum is not a term"


def test_one_term_leaves_the_graph_as_it_is() -> None:
    """With one kind of weight nothing is added to the step; with two, a tangent and what leads to the second
    term.
    """
    one, two = (
        captured(LOSSES[name][0])[0].at(SIZE).interfaces[1, "B"].seeds for name in ("labels", "two terms")
    )
    assert (one, two) == ((0,), (0, 1))


def test_a_count_is_one_number() -> None:
    with pytest.raises(
        CaptureError, match=r"piper.mean: count has shape \(3,\). Give a single number, such as mask.sum\(\)"
    ):
        piper.mean(torch.ones(3), torch.ones(3))
    assert piper.mean(torch.ones(4), np.ones((2, 4), dtype=bool).sum()) == 0.5
    with pytest.raises(CaptureError, match=r"piper\.mean: count is a str"):
        piper.mean(torch.ones(3), "3")  # type: ignore[arg-type]
    assert float(piper.mean(torch.ones(3), torch.tensor(2))) == 1.5 == float(piper.mean(torch.ones(3), 2))
