"""A search for a model whose scores need much memory: it computes the loss in chunks if memory limits the program, and
only then."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import lightning_piper as piper
from lightning_piper.errors import SearchError
from lightning_piper.placements import chunked_scores
from lightning_piper.placements.chunked_scores import SCORES_BACKWARD, SCORES_OF, workspace
from lightning_piper.search.costs.operation_costs import Counting
from lightning_piper.search.proposal import compared, with_less_memory

WORDS, WIDTH, ROWS = 40_000, 8, 2048
SCORES = 4 * ROWS * WORDS  # bytes: 313 MiB
CHUNK = 4 * chunked_scores.ROWS * WORDS  # bytes: 78 MiB


class Words(L.LightningModule):
    """A model of which the scores need nearly all of the memory. With `weights`, `ChunkLoss` does not apply."""

    def __init__(self, weights: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.register_buffer("weight", torch.ones(WORDS) if weights else None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.head(self.embed(batch).tanh())
        return F.cross_entropy(scores.flatten(0, 1), batch.flatten(), self.weight)


def found(
    memory: str, weights: bool = False, samples: int = 1, devices: int = 1, **options: Any
) -> piper.search.Proposal:
    """A search for a batch of `ROWS` words. Microbatches cannot divide one sample."""
    with torch.device("meta"):
        module = Words(weights, options.pop("width", WIDTH))
    batch = torch.arange(ROWS).view(samples, -1)
    return piper.search(module, batch, devices, memory, hardware="cpu", schedules=("gpipe",), **options)


def test_the_loss_in_chunks_if_nothing_else_fits() -> None:
    lines: dict[str, list[str]] = {"2GiB": [], "100MiB": []}
    roomy, tight = (found(memory, progress=said.append) for memory, said in lines.items())
    again = "found no program that fits; searching again with the logits of the loss in chunks (ChunkLoss)"
    assert [again in said for said in lines.values()] == [False, True]
    assert not any(isinstance(each, piper.ChunkLoss) for each in roomy.directives)
    assert isinstance(tight.directives[0], piper.ChunkLoss) and not roomy.alternative and not roomy.is_limited
    assert CHUNK < tight.memory <= 100 * 2**20 < 2 * SCORES < roomy.memory
    without = "without ChunkLoss, the search found no program"
    assert "ChunkLoss(" in str(tight) and tight.alternative == f"{without} that fits"
    assert compared(tight, math.inf).alternative == without  # memory was not the cause


def test_a_loss_that_has_no_chunks_does_not_fit() -> None:
    with pytest.raises(SearchError, match="no program fits"):
        found("100MiB", weights=True)


def test_the_error_names_the_memory_with_which_the_loss_in_chunks_fits() -> None:
    with pytest.raises(SearchError, match="for each device") as caught:
        found("20MiB")
    assert 20 * 2**20 < caught.value.memory < 100 * 2**20 < SCORES
    assert found(f"{int(caught.value.memory)}B").first
    less, more, none = SearchError("less"), SearchError("more"), SearchError("none")
    less.memory, more.memory = 1, 2
    assert with_less_memory(more, less) is less and with_less_memory(less, more) is less
    assert with_less_memory(less, none) is less and with_less_memory(none, less) is less


def test_the_faster_one_of_chunks_and_microbatches() -> None:
    """If memory excludes a step without microbatches. And the control: a loss without chunks takes microbatches."""
    chunks, microbatches = (found("500MiB", weights, samples=4) for weights in (False, True))
    assert chunks.described == "one device; the loss in chunks" and not chunks.is_limited
    assert chunks.alternative.startswith("without ChunkLoss: one device; 4 microbatches")
    assert microbatches.chosen.layout.microbatches == 4 and microbatches.time > chunks.time
    assert microbatches.is_limited and not microbatches.first and not microbatches.alternative


def test_microbatches_if_they_are_faster_than_chunks() -> None:
    """The products of a wide head take most of the time, and chunks compute one of them twice."""
    wide = found("1GiB", samples=4, width=256)
    assert wide.chosen.layout.microbatches == 2 and not wide.first
    assert wide.alternative.startswith("with ChunkLoss: one device, ")


def test_the_least_memory_needs_chunks() -> None:
    least = found("2GiB", objective="memory")
    assert isinstance(least.directives[0], piper.ChunkLoss) and least.memory < SCORES


def test_chunks_of_sharded_words() -> None:
    """Each of two devices has half of the words. Neither chunks nor shards alone fit."""
    proposal = found("380MiB", devices=2, ranks=1, levels=(0,), width=512)
    chunk, _, shard = proposal.directives
    assert isinstance(chunk, piper.ChunkLoss) and isinstance(shard, piper.ShardWeights)
    assert proposal.alternative == "without ChunkLoss, the search found no program that fits"
    assert shard.params["head.weight"] == 0 and "tensor-parallel over 2 devices" in proposal.described


def arguments(dtype: torch.dtype, chunk: int) -> list[tuple[Any, tuple[Any, ...]]]:
    hidden, weight, target = torch.randn(3, 32, 8), torch.randn(500, 8), torch.randint(500, (3, 32))
    forward = (hidden.to(dtype), weight.to(dtype), None, target, chunk)
    picked, sums = SCORES_OF(*forward)
    wanted = [True, True, False]
    return [
        (SCORES_OF, forward),
        (SCORES_BACKWARD, (picked, sums, *forward[:4], sums, None, chunk, wanted)),
    ]


@pytest.mark.parametrize(
    ("dtype", "far"), [(torch.float32, 0.02), (torch.float64, 0.02), (torch.bfloat16, 0.3)]
)
@pytest.mark.parametrize("chunk", [16, 40, 96])
def test_the_workspace_is_as_measured(dtype: torch.dtype, far: float, chunk: int) -> None:
    """And the control: the workspace of other chunks is not."""
    for op, args in arguments(dtype, chunk):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            made = op(*args)
        live = most = 0
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            live += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, live)
        measured = most - sum(x.nbytes for x in made)
        assert workspace(op, args) == pytest.approx(measured, rel=far)
        place = 8 if op is SCORES_BACKWARD else 4
        other = workspace(op, (*args[:place], chunk // 4, *args[place + 1 :]))
        assert other != pytest.approx(measured, rel=far)


def test_the_products_and_the_scores_count() -> None:
    """Twelve reads or writes of all scores: one product and five steps forward, and three products and four steps
    backward, less one gradient that nobody wants."""
    scores = 4 * 96 * 500
    with Counting() as mode:
        for op, args in arguments(torch.float32, 0):
            op(*args)
    chunked = [cost for cost in mode.costs if "chunked_scores" in cost.name]
    apart = [cost.nbytes for cost in chunked if not cost.flops]
    assert apart == [5 * scores, 5 * scores, 4 * scores]
    assert [cost.flops for cost in chunked if cost.flops] == [2 * 96 * 500 * 8 * n for n in (1, 1, 3)]
