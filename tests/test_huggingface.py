"""Experts of Hugging Face models, whose code is not changed: computed as the models do it, and divided over
devices.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError
from lightning_piper.huggingface import use_piper_experts

pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32,
}  # fmt: skip
GROUPS = [[0, 2], [1, 3]]


def qwen() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=12))


def gpt_oss() -> Any:
    """A model whose experts have biases, transposed weights and a gate of their own."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    special = {"pad_token_id": 0, "eos_token_id": 1, "rope_parameters": rope}
    return GptOssForCausalLM(GptOssConfig(**SIZES, **special, num_local_experts=4, intermediate_size=12))


MODELS = {"qwen3_moe": qwen, "gpt_oss": gpt_oss}


class Wrapped(L.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # With this learning rate, a step changes a parameter by its gradient.
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(model: Any, strategy: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of one step, and the change of each parameter."""
    module = Wrapped(model)
    piper.annotate_modules(
        module,
        "PP",
        [
            ["model.model.embed_tokens", "model.model.layers.0"],
            ["model.model.layers.1", "model.model.norm", "model.lm_head"],
        ],
    )
    before = {name: x.detach().clone() for name, x in module.named_parameters()}
    tokens = torch.randint(2, SIZES["vocab_size"], (8, 6), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(tokens, batch_size=8))  # type: ignore[arg-type]
    return trainer.callback_metrics["loss"].item(), {
        name: x.detach() - before[name] for name, x in module.named_parameters()
    }


@pytest.mark.parametrize("name", MODELS)
def test_computes_what_eager_experts_do(name: str) -> None:
    """In float64: outputs, and gradients of tokens, weights of the choice and all parameters."""
    model = MODELS[name]().double()
    torch.nn.init.normal_(model.model.layers[0].mlp.experts.down_proj)
    other = copy.deepcopy(model)
    model.set_experts_implementation("eager")
    use_piper_experts(other)
    tokens, width, experts = 24, SIZES["hidden_size"], 4
    x = torch.randn(tokens, width, dtype=torch.float64)
    chosen = torch.stack(
        [torch.randperm(experts - 1)[:2] for _ in range(tokens)]
    )  # nobody chooses the last one
    weights = torch.rand(tokens, 2, dtype=torch.float64)

    def results(model: Any, weights: torch.Tensor) -> list[torch.Tensor]:
        given = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        module = model.model.layers[0].mlp.experts
        module.zero_grad()
        out = module(given[0], chosen, given[1])
        (out * torch.arange(width)).sum().backward()
        return [out.detach(), *(v.grad for v in given), *(p.grad for p in module.parameters())]

    def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return max(float((x - y).abs().max() / x.abs().max()) for x, y in zip(a, b, strict=True))

    expected = results(model, weights)
    assert distance(expected, results(other, weights)) <= 1e-14
    assert distance(expected, results(other, weights.flip(1))) > 1e-3


@pytest.mark.parametrize("implementation, refused", [("eager", True), ("batched_mm", False)])
def test_eager_experts_are_refused_with_a_remedy(implementation: str, refused: bool) -> None:
    model = qwen()
    model.set_experts_implementation(implementation)
    expected = (
        pytest.raises(
            CaptureError, match=r"by values\. Call model\.set_experts_implementation\('batched_mm'\)"
        )
        if refused
        else contextlib.nullcontext()
    )
    with expected:
        capture(Wrapped(model), torch.randint(16, (4, 6))).at(4)


def test_trains_as_one_device_does() -> None:
    """PP2 x EP2 of Qwen3-MoE, with all devices in this process, against its own eager experts under a plain
    Trainer.

    Not in float64: the model itself goes through float32 in norms, router and loss.
    """
    plain, divided = qwen(), qwen()
    plain.set_experts_implementation("eager")
    use_piper_experts(divided)
    program = piper.schedules.one_f_one_b(stages=2, microbatches=2, devices=GROUPS)
    program += [
        piper.Replicate(filter={}, devices=GROUPS),
        piper.ShardExperts(filter={"EP": "*"}, devices=GROUPS),
    ]
    loss, expected = fit(plain, "auto")
    found, moved = fit(divided, piper.PiperStrategy(program, transport="local", verify="first_batch"))
    eps = torch.finfo(torch.float32).eps
    assert found == pytest.approx(loss, rel=4 * eps)
    for name, x in expected.items():
        assert float(x.abs().max()) > 0, name
        weight = plain.get_parameter(name.removeprefix("model.")).detach()
        rounding = eps * float(weight.abs().max())  # a weight that moves is rounded, twice
        assert float((x - moved[name]).abs().max()) <= 16 * eps * float(x.abs().max()) + rounding, name


def test_refuses_what_it_cannot_divide() -> None:
    with pytest.raises(CaptureError, match="Linear has no experts whose implementation can be chosen"):
        use_piper_experts(torch.nn.Linear(2, 2))
    model = qwen()
    model.model.layers[1].mlp.experts.has_post_expert_norm = True
    with pytest.raises(CaptureError, match=r"model\.layers\.1\.mlp\.experts has a norm after its experts"):
        use_piper_experts(model)
