"""`tensor_parallel` finds what can be divided in models as people write them."""

from __future__ import annotations

import operator
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper import PiperError
from tests.tensors import PARAMS, VOCABULARY, Decoder, decoder, fit, tensors


@pytest.mark.parametrize("sequence", [False, True])
def test_it_finds_columns_and_rows(sequence):
    place, shard = program = piper.tensor_parallel(decoder(), tensors(8), 2, sequence=sequence)
    assert (
        shard.params
        == {
            f"blocks.*.{'' if name in ('up', 'down') else 'attention.'}{name}.weight": dim
            for name, dim in ((key.split(".")[1], dim) for key, dim in PARAMS.items())
        }
        | VOCABULARY
    )
    assert list(place.devices) == [0, 1] and shard.values == ({"*": 1} if sequence else None)
    assert piper.verify(decoder(), tensors(8), program).verdict == "verified"


def test_what_it_finds_trains():
    module, alone = decoder(), decoder()
    program = piper.tensor_parallel(module, tensors(8), 4)
    fit(module, piper.PiperStrategy(program, transport="local"), max_epochs=1)
    fit(alone, "auto", max_epochs=1)
    assert all(
        torch.allclose(x, y, rtol=0, atol=1e-12)
        for x, y in zip(module.parameters(), alone.parameters(), strict=True)
    )


def test_a_model_may_be_on_the_meta_device():
    with torch.device("meta"):
        module = Decoder()
    (_, shard) = piper.tensor_parallel(module, tensors(8), 2)
    assert len(shard.params) == 8


class Alone(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).softmax(-1).square().mean()


def test_what_is_needed_whole_stays_whole():
    with pytest.raises(
        PiperError,
        match=r"found no weight of Alone to shard over 2 devices, .* You can still shard weights by",
    ):
        piper.tensor_parallel(Alone(), torch.randn(4, 4), 2)
    with pytest.raises(PiperError, match="Give a number of devices >= 2"):
        piper.tensor_parallel(Alone(), torch.randn(4, 4), 1)


class Unbound(L.LightningModule):
    """Queries, keys and values are one product, which `unbind` takes apart, in shapes that are too large to
    be tried unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        b, t, d = batch.shape
        q, k, v = self.qkv(batch).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(b, t, d)).square().mean()


def test_large_values_may_be_unbound():
    (_, shard) = piper.tensor_parallel(Unbound(), torch.randn(4, 32, 32), 2)
    assert shard.params == {"qkv.weight": (0, 3), "proj.weight": 1}


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


class Model(L.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "t5",
        pytest.param("qwen", marks=pytest.mark.long),
        pytest.param("bert", marks=pytest.mark.long),
    ],
)
def test_models_of_hugging_face(kind):
    found = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = {
        "llama": lambda: found.LlamaForCausalLM(found.LlamaConfig(**SIZES, num_key_value_heads=2)),
        "qwen": lambda: found.Qwen2ForCausalLM(found.Qwen2Config(**SIZES, num_key_value_heads=2)),
        "bert": lambda: found.BertForMaskedLM(
            found.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        ),
        "t5": lambda: found.T5ForConditionalGeneration(
            found.T5Config(
                vocab_size=32,
                d_model=16,
                d_kv=4,
                d_ff=32,
                num_layers=1,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
    }[kind]()
    words = torch.randint(1, 32, (4, 8))
    batch = {"input_ids": words, "labels": words.clone()}
    program = piper.tensor_parallel(Model(model), batch, 2)
    names = {name.split(".")[-2] for name in program[1].params}
    of_llama = {
        "embed_tokens",
        "lm_head",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    wanted = {
        "llama": of_llama,
        "qwen": of_llama,
        "bert": {"word_embeddings", "query", "key", "value", "dense"},
        "t5": {"shared", "q", "k", "v", "o", "wi", "wo"},
    }
    assert names >= wanted[kind]
    assert piper.verify(Model(model), batch, program).verdict == "verified"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Phi3", "Gemma2", "Bloom", "GptOss"])
def test_masks_and_positions_of_models_of_hugging_face_are_no_sequences(kind):
    """Masks and biases of one head, and parts of heads that have no positions, are beside sequences."""
    found = pytest.importorskip("transformers")
    torch.manual_seed(0)
    about: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
    own = {
        "Phi3": {"pad_token_id": 0},
        "Gemma2": {"head_dim": 4},
        "GptOss": {"head_dim": 4, "num_local_experts": 4},
    }
    about |= own.get(kind, {})
    if kind == "Bloom":
        about = {
            "vocab_size": 32,
            "hidden_size": 16,
            "n_layer": 2,
            "n_head": 4,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    model = Model(getattr(found, f"{kind}ForCausalLM")(getattr(found, f"{kind}Config")(**about)))
    words = torch.randint(1, 32, (4, 8))
    batch = {"input_ids": words, "labels": words.clone()}
    assert (
        piper.verify(model, batch, piper.tensor_parallel(model, batch, 2, sequence=True)).verdict
        == "verified"
    )


def test_keys_go_round_in_models_of_hugging_face():
    """A cache that is new adds nothing to them, so it does not gather them."""
    found = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Model(found.LlamaForCausalLM(found.LlamaConfig(**SIZES, num_key_value_heads=2)))
    words = torch.randint(1, 32, (4, 8))
    batch = {"input_ids": words, "labels": words.clone()}
    program = [
        piper.Place(filter={}, devices=[[0, 1], [2, 3]], axes=["cp", "tp"]),
        piper.ShardWeights(filter={}, axis="tp", params=piper.tensor_parallel(model, batch, 2)[1].params),
        piper.ShardSequences(filter={}, axis="cp", values={"*": 1}, attention="ring"),
    ]
    assert piper.verify(model, batch, program).verdict == "verified"
    labels = [node.label for node in piper.compile(model, batch, program).dag.nodes.values()]
    assert labels.count("shift.cp") == 2 * 2 * 3  # of both layers


class Penalized(L.LightningModule):
    """Two gates. One of the first gate's tensors is needed whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down, self.other, self.last = (
            nn.Linear(a, b) for a, b in ((8, 16), (16, 8), (8, 16), (16, 8))
        )
        self.name = name

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.down(self.up(batch).relu()).tanh()
        penalty = torch.linalg.svdvals(operator.attrgetter(self.name)(self).reshape(8, -1)).sum()
        return self.last(self.other(hidden).relu()).pow(2).mean() + penalty  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "left"), [("down.weight", {"down.weight"}), ("up.bias", {"up.weight"})])
def test_a_weight_that_is_needed_whole_itself_is_left(name, left):
    module, batch = Penalized(name).double(), torch.randn(4, 8, dtype=torch.float64)
    (_, shard) = program = piper.tensor_parallel(module, batch, 2)
    assert not left & shard.params.keys() and {"other.weight", "last.weight"} & shard.params.keys()
    assert piper.verify(module, batch, program).verdict == "verified"
    named = [
        program[0],
        piper.ShardWeights(
            filter={}, axis="tp", params=dict.fromkeys(left, 1 if name == "down.weight" else 0)
        ),
    ]
    fix = (
        "out of params the parameters that are used with up.bias"
        if name == "up.bias"
        else f"{name} out of params"
    )
    with pytest.raises(
        piper.CaptureError,
        match=rf"svdvals.* cannot work on shards of {name} as .*Leave {fix}",
    ):
        piper.compile(module, batch, named)


class Partly(L.LightningModule):
    """Layers with a residual: a product that is needed whole, the product that reads it, and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    name: nn.Linear(*sizes)
                    for name, sizes in {
                        "whole": (8, 8),
                        "out": (8, 8),
                        "up": (8, 16),
                        "down": (16, 8),
                    }.items()
                }
            )
            for _ in range(3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch
        for layer in self.layers:
            x = x + layer["out"](layer["whole"](x).sort().values)
            x = x + layer["down"](layer["up"](nn.functional.rms_norm(x, (8,))).relu())
        return x.square().mean()


def test_weights_before_one_that_is_needed_whole_are_sharded():
    module, batch = Partly().double(), torch.randn(4, 8, dtype=torch.float64)
    (_, shard) = program = piper.tensor_parallel(module, batch, 2)
    assert {"layers.*.up.weight": 0, "layers.*.down.weight": 1}.items() <= shard.params.items()
    assert len(shard.params) == 2
    assert piper.verify(module, batch, program).verdict == "verified"


class Noisy(L.LightningModule):
    """Work outside of the stages reads the batch: in parts in the forward pass, and once more in the backward
    pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.spread = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, noise = batch
        with piper.annotate("PP", 0):
            h = self.first(x).relu()
            mean, spread = self.mean(h), self.spread(h)
        drawn = mean + noise * (0.5 * spread).exp()
        with piper.annotate("PP", 1):
            return self.down(self.up(drawn).relu()).square().mean()


def test_work_outside_of_stages_is_in_one_of_them_on_the_way_back():
    module, batch = Noisy().double(), tuple(torch.randn(2, 8, 4, dtype=torch.float64))
    parts = {"mean.weight": 0, "mean.bias": 0, "spread.weight": 0, "spread.bias": 0, "up.weight": 1}
    groups = [[0, 1], [2, 3]]
    program = piper.schedules.one_f_one_b(stages=2, microbatches=2, devices=groups)
    program += [piper.ShardWeights(filter={}, devices=groups, axis="tp", stream="tp", params=parts)]
    compiled = piper.compile(module, batch, program)
    assert all(region.tags for region in compiled.step.at(4, (2,)).regions)
    assert piper.verify(module, batch, program).verdict == "verified"
