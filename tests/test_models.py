"""Models as their users have them, tagged with what the package offers and nothing else: every program gives
what one device gives.

The programs are run by the reference interpreter in float64, so that what is left of a difference is the
order of sums. Models of Hugging Face are built from small configurations; nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import LightningTransformer, Transformer
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import CapturedStep, capture
from lightning_piper.verify import Report, verify_step
from tests.groups import marked

GROUPS = [[0, 2], [1, 3]]
PROGRAMS: dict[str, Callable[[], list[piper.Directive]]] = {
    "PP2": lambda: piper.schedules.one_f_one_b(2, 2),
    "DP2": lambda: [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])],
    "PP2 x DP2 ZeRO-3": lambda: [
        *piper.schedules.one_f_one_b(2, 2, devices=GROUPS),
        piper.Replicate(filter={}, devices=GROUPS, shard_params=True),
    ],
}
Case = tuple[L.LightningModule, Any]


def demo() -> Case:
    """Return Lightning's own Transformer. Its first call makes a position table and a mask, which a captured
    step cannot do.
    """
    module = LightningTransformer(vocab_size=11)
    module.model = model = Transformer(11, ninp=8, nhead=2, nhid=16, nlayers=1, dropout=0.0)
    table = model.pos_encoder._init_pos_encoding(torch.device("cpu"))
    del model.pos_encoder.pe
    model.pos_encoder.register_buffer("pe", table[:, :8])
    model.src_mask = model.generate_square_subsequent_mask(6)
    stages = [
        ["model.embedding", "model.pos_encoder", "model.transformer.encoder"],
        ["model.transformer.decoder", "model.decoder"],
    ]
    piper.annotate_modules(module, "PP", stages)
    return module, tuple(torch.randint(11, (4, 6)) for _ in range(2))


class Language(L.LightningModule):
    """A model that predicts tokens. With `labeled`, the model computes the loss, in float32 regardless of
    its dtype.
    """

    def __init__(self, model: nn.Module, labeled: bool = False) -> None:
        super().__init__()
        self.model, self.labeled = model, labeled

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.labeled:
            return self.model(**batch).loss
        logits = self.model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def tokens() -> dict[str, Tensor]:
    return {name: torch.randint(11, (4, 6)) for name in ("input_ids", "labels")}


def gpt2(labeled: bool = False) -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    module = Language(transformers.GPT2LMHeadModel(config), labeled)
    stages = [["*.wte", "*.wpe", "*.h.0"], ["*.h.1", "*.ln_f", "model.lm_head"]]
    piper.annotate_modules(module, "PP", stages)
    return module, tokens()


def llama() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=8,
                                      bos_token_id=0, eos_token_id=0)  # fmt: skip
    module = Language(transformers.LlamaForCausalLM(config))
    piper.annotate_modules(
        module, "PP", [["*.embed_tokens", "*.layers.0"], ["*.layers.1", "model.model.norm", "model.lm_head"]]
    )
    return module, tokens()


class Vision(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=batch[0]).logits, batch[1])


def vit() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_labels=3,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        qkv_bias=False,
    )  # the gradient of a key's bias is zero except for rounding
    module = Vision(transformers.ViTForImageClassification(config))
    stages = [["*.embeddings", "*.layers.0"], ["*.layers.1", "model.vit.layernorm", "model.classifier"]]
    piper.annotate_modules(module, "PP", stages)
    return module, (torch.randn(4, 3, 8, 8).double(), torch.randint(3, (4,)))


class ConvNet(L.LightningModule):
    """A network of convolutions and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(
            nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP"):
            x = self.body(batch[0])
        with piper.annotate("PP"):
            return F.cross_entropy(self.head(x), batch[1])


class Towers(L.LightningModule):
    """A contrastive model: the other samples of the batch are each sample's negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(n, 8), nn.Tanh(), nn.Linear(8, 4)) for n in (6, 5))
        self.temperature = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            x = F.normalize(self.left(batch[0]), dim=-1)
        with piper.annotate("PP", 1):
            y = F.normalize(self.right(batch[1]), dim=-1)
            similar = self.temperature.exp() * x @ y.t()
            own = torch.arange(len(x), device=x.device)
            return (F.cross_entropy(similar, own) + F.cross_entropy(similar.t(), own)) / 2


def conv() -> Case:
    return ConvNet(), (torch.randn(4, 1, 8, 8).double(), torch.randint(3, (4,)))


def towers() -> Case:
    return Towers(), (torch.randn(4, 6).double(), torch.randn(4, 5).double())


class Captured:
    """A model in float64, which is captured once for all programs."""

    def __init__(self, make: Callable[[], Case]) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module, self.batch = make()
        self.module = module.double()
        self.step: CapturedStep = capture(self.module, self.batch)

    def verify(self, program: list[piper.Directive]) -> Report:
        report = verify_step(self.step, self.module, self.batch, program)
        assert report.ok, str(report)
        return report


@pytest.mark.parametrize("make", marked([demo, gpt2, llama, vit], [demo]))
def test_models_of_independent_samples_give_what_one_device_gives(make: Callable[[], Case]) -> None:
    captured = Captured(make)
    for name, program in PROGRAMS.items():
        report = captured.verify(program())
        for row in report.rows:
            assert row.before.verdict != "differs", f"{name}: {report}"
            assert max(row.before.distance, row.single.distance) < 1e-14, f"{name}: {report}"
        assert any(row.before.verdict == "equal within rounding" for row in report.rows), (
            f"{name}: nothing was divided"
        )
        assert report.verdict == "verified"


def test_a_loss_in_float32_couples_nothing() -> None:
    """Inside of a model in float64 it rounds as single precision does; no operation looks across samples."""
    report = Captured(lambda: gpt2(labeled=True)).verify(PROGRAMS["PP2"]())
    found = report.rows[3].before
    assert found.verdict == "equal within rounding" and 1e-12 < found.distance <= found.allowed < 1e-5
    assert report.couplings == () and report.verdict == "verified"


def test_batch_norm_in_a_pipeline() -> None:
    """It gives what one device gives that accumulates over the same microbatches. Replicas are refused."""
    captured = Captured(conv)
    report = captured.verify(PROGRAMS["PP2"]())
    assert report.rows[3].before.verdict == "differs" and all(
        row.single.distance < 1e-14 for row in report.rows
    )
    assert report.verdict == "verified except"
    assert {c.operation for c in report.couplings} == {"aten._native_batch_norm_legit_functional"}
    whole = captured.verify(PROGRAMS["PP2"]()[:2])
    assert all(row.before.verdict == "bitwise equal" for row in whole.rows) and whole.verdict == "verified"
    for name in ("DP2", "PP2 x DP2 ZeRO-3"):
        with pytest.raises(
            piper.DirectiveError, match=r"\(replicate\).*body\.1\.running_mean.*GroupNorm or nn.LayerNorm"
        ):
            captured.verify(PROGRAMS[name]())


def test_in_batch_negatives() -> None:
    """Replicas and microbatches have fewer negatives, and the report says which operation is to blame; a
    pipeline without microbatches has them all.
    """
    captured = Captured(towers)
    for name, program in PROGRAMS.items():
        report = captured.verify(program())
        assert any(row.before.verdict == "differs" and row.before.distance > 1e-2 for row in report.rows), (
            name
        )
        assert report.conclusion.startswith("verified except aten.mm in region PP=1: differs by ")
    whole = captured.verify(PROGRAMS["PP2"]()[:2])
    assert all(row.before.verdict == "bitwise equal" for row in whole.rows) and whole.verdict == "verified"


def test_a_table_that_is_made_at_the_first_call_is_refused() -> None:
    module = LightningTransformer(vocab_size=11)
    with pytest.raises(piper.CaptureError, match=r"changes self\.model\.\w+.*write it into a buffer instead"):
        Captured(lambda: (module, tuple(torch.randint(11, (4, 6)) for _ in range(2)))).verify(
            PROGRAMS["DP2"]()
        )
