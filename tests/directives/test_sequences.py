"""Parts of sequences: the attention that reads them, and the loss after it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Place, Replicate, Split
from lightning_piper.capture.tensor_sharding import decompositions
from lightning_piper.errors import CaptureError, DirectiveError
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute
from tests.groups import marked
from tests.tensors import LENGTH, VOCABULARY, decoder, divided, report_of, stages, tensors

SEQUENCES: dict[str, Any] = {"params": {}, "values": {"*": 1}}


def over(degree: int = 2, **fields: Any) -> list[Any]:
    devices = list(range(degree))
    return [Place(filter={}, devices=devices), divided(devices, **(SEQUENCES | fields))]


def exchanges(module: L.LightningModule, batch: Any, program: Any) -> Counter[str]:
    """Count the exchanges of each kind, among values that have samples."""
    nodes = piper.compile(module, batch, program).dag.of_type(Redistribute)
    return Counter(
        n.label
        for n in nodes
        if not isinstance(n, CutOut) and n.outputs[0].tensors[0].shape[:1] == (len(batch[0]),)
    )


def test_heads_are_exchanged_for_parts():
    """q, k and v there and the result back, in each of two blocks, forth and back (Jacobs et al., DeepSpeed
    Ulysses, 2023).
    """
    program = over(attention="heads")
    assert report_of(program).verdict == "verified"
    assert exchanges(decoder(), tensors(8), program) == {"alltoall.tp": 16}


def test_keys_are_gathered():
    """k and v, in each of two blocks, and their gradients back into the parts."""
    program = over(attention="keys")
    assert report_of(program).verdict == "verified"
    assert exchanges(decoder(), tensors(8), program) == {"allgather.tp": 4, "reducescatter.tp": 4}


GOES: dict[str, Any] = {
    "microbatches": lambda about: [
        *over(**about)[:1],
        Split(filter={}, dim_name="MB", num_microbatches=2),
        *over(**about)[1:],
    ],
    "stages": lambda about: [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]], **about)],
    "zero3": lambda about: [
        Place(filter={}, devices=[[0, 1], [2, 3]], axes=["data", "tp"]),
        divided(None, **about),
        Replicate(filter={}, devices=[0, 1, 2, 3], shard_params=True),
    ],
    "words": lambda about: over(**(about | {"params": VOCABULARY})),
}
PAIRS = [(program, attention) for program in GOES for attention in ("keys", "heads")]


@pytest.mark.parametrize("program, attention", marked(PAIRS, [("stages", "heads"), ("zero3", "keys")]))
def test_they_go_with_other_directives(program, attention):
    made = GOES[program](SEQUENCES | {"attention": attention})
    assert report_of(made).verdict == "verified"


def test_few_keys_are_gathered_and_one_head_has_no_parts():
    """What moves less; heads that cannot be divided are no way."""
    assert "alltoall.tp" in exchanges(decoder(heads=4), tensors(8), over())
    assert set(exchanges(decoder(heads=1), tensors(8), over())) == {"allgather.tp", "reducescatter.tp"}
    assert piper.verify(decoder(heads=1), tensors(8), over()).verdict == "verified"
    assert piper.verify(decoder(heads=4), tensors(8), over(3)).verdict == "verified"  # 4 heads for 3 devices


class Attends(L.LightningModule):
    """An attention with few keys, to the keys that a mask lets it see."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.q, self.kv, self.out, self.mask = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8), mask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, pad = batch
        with piper.annotate("LAYER", 0):
            x = x.sin()
        with piper.annotate("LAYER", 1):
            q = self.q(x).unflatten(-1, (4, 2)).transpose(1, 2)
            k, v = (part.unflatten(-1, (1, 2)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
            mask = {"causal": None, "none": None, "keys": pad[:, None, None, :], "pairs": self._band(x)}[
                self.mask
            ]
            found = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=self.mask == "causal", enable_gqa=True
            )
            x = x + self.out(found.transpose(1, 2).flatten(2))
        with piper.annotate("LAYER", 2):
            return x.square().mean()

    def _band(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        return (at[:, None] - at[None, :]).abs() < 3


def attends(mask: str) -> tuple[L.LightningModule, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    pad = torch.ones(4, LENGTH, dtype=torch.bool)
    pad[1, 4:] = False
    return Attends(mask).double(), (torch.randn(4, LENGTH, 8, dtype=torch.float64), pad)


@pytest.mark.parametrize("mask", ["causal", "none", "keys", "pairs"])
@pytest.mark.parametrize("attention", marked(["keys", None], ["keys"]))
def test_every_mask_says_what_a_query_may_see(mask, attention):
    module, batch = attends(mask)
    program = over(attention=attention, values={"LAYER=*": 1})
    assert piper.verify(module, batch, program).verdict == "verified"
    assert "alltoall.tp" not in exchanges(module, batch, program)  # one head of keys is gathered


def test_lengths_that_cannot_be_divided_are_refused():
    with pytest.raises(
        CaptureError,
        match=r"whose dimension 1 cannot be sharded evenly over the 4 devices along 'tp'\. Pad it",
    ):
        report_of(over(4))


def test_what_is_no_way_to_attend_is_refused():
    with pytest.raises(DirectiveError, match="Give 'keys', 'heads' or 'ring'"):
        report_of(over(attention="around"))
    with pytest.raises(DirectiveError, match="Shard sequences"):
        report_of(over(attention="keys", values=None))


def test_a_mask_of_another_part_is_found(monkeypatch):
    """Queries that are taken for the first ones of the sequence see too few keys."""
    original = decompositions.Decomposer.ids
    late = lambda self, *about: self(torch.ops.aten.sub.Tensor, original(self, *about), 1)  # noqa: E731
    monkeypatch.setattr(decompositions.Decomposer, "ids", late)
    report = piper.verify(decoder(), tensors(8), over(attention="keys"))
    assert report.verdict == "NOT EQUIVALENT"
