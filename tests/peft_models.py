"""Language models with adapters of peft, and their trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_piper as piper
from tests.pretrained import KINDS, by_transformers
from tests.strategy.fitting import QUIET


def _lora(**options: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], **options
    )


def _dora() -> Any:
    return _lora(use_dora=True)


def _lora_and_head() -> Any:
    return _lora(modules_to_save=["lm_head"])


def _ia3() -> Any:
    from peft import IA3Config

    targets = ["k_proj", "v_proj", "down_proj"]
    return IA3Config(task_type="CAUSAL_LM", target_modules=targets, feedforward_modules=["down_proj"])


def _prompt() -> Any:
    from peft import PromptTuningConfig

    return PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def _prefix() -> Any:
    from peft import PrefixTuningConfig

    return PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def _p_tuning() -> Any:
    from peft import PromptEncoderConfig

    return PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8)


ADAPTERS: dict[str, Callable[[], Any]] = {
    "lora": _lora,
    "dora": _dora,
    "lora and head": _lora_and_head,
    "ia3": _ia3,
    "prompt": _prompt,
    "prefix": _prefix,
    "p-tuning": _p_tuning,
}


class Adapted(L.LightningModule):
    """A Llama from files, whose adapters alone are trained. `read` is `piper.from_pretrained` or
    `by_transformers`."""

    def __init__(self, kind: str, path: Path, read: Callable[..., Any] = by_transformers) -> None:
        super().__init__()
        self.kind, self.path, self.read = kind, path, read
        self.model: Any = None

    def configure_model(self) -> None:
        from peft import get_peft_model

        if self.model is None:
            base = self.read(KINDS["llama"]()[0], self.path)
            torch.manual_seed(1)
            self.model = get_peft_model(base, ADAPTERS[self.kind]()).to(base.dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=0.1)


def fitted(module: L.LightningModule, strategy: Any, devices: int = 1) -> L.Trainer:
    """Train a module for three steps on fixed tokens. Return its Trainer."""
    tokens = torch.randint(32, (12, 8), generator=torch.Generator().manual_seed(5))
    trainer = L.Trainer(
        **{**QUIET, "accelerator": "cpu", "max_epochs": 1}, devices=devices, strategy=strategy
    )
    trainer.fit(module, DataLoader(tokens, batch_size=4 // devices))
    return trainer


def save(
    rank: int, kind: str, source: Path, folder: Path, options: dict[str, Any], read: Any
) -> dict[Any, Any]:
    """Train in this process, and save the adapters and a checkpoint. Return an empty dict."""
    trainer = fitted(Adapted(kind, source, read), piper.PiperStrategy(**options), devices=2)
    piper.save_pretrained(trainer, folder / "adapters")
    trainer.save_checkpoint(folder / "plain.ckpt")
    return {}
