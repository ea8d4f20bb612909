"""Rows that contain several documents: the losses and weights of one device under every program, and the logits of
each document alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as F
from torch import Tensor

import lightning_piper as piper
from tests import packed
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.packed import IGNORED, KINDS, PROGRAMS, Packed, Rows, fit

EXACT = {"rel": 0, "abs": 1e-12}
CASES = [(kind, program) for kind in KINDS for program in PROGRAMS]
SAME_ATTENTION = ("mask in the batch", "mean of documents", "parts of the scores")  # as "bool mask"


@functools.cache
def alone(kind: str) -> Packed:
    module = packed.packed(kind)
    fit(module)
    return module


def assert_equal(one: Any, other: Any) -> None:
    assert one.losses == pytest.approx(other.losses, **EXACT) and one.losses[0] != one.losses[-1]
    for name, x in one.state_dict().items():
        assert torch.allclose(x, other.state_dict()[name], rtol=0, atol=1e-11), name


@pytest.mark.long
@pytest.mark.parametrize("kind, program", CASES)
def test_training_is_that_of_one_device(kind, program):
    module = packed.packed(kind)
    fit(module, piper.PiperStrategy(**PROGRAMS[program], transport="local"))
    assert_equal(module, alone(kind))


@pytest.mark.long
@pytest.mark.filterwarnings("error:the loss or a gradient mixes samples")
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("kind", ["llama", "gpt-oss"])
def test_positions_of_transformers_that_restart(kind, program):
    """These models hide documents from each other if the positions restart. Their norms compute in float32."""
    pytest.importorskip("transformers", minversion="5.0")
    one, module = packed.of_transformers(kind), packed.of_transformers(kind)
    fit(one)
    fit(module, piper.PiperStrategy(**PROGRAMS[program], transport="local"))
    assert module.losses == pytest.approx(one.losses, rel=1e-6) and one.losses[0] != one.losses[-1]
    for name, x in module.state_dict().items():
        assert torch.allclose(x, one.state_dict()[name], rtol=0, atol=1e-6), name


@pytest.mark.long
def test_processes_train_as_one_device(tmp_path):
    programs = ("pp2", "tp2", "ring", "heads")
    for losses in launch_trainings(2, packed.fit_all, tmp_path, programs):
        for name in programs:
            assert losses[name] == pytest.approx(alone("sinks").losses, **EXACT), name


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SAME_ATTENTION])
@pytest.mark.parametrize("apart", [True, False])
def test_a_document_in_a_row_is_the_document_alone(kind, apart):
    """Without the mask between documents, it is not."""
    module = packed.packed(kind, apart=apart)
    for each in Rows(4).rows:
        whole = module({name: x[None] for name, x in each.items()})[0]
        for doc in each["docs"].unique():
            part = each["docs"] == doc
            own = module({name: x[part][None] for name, x in each.items()})[0]
            same = torch.allclose(whole[part], own, rtol=0, atol=1e-12)
            assert same == (apart or bool(doc == 0))


class Functions(Packed):
    """Documents are apart by FlexAttention, or a branch depends on a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch["tokens"])
        if self.kind == "cond":
            x = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        else:
            docs = batch["docs"]
            size = docs.shape[1]
            block_mask = flex.create_block_mask(
                lambda b, h, q, k: (docs[b, q] == docs[b, k]) & (q >= k), len(docs), None, size, size, "cpu"
            )
            heads = x.unflatten(-1, (4, -1)).transpose(1, 2)
            x = flex.flex_attention(heads, heads, heads, block_mask=block_mask).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


@pytest.fixture
def trainable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention has a backward pass on CPUs, which torch forbids."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    yield


REFUSED = {
    "flex": r"test_packed_text.py:\d+ .*: flex_attention cannot be captured, .*Use scaled_dot_product_attention",
    "cond": r"test_packed_text.py:\d+ .*: cond cannot be captured, .*choose with torch.where",
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("program", marked(["pp2", "tp2", "ring"], ["pp2"]))
def test_operations_that_get_functions_are_refused(trainable, kind, program):
    module = Functions(kind).double()
    with pytest.raises(piper.CaptureError, match=REFUSED[kind]):
        fit(module, piper.PiperStrategy(**PROGRAMS[program], transport="local", capture="always"))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", REFUSED)
def test_in_replicas_operations_that_get_functions_run_uncaptured(trainable, kind):
    torch.manual_seed(0)
    one, module = (Functions(kind).double() for _ in range(2))
    module.load_state_dict(one.state_dict())
    fit(one)
    with pytest.warns(UserWarning, match=rf"runs uncaptured.*{REFUSED[kind]}"):
        fit(module, piper.PiperStrategy(dp=2, transport="local"))
    assert_equal(module, one)
