"""Small models of ten Hugging Face architectures with a batch for each, and their trainings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_piper as piper
from tests.strategy.fitting import QUIET

VOCABULARY, SAMPLES = 32, 4
Batch = dict[str, Tensor]
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
TEXT = {**SIZES, "vocab_size": VOCABULARY}
DECODER = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
VISION = {**SIZES, "image_size": 8, "patch_size": 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Architecture(NamedTuple):
    """A kind of model.

    Attributes:
        model: Name of the model's class in `transformers`.
        config: Gets the module `transformers`, and returns the model's configuration.
        batch: Gets a random generator, and returns a batch as keyword arguments of the model.
    """

    model: str
    config: Callable[[Any], Any]
    batch: Callable[[torch.Generator], Batch]


def tokens(draw: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (SAMPLES, 6), generator=draw)


def images(draw: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 8, 8, generator=draw, dtype=torch.float64)


def text(draw: torch.Generator) -> Batch:
    found = tokens(draw)
    return {"input_ids": found, "labels": found}


def about_images(draw: torch.Generator) -> Batch:
    found = tokens(draw)
    found[:, 1:5] = 1  # the tokens for the patches of the image
    return {"input_ids": found, "labels": found, "pixel_values": images(draw)}


def labeled(draw: torch.Generator) -> Batch:
    return {
        "pixel_values": images(draw),
        "labels": torch.randint(0, 3, (SAMPLES,), generator=draw),
    }


def speech(draw: torch.Generator) -> Batch:
    sound = torch.randn(SAMPLES, 8, 20, generator=draw, dtype=torch.float64)
    return {"input_features": sound, "labels": tokens(draw)}


def pairs(draw: torch.Generator) -> Batch:
    return {"input_ids": tokens(draw), "pixel_values": images(draw)}


def _whisper(hf: Any) -> Any:
    layers = {
        f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")
    }
    return hf.WhisperConfig(
        **layers, vocab_size=VOCABULARY, d_model=16, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0,
    )  # fmt: skip


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", lambda hf: hf.LlamaConfig(**DECODER), text),
    "qwen3": Architecture("Qwen3ForCausalLM", lambda hf: hf.Qwen3Config(**DECODER), text),
    "gemma3": Architecture("Gemma3ForCausalLM", lambda hf: hf.Gemma3TextConfig(**DECODER), text),
    "mixtral": Architecture(
        "MixtralForCausalLM", lambda hf: hf.MixtralConfig(**DECODER, num_local_experts=4), text
    ),
    "bert": Architecture("BertForMaskedLM", lambda hf: hf.BertConfig(**TEXT, **NO_DROPOUT), text),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        lambda hf: hf.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0,
        ),
        text,
    ),
    "vit": Architecture(
        "ViTForImageClassification", lambda hf: hf.ViTConfig(**VISION, **NO_DROPOUT, num_labels=3), labeled
    ),
    "whisper": Architecture("WhisperForConditionalGeneration", _whisper, speech),
    "clip": Architecture(
        "CLIPModel",
        lambda hf: hf.CLIPConfig(
            text_config={**TEXT, "max_position_embeddings": 16, "eos_token_id": 2},
            vision_config=VISION,
            projection_dim=8,
        ),
        pairs,
    ),
    "llava": Architecture(
        "LlavaForConditionalGeneration",
        lambda hf: hf.LlavaConfig(
            vision_config=hf.CLIPVisionConfig(**VISION), text_config=hf.LlamaConfig(**DECODER),
            image_token_index=1, vision_feature_layer=-1,
        ),
        about_images,
    ),
}  # fmt: skip


def model_class(kind: str) -> Any:
    import transformers

    return getattr(transformers, ARCHITECTURES[kind].model)


def saved(kind: str, folder: Path) -> Path:
    """Save a model with random weights in float64 into `folder` with transformers, and return the folder."""
    import transformers

    torch.manual_seed(3)
    model = model_class(kind)(ARCHITECTURES[kind].config(transformers)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(folder, save_original_format=False)
    return folder


def batch_of(kind: str, step: int) -> Batch:
    return ARCHITECTURES[kind].batch(torch.Generator().manual_seed(step))


class Adapted(torch.nn.Module):
    """A frozen linear layer with a trained low-rank addition (LoRA)."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Linear(base.in_features, 2, bias=False, dtype=torch.float64)
        self.up = torch.nn.Linear(2, base.out_features, bias=False, dtype=torch.float64)
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for layer in (self.down, self.up):
                layer.weight.copy_(0.1 * torch.randn(layer.weight.shape, generator=draw, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


def adapt(model: torch.nn.Module) -> None:
    """Freeze the model, and replace each linear layer of an attention by an `Adapted` one, in place."""
    model.requires_grad_(False)
    found = [
        (part, name, child)
        for part in model.modules()
        if "Attention" in type(part).__name__
        for name, child in part.named_children()
        if isinstance(child, torch.nn.Linear)
    ]
    assert found
    for part, name, child in found:
        setattr(part, name, Adapted(child))


class Tuned(L.LightningModule):
    """A module that trains a model of an architecture. `read` gets the architecture's name and a folder, and
    returns the model. With `adapters`, only the adapters are trained."""

    def __init__(
        self, kind: str, path: Path, read: Callable[[str, Path], Any], adapters: bool = False
    ) -> None:
        super().__init__()
        self.kind, self.path, self.read, self.adapters = kind, path, read, adapters
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.read(self.kind, self.path)
            # transformers trains this table although its constructor freezes it
            if self.kind == "whisper":
                self.model.model.encoder.embed_positions.requires_grad_(False)
            if self.adapters:
                adapt(self.model)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.kind != "clip":
            loss: Tensor = self.model(**batch).loss
            return loss
        found = self.model(**batch)
        words, pictures = (piper.gather_samples(each) for each in (found.text_embeds, found.image_embeds))
        scores = self.model.logit_scale.exp() * words @ pictures.T
        right = torch.arange(len(scores))
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def by_transformers(kind: str, path: Path) -> Any:
    return _in_float64(kind, model_class(kind).from_pretrained(path))


def by_piper(kind: str, path: Path) -> Any:
    return _in_float64(kind, piper.from_pretrained(model_class(kind), path))


def _in_float64(kind: str, model: Any) -> Any:
    if kind == "mixtral":  # the product of all experts that transformers chooses does not exist in float64
        model.set_experts_implementation("batched_mm")
    return model


def train(module: Tuned, strategy: Any = "auto", steps: int = 5) -> L.Trainer:
    """Train in one process for `steps` steps with the same batches at each call. Returns the Trainer."""
    trainer = L.Trainer(
        **{**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": steps}, strategy=strategy
    )
    batches: Iterator[Batch] = iter([batch_of(module.kind, step) for step in range(steps)])
    trainer.fit(module, DataLoader(list(batches), batch_size=None))  # type: ignore[arg-type]
    return trainer
