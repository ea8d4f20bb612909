"""Hugging Face models in the files of `transformers`: each process reads and writes what it holds."""

from lightning_piper.pretrained.loading import from_pretrained
from lightning_piper.pretrained.saving import save_pretrained

__all__ = ["from_pretrained", "save_pretrained"]
