"""Tensor parallelism of models with LoRA layers: the base weights are sharded as without adapters, and the adapters
follow them."""

from __future__ import annotations

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.ir.values import Kind, Partial, Sharded
from lightning_piper.ops.communication.redistribute import Redistribute
from tests.peft_models import fitted
from tests.strategy.fitting import QUIET, Counted

pytest.importorskip("peft")

WIDTH, NARROW, WIDE = 16, 2, 40
TARGETS = ("c_attn", "c_proj", "c_fc")


class Decoder(L.LightningModule):
    """A GPT-2 in float64 with LoRA layers of this rank, or with DoRA layers. Rank 0: without adapters."""

    def __init__(self, rank: int, dora: bool = False) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        sizes: dict[str, Any] = {
            "n_embd": WIDTH,
            "n_head": 2,
            "n_layer": 2,
            "vocab_size": 32,
            "n_positions": 8,
        }
        none: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        base: Any = GPT2LMHeadModel(GPT2Config(**sizes, **none, attn_pdrop=0.0)).double()
        if rank:
            adapters = LoraConfig(
                task_type="CAUSAL_LM",
                r=rank,
                target_modules=list(TARGETS),
                fan_in_fan_out=True,
                use_dora=dora,
            )
            base = get_peft_model(base, adapters).double()
            for name, x in base.named_parameters():  # so that gradients reach both matrices
                if "lora_B" in name:
                    nn.init.normal_(x, std=0.1)
        self.model: Any = base

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores = self.model(input_ids=batch, use_cache=False).logits  # the model's own loss is in float32
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([x for x in self.parameters() if x.requires_grad], lr=0.1)


def shards(rank: int, dora: bool = False) -> dict[str, Any]:
    """Return the shards that the search finds, by the last parts of the names."""
    *_, found = piper.tensor_parallel(Decoder(rank, dora), torch.randint(32, (4, 8)), 2)
    assert isinstance(found, piper.ShardWeights) and found.params is not None
    return {name.partition("transformer.")[2].replace("default.", ""): x for name, x in found.params.items()}


COLUMNS, ROWS = ("attn.c_attn", "mlp.c_fc"), ("attn.c_proj", "mlp.c_proj")  # of the products of a layer


def test_a_narrow_adapter_follows_its_base_weight():
    found = shards(NARROW)
    for layer in COLUMNS:
        along = (1, 3) if layer == "attn.c_attn" else 1  # queries, keys and values
        assert found[f"h.*.{layer}.base_layer.weight"] == along
        assert found[f"h.*.{layer}.lora_B.weight"] == ((0, 3) if layer == "attn.c_attn" else 0)
        assert f"h.*.{layer}.lora_A.weight" not in found
    for layer in ROWS:
        assert found[f"h.*.{layer}.base_layer.weight"] == 0 and found[f"h.*.{layer}.lora_A.weight"] == 1
        assert f"h.*.{layer}.lora_B.weight" not in found
    plain = shards(0)
    assert {name.replace(".base_layer", ""): x for name, x in found.items() if "lora" not in name} == plain


def test_a_wide_adapter_is_sharded_along_its_rank():
    found = shards(WIDE)
    for layer in COLUMNS:
        assert found[f"h.*.{layer}.lora_A.weight"] == 0 and found[f"h.*.{layer}.lora_B.weight"] == 1
    assert found["h.*.mlp.c_fc.base_layer.weight"] == 1
    assert found["h.*.attn.c_attn.base_layer.weight"] == (1, 3)


def test_magnitudes_follow_their_base_weight():
    """The norms of DoRA are computed from shards. And the control: an adapter along its rank needs whole base weights."""
    assert shards(NARROW, dora=True) == shards(NARROW)
    assert not any("base_layer" in name for name in shards(WIDE, dora=True))


def scattered(rank: int) -> int:
    """Return the number of partial sums that the forward pass scatters under tensor parallelism."""
    module, batch = Decoder(rank), torch.randint(32, (4, 8))
    nodes = piper.compile(module, batch, piper.tensor_parallel(module, batch, 2)).dag.of_type(Redistribute)
    forward = [node for node in nodes if node.outputs[0].kind == Kind.ACTIVATION]
    return sum(isinstance(node.before, Partial) and isinstance(node.after, Sharded) for node in forward)


def test_narrow_adapters_scatter_no_sums():
    assert (scattered(0), scattered(NARROW), scattered(WIDE)) == (0, 0, 4)


@functools.cache
def by_plain_lightning(rank: int, dora: bool = False) -> dict[str, Tensor]:
    module = Decoder(rank, dora)
    fitted(module, "auto")
    return {name: x.detach() for name, x in module.named_parameters()}


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((x - ours[name]).abs().max()) for name, x in theirs.items())


PROGRAMS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tp": 2},
    "pipeline": {"pp": 2, "tp": 2, "microbatches": 2},
    "zero3": {"dp": 2, "tp": 2, "zero": 3},
}
LONG = [pytest.param(rank, name, marks=pytest.mark.long) for rank in (NARROW, WIDE) for name in PROGRAMS][1:]


@pytest.mark.filterwarnings("error:.*PIPER")
@pytest.mark.parametrize("rank, name", [(NARROW, "tensor parallel"), *LONG])
def test_training_is_that_of_one_device(rank: int, name: str) -> None:
    module, start = Decoder(rank), dict(Decoder(rank).named_parameters())
    fitted(module, piper.PiperStrategy(**PROGRAMS[name], transport="local"))
    found = {name: x.detach() for name, x in module.named_parameters()}
    wanted = by_plain_lightning(rank)
    assert distance(wanted, found) < 1e-12
    moved = {name for name, x in found.items() if not torch.equal(x, start[name])}
    assert moved == {name for name in found if "lora" in name}


@pytest.mark.filterwarnings("error:.*PIPER")
@pytest.mark.parametrize(
    "rank, name",
    [
        (NARROW, "tensor parallel"),
        *(pytest.param(NARROW, name, marks=pytest.mark.long) for name in ("pipeline", "zero3")),
        pytest.param(WIDE, "tensor parallel", marks=pytest.mark.long),
    ],
)
def test_training_with_magnitudes_is_that_of_one_device(rank: int, name: str) -> None:
    module, start = Decoder(rank, dora=True), dict(Decoder(rank, dora=True).named_parameters())
    fitted(module, piper.PiperStrategy(**PROGRAMS[name], transport="local"))
    found = {name: x.detach() for name, x in module.named_parameters()}
    assert distance(by_plain_lightning(rank, dora=True), found) < 1e-12
    without = {n: x for n, x in by_plain_lightning(rank).items() if "lora_B" in n}
    assert distance(without, {n: found[n] for n in without}) > 1e-6  # the magnitudes count
    moved = {name for name, x in found.items() if not torch.equal(x, start[name])}
    assert moved == {name for name in found if "lora" in name} and any("magnitude" in name for name in moved)


class Unit(L.LightningModule):
    """A layer whose weight has rows of length 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        length = torch.linalg.vector_norm(self.weight, dim=1, keepdim=True)
        return (F.linear(batch, self.weight / length).sin() * length.mean()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize("dtype, rounding", [(torch.float64, 1e-15), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("dim", [0, 1])
def test_norms_of_shards(dtype: torch.dtype, rounding: float, dim: int) -> None:
    """Along the elements of a row, the shards add up. Each shard alone has another norm."""
    program = [piper.Place([0, 1]), piper.ShardWeights(params={"weight": dim})]
    weights = []
    for strategy in ("auto", piper.PiperStrategy(program, transport="local")):
        module = Unit().to(dtype)
        trainer = L.Trainer(**QUIET, accelerator="cpu", devices=1, strategy=strategy, max_epochs=1)
        draw = torch.Generator().manual_seed(1)
        trainer.fit(module, Counted([torch.randn(4, 8, generator=draw).to(dtype) for _ in range(3)]))
        weights.append(module.weight.detach().double())
    start = Unit().weight.detach()
    assert float((weights[0] - weights[1]).abs().max()) <= rounding < float((weights[0] - start).abs().max())


def test_other_adapters_show() -> None:
    one, other = by_plain_lightning(NARROW), Decoder(NARROW)
    with torch.no_grad():
        next(x for name, x in other.named_parameters() if "lora_B" in name)[:1] += 1e-3
    fitted(other, piper.PiperStrategy(tp=2, transport="local"))
    assert distance(one, {name: x.detach() for name, x in other.named_parameters()}) > 1e-6
