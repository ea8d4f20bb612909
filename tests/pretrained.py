"""Small Hugging Face models in files, and their trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.checkpoint import safetensors_files
from tests.strategy.fitting import QUIET

VOCABULARY = 32


def llama() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM, LlamaConfig, {**sizes, "num_hidden_layers": 2}


def tied_llama() -> tuple[Any, Any, dict[str, Any]]:
    model_class, config_class, sizes = llama()
    return model_class, config_class, {**sizes, "tie_word_embeddings": True}


def gpt2() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return (
        GPT2LMHeadModel,
        GPT2Config,
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, **dropout},
    )


def bert() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return BertForMaskedLM, BertConfig, {**sizes, "max_position_embeddings": 16}


def t5() -> tuple[Any, Any, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration, T5Config, {**sizes, "decoder_start_token_id": 0, "pad_token_id": 0}


def llava() -> tuple[Any, Any, dict[str, Any]]:
    """A model whose vision tower is a model of its own, with a buffer that is not in the file."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    def config(vocab_size: int, **sizes: int) -> Any:
        vision = CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4)
        text = LlamaConfig(vocab_size=vocab_size, **sizes, num_hidden_layers=2, num_key_value_heads=2)
        return LlavaConfig(vision_config=vision, text_config=text, image_token_index=1)

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return LlavaForConditionalGeneration, config, sizes


def wav2vec2() -> tuple[Any, Any, dict[str, Any]]:
    """A model whose constructor makes a parameter with `torch.Tensor(size)`, which is not on the meta device."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    layers = {"conv_dim": (8,), "conv_stride": (5,), "conv_kernel": (10,)}
    groups = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    return Wav2Vec2ForCTC, Wav2Vec2Config, {**sizes, **layers, **groups, "pad_token_id": 0}


KINDS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "llama": llama,
    "tied_llama": tied_llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "llava": llava,
    "wav2vec2": wav2vec2,
}
LLAMA_STAGES = [
    ["model.model.embed_tokens", "model.model.layers.0"],
    ["model.model.layers.1", "model.model.norm", "model.lm_head"],
]
STAGES = {"llama": LLAMA_STAGES, "tied_llama": LLAMA_STAGES}


def saved(kind: str, folder: Path, dtype: torch.dtype, sharded: bool) -> Path:
    """Save a model with random weights into `folder` with transformers, and return the folder. With
    `sharded`, the weights are in several files."""
    model_class, config_class, sizes = KINDS[kind]()
    torch.manual_seed(3)
    model = model_class(config_class(vocab_size=VOCABULARY, **sizes)).to(dtype)
    model.save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
    return folder


class Tuned(L.LightningModule):
    """A module that trains a model of a kind in `KINDS`. `read` gets the model's class and a folder, and
    returns the model: `piper.from_pretrained` or `by_transformers`."""

    def __init__(self, kind: str, path: Path, read: Callable[..., Any]) -> None:
        super().__init__()
        self.kind, self.path, self.read = kind, path, read
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.read(KINDS[self.kind]()[0], self.path)
            if self.kind in STAGES:
                piper.annotate_modules(self, "PP", STAGES[self.kind])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        options = {} if self.kind == "bert" else {"use_cache": False}
        loss: Tensor = self.model(input_ids=batch, labels=batch, **options).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Assigning(Tuned):
    """Halves the weights of the first layer when it makes the optimizer, with `load_state_dict(assign=True)`."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        whole = by_transformers(KINDS[self.kind]()[0], self.path)
        layer = {name: x / 2 for name, x in whole.model.layers[0].state_dict().items()}
        self.model.model.layers[0].load_state_dict(layer, assign=True)
        return super().configure_optimizers()


def assign(rank: int, source: Path, folder: Path, program: Any) -> dict[Any, Any]:
    """Train `Assigning` for two steps, and save the model. Return an empty dict."""
    trainer = trained(
        Assigning("llama", source, piper.from_pretrained), piper.PiperStrategy(program), devices=2
    )
    piper.save_pretrained(trainer, folder)
    return {}


def by_transformers(model_class: Any, path: Path) -> Any:
    return model_class.from_pretrained(path)


def fit(module: Tuned, strategy: Any = "auto", devices: int = 1, steps: int = 2) -> dict[str, Tensor]:
    """Return name -> parameter after some steps, if `devices` is 1; otherwise an empty dict."""
    trained(module, strategy, devices, steps)
    if devices > 1:
        return {}  # the module stays distributed
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def trained(module: Tuned, strategy: Any = "auto", devices: int = 1, steps: int = 2) -> L.Trainer:
    """Train the module for `steps` steps, with the same batches at each call. Returns the Trainer."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (4 * steps, 6), generator=draw)
    trainer = L.Trainer(
        **{**QUIET, "accelerator": "cpu", "devices": devices, "max_steps": steps}, strategy=strategy
    )
    trainer.fit(module, DataLoader(tokens, batch_size=4))  # type: ignore[arg-type]
    return trainer


class Counting:
    """A context that counts, in `bytes`, the bytes of tensors that this process reads from safetensors
    files."""

    def __init__(self) -> None:
        self.bytes, self._read = 0, safetensors_files.StoredTensor._elements

    def __enter__(self) -> Counting:
        def read(tensor: Any, start: int, stop: int) -> Tensor:
            self.bytes += (stop - start) * tensor.dtype.itemsize
            return self._read(tensor, start, stop)

        safetensors_files.StoredTensor._elements = read  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        safetensors_files.StoredTensor._elements = self._read  # type: ignore[method-assign]


def count(rank: int, path: Path, programs: dict[str, Any]) -> dict[Any, Any]:
    """Train under each program for a step. Return name of the program -> (bytes that this process has read,
    number of elements of parameters that it holds)."""
    found: dict[Any, Any] = {}
    for name, program in programs.items():
        module = Tuned("llama", path, piper.from_pretrained)
        held: list[int] = []

        def begin(module: Any = module, held: list[int] = held) -> None:
            own = module.__dict__["_piper_parts"]
            held.append(sum(x.numel() for x in own.owned_params.values()))

        module.on_train_batch_end = lambda *args, begin=begin: begin()  # type: ignore[method-assign, assignment, misc]
        with Counting() as counting:
            fit(module, piper.PiperStrategy(program), devices=2, steps=1)
        found[name] = counting.bytes, held[0]
    return found


def save(rank: int, source: Path, folder: Path, program: Any) -> dict[Any, Any]:
    """Train for a step, and save the model in a hook, twice after the fit, and as a checkpoint. Without a
    program, the step runs uncaptured. Return an empty dict."""
    module = Tuned("tied_llama", source, piper.from_pretrained if program else by_transformers)
    strategy = piper.PiperStrategy(program, capture="auto" if program else "never")
    module.on_train_end = lambda: piper.save_pretrained(module.trainer, folder / "hook")  # type: ignore[method-assign]
    trainer = trained(module, strategy, devices=2, steps=1)
    for _ in range(2):
        piper.save_pretrained(trainer, folder / "after")
    trainer.save_checkpoint(folder / "plain.ckpt")
    return {}


def continue_training(rank: int, source: Path, folder: Path, program: Any) -> dict[Any, Any]:
    """Train for one step ("first"), and train the same module for a second step in another fit ("second"). In
    a third fit, a new module resumes from the first checkpoint ("resumed"). All steps have the same batch.
    Save the model and a checkpoint after each fit. Return an empty dict."""
    loader: Any = DataLoader(torch.arange(2, 8).expand(8, 6), batch_size=2)

    def step(module: Tuned, name: str, steps: int, ckpt_path: Path | None = None) -> None:
        options = {**QUIET, "accelerator": "cpu", "devices": 2, "max_steps": steps}
        trainer = L.Trainer(**options, strategy=piper.PiperStrategy(program))
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        piper.save_pretrained(trainer, folder / name)
        trainer.save_checkpoint(folder / f"{name}.ckpt")

    module = Tuned("llama", source, piper.from_pretrained)
    step(module, "first", 1)
    step(module, "second", 1)
    step(Tuned("llama", source, piper.from_pretrained), "resumed", 2, folder / "first.ckpt")
    return {}
