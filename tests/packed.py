"""A decoder whose rows contain several documents, in the ways in which people hide documents from each other."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import lightning_piper as piper
from tests.strategy.fitting import QUIET

WORDS, DIM, LENGTH, HEADS, WINDOW, SAMPLES, STEPS = 13, 16, 16, 4, 4, 8, 3
IGNORED = -100
# The lengths of the documents of a row.
ROWS = ((5, 4, 7), (9, 7), (3, 3, 3, 7), (16,), (1, 15), (6, 10), (8, 8), (2, 2, 12))
Batch = dict[str, Tensor]


def row(index: int) -> Batch:
    """Return one row: its tokens, the number of each token's document, its position there, and the next token."""
    draw = torch.Generator().manual_seed(index)
    lengths = torch.tensor(ROWS[(index + index // SAMPLES) % len(ROWS)])
    tokens = torch.randint(0, WORDS, (LENGTH,), generator=draw)
    docs = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    positions = torch.cat([torch.arange(int(n)) for n in lengths])
    labels = torch.full((LENGTH,), IGNORED)
    labels[:-1] = torch.where(docs[1:] == docs[:-1], tokens[1:], IGNORED)
    return {"tokens": tokens, "docs": docs, "positions": positions, "labels": labels}


class Rows(Dataset[Batch]):
    def __init__(self, count: int = SAMPLES * STEPS, with_mask: bool = False) -> None:
        self.rows = [row(index) for index in range(count)]
        if with_mask:
            for each in self.rows:
                each["mask"] = seen(each["docs"][None])[0]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def seen(docs: Tensor, window: int | None = None, apart: bool = True) -> Tensor:
    """Return the mask [samples, 1, queries, keys]: a query sees the keys of its document that do not come after
    it.

    Args:
        window: A query sees this many keys at most.
        apart: Whether a query sees only its document.
    """
    whole = torch.ones(docs.shape[1], docs.shape[1], dtype=torch.bool).tril()
    if window is not None:
        whole = whole.triu(1 - window)
    same = docs[:, None, :, None] == docs[:, None, None, :]
    return whole & same if apart else whole.expand(same.shape)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate queries or keys by the positions within their documents."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None] / 100 ** (torch.arange(half, dtype=x.dtype) / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat(
        (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1
    )


class Layer(nn.Module):
    """An attention and a gate. `sinks` is one learned score for each head, to which a query can give its weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.norms = nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        if "sinks" in kind:
            self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        inner = self.norms[0](x)
        q, k, v = (
            part(inner).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        found = self.attend(turned(q, positions), turned(k, positions), v, mask)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        hidden = float("-inf")
        if self.kind == "float mask":
            return F.scaled_dot_product_attention(
                q, k, v, torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
            )
        if self.kind == "sinks in the mask":  # one more key, of which every query sees the same score
            k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
            scores = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, hidden)
            sinks = self.sinks.view(1, -1, 1, 1).expand(len(q), -1, q.shape[2], 1)
            scores = torch.cat([scores.expand(*sinks.shape[:3], -1), sinks], -1)
            return F.scaled_dot_product_attention(q, k, v, scores)
        if self.kind in ("written out", "sinks"):
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, hidden)
            if self.kind == "sinks":  # as in GPT-OSS
                sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
                return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
            return scores.softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, mask)


class Packed(L.LightningModule):
    """A decoder. `kind` names its attention."""

    def __init__(self, kind: str = "bool mask", apart: bool = True) -> None:
        super().__init__()
        self.kind, self.apart = kind, apart
        self.embed, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.layers = nn.ModuleList(Layer(kind) for _ in range(2))
        self.losses: list[float] = []

    def forward(self, batch: Batch) -> Tensor:
        result: Tensor = self.head(self.hidden(batch))
        return result

    def summed(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(
            self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def hidden(self, batch: Batch) -> Tensor:
        window = WINDOW if self.kind == "sliding window" else None
        mask = batch["mask"] if "mask" in batch else seen(batch["docs"], window, self.apart)
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x, batch["positions"], mask)
        return x

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.kind == "parts of the scores":  # never the scores of all positions at once
            parts = zip(self.hidden(batch).chunk(4, 1), batch["labels"].chunk(4, 1), strict=True)
            total = sum(checkpoint(self.summed, *part, use_reentrant=False) for part in parts)
            return total / (batch["labels"] != IGNORED).sum()  # type: ignore[no-any-return]
        logits = self(batch)
        if self.kind != "mean of documents":
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        each = F.cross_entropy(logits.mT, batch["labels"], ignore_index=IGNORED, reduction="none")
        counted = (batch["labels"] != IGNORED).to(each.dtype)
        same = (batch["docs"][:, :, None] == batch["docs"][:, None]).to(each.dtype)
        weights = counted / (same @ counted[..., None]).squeeze(-1).clamp(min=1)
        return (each * weights).sum() / weights.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def packed(kind: str = "bool mask", **options: Any) -> Packed:
    torch.manual_seed(0)
    return Packed(kind, **options).double()


class OfTransformers(Packed):
    """A model of transformers, which gets no mask but positions that restart."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        del self.embed, self.layers, self.head
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        result: Tensor = self.model(
            input_ids=batch["tokens"], position_ids=batch["positions"], use_cache=False
        ).logits
        return result


def of_transformers(kind: str) -> OfTransformers:
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": DIM, "intermediate_size": DIM, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM // HEADS,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model: Any
    if kind == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    else:
        config = transformers.GptOssConfig(
            **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
        )  # fmt: skip
        model = transformers.GptOssForCausalLM(config)
        # the product of all experts that transformers chooses does not exist in float64
        model.set_experts_implementation("batched_mm")
    return OfTransformers(model.train()).double()


def fit(module: Any, strategy: Any = "auto", devices: int = 1, loader: Any = None) -> L.Trainer:
    options = {**QUIET, "accelerator": "cpu", "devices": devices, "max_steps": STEPS}
    trainer = L.Trainer(strategy=strategy, **options)
    with_mask = getattr(module, "kind", "") == "mask in the batch"
    trainer.fit(module, loader or DataLoader(Rows(with_mask=with_mask), batch_size=SAMPLES))
    return trainer


def sequences(attention: str, runs: int = 1) -> list[Any]:
    """Return a program with two devices that share each sequence."""
    values: Any = {"*": 1 if runs == 1 else (1, runs)}
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.ShardSequences(filter={}, devices=[0, 1], values=values, attention=attention),
    ]


PROGRAMS: dict[str, dict[str, Any]] = {
    "replicas": {"dp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp2": {"pp": 2, "microbatches": 4},
    "tp2": {"tp": 2},
    "ring": {"directives": sequences("ring")},
    "ring, two runs": {"directives": sequences("ring", runs=2)},
    "heads": {"directives": sequences("heads")},
}
KINDS = (
    "bool mask",
    "float mask",
    "mask in the batch",
    "written out",
    "sliding window",
    "sinks",
    "sinks in the mask",
    "mean of documents",
    "parts of the scores",
)


def fit_all(rank: int, programs: tuple[str, ...]) -> dict[str, Any]:
    """Train on two processes: program -> the losses of the steps."""
    found: dict[str, Any] = {}
    for name in programs:
        module = packed("sinks")
        fit(module, piper.PiperStrategy(**PROGRAMS[name]), devices=2)
        found[name] = module.losses
    return found
