"""Language, and images with it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.kinds import SAMPLES, Kind, integers, normal, samples, tensors

VOCAB, LENGTH, WIDTH, PAD = 12, 6, 8, 0


class Encoder(nn.Module):
    def __init__(self, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal = causal
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        mask = (
            nn.Transformer.generate_square_subsequent_mask(ids.size(1), ids.device, x.dtype)
            if self.causal
            else None
        )
        return self.layers(x, mask=mask, is_causal=self.causal)


class MaskedLM(L.LightningModule):
    """The loss counts masked positions only."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, VOCAB)

    def loss(self, batch: Any) -> Tensor:
        logits = self.head(self.encoder(batch["input_ids"]))
        return F.cross_entropy(logits.view(-1, VOCAB), batch["labels"].view(-1), ignore_index=-100)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log("val_ppl", torch.exp(loss))

    def configure_optimizers(self) -> Any:
        no_decay = ["bias", "norm"]
        named = list(self.named_parameters())
        groups = [
            {"params": [p for n, p in named if not any(w in n for w in no_decay)], "weight_decay": 0.01},
            {"params": [p for n, p in named if any(w in n for w in no_decay)], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


class CausalLM(L.LightningModule):
    """Padding does not count; the tokens that were seen are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = Encoder(causal=True), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.model.embed.weight
        self.tokens_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = self.head(self.model(inputs))
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        mask = (targets != PAD).to(losses.dtype)
        loss = (losses * mask).sum() / mask.sum()
        self.tokens_seen += int(targets.numel())
        self.log("loss", loss)
        self.log("tokens", float(self.tokens_seen))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        self.log("grad_norm", norm)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclass
class ModelOutput:
    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] = ()


class PretrainedModel(nn.Module):
    """In the manner of Hugging Face: it has the loss itself, and returns all in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classifier = Encoder(dropout=0.1), nn.Linear(WIDTH, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> ModelOutput:
        hidden = self.encoder(input_ids)
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        logits = self.classifier((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        loss = F.cross_entropy(logits, labels) if labels is not None else None
        return ModelOutput(loss, logits, (hidden,))


class FineTuning(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = PretrainedModel()
        self.outputs: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.model(**batch)
        return outputs.loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        outputs = self.model(**batch)
        preds = torch.argmax(outputs.logits, dim=1)
        self.outputs.append({"loss": outputs.loss, "preds": preds, "labels": batch["labels"]})
        return outputs.loss

    def on_validation_epoch_end(self) -> None:
        preds = torch.cat([x["preds"] for x in self.outputs]).detach().cpu().numpy()
        labels = torch.cat([x["labels"] for x in self.outputs]).detach().cpu().numpy()
        self.log("val_loss", torch.stack([x["loss"] for x in self.outputs]).mean(), prog_bar=True)
        self.log("val_acc", float((preds == labels).mean()))
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


class Seq2Seq(L.LightningModule):
    """Teacher forcing, decided by a random number at each position."""

    def __init__(self, ratio: float = 0.5) -> None:
        super().__init__()
        self.ratio = ratio
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, src: Tensor, tgt: Tensor, ratio: float) -> Tensor:
        _, hidden = self.encoder(self.embed(src))
        hidden, token, outputs = hidden[0], tgt[:, 0], []
        for t in range(1, tgt.size(1)):
            hidden = self.decoder(self.embed(token), hidden)
            logits = self.out(hidden)
            outputs.append(logits)
            token = tgt[:, t] if random.random() < ratio else logits.argmax(1)
        return torch.stack(outputs, dim=1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        src, tgt = batch
        out = self(src, tgt, self.ratio)
        loss = F.cross_entropy(out.reshape(-1, VOCAB), tgt[:, 1:].reshape(-1), ignore_index=PAD)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        src, tgt = batch
        self.log(
            "val_loss",
            F.cross_entropy(self(src, tgt, 0.0).flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class LoRALinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t() @ self.b.t()) * self.scale


class LoRA(L.LightningModule):
    """Small matrices beside frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Encoder().requires_grad_(False)
        for layer in self.base.layers.layers:
            layer.linear1, layer.linear2 = LoRALinear(layer.linear1), LoRALinear(layer.linear2)
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.head(self.base(batch["input_ids"]).mean(1)), batch["labels"])
        self.log("loss", loss)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        trained = {n for n, p in self.named_parameters() if p.requires_grad}
        checkpoint["state_dict"] = {n: x for n, x in checkpoint["state_dict"].items() if n in trained}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {**self.state_dict(), **checkpoint["state_dict"]}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), lr=1e-2)


class CLIP(L.LightningModule):
    """Manual optimization of two towers, with a temperature that is learned and kept in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.image, self.text, self.project = nn.Linear(10, WIDTH), Encoder(), nn.Linear(WIDTH, WIDTH)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        image, text = batch
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        image_embed = F.normalize(self.image(image), dim=1)
        text_embed = F.normalize(self.project(self.text(text)[:, 0]), dim=1)
        logits = image_embed @ text_embed.t() * self.logit_scale.exp()
        ground_truth = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, ground_truth) + F.cross_entropy(logits.t(), ground_truth)) / 2
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        scheduler.step()
        self.logit_scale.data.clamp_(-math.log(100), math.log(100))
        self.log_dict({"loss": loss, "temperature": self.logit_scale.exp()}, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.98))
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12),
        }


class LayerDrop(L.LightningModule):
    """Layers are skipped at random."""

    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        self.p = p
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.training and random.random() < self.p:
                continue
            x = layer(x)
        return self.head(x.mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]), batch["labels"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch["input_ids"]), batch["labels"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PositionalEncoding(nn.Module):
    """Makes its table when it is first called, and again for longer texts."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.size(0) < x.size(1):
            position = torch.arange(x.size(1), dtype=x.dtype, device=x.device).unsqueeze(1)
            rate = torch.exp(
                torch.arange(0, WIDTH, 2, dtype=x.dtype, device=x.device) * (-math.log(10000.0) / WIDTH)
            )
            self.table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], -1).flatten(1)
        return x + self.table[: x.size(1)]


class CachedPositions(L.LightningModule):
    """Predicts words."""

    words = ("yes", "no", "maybe")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, WIDTH), PositionalEncoding()
        self.body = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.positions(self.embed(ids))).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["input_ids"]), batch["labels"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_acc", (self(batch["input_ids"]).argmax(-1) == batch["labels"]).double().mean())

    def predict_step(self, batch: Any, batch_idx: int) -> list[str]:
        return [self.words[i] for i in self(batch["input_ids"]).argmax(-1).tolist()]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def masked_texts() -> list[Any]:
    ids, hide = integers(VOCAB, SAMPLES, LENGTH, low=2), normal(SAMPLES, LENGTH, seed=3) > 0.3
    hide[:, 0] = True
    return [
        {"input_ids": x.masked_fill(h, 1), "labels": x.masked_fill(~h, -100)}
        for x, h in zip(ids, hide, strict=True)
    ]


def padded_texts() -> Tensor:
    ids = integers(VOCAB, SAMPLES, LENGTH, low=1)
    return ids.masked_fill(torch.arange(LENGTH) >= integers(LENGTH + 1, SAMPLES, 1, low=2, seed=5), PAD)


def pad_together(items: list[Tensor]) -> Tensor:
    """As long as the longest one of the batch."""
    return nn.utils.rnn.pad_sequence([x[x != PAD] for x in items], batch_first=True, padding_value=PAD)


def labeled(mask: bool) -> list[Any]:
    ids, labels = padded_texts(), integers(3, SAMPLES, seed=6)
    more = [{"attention_mask": (x != PAD).long()} if mask else {} for x in ids]
    return [{"input_ids": x, "labels": y, **m} for x, y, m in zip(ids, labels, more, strict=True)]


masked, pairs = samples(masked_texts()), tensors(integers(VOCAB, SAMPLES, LENGTH, low=1), padded_texts())
texts, attended = samples(labeled(False)), samples(labeled(True))
KINDS = [
    Kind("masked_lm", "`ignore_index`; groups of parameters, warm-up", MaskedLM, masked, masked),
    Kind("causal_lm", "batches padded to their longest, tied weights, gradient norm in a hook", CausalLM,
         samples(list(padded_texts()), pad_together)),
    Kind("fine_tuning", "a model's output object with the loss; dropout; "
                        "`self.outputs.append`", FineTuning, attended, attended,
         single=("val_acc",)),
    Kind("seq2seq", "teacher forcing by `random`", Seq2Seq, pairs, pairs),
    Kind("lora", "frozen base; a checkpoint of the trained part only", LoRA, texts),
    Kind("clip", "manual optimization with clipping; parameter clamped in the step; the loss compares all "
                 "samples", CLIP,
         tensors(normal(SAMPLES, 10), padded_texts())),
    Kind("layer_drop", "layers skipped by `random`", LayerDrop, texts, texts),
    Kind("cached_positions", "a table made at the first call; `predict_step` gives "
                             "words", CachedPositions, texts, texts, True),
]  # fmt: skip
