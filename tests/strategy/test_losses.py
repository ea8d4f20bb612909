"""Losses over tokens, trained under schedules, replicas and shards: the results are those of one device with
the whole batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.capture.losses.denominators import SAMPLES
from lightning_piper.capture.losses.loss_weights import _LossWeighting
from lightning_piper.errors import PiperError
from tests.strategy.fitting import Batches, Record, local, trainer

pytest.importorskip("transformers")

VOCABULARY, LENGTH, SAMPLES_A_BATCH = 29, 7, 16
BOUND = 2e-12  # in float64, after ten steps of an optimizer; the largest distance measured is 4e-14


class Llama(L.LightningModule):
    """A causal language model with padding, class weights, and the z-loss of its logits as an additional
    term.
    """

    def __init__(self, optimizer: str = "sgd", auxiliary: bool = True) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attn_implementation="eager",
        )
        self.model, self.optimizer, self.auxiliary = LlamaForCausalLM(config), optimizer, auxiliary
        self.register_buffer("classes", torch.rand(VOCABULARY) + 0.5)
        first = ["model.model.embed_tokens", "model.model.layers.0"]
        last = ["model.model.layers.1", "model.model.norm", "model.lm_head"]
        piper.annotate_modules(self, "PP", [first, last])
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, mask = batch["tokens"], batch["mask"]
        logits = self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
        labels = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.classes)
        self.log("perplexity of tokens", loss)
        self.log("tokens", (labels != -100).sum().double())
        if self.auxiliary:
            loss = loss + 0.01 * logits.logsumexp(-1).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.SGD
        return kind(self.parameters(), lr=1e-2)


def batches(count: int, samples: int = SAMPLES_A_BATCH) -> list[dict[str, Tensor]]:
    """Padded sequences of 2 to 7 tokens; those in the second half of a batch are short."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        tokens = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (samples,), generator=generator)
        lengths[samples // 2 :] = lengths[samples // 2 :].clamp(max=3)
        found.append({"tokens": tokens, "mask": (torch.arange(LENGTH) < lengths[:, None]).long()})
    return found


def fit(
    module: L.LightningModule, strategy: Any, data: list[Any], **options: Any
) -> tuple[dict[str, Tensor], Record]:
    run, record = trainer(strategy, max_steps=options.pop("max_steps", len(data)), **options)
    run.fit(module, Batches(data))  # type: ignore[arg-type]
    return {name: x.detach().clone() for name, x in module.named_parameters()}, record


def distance(one: tuple[dict[str, Tensor], Record], two: tuple[dict[str, Tensor], Record]) -> float:
    """The largest distance of losses, logged values and parameters, each relative to the largest value of its
    kind.
    """
    pairs = [(one[0][name], two[0][name]) for name in one[0]]
    pairs += list(zip(one[1].losses, two[1].losses, strict=True))
    for a, b in zip(one[1].logged, two[1].logged, strict=True):
        assert a.keys() == b.keys()
        pairs += [(a[name], b[name]) for name in a]
    return float(
        torch.stack([(a.double() - b.double()).abs().max() / a.double().abs().max() for a, b in pairs]).max()
    )


GROUPS = [[0, 2], [1, 3]]
REPLICAS = piper.Replicate(filter={}, devices=GROUPS)
PROGRAMS: dict[str, list[Any]] = {
    "1F1B": [*schedules.one_f_one_b(2, 4, devices=GROUPS), REPLICAS],
    "zero bubble": [*schedules.zero_bubble(2, 4, devices=GROUPS), REPLICAS],
    "DualPipe": [*schedules.dualpipe(2, 4, devices=GROUPS), REPLICAS],
    "ZeRO-3": [
        *schedules.one_f_one_b(2, 4, devices=GROUPS),
        piper.Replicate(filter={}, devices=GROUPS, shard_params=True),
    ],
    "ZeRO-1": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_optimizer=True),
    ],
}


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[dict[str, Tensor], Record]]:
    return {optimizer: fit(Llama(optimizer), "auto", batches(10)) for optimizer in ("adamw", "sgd")}


@pytest.mark.parametrize(
    ("program", "optimizer"),
    [
        ("1F1B", "adamw"),
        *(pytest.param(name, "adamw", marks=pytest.mark.long) for name in PROGRAMS if name != "1F1B"),
        *(pytest.param(name, "sgd", marks=pytest.mark.long) for name in ("1F1B", "ZeRO-3")),
    ],
)
def test_a_language_model_with_padding(program: str, optimizer: str, plain: Any) -> None:
    found = fit(Llama(optimizer), local(PROGRAMS[program]), batches(10))
    assert distance(plain[optimizer], found) < BOUND


@contextlib.contextmanager
def shares_of_samples() -> Iterator[None]:
    own = _LossWeighting._term
    with mock.patch.object(_LossWeighting, "_term", lambda self, denominator: own(self, SAMPLES)):
        yield


@pytest.mark.long
def test_shares_of_the_samples_would_train_another_model(plain: Any) -> None:
    """The control. The trial of the first batch sees it as well."""
    with (
        shares_of_samples(),
        pytest.warns(UserWarning, match="a different result than the whole batch on one device"),
    ):
        assert distance(plain["sgd"], fit(Llama("sgd"), local(PROGRAMS["1F1B"]), batches(10))) > 1e-3


class Tokens(L.LightningModule):
    """A mean over the positions that count."""

    def __init__(self, terms: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.terms = nn.Linear(4, 6), nn.Linear(6, 2), terms
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with piper.annotate("PP", 0):
            h = self.first(x).tanh()
        with piper.annotate("PP", 1):
            error, counts = (self.second(h) - y).square(), y > 0
            loss = (error * counts).sum() / counts.sum()
        return loss + h.square().mean() if self.terms else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def pairs(count: int, samples: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 4, dtype=torch.float64, generator=generator),
            torch.randn(samples, 2, dtype=torch.float64, generator=generator) + 1 - i % 3,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "program",
    [
        [piper.Place(devices=[0, 1])],
        [
            piper.Place(devices=[[0, 1], [2, 3]], axes=["dp", "tp"]),
            piper.ShardWeights(params={"first.weight": 0, "second.weight": 1}),
        ],
    ],
)
def test_the_mean_of_replicas_is_that_of_ddp(program: list[Any]) -> None:
    """Each replica divides by its own tokens. One device gets there by the mean of the losses of the two
    halves.
    """
    data = pairs(3, 8)
    found, _ = fit(Tokens(), local([*program, piper.Replicate(average="replicas")]), data)
    halves = [half for batch in data for half in zip(*(x.chunk(2) for x in batch), strict=True)]
    mean, _ = fit(Tokens(), "auto", halves, max_steps=3, accumulate_grad_batches=2)
    assert max(float((mean[name] - found[name]).abs().max()) for name in mean) < 1e-14
    whole, _ = fit(Tokens(), "auto", data)
    assert max(float((whole[name] - found[name]).abs().max()) for name in mean) > 1e-3, "the control"


ACCUMULATING: dict[str, list[Any]] = {
    "one device": [],
    "1F1B": [*schedules.one_f_one_b(2, 2, devices=GROUPS), REPLICAS],
    "ZeRO-2": [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Replicate(filter={}, devices=[0, 1], shard_grads=True),
    ],
}


@pytest.mark.parametrize("program", ACCUMULATING)
def test_batches_accumulate_by_tokens(program: str) -> None:
    """Three batches are one of three times the size, the last two of an epoch one of twice."""
    data = pairs(8, 4)
    joined = [tuple(torch.cat(xs) for xs in zip(*data[i : i + 3], strict=True)) for i in (0, 3, 6)]
    expected, _ = fit(Tokens(), "auto", joined)
    strategy = local(ACCUMULATING[program], accumulate="tokens")
    found, _ = fit(Tokens(), strategy, data, max_steps=3, max_epochs=1, accumulate_grad_batches=3)
    assert max(float((expected[name] - found[name]).abs().max()) for name in expected) < 1e-14
    batchwise, _ = fit(
        Tokens(), local(ACCUMULATING[program]), data, max_steps=3, max_epochs=1, accumulate_grad_batches=3
    )
    assert max(float((expected[name] - batchwise[name]).abs().max()) for name in expected) > 1e-3, (
        "the control: Lightning's mean"
    )


def test_terms_with_different_denominators_do_not_accumulate_by_tokens() -> None:
    with pytest.raises(
        PiperError,
        match=r'accumulate="tokens"\): returned loss is a sum of terms with different denominators',
    ):
        fit(
            Tokens(terms=True),
            local([], accumulate="tokens"),
            pairs(4, 4),
            accumulate_grad_batches=2,
            max_steps=2,
        )
    with pytest.raises(
        PiperError,
        match=r"PiperStrategy\(accumulate='token'\) is not usable. Give one of 'batches', 'tokens'",
    ):
        local([], accumulate="token")


class Rooted(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).sqrt()


class Beside(Tokens):
    """Compares each sample with the previous one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].roll(1, 0), *batch[1:]), batch_idx)


@pytest.mark.parametrize(
    "module, words, warned",
    [
        (Rooted, "the loss is not a sum of means", True), (Tokens, "the loss is not a sum of means", False),
        (Beside, "the loss or a gradient mixes samples, or indexes into the batch, in aten.roll", True),
        (Tokens, "mixes samples", False),
    ],
)  # fmt: skip
def test_a_loss_that_parts_do_not_give_is_warned_of_where_it_is_cut(
    module: type[Tokens], words: str, warned: bool
) -> None:
    for program, cut in (schedules.gpipe(2, 2), True), (schedules.gpipe(2, 1), False):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(module(), local(program), pairs(2, 8))
        assert any(words in str(each.message) for each in seen) == (warned and cut)
