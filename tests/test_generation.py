"""Texts that models generate in evaluation steps: under every program, the tokens of one device."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from tests import generation
from tests.distributed.processes import launch_trainings, run_ranks
from tests.generation import PROGRAMS, WRITERS, Writer
from tests.pretrained import by_transformers, saved

pytest.importorskip("transformers", minversion="5.0")


@functools.cache
def alone(name: str) -> tuple[Writer, dict[str, Any]]:
    """A writer after its training on one device, and what `generation.run` returned."""
    module = WRITERS[name]()
    return module, generation.run(module)


def assert_texts(name: str, found: dict[str, Any]) -> None:
    """The texts of a process are those that one device writes for the same prompts."""
    trained, _ = alone(name)
    before = WRITERS[name]()
    assert {"sanity", "test", "predict"} <= found.keys()
    for step in found.keys() - {"length", "returned"}:
        writer = before if step == "sanity" else trained
        for batch_idx, prompts, texts in found[step]:
            assert torch.equal(texts, writer.generate(prompts, batch_idx)), (name, step, batch_idx)
    assert all(map(torch.equal, found["returned"], (texts for _, _, texts in found["predict"])))


def mean_length(ranks: list[dict[str, Any]], name: str) -> float:
    """The mean length of the texts that all replicas have written in the validation."""
    lengths = [texts.shape[1] for rank in ranks for _, _, texts in rank[name]["validation"]]
    return sum(lengths) / len(lengths)


def launched(tmp_path: Any, names: list[str], program: str) -> list[dict[str, Any]]:
    devices = 4 if program == "pp2 dp2" else 2
    return launch_trainings(devices, generation.write, tmp_path, devices, names, program)


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
def test_generate_gives_the_tokens_of_one_device(tmp_path, program):
    names = ["Greedy", "Sampling", "BeamSearch"]
    ranks = launched(tmp_path, names, program)
    for rank in ranks:
        for name in names:
            assert_texts(name, rank[name])
            assert rank[name]["length"] == mean_length(ranks, name)


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
    ranks = launched(tmp_path, ["SomeBatches"], program)
    for rank in ranks:
        assert_texts("SomeBatches", rank["SomeBatches"])
        assert rank["SomeBatches"]["length"] == mean_length(ranks, "SomeBatches")


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2"])
def test_one_rank_alone_may_generate(tmp_path, program):
    first, second = launched(tmp_path, ["OneRank"], program)
    assert first["OneRank"]["test"][0][2].shape[1] > generation.PROMPT
    assert all(texts.shape[1] == generation.PROMPT for _, _, texts in second["OneRank"]["test"])


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2"])
def test_hooks_have_the_whole_module(tmp_path, program):
    """In the sanity check, after a captured validation, at the end of an epoch and of the fit."""
    first, second = launched(tmp_path, ["InHooks", "InHooksOfOneRank"], program)
    for rank in (first, second):
        assert_texts("InHooks", rank["InHooks"])
        assert {"sanity", "validation", "epoch", "end"} <= rank["InHooks"].keys()
    assert_texts("InHooks", first["InHooksOfOneRank"])
    assert not {"validation", "epoch", "end"} & second["InHooksOfOneRank"].keys()


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2"])
def test_models_from_files(tmp_path, program):
    """Every process has values only while it generates: without a fit, and from a sanity check to its end."""
    folder = saved("llama", tmp_path / "model", torch.float64, sharded=True)
    one = generation.FromFiles(folder, by_transformers)
    one.configure_model()
    before = generation.FromFiles(folder, by_transformers)
    before.configure_model()
    generation.run(one)
    for rank in launch_trainings(2, generation.write_from_files, tmp_path / "run", folder, program):
        predicted, written = rank["predicted"]
        assert len(predicted) == len(written["predict"]) > 0
        for step, batches in (*rank["run"].items(), ("before", written["predict"])):
            for batch_idx, prompts, texts in () if step in ("length", "returned") else batches:
                writer = before if step in ("sanity", "before") else one
                assert torch.equal(texts, writer.generate(prompts, batch_idx)), (step, batch_idx)
        assert not rank["kept"]


@pytest.mark.long
@pytest.mark.parametrize("program", ["zero3", "pp2 dp2"])
def test_replicas_generate_texts_of_different_lengths(tmp_path, program, batches=5):
    devices = 4 if program == "pp2 dp2" else 2
    ranks = launch_trainings(devices, generation.write_lengths, tmp_path, "Sampling", program, batches)
    first, last = ranks[0]["lengths"], ranks[-1]["lengths"]
    assert len(first) == len(last) == batches and first != last
    assert all(rank["logged"] == pytest.approx(sum(first + last) / len(first + last)) for rank in ranks)


def test_errors_of_whole_module(tmp_path):
    line = r"piper\.whole_module at .*tests/generation\.py:\d+: "
    kinds = ["restores", "reads gradients", "changes", "backward", "memory", "submodule"]
    for rank in launch_trainings(2, generation.misuse, tmp_path, kinds):
        assert "restores" not in rank and "reads gradients" not in rank
        assert re.match(
            rf"{line}the gradient of 'head\.1\.weight' was changed in the block", rank["backward"]
        )
        assert re.match(
            f"{line}Sequential is not the LightningModule that the Trainer runs", rank["submodule"]
        )
        assert re.match(rf"{line}'head\.1\.weight' was changed in the block", rank["changes"])
        assert re.match(
            rf"{line}the whole module needs .* more memory on rank 0, which has 0", rank["memory"]
        )


def test_a_change_of_data_on_one_rank_is_an_error(tmp_path):
    """On rank 1, which has received this parameter from rank 0. Torch does not count such a change."""
    _, second = run_ranks(2, generation.misuse, tmp_path, ["changes data"], joined=False)
    assert "'head.1.weight' was changed in the block" in second.result["changes data"]


@pytest.mark.long
def test_whole_module_on_one_rank_ends_with_an_error(tmp_path):
    first, second = run_ranks(2, generation.misuse, tmp_path, ["one rank"], 0.5, joined=False)
    assert first.exitcode == 1
    assert re.search(
        r"rank 0 ends, .*: it waits in piper\.whole_module at .*generation\.py:\d+, which all ranks must call",
        first.said,
    )
    assert second.exitcode == 0 and "it waits in piper.whole_module" in second.result["one rank"]


def test_without_memory_for_the_whole_module_the_first_batch_is_an_error(tmp_path):
    """If the sanity check has shown that the step cannot be captured, or if a validation is the first to run."""
    for rank in launch_trainings(2, generation.refuse, tmp_path):
        for sanity in (True, False):
            assert re.search(r"generation\.py:\d+ .*needs the value of a tensor", rank[sanity])
            assert re.search(
                "the whole module needs .* more memory on rank 0, which has 0 B free", rank[sanity]
            )


def test_texts_differ_from_those_before_the_training():
    for name in ("Greedy", "Sampling", "BeamSearch"):
        trained, written = alone(name)
        before = WRITERS[name]()
        texts = [(texts, before.generate(prompts, i)) for i, prompts, texts in written["test"]]
        assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in texts)
        _, prompts, first = written["test"][1]
        other = trained.generate(prompts, 0)  # of another batch, and seed
        assert (name == "Sampling") != (first.shape == other.shape and torch.equal(first, other))
