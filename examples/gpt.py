"""A small character-level GPT as an ordinary LightningModule, and real text to train it on.

Nothing here depends on how the model is trained. Its only use of `lightning_piper` is `piper.annotate("PP",
i)`, which marks where stage `i` begins and ends. With a plain Trainer the annotation does nothing.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import lightning_piper as piper

# A fixed vocabulary, so that the model has the same shape for all source texts.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))


class Attention(nn.Module):
    """Causal self-attention. Input and output: (batch, context, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, got dim={dim} and heads={heads}")
        self.heads = heads
        # Without a bias, because softmax ignores a key's bias and its gradient would be rounding error only.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer layer. Input and output: (batch, context, dim)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharGPT(L.LightningModule):
    """A GPT over characters, with its layers divided evenly over `stages` regions tagged `PP`.

    The embeddings belong to the first stage. The final norm, the head and the loss belong to the last stage.
    The parameters' names do not depend on `stages`, so a checkpoint loads with any number of stages.

    Args:
        layers: The number of transformer layers.
        stages: The number of regions, from 1 to `layers`.
        dim: The width of the residual stream.
        heads: The number of attention heads, a divisor of `dim`.
        context: The length of the longest sequence, in characters.
        lr: The learning rate of AdamW.
        eps: Added to AdamW's denominator. AdamW divides each gradient by its own size. With a tiny `eps`,
            rounding error in a small gradient grows to a full step, and a gradient that is wrong by a
            constant factor goes unnoticed.
    """

    def __init__(
        self,
        layers: int = 4,
        stages: int = 2,
        dim: int = 128,
        heads: int = 4,
        context: int = 128,
        lr: float = 5e-4,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if not 1 <= stages <= layers:
            raise ValueError(f"stages must be between 1 and layers={layers}, got {stages}")
        self.save_hyperparameters()
        self.stages = stages
        self.lr = lr
        self.eps = eps
        self.token_embedding = nn.Embedding(len(VOCABULARY), dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, len(VOCABULARY), bias=False)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, time) to next-token logits (batch, time, vocabulary). time is at most
        `context`.
        """
        layers = len(self.blocks)
        for stage in range(self.stages):
            with piper.annotate("PP", stage):
                if stage == 0:
                    positions = torch.arange(tokens.shape[1], device=tokens.device)
                    x = self.token_embedding(tokens) + self.position_embedding(positions)
                for i in range(stage * layers // self.stages, (stage + 1) * layers // self.stages):
                    x = self.blocks[i](x)
                if stage == self.stages - 1:
                    logits = self.head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens)
        with piper.annotate("PP", self.stages - 1):
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=self.eps)


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """A next-character prediction dataset of windows of the Python standard library's source text.

    An item is `(tokens, targets)`: two int64 tensors of shape (context,), the second one character ahead.
    Windows do not overlap. The text is the library's top-level modules in alphabetical order, up to
    `characters`. Characters outside `VOCABULARY` are left out.
    """

    def __init__(self, context: int = 128, characters: int = 1_000_000) -> None:
        self.context = context
        self.data = encode(standard_library_text(characters))
        if len(self) < 1:
            raise ValueError(f"context={context} is longer than the text of {len(self.data)} characters")

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.context
        window = self.data[start : start + self.context + 1]
        return window[:-1], window[1:]


def standard_library_text(characters: int) -> str:
    """Return the first `characters` characters of the standard library's top-level modules, in alphabetical
    order.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="ignore").expandtabs(4)
        if len(text) >= characters:
            return text[:characters]
    raise FileNotFoundError(f"the sources under {folder} hold only {len(text)} of {characters} characters")


def encode(text: str) -> Tensor:
    """Return the ids of the text's characters in `VOCABULARY`, without other characters: int64, shape (number
    kept,).
    """
    ids = {character: i for i, character in enumerate(VOCABULARY)}
    return torch.tensor([ids[character] for character in text if character in ids])


def decode(tokens: Tensor) -> str:
    """Return the text of a vector of ids."""
    return "".join(VOCABULARY[i] for i in tokens.tolist())
