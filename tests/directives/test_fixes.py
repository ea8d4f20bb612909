"""The filters, degrees and meshes that messages of directives name."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn

import lightning_piper as piper
from lightning_piper.compiler import Compiled
from lightning_piper.session.program import for_fit
from tests.errors import dividing


class Parts(LightningModule):
    """Code without a tag between two stages, and a second tag inside of stage 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.LayerNorm(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 0):
            h = self.layers[0](batch).tanh()
        h = self.layers[1](h).tanh()
        with piper.annotate("PP", 1), piper.annotate("EP", 0):
            h = self.layers[2](h).tanh()
        with piper.annotate("PP", 1):
            return F.mse_loss(self.layers[3](h), batch)


def place(condition: Any, *devices: int) -> piper.Place:
    return piper.Place(list(devices), filter=condition)


def compiled(*program: Any) -> Compiled:
    return piper.compile(Parts(), torch.randn(4, 4), list(program))


def named(said: str) -> list[Any]:
    """Return the filters at the end of a message."""
    return [json.loads(text) for text in re.findall(r"\{[^{}]*\}", said.partition("with the filter ")[2])]


BOTH = (0, 1)
UNSUMMED: list[tuple[Any, list[Any]]] = [
    ({"PP": [0, 1]}, [{"PP": "-"}]),
    ({"EP": 0}, [{"PP": "-"}, {"PP": 0}, {"PP": 1, "EP": "-"}]),
    ({"PP": "-"}, [{"PP": [0, 1]}]),
    ({"PP": 0}, [{"PP": "-"}, {"PP": 1}]),
]


@pytest.mark.parametrize("selected, missing", UNSUMMED)
def test_a_missing_replicate_is_named_with_a_filter_of_exactly_these_regions(
    selected: Any, missing: list[Any]
) -> None:
    program = [place({}, *BOTH), piper.Replicate(filter=selected)]
    with pytest.raises(piper.DirectiveError, match="no directive sums the gradient of") as caught:
        compiled(*program)
    found = named(str(caught.value))
    assert sorted(map(str, found)) == sorted(map(str, missing))
    compiled(*program, *(piper.Replicate(filter=each) for each in found))
    with pytest.raises(piper.DirectiveError, match="already sums the gradients"):
        compiled(*program, piper.Replicate(filter={}))


def test_a_missing_place_is_named_with_a_filter_of_exactly_this_region() -> None:
    program = [place({"PP": 0}, 0), place({"PP": "-"}, 0), place({"EP": 0}, 1)]
    with pytest.raises(piper.DirectiveError, match="leaves 1 without a device: PP=1") as caught:
        compiled(*program)
    assert named(str(caught.value)) == [{"PP": 1, "EP": "-"}]
    compiled(*program, place({"PP": 1, "EP": "-"}, 1))
    with pytest.raises(piper.DirectiveError, match="is already on device"):
        compiled(*program, place({"PP": 1}, 1))


def test_tags_that_no_chunk_has_together_are_named() -> None:
    with pytest.raises(
        piper.DirectiveError,
        match=r"no chunk has all of these tags. Choose .*: \{PP: 0\}, \{\}, \{PP: 1, EP: 0\}, \{PP: 1\}",
    ):
        compiled(place({"PP": 0, "EP": 0}, 0))


def test_the_directives_without_a_user_are_not_named_by_their_index() -> None:
    program = for_fit(None, Parts(), 2, lambda text: None)
    with pytest.raises(piper.DirectiveError, match=r"^PiperStrategy\(\): the batch has 3 samples"):
        piper.compile(Parts(), torch.randn(3, 4), program)
    given = [place({}, *BOTH), piper.Replicate(filter={})]
    with pytest.raises(piper.DirectiveError, match=r"^directive 1 \(replicate\): .*the batch has 3 samples"):
        piper.compile(Parts(), torch.randn(3, 4), given)


def test_orders_against_running_statistics_name_the_buffer() -> None:
    class Running(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.seen: torch.Tensor
            self.register_buffer("seen", torch.zeros(4))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.seen.add_(batch.mean(0))
            return super().training_step(batch, batch_idx)

    def ordered(*microbatches: int) -> list[Any]:
        filters: Any = [{"PASS": "F", "MB": i} for i in microbatches]
        return [piper.Split(filter={}, num_microbatches=2), piper.Order(filters=filters)]

    with pytest.raises(
        piper.DirectiveError, match="Each microbatch changes seen after the microbatch before"
    ):
        piper.compile(Running(), torch.randn(4, 4), ordered(1, 0))
    piper.compile(Running(), torch.randn(4, 4), ordered(0, 1))


def test_an_offload_after_a_recompute_names_the_recompute() -> None:
    program = [place({}, 0), piper.Recompute()]
    with pytest.raises(
        piper.DirectiveError,
        match=r"directive 2 \(offload\): .*: an earlier recompute repeats the selected passes \(such as F\[PP=0\]\), so they "
        r"save nothing .* Remove this directive",
    ):
        compiled(*program, piper.Offload(filter={"PP": 0}))
    compiled(*program)
    with pytest.raises(piper.DirectiveError, match=r"such as B\[.*\]\) save nothing for a backward pass"):
        compiled(*program, piper.Offload(filter={"PASS": "B"}))
    both = piper.Offload(filter={"PP": 0}, states=True)
    with pytest.raises(piper.DirectiveError, match=r"an earlier recompute repeats .* Give saved=False"):
        compiled(*program, both)
    compiled(*program, dataclasses.replace(both, saved=False))
    compiled(*program, piper.Offload(filter={"PP": 1}))  # reads an activation of the region before it


def test_an_offload_of_regions_without_a_device_names_them() -> None:
    program = [piper.Recompute(filter={"EP": "*"}), piper.Offload(), place({"PP": "*"}, 0)]
    with pytest.raises(piper.DirectiveError, match="without a device") as caught:
        compiled(*program)
    assert named(str(caught.value)) == [{"PP": "-"}]
    compiled(*program, place({"PP": "-"}, 0))


def test_a_pass_without_a_device_is_named() -> None:
    rest = place({"PP": "-"}, 0)
    with pytest.raises(
        piper.DirectiveError,
        match=r"directive 1 \(place\) places B\[PP=0\], but F\[PP=0\] has no device. Leave PASS out of the filter of this",
    ):
        compiled(rest, place({"PP": "*", "PASS": "B"}, 0))
    compiled(rest, place({"PP": "*"}, 0))


def test_microbatches_without_a_device_are_named() -> None:
    program = [
        place({"PP": "-"}, 0),
        place({"PP": 1}, 0),
        piper.Split(num_microbatches=4),
        place({"PP": 0, "MB": 0}, 0),
    ]
    with pytest.raises(
        piper.DirectiveError, match=r"some microbatches of PP=0, but F\[PP=0,MB=1\] has no device"
    ) as caught:
        compiled(*program)
    (missing,) = named(str(caught.value))
    assert missing == {"PP": 0, "MB": [1, 2, 3]}
    compiled(*program, place(missing, 1))


class Gathered(Parts):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 0):
            h = self.layers[0](batch).tanh()
        rows = piper.gather_samples(h)
        return (rows @ rows.T).logsumexp(1).mean()


def test_an_offload_before_a_split_needs_no_place() -> None:
    program = [piper.Offload(), piper.Recompute(), piper.Split(num_microbatches=2, filter={"PP": 0})]
    assert piper.verify(Gathered(), torch.randn(4, 4), program).verdict == "verified"


class Numbered(Parts):
    """A step whose batch has no tensor."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(torch.full((4, 4), float(batch)), batch_idx)


@pytest.mark.parametrize(
    "program, says",
    [
        (
            [piper.Split(num_microbatches=2)],
            "because it has no tensor. Use one microbatch",
        ),
        (
            [place({}, *BOTH), piper.Replicate()],
            "because it has no tensor. Give the batch tensors whose first dimension is the samples",
        ),
    ],
)
def test_a_batch_without_tensors(program: list[Any], says: str) -> None:
    with pytest.raises(piper.DirectiveError, match=says):
        piper.compile(Numbered(), 1, program)
    piper.compile(Numbered(), 1, [piper.Split(num_microbatches=1)])
    compiled(*program)  # tensors with samples


@pytest.mark.parametrize(
    "made",
    [
        lambda x: piper.Replicate(shard_by=x, zero=1),
        lambda x: piper.Replicate(average=x),
        lambda x: piper.ShardWeights(params={"w": 0}, attention=x),
        lambda x: piper.ShardSequences(attention=x),
    ],
)
def test_a_value_of_another_kind_is_unknown(made: Any) -> None:
    with pytest.raises(piper.DirectiveError, match=r"is unknown. Give "):
        piper.directives.parse([made(np.array([0, 1]))])


def test_experts_that_the_annotation_does_not_enclose() -> None:
    program = [place({}, *BOTH), piper.Replicate(), piper.ShardExperts(filter={"EP": "*"}, devices=[0, 1])]
    dispatch = "rows, sizes = piper.dispatch(x[order], counts)\n"
    apart = dispatch + " " * 8 + 'with piper.annotate("PP", 0):\n'
    with pytest.raises(
        piper.DirectiveError,
        match=r"reads no parameter whose first dimension is its number of experts, 4\. Annotate the experts together",
    ):
        piper.compile(dividing.experts((dispatch, apart)), dividing.batch(), program)
    piper.compile(dividing.experts(), dividing.batch(), program)


class Lone(LightningModule):
    """A norm after the only product, which needs the whole result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(self.fc(batch)).square().mean()


def test_tensor_parallelism_without_weights_names_directives_that_work() -> None:
    with pytest.raises(piper.PiperError) as caught:
        piper.tensor_parallel(Lone(), torch.randn(2, 4), 2)
    said = str(caught.value)
    assert "Place(devices=[0, 1], axes=['tp']) and ShardWeights(params={'fc.weight': 0})" in said
    program = [piper.Place(devices=[0, 1], axes=["tp"]), piper.ShardWeights(params={"fc.weight": 0})]
    piper.compile(Lone(), torch.randn(2, 4), program)
    with pytest.raises(
        piper.PiperError, match=r"3 does not divide any dimension of a weight matrix. Use replicas"
    ):
        piper.tensor_parallel(Lone(), torch.randn(2, 4), 3)
