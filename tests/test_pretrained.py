"""Weights of Hugging Face models: they train as with transformers' own loading, each process reads what it
holds, and files that do not fit are refused.
"""

from __future__ import annotations

import copy
import io
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.checkpoint.safetensors_files import StoredTensor, stored_tensors
from lightning_piper.errors import PiperError
from lightning_piper.holdings.materialization import Known, materialize, named_tensors
from lightning_piper.ir.values import TensorSpec, flattened
from lightning_piper.session.eager.standalone_module import Standalone
from tests import pretrained
from tests.distributed.processes import launch_trainings
from tests.pretrained import KINDS, Assigning, Tuned, by_transformers, fit, saved

pytest.importorskip("transformers", minversion="5.0")

PROGRAMS = {
    "replicas": [piper.Place([0, 1]), piper.Replicate()],
    "zero3": [piper.Place([0, 1]), piper.Replicate(zero=3)],
    "pp2": piper.schedules.one_f_one_b(stages=2, microbatches=2),
}


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)


def read(kind: str, folder: Any, **options: Any) -> Any:
    return piper.from_pretrained(KINDS[kind]()[0], folder, **options)


def with_values(model: Any) -> Any:
    materialize(model, 0, Known().with_stored(model))
    return model


@pytest.mark.parametrize(
    "kind, program",
    [("llama", "pp2"), ("llama", "zero3"), ("gpt2", "zero3"), ("bert", "replicas"), ("t5", "replicas")],
)
def test_training_is_that_of_transformers(tmp_path, kind, program):
    saved(kind, tmp_path, torch.float64, sharded=kind != "bert")
    one = fit(Tuned(kind, tmp_path, by_transformers))
    module = Tuned(kind, tmp_path, piper.from_pretrained)
    ours = fit(module, piper.PiperStrategy(PROGRAMS[program], transport="local"))
    assert distance(ours, one) < 1e-12
    assert distance(fit(Tuned(kind, tmp_path, by_transformers), steps=1), one) > 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sharded", [False, True])
def test_values_are_those_of_transformers(tmp_path, kind, sharded):
    saved(kind, tmp_path, torch.float32, sharded)
    model, other = with_values(read(kind, tmp_path)), by_transformers(KINDS[kind]()[0], tmp_path)
    assert not model.training
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(ours[name].dtype == x.dtype and torch.equal(ours[name], x) for name, x in theirs.items())
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], x) for name, x in other.named_buffers())


def test_each_process_reads_what_it_holds(tmp_path):
    folder = saved("llama", tmp_path / "model", torch.float64, sharded=True)
    programs = {name: PROGRAMS[name] for name in ("zero3", "pp2")}
    ranks = launch_trainings(2, pretrained.count, tmp_path / "run", folder, programs)
    total = sum(8 * torch.Size(x.shape).numel() for x in stored_tensors(folder).values())
    for name in programs:
        assert all(read == 8 * held for read, held in (rank[name] for rank in ranks))
        assert sum(rank[name][0] for rank in ranks) == total


def test_weights_that_a_hook_assigns_before_the_first_batch_are_trained(tmp_path):
    folder = saved("llama", tmp_path / "model", torch.float64, sharded=False)
    launch_trainings(2, pretrained.assign, tmp_path / "run", folder, tmp_path / "tuned", PROGRAMS["pp2"])
    found = by_transformers(KINDS["llama"]()[0], tmp_path / "tuned").state_dict()
    wanted = fit(Assigning("llama", folder, by_transformers))
    other = fit(Tuned("llama", folder, by_transformers))
    assert distance({f"model.{name}": found[name] for name in found}, wanted) < 1e-12
    assert distance(other, wanted) > 0.01


def test_values_of_a_checkpoint_do_not_replace_what_a_hook_has_assigned() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    blank = [(name, x, x._version) for name, x in named_tensors(module)]
    values = {name: torch.ones(x.shape) for name, x in named_tensors(module)}
    module[0].load_state_dict(nn.Linear(2, 2).state_dict(), assign=True)
    run = SimpleNamespace(module=module, known=Known(values), _blank=blank)
    assert Standalone._known_now(run).loaded.keys() == {"1.weight", "1.bias"}
    run.known = Known(later=frozenset(values))
    with pytest.raises(PiperError, match=r"'0\.bias' got a value after the checkpoint was loaded"):
        Standalone._known_now(run)


@pytest.mark.parametrize("runs", [None, (3, 2), (1, 4), (12, 2)])
def test_ranges_are_those_of_the_whole_tensor(tmp_path, runs):
    whole = torch.arange(48, dtype=torch.float32).view(12, 4)
    (tmp_path / "x").write_bytes(b"12345678" + whole.numpy().tobytes())
    stored = StoredTensor(tmp_path / "x", "x", torch.float32, (12, 4), 8)
    spec = TensorSpec((12, 4), torch.float32, (4, 1), runs)
    for start in range(0, 48, 5):
        for stop in range(start, 49, 3):
            assert torch.equal(stored.read(spec, start, stop), flattened(whole, spec)[start:stop])
    assert torch.equal(stored.whole(), whole)


def test_a_new_head_has_initial_values(tmp_path):
    from transformers import BertForSequenceClassification, BertForTokenClassification

    saved("bert", tmp_path, torch.float32, sharded=False)
    with pytest.warns(UserWarning, match=r"do not have classifier\.weight, classifier\.bias") as warned:
        model = piper.from_pretrained(BertForTokenClassification, tmp_path, num_labels=3)
    assert "the model does not use cls.predictions.bias" in str(warned[0].message)
    with_values(model)
    other = by_transformers(KINDS["bert"]()[0], tmp_path).state_dict()
    state = model.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in state.items() if name in other)
    assert state["classifier.weight"].shape == (3, 16)
    assert 0 < state["classifier.weight"].std() < 0.1 and not state["classifier.bias"].any()
    with pytest.raises(PiperError, match=r"they do not have bert\.pooler\.dense\.weight, .* \[PIPER-K009\]"):
        piper.from_pretrained(BertForSequenceClassification, tmp_path)


def test_prefixes_of_base_models(tmp_path):
    from transformers import LlamaModel

    saved("llama", tmp_path, torch.float32, sharded=False)
    with pytest.warns(UserWarning, match=r"the model does not use lm_head\.weight"):
        base = with_values(piper.from_pretrained(LlamaModel, tmp_path))
    other = by_transformers(KINDS["llama"]()[0], tmp_path).model.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in base.state_dict().items())


def changed(folder: Any, change: Any) -> None:
    """Change the names and tensors of a file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.pop("transformer.h.0.ln_1.bias"), "they do not have transformer.h.0.ln_1.bias"),
        (lambda x: x.update({"transformer.h.7.x": torch.ones(1)}), "does not have transformer.h.7.x"),
        (
            lambda x: x.update({"transformer.ln_f.bias": torch.ones(3)}),
            "shapes differ of transformer.ln_f.bias ([3] in the files, [16] in the model)",
        ),
        (lambda x: x.update({"lm_head.weight": torch.ones(32, 16)}), "that the files have separately"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, message):
    saved("gpt2", tmp_path, torch.float32, sharded=False)
    read("gpt2", tmp_path)
    changed(tmp_path, change)
    with pytest.raises(PiperError, match=re.escape(message)):
        read("gpt2", tmp_path)


@pytest.mark.parametrize("equal", [True, False])
def test_the_fix_of_tensors_that_are_tied_depends_on_their_values(tmp_path, equal):
    from transformers import GPT2LMHeadModel

    saved("gpt2", tmp_path, torch.float32, sharded=False)
    head = (lambda x: x["transformer.wte.weight"].clone()) if equal else (lambda x: torch.ones(32, 16))
    changed(tmp_path, lambda x: x.update({"lm_head.weight": head(x)}))
    fix = "save_original_format=False" if equal else "Pass tie_word_embeddings=False"
    with pytest.raises(PiperError, match=rf"lm_head\.weight, transformer\.wte\.weight\. .*{fix}"):
        read("gpt2", tmp_path)
    if equal:
        GPT2LMHeadModel.from_pretrained(tmp_path).save_pretrained(tmp_path, save_original_format=False)
    read("gpt2", tmp_path, **({} if equal else {"tie_word_embeddings": False}))


def test_a_class_that_is_no_model_is_refused(tmp_path):
    saved("gpt2", tmp_path, torch.float32, sharded=False)
    with pytest.raises(PiperError, match=r"Linear'> is not a model class of transformers.*PIPER-K009"):
        piper.from_pretrained(nn.Linear, tmp_path)


def test_conversions_are_refused_by_name(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(vocab_size=32, num_experts=2, moe_intermediate_size=8, head_dim=8, **sizes)
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        PiperError, match=r"transformers converts model\.layers\.0\.mlp\.experts\.0\.down_proj"
    ):
        piper.from_pretrained(Qwen3MoeForCausalLM, tmp_path)
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)  # what the message says to do
    assert piper.from_pretrained(Qwen3MoeForCausalLM, tmp_path / "stacked").device.type == "meta"


def test_damaged_files_and_folders_are_refused(tmp_path):
    with pytest.raises(PiperError, match=r"s3://bucket/x is an address.*local folder.*\[PIPER-K008\]"):
        piper.from_pretrained(object, "s3://bucket/x")
    with pytest.raises(PiperError, match=r"does not have a config\.json.*\[PIPER-K008\]"):
        read("llama", tmp_path)
    saved("llama", tmp_path, torch.float32, sharded=True)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first = min(content["weight_map"].values())
    whole = (tmp_path / first).read_bytes()
    (tmp_path / first).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(PiperError, match=r"is a pointer of Git LFS.*git lfs pull"):
        read("llama", tmp_path)
    (tmp_path / first).write_bytes(whole[:-4])
    with pytest.raises(PiperError, match="does not fit into the file"):
        read("llama", tmp_path)
    kept = dict(content["weight_map"])
    missing = next(name for name, file in kept.items() if file == first)
    del content["weight_map"][missing]
    index.write_text(json.dumps(content))
    (tmp_path / first).write_bytes(whole)
    with pytest.raises(
        PiperError, match=rf"fit together: only {first} has '{missing}'\. Copy or download both"
    ):
        read("llama", tmp_path)
    content["weight_map"] = {**kept, "more": first}
    index.write_text(json.dumps(content))
    with pytest.raises(PiperError, match=rf"fit together: only {index.name} has 'more'"):
        read("llama", tmp_path)
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../x")
    index.write_text(json.dumps(content))
    with pytest.raises(PiperError, match=r"names the file '\.\./x', but Piper reads only files next to the"):
        read("llama", tmp_path)
    index.unlink()
    with pytest.raises(PiperError, match=r"has neither model\.safetensors nor"):
        read("llama", tmp_path)
    with pytest.raises(PiperError, match="LlamaConfig does not have nonsense"):
        read("llama", tmp_path, nonsense=1)
    transformers = pytest.importorskip("transformers")
    config = json.loads((tmp_path / "config.json").read_text())
    code = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **code}))
    with pytest.raises(
        PiperError, match=r"needs Python code from its folder.* instead of AutoModelForCausalLM"
    ):
        piper.from_pretrained(transformers.AutoModelForCausalLM, tmp_path)
    with pytest.raises(PiperError, match=r"has neither model\.safetensors nor"):
        piper.from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PiperError, match=r"transformers cannot read .*config\.json.*\[PIPER-K008\]"):
        read("llama", tmp_path)


def test_a_resized_model_is_refused(tmp_path):
    saved("gpt2", tmp_path, torch.float32, sharded=False)
    model = read("gpt2", tmp_path)
    model.transformer.ln_f.bias.data = torch.empty(3, device="meta")
    with pytest.raises(PiperError, match=r"has the shape \[3\], but \[16\] in its file"):
        Known().with_stored(model)


class Adapted(nn.Module):
    """A layer with an adapter, as packages for adapters wrap layers."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.more = nn.Parameter(torch.zeros(base.out_features, base.in_features, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.more.t()


def adapt(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = Adapted(attention.q_proj)


def drop(model: Any) -> None:
    model.model.layers = model.model.layers[1:]


def swap(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def take_out(model: Any) -> nn.Module:
    return nn.Sequential(model.model.embed_tokens, model.model.layers[1].mlp, model.lm_head)


def take_a_parameter_out(model: Any) -> nn.Module:
    head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False, device="meta")
    head.weight = model.lm_head.weight
    return head


def copied(model: Any) -> nn.Module:
    return copy.deepcopy(model.model.layers)


def pickled(model: Any) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # type: ignore[no-any-return]


def converted(model: Any) -> nn.Module:
    return model.to(torch.float32)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change", [adapt, drop, swap, tie, take_out, take_a_parameter_out, copied, pickled, converted]
)
def test_a_changed_model_has_the_values_of_its_tensors(tmp_path, change):
    """Names no longer say which tensor of the files a parameter is."""
    folder = saved("llama", tmp_path, torch.float64, sharded=False)
    wanted, found = by_transformers(KINDS["llama"]()[0], folder), read("llama", folder)
    right, ours = (change(model) or model for model in (wanted, found))
    values = dict(named_tensors(with_values(ours)))
    for name, tensor in named_tensors(right):
        assert torch.equal(values[name], tensor), name


def zero(model: Any) -> None:
    nn.init.zeros_(model.lm_head.weight)


def scale_a_copy(model: Any) -> nn.Module:
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    return copy.deepcopy(model)


def replace(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))


def scale_data(model: Any) -> None:
    model.lm_head.weight.data.mul_(0.5)


def replace_data(model: Any) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data * 2


@pytest.mark.parametrize(
    "change, says",
    [
        (scale_data, "'lm_head.weight' comes from piper.from_pretrained and was changed in place"),
        (replace_data, "'lm_head.weight' comes from piper.from_pretrained and was changed in place"),
        (zero, "'lm_head.weight' comes from piper.from_pretrained and was changed in place"),
        (scale_a_copy, "'lm_head.weight' comes from piper.from_pretrained and was changed in place"),
        (replace, "'lm_head.weight' comes from piper.from_pretrained and was replaced by a parameter"),
    ],
)
def test_changes_that_would_be_lost_are_refused(tmp_path, change, says):
    model = read("llama", saved("llama", tmp_path, torch.float64, sharded=False))
    with pytest.raises(PiperError, match=re.escape(says)):
        with_values(change(model) or model)


def test_a_new_submodule_has_its_own_initial_values(tmp_path):
    model = read("llama", saved("llama", tmp_path, torch.float64, sharded=False))
    with torch.device("meta"):
        model.lm_head = nn.Linear(model.config.hidden_size, 3)
    assert with_values(model).lm_head.weight.std() > 0


@pytest.mark.parametrize("options", [{}, {"dtype": "auto"}, {"torch_dtype": "auto"}, {"dtype": "float32"}])
def test_dtypes_by_name(tmp_path, options):
    model = read("llama", saved("llama", tmp_path, torch.float64, sharded=False), **options)
    assert model.dtype == (torch.float32 if options.get("dtype") == "float32" else torch.float64)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"dtype": "flaot32"}, "dtype='flaot32' is not a floating-point dtype. Give one such as"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not a floating-point dtype"),
        ({"subfolder": "step"}, "subfolder='step' is not supported. Give the path"),
    ],
)
def test_options_that_are_refused(tmp_path, options, says):
    saved("llama", tmp_path, torch.float64, sharded=False)
    with pytest.raises(PiperError, match=re.escape(says)):
        read("llama", tmp_path, **options)
