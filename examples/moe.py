"""Train a small mixture-of-experts GPT on four processes with pipeline and expert parallelism, then on one
device.

The model is a small Qwen3-MoE: RMSNorm, rotary positions, grouped queries, a router that sends each token to
2 of 8 experts, and no limit on the tokens of an expert. There are two pipeline ranks (PP2) with two processes
each. Each process holds half of the experts of its layers (EP2) and shards of all other parameters (ZeRO-3).
The script trains the same model on the same data under 1F1B, under DualPipeV and on one device, and compares
the losses.

The comparison is in float64. If the scores of two experts for a token are within rounding of each other, sums
in another order may choose the other expert, and the curves differ by more than rounding. In float64 such
scores would have to agree in fifteen digits, which does not occur here.

Lightning starts the other processes by running this file again, as for demo.py.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import VOCABULARY, CharDataset
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

import lightning_piper as piper

SEED = 1
STEPS = 40
LAYERS = 4
BATCH_SIZE = 16  # of all replicas together
MICROBATCHES = 4
CONTEXT = 64
GROUPS = [[0, 2], [1, 3]]  # by pipeline rank: its replicas, which divide its experts
# Largest relative difference of the losses, over all steps. Measured differences are a few ulps.
TOLERANCE = 1e-12


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped queries. Input and output: (batch, CONTEXT,
    dim).
    """

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.size), nn.RMSNorm(self.size)
        frequencies = 10_000.0 ** (-torch.arange(0, self.size, 2) / self.size).repeat(2)
        angles = torch.arange(CONTEXT).unsqueeze(1) * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(-1, (-1, self.size)).transpose(1, 2).chunk(2, dim=1)
        q, k = self.q_norm(self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)), self.k_norm(k)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], dim=-1) * self.sin


class Experts(nn.Module):
    """Stacked SwiGLU feed-forward networks. Input: rows (rows, dim) sorted by expert, and the number of rows
    of each expert.
    """

    def __init__(self, experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(0.02 * torch.randn(experts, 2 * hidden, dim))
        self.down = nn.Parameter(0.02 * torch.randn(experts, dim, hidden))

    def forward(self, rows: Tensor, sizes: Tensor) -> Tensor:
        gate, up = piper.grouped_linear(rows, self.gate_up, sizes).chunk(2, dim=-1)
        return piper.grouped_linear(F.silu(gate) * up, self.down, sizes)


class SparseMLP(nn.Module):
    """A mixture of each token's `top` experts, weighted by the router's normalized scores.

    Input: (batch, context, dim). Output: (batch, context, dim), and a loss (batch,) that is 1 if a sequence
    uses all experts equally.

    The balancing loss is computed for each sequence: the sum over experts of (share of the sequence's
    choices) x (mean score), times the number of experts (the sequence-wise loss of DeepSeek-V3). Its mean
    over sequences is the same for any division of the batch. The usual form multiplies shares and scores of
    all tokens of a batch. This product of two means differs between microbatches or replicas and the whole
    batch.
    """

    def __init__(self, experts: int, top: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.count, self.top = experts, top
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = Experts(experts, dim, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(self.top)
        weights = weights / weights.sum(-1, keepdim=True)
        choices = F.one_hot(chosen, self.count).sum(1)  # (tokens, experts): 1 where chosen

        order = chosen.flatten().argsort(stable=True)
        with piper.annotate("EP"):
            rows, sizes = piper.dispatch(tokens[order // self.top], choices.sum(0))
            rows = piper.combine(self.experts(rows, sizes))
        mixed = torch.zeros_like(tokens).index_add(
            0, order // self.top, rows * weights.flatten()[order].unsqueeze(1)
        )

        share = choices.view(*x.shape[:2], -1).to(x.dtype).mean(1) / self.top
        balance = self.count * (share * scores.view(*x.shape[:2], -1).mean(1)).sum(-1)
        return mixed.view_as(x), balance


class Block(nn.Module):
    """One pre-norm layer. Input: (batch, context, dim). Output: (batch, context, dim), and the balancing loss
    (batch,).
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, experts: int, top: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads, kv_heads)
        self.mlp = SparseMLP(experts, top, dim, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        mixed, balance = self.mlp(self.norm2(x))
        return x + mixed, balance


class SparseGPT(L.LightningModule):
    """A GPT over characters with mixtures of experts as feed-forward networks. It has `stages` regions tagged
    `PP`, as `CharGPT`.

    Args:
        stages: The number of regions, a divisor of LAYERS.
        alpha: The weight of the balancing loss, which is the mean over layers.
        lr, eps: Options of AdamW; see `CharGPT` for `eps`.
    """

    def __init__(
        self,
        stages: int,
        dim: int = 64,
        heads: int = 4,
        kv_heads: int = 2,
        experts: int = 8,
        top: int = 2,
        hidden: int = 96,
        alpha: float = 0.01,
        lr: float = 1e-3,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.stages, self.alpha, self.lr, self.eps = stages, alpha, lr, eps
        self.embedding = nn.Embedding(len(VOCABULARY), dim)
        self.blocks = nn.ModuleList(Block(dim, heads, kv_heads, experts, top, hidden) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, len(VOCABULARY), bias=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        layers = len(self.blocks) // self.stages
        for stage in range(self.stages):
            with piper.annotate("PP", stage):
                if stage == 0:
                    x, balance = self.embedding(tokens), 0.0
                for block in self.blocks[stage * layers : (stage + 1) * layers]:
                    x, more = block(x)
                    balance = balance + more / len(self.blocks)
                if stage == self.stages - 1:
                    loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
                    self.log("train_loss", loss)
                    self.log("balance_loss", balance.mean())
                    return loss + self.alpha * balance.mean()
        raise ValueError("a model has at least one stage")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        experts = [p for block in self.blocks for p in block.mlp.experts.parameters()]
        of_experts = set(experts)
        others = [p for p in self.parameters() if p not in of_experts]
        return torch.optim.AdamW([{"params": experts}, {"params": others}], lr=self.lr, eps=self.eps)


class Share(Sampler[list[int]]):
    """A sampler that yields one replica's local batch of each step. A step takes the next BATCH_SIZE numbers
    of `order`, and each replica an equal run of them."""

    def __init__(self, order: list[int], replica: int, replicas: int) -> None:
        self.order, self.replica, self.size = order, replica, BATCH_SIZE // replicas

    def __len__(self) -> int:
        return len(self.order) // BATCH_SIZE

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            start = step * BATCH_SIZE + self.replica * self.size
            yield self.order[start : start + self.size]


class Text(L.LightningDataModule):
    """A data module whose loader gives each replica of the strategy its local batches."""

    def train_dataloader(self) -> DataLoader:
        replicas = getattr(
            self.trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1, "rank": 0}
        )
        return loader(replicas["rank"], replicas["num_replicas"])


def loader(replica: int = 0, replicas: int = 1) -> DataLoader:
    dataset = CharDataset(context=CONTEXT)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED)).tolist()
    return DataLoader(dataset, batch_sampler=Share(order, replica, replicas))


class Figures(Callback):
    """A callback that keeps the logged losses of every step. At the end, it adds up the bytes of the experts'
    parameters and optimizer states on this process.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.balance: list[float] = []
        self.experts, self.state = 0, 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        self.losses.append(trainer.callback_metrics["train_loss"].item())
        self.balance.append(trainer.callback_metrics["balance_loss"].item())

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        params = optimizer.param_groups[0]["params"]
        self.experts = sum(p.nbytes for p in params)
        self.state = sum(x.nbytes for p in params for x in optimizer.state[p].values() if x.numel() > 1)


def make_module(stages: int) -> SparseGPT:
    """Return a model. Its initial weights are the same at every call, in every process, with any `stages`."""
    L.seed_everything(SEED, verbose=False)
    return SparseGPT(stages)


def programs() -> dict[str, tuple[int, list[piper.Directive]]]:
    """Return name of a schedule -> number of stages, directives."""
    ways = {
        "1F1B": (2, piper.schedules.one_f_one_b(stages=2, microbatches=MICROBATCHES, devices=GROUPS)),
        "DualPipeV": (4, piper.schedules.dualpipev(stages=4, microbatches=MICROBATCHES, devices=GROUPS)),
    }
    divided = [
        piper.Replicate(filter={}, devices=GROUPS, shard_params=True),
        piper.ShardExperts(filter={"EP": "*"}, devices=GROUPS),
    ]
    return {name: (stages, program + divided) for name, (stages, program) in ways.items()}


def train(stages: int, **trainer_options: Any) -> tuple[L.Trainer, Figures]:
    """Train a new model for STEPS steps. Returns the trainer, and the figures of this process."""
    figures = Figures()
    trainer = L.Trainer(
        accelerator="cpu",
        precision="64-true",
        max_steps=STEPS,
        callbacks=[figures],
        use_distributed_sampler=False,  # Text divides the data
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **trainer_options,
    )
    start = time.perf_counter()
    trainer.fit(make_module(stages), Text())
    if trainer.is_global_zero:
        print(f"{STEPS} steps in {time.perf_counter() - start:.1f} s, starting included", flush=True)
    return trainer, figures


def verified(name: str, stages: int, program: list[piper.Directive]) -> bool:
    print(f"\nVerify PP2 x EP2 x ZeRO under {name}\n")
    report = piper.verify(make_module(stages), next(iter(loader())), program)
    print(report, flush=True)
    return report.ok


def print_memory(held: list[tuple[int, int]], single: Figures) -> None:
    """Print the memory of the experts on each process, next to their memory on one device.

    Args:
        held: For each process, bytes of the experts' parameters and of their optimizer states.
        single: The figures of one device.
    """
    print("\nHalf of the layers is on each process, and half of their experts. Of all experts it has:")
    for rank, (experts, state) in enumerate(held):
        print(
            f"  process {rank}: parameters {experts / 2**20:.2f} MB, 1/{single.experts / experts:.1f} of one "
            f"device's; optimizer state {state / 2**20:.2f} MB, 1/{single.state / state:.1f}"
        )


def compare(curves: dict[str, Figures], single: Figures) -> bool:
    """Print the curves and their largest relative differences. Returns whether all are within TOLERANCE."""
    print(f"\n{'step':>4}  {'1 device':>10}", *(f"{name:>10}" for name in curves), f"{'balance':>10}")
    for step in [*range(0, STEPS, max(STEPS // 8, 1)), STEPS - 1]:
        losses = [
            single.losses[step],
            *(found.losses[step] for found in curves.values()),
            single.balance[step],
        ]
        print(f"{step:>4} ", " ".join(f"{loss:>10.7f}" for loss in losses))
    agree = True
    for name, found in curves.items():
        pairs = list(zip(found.losses + found.balance, single.losses + single.balance, strict=True))
        differences = [abs(a - b) / abs(b) for a, b in pairs]
        print(
            f"{name}: largest relative difference over {STEPS} steps {max(differences):.1e}, allowed: "
            f"{TOLERANCE:.0e}"
        )
        # A NaN makes the comparison false.
        agree = agree and len(pairs) == 2 * STEPS and all(x <= TOLERANCE for x in differences)
    print("The curves agree." if agree else "The curves DIFFER.")
    return agree


def main() -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    ways = programs()
    if rank_zero_only.rank == 0 and not all(verified(name, *way) for name, way in ways.items()):
        print("The program does not compute what one device computes.")
        return 1
    curves: dict[str, Figures] = {}
    for name, (stages, program) in ways.items():
        if rank_zero_only.rank == 0:
            print(f"\nTrain under {name} on four processes\n", flush=True)
        trainer, curves[name] = train(stages, devices=4, strategy=piper.PiperStrategy(directives=program))
    held: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(held, (curves[name].experts, curves[name].state))
    if not trainer.is_global_zero:
        return 0
    print("\nTrain on one device, with plain Lightning\n", flush=True)
    _, single = train(1, devices=1)
    print_memory(held, single)
    return 0 if compare(curves, single) else 1


if __name__ == "__main__":
    sys.exit(main())
