"""The Qwen3-MoE models of the Piper paper (1B and 9B), and a tiny one, as a LightningModule.

The models are `Qwen3MoeForCausalLM` of `transformers`, unchanged. `use_piper_experts` marks their experts with
the tag `EP`, and `annotate_modules` names the layers of each pipeline stage. `on_meta` builds a model without
memory for its parameters, which is enough to compile and simulate programs.
"""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.output_capturing import maybe_install_capturing_hooks

import lightning_piper as piper
from lightning_piper.huggingface import use_piper_experts


class Size(NamedTuple):
    """The shape of a model. Each token uses 2 experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int  # of one expert
    experts: int
    head: int = 64
    vocabulary: int = 151_936


SIZES = {
    "1B": Size(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=3584, experts=4),
    "9B": Size(layers=24, hidden=2048, heads=32, kv_heads=8, ffn=7168, experts=8),
    "tiny": Size(layers=4, hidden=32, heads=4, kv_heads=2, ffn=64, experts=4, head=8, vocabulary=64),
}
AUXILIARY = 0.001  # weight of the balancing loss


class Qwen3Moe(L.LightningModule):
    """A Qwen3-MoE model in `stages` equal stages of layers, tagged `PP`.

    A batch has token numbers (samples, length + 1). The loss is the cross entropy of the next tokens, plus
    `AUXILIARY` times the balancing loss.

    The balancing loss is computed for each sequence, and its mean over sequences is the same for any division
    of the batch. The balancing loss of `transformers` multiplies means over all tokens of a batch, so it would
    differ between microbatches and the whole batch.
    """

    def __init__(self, size: str, stages: int, lr: float = 1e-3) -> None:
        super().__init__()
        self.size, self.lr = SIZES[size], lr
        shape = self.size
        self.model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                vocab_size=shape.vocabulary,
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.head,
                moe_intermediate_size=shape.ffn,
                num_experts=shape.experts,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                use_cache=False,
            )
        )
        use_piper_experts(self.model)
        maybe_install_capturing_hooks(self.model.model)  # otherwise the first step installs them
        layers = [
            [f"model.model.layers.{i}" for i in range(shape.layers) if i * stages // shape.layers == stage]
            for stage in range(stages)
        ]
        layers[0].insert(0, "model.model.embed_tokens")
        layers[-1] += ["model.model.norm", "model.lm_head"]
        piper.annotate_modules(self, "PP", layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        tokens, targets = batch[:, :-1], batch[:, 1:]
        made = self.model(tokens, output_router_logits=True)
        loss = F.cross_entropy(made.logits.flatten(0, 1), targets.flatten())
        balance = torch.stack([self._balance(x, len(tokens)) for x in made.router_logits]).mean()
        self.log("train_loss", loss.detach())
        self.log("balance_loss", balance.detach())
        return loss + AUXILIARY * balance

    def _balance(self, logits: Tensor, samples: int) -> Tensor:
        """Return the balancing loss of a layer. It is 1 if each sequence uses all experts equally."""
        scores = logits.float().softmax(-1)
        chosen = F.one_hot(scores.topk(2).indices, self.size.experts).sum(1)
        share, score = (x.unflatten(0, (samples, -1)).float().mean(1) for x in (chosen, scores))
        return self.size.experts / 2 * (share * score).sum(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def on_meta(size: str, stages: int) -> Qwen3Moe:
    """Return a model in bfloat16 on the meta device."""
    with torch.device("meta"):
        return Qwen3Moe(size, stages).bfloat16()
