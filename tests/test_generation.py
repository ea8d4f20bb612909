"""Texts that models generate in evaluation steps: under every program, the tokens of one device."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests import generation
from tests.distributed.processes import launch_trainings
from tests.generation import PROGRAMS, WRITERS, Writer

pytest.importorskip("transformers", minversion="5.0")

STEPS = ("validation", "test", "predict")


@functools.cache
def alone(name: str) -> tuple[Writer, dict[str, Any]]:
    """A writer after its training on one device, and what `generation.run` returned."""
    module = WRITERS[name]()
    return module, generation.run(module)


def assert_texts(name: str, found: dict[str, Any]) -> None:
    """The texts of a process are those that one device writes for the same prompts."""
    trained, _ = alone(name)
    before = WRITERS[name]()
    for step in ("sanity", *STEPS):
        writer = before if step == "sanity" else trained
        for batch_idx, prompts, texts in found[step]:
            assert torch.equal(texts, writer.generate(prompts, batch_idx)), (name, step, batch_idx)
    assert all(map(torch.equal, found["returned"], (texts for _, _, texts in found["predict"])))


def launched(tmp_path: Any, names: list[str], program: str) -> list[dict[str, Any]]:
    devices = 4 if program == "pp2 dp2" else 2
    return launch_trainings(devices, generation.write, tmp_path, devices, names, program)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_generate_gives_the_tokens_of_one_device(tmp_path, program):
    names = ["Greedy", "Sampling", "BeamSearch"]
    for rank in launched(tmp_path, names, program):
        for name in names:
            assert_texts(name, rank[name])
            assert rank[name]["length"] == alone(name)[1]["length"]


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2", "tp2"])
def test_loops_over_tokens_give_the_tokens_of_one_device(tmp_path, program):
    """Piper captures the first two kinds as plans, the second with keys and values that stay on their stage."""
    names = ["Loop", "CachedLoop", "SamplingLoop"]
    for rank in launched(tmp_path, names, program):
        for name in names:
            assert_texts(name, rank[name])


def test_a_loop_that_ends_at_a_token(tmp_path):
    for rank in launched(tmp_path, ["LoopUntilEnd"], "pp2"):
        assert_texts("LoopUntilEnd", rank["LoopUntilEnd"])


@pytest.mark.long
def test_other_caches_and_models(tmp_path):
    names = ["StaticCache", "Gpt2"]
    for rank in launched(tmp_path, names, "pp2"):
        for name in names:
            assert_texts(name, rank[name])


@pytest.mark.long
@pytest.mark.parametrize("program", ["replicas", "pp2"])
def test_a_step_that_generates_for_some_batches(tmp_path, program):
    """The batches before the first text run captured, and count as much as the others in what is logged."""
    for rank in launched(tmp_path, ["SomeBatches"], program):
        assert_texts("SomeBatches", rank["SomeBatches"])
        assert rank["SomeBatches"]["length"] == alone("SomeBatches")[1]["length"]


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2"])
def test_one_rank_alone_may_generate(tmp_path, program):
    first, second = launched(tmp_path, ["OneRank"], program)
    assert first["OneRank"]["test"][0][2].shape[1] > generation.PROMPT
    assert all(texts.shape[1] == generation.PROMPT for _, _, texts in second["OneRank"]["test"])


def test_texts_differ_from_those_before_the_training():
    for name in ("Greedy", "Sampling", "BeamSearch"):
        trained, written = alone(name)
        before = WRITERS[name]()
        texts = [(texts, before.generate(prompts, i)) for i, prompts, texts in written["test"]]
        assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in texts)
        _, prompts, first = written["test"][1]
        other = trained.generate(prompts, 0)  # of another batch, and seed
        assert (name == "Sampling") != (first.shape == other.shape and torch.equal(first, other))
