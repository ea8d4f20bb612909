"""Hugging Face models that are saved from the processes that hold them: the files have what transformers
writes, an interrupted save leaves the earlier model, and models that cannot be saved are refused.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

import lightning_piper as piper
from lightning_piper.checkpoint.safetensors_files import INDEX, SINGLE, stored_tensors
from lightning_piper.checkpoint.safetensors_writer import SafetensorsWriter
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import PARTS
from lightning_piper.pretrained.model_folder import UNFINISHED, ModelFolder
from tests import pretrained
from tests.distributed.processes import launch_trainings
from tests.pretrained import KINDS, by_transformers, saved
from tests.strategy.fitting import QUIET

pytest.importorskip("transformers", minversion="5.0")

PROGRAMS = {
    "zero3": [piper.Place([0, 1]), piper.Replicate(zero=3)],
    "pp2": piper.schedules.one_f_one_b(stages=2, microbatches=2),
    "tp2": [
        piper.Place([0, 1], axes=("tp",)),
        piper.ShardWeights(
            axis="tp",
            params={"*.gate_proj.weight": 0, "*.up_proj.weight": 0, "*.down_proj.weight": 1},
            stream="tp",
        ),
    ],
}


class Holder(L.LightningModule):
    """A module with some models."""

    def __init__(self, **models: Any) -> None:
        super().__init__()
        for name, model in models.items():
            setattr(self, name, model)


def trainer_of(module: L.LightningModule, strategy: Any = None) -> L.Trainer:
    """A Trainer that has this module, without a run."""
    strategy = piper.PiperStrategy(transport="local") if strategy is None else strategy
    trainer = L.Trainer(**{**QUIET, "accelerator": "cpu", "devices": 1}, strategy=strategy)
    trainer.strategy.connect(module)
    return trainer


def made(kind: str, **options: Any) -> Any:
    model_class, config_class, sizes = KINDS[kind]()
    torch.manual_seed(3)
    return model_class(config_class(vocab_size=pretrained.VOCABULARY, **sizes, **options))


def values(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each.whole() for name, each in stored_tensors(folder).items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == x.dtype and torch.equal(ours[name], x) for name, x in theirs.items()
    )


def check_saved_by_processes(folder: Path, program: Any, count: int) -> None:
    """Train on two processes, and check that they save the values of a checkpoint in `count` files."""
    source = saved("tied_llama", folder / "source", torch.float64, sharded=True)
    launch_trainings(2, pretrained.save, folder / "run", source, folder, program)
    assert "captured 2 times" not in (folder / "run" / "0.txt").read_text()
    state = torch.load(folder / "plain.ckpt", weights_only=False)["state_dict"]
    state = {key.removeprefix("model."): x for key, x in state.items()}
    untied = {key: x for key, x in state.items() if key != "lm_head.weight"}
    assert same(values(folder / "hook"), untied) and same(values(folder / "after"), untied)
    files = {each.path.name for each in stored_tensors(folder / "after").values()}
    assert len(files) == count
    assert {each.name for each in (folder / "after").glob("*safetensors*")} == files | (
        {INDEX} if count > 1 else set()
    )
    loaded, other = (by_transformers(KINDS["tied_llama"]()[0], x) for x in (folder / "after", source))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    tokens = torch.arange(12).view(2, 6)
    before = other(input_ids=tokens).logits
    other.load_state_dict(state)
    assert torch.equal(loaded(input_ids=tokens).logits, other(input_ids=tokens).logits)
    assert not torch.equal(loaded(input_ids=tokens).logits, before)


@pytest.mark.parametrize("name", ["zero3", "pp2", "tp2"])
def test_processes_write_what_a_checkpoint_has(tmp_path, name):
    check_saved_by_processes(tmp_path, PROGRAMS[name], count=2)


def test_rank_zero_writes_what_every_process_has(tmp_path):
    check_saved_by_processes(tmp_path, None, count=1)


def test_later_fits_continue_with_the_trained_values(tmp_path):
    source = saved("llama", tmp_path / "source", torch.float64, sharded=False)
    launch_trainings(2, pretrained.continue_training, tmp_path / "run", source, tmp_path, PROGRAMS["zero3"])
    first, second, resumed = (values(tmp_path / name) for name in ("first", "second", "resumed"))
    assert same(second, resumed)
    assert not same(first, second) and not same(values(source), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_transformers(tmp_path, kind, dtype):
    model = made(kind).to(dtype)
    piper.save_pretrained(trainer_of(Holder(model=model)), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    names = {each.name for each in (tmp_path / "theirs").iterdir()}
    assert {each.name for each in (tmp_path / "ours").iterdir()} == names
    for name in names - {SINGLE}:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    assert same(values(tmp_path / "ours"), values(tmp_path / "theirs"))
    from safetensors.torch import load_file

    assert same(load_file(tmp_path / "ours" / SINGLE), values(tmp_path / "theirs"))


def test_converted_tensors_stay_as_the_model_has_them(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=32, num_experts=2, moe_intermediate_size=8, head_dim=8, **sizes)
    model = Qwen3MoeForCausalLM(config)
    piper.save_pretrained(trainer_of(Holder(model=model)), tmp_path)
    loaded = by_transformers(Qwen3MoeForCausalLM, tmp_path)
    assert same(loaded.state_dict(), model.state_dict())
    assert piper.from_pretrained(Qwen3MoeForCausalLM, tmp_path).device.type == "meta"


def test_one_of_several_models(tmp_path):
    module = Holder(student=made("llama"), teacher=made("gpt2"))
    with pytest.raises(
        PiperError, match=r"several models of transformers \(student, teacher\).*\[PIPER-K011\]"
    ):
        piper.save_pretrained(trainer_of(module), tmp_path)
    piper.save_pretrained(trainer_of(module), tmp_path, model=module.teacher)
    assert same(by_transformers(KINDS["gpt2"]()[0], tmp_path).state_dict(), module.teacher.state_dict())


class Adapter(torch.nn.Linear):
    __module__ = "peft.tuners.lora"


def with_adapter() -> Holder:
    module = Holder(model=made("llama"))
    module.model.lm_head = Adapter(16, 32)
    return module


def with_tied() -> Holder:
    module = Holder(model=made("llama"))
    one, two = module.model.model.layers
    two.mlp.up_proj.weight = one.mlp.up_proj.weight
    return module


def with_dtype() -> Holder:
    module = Holder(model=made("llama"))
    module.model.register_buffer("scale", torch.ones(1, dtype=torch.complex64))
    return module


def quantized() -> Holder:
    module = Holder(model=made("llama"))
    module.model.hf_quantizer = object()
    return module


def on_meta() -> Holder:
    with torch.device("meta"):
        return Holder(model=made("llama"))


def after_a_failure() -> Holder:
    module = Holder(model=made("llama"))
    module.__dict__[PARTS] = SimpleNamespace(ended=False, whole=False)
    return module


@pytest.mark.parametrize(
    "module, message",
    [
        (lambda: Holder(model=torch.nn.Linear(2, 2)), "Holder has no model of transformers"),
        (with_adapter, "LlamaForCausalLM is the base model of adapters of PEFT"),
        (with_tied, "has tied tensors that its class does not declare"),
        (with_dtype, "'scale' of LlamaForCausalLM has the dtype torch.complex64"),
        (quantized, "the weights of LlamaForCausalLM are quantized"),
        (on_meta, "has no values before the first step"),
        (after_a_failure, "the previous run failed"),
    ],
)
def test_models_that_cannot_be_saved_are_refused(tmp_path, module, message):
    with pytest.raises(PiperError, match=re.escape(message)):
        piper.save_pretrained(trainer_of(module()), tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_wrong_arguments_are_refused(tmp_path):
    module = Holder(model=made("llama"))
    with pytest.raises(PiperError, match="but Holder was found"):
        piper.save_pretrained(module, tmp_path)
    with pytest.raises(PiperError, match="but SingleDeviceStrategy was found"):
        piper.save_pretrained(trainer_of(module, "auto"), tmp_path)
    with pytest.raises(PiperError, match="s3://bucket/x is a remote address"):
        piper.save_pretrained(trainer_of(module), "s3://bucket/x")
    with pytest.raises(PiperError, match="Give the address as a text: 's3://bucket/x'"):
        piper.save_pretrained(trainer_of(module), Path("s3://bucket/x"))
    with pytest.raises(PiperError, match="is not a model of transformers inside of the Trainer's Holder"):
        piper.save_pretrained(trainer_of(module), tmp_path, model=made("llama"))
    trainer = L.Trainer(**QUIET, strategy=piper.PiperStrategy(transport="local"))
    with pytest.raises(PiperError, match="does not have a module yet"):
        piper.save_pretrained(trainer, tmp_path)


# Interrupted saves


class Killed(BaseException):
    pass


@pytest.fixture
def kill_at(monkeypatch) -> Iterator[Any]:
    """Raise `Killed` at the n-th change of a name in the folder, instead of the change; None never kills."""
    left: list[int | None] = [None]

    def counted(change: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            if left[0] == 0:
                raise Killed
            left[0] = left[0] and left[0] - 1
            return change(*args, **options)

        return run

    monkeypatch.setattr(os, "replace", counted(os.replace))
    monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
    yield lambda number: left.__setitem__(0, number)


def write(path: Path, model: Any, count: int) -> None:
    """Save a model in some files."""
    folder, state = ModelFolder(path), model.state_dict()
    names = folder.begin(model, count)
    weights = {key: names[number % count] for number, key in enumerate(state)}
    sizes = {}
    for name in names:
        own = {key: x for key, x in state.items() if weights[key] == name}
        writer = SafetensorsWriter(folder.unfinished() / name, own)
        for x in own.values():
            writer.add(x)
        sizes[name] = writer.close()
    folder.finish(sizes, weights, {"total_size": sum(sizes.values())})


@pytest.mark.parametrize("new_config", [False, True])
@pytest.mark.parametrize("before, after", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_killed_save_leaves_a_whole_model(tmp_path, kill_at, before, after, new_config):
    old, new = made("llama"), made("llama", initializer_range=0.03 if new_config else 0.02)
    with torch.no_grad():
        for x in new.parameters():
            x.add_(1)
    seen = set()
    for number in range(30):
        folder = tmp_path / str(number)
        write(folder, old, before)
        (folder / "tokenizer.json").write_text("{}")
        kill_at(number)
        killed = False
        try:
            write(folder, new, after)
        except Killed:
            killed = True
        kill_at(None)
        if not killed:
            break
        config = json.loads((folder / "config.json").read_text())
        try:
            found = values(folder)
        except PiperError:
            assert new_config and not (folder / SINGLE).exists() and not (folder / INDEX).exists()
            seen.add("none")
        else:
            which = next(x for x in (old, new) if same(found, x.state_dict()))
            assert config["initializer_range"] == which.config.initializer_range
            seen.add("old" if which is old else "new")
        write(folder, new, after)  # the next save cleans up
        assert same(values(folder), new.state_dict())
    assert not killed and same(values(folder), new.state_dict())
    assert {"old"} <= seen <= {"old", "new", "none"} and (new_config or "none" not in seen)
    files = {each.path.name for each in stored_tensors(folder).values()}
    assert len(files) == after
    assert {each.name for each in folder.glob("*safetensors*")} == files | ({INDEX} if after > 1 else set())
    assert not (folder / UNFINISHED).exists() and (folder / "tokenizer.json").exists()


def test_a_failed_write_leaves_the_earlier_model(tmp_path, monkeypatch):
    old = made("llama")
    piper.save_pretrained(trainer_of(Holder(model=old)), tmp_path)
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(PiperError, match="the disk is full"):
        piper.save_pretrained(trainer_of(Holder(model=made("gpt2"))), tmp_path)
    assert same(values(tmp_path), old.state_dict()) and not (tmp_path / UNFINISHED).exists()


def test_a_missing_file_of_another_process_is_noticed(tmp_path):
    folder = ModelFolder(tmp_path)
    names = folder.begin(made("llama"), 2)
    with pytest.raises(PiperError, match=r"does not see .*00001-of-00002.*\[PIPER-K004\]"):
        folder.finish(dict.fromkeys(names, 8), {}, {})
