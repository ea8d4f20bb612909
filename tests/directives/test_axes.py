"""Tensors divided along several axes at once, and beside experts."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import Replicate, ShardExperts, ShardWeights, Split
from lightning_piper.degrees import Degrees
from lightning_piper.directives import member_tensors
from lightning_piper.errors import CaptureError, DirectiveError, VerificationError
from lightning_piper.ir.values import Kind
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute
from lightning_piper.ops.update import Update
from lightning_piper.verify.static_check import check
from tests.axes import EXPERTS, HEADS, columns, everywhere, sequences, sparse
from tests.dags import Fixed
from tests.groups import marked
from tests.tensors import DIM, PARAMS, VOCABULARY, WORDS, compiled_for, decoder, grid, report_of, tensors

LEVELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "zero1": {"shard_optimizer": True},
    "zero3": {"shard_params": True},
}
SPLIT = Split(filter={}, dim_name="MB", num_microbatches=2)
PROGRAMS: dict[str, list[Any]] = {
    "keys": [grid(cp=2, tp=2), columns(), sequences("keys")],
    "ring": [grid(cp=2, tp=2), columns(), sequences("ring")],
    "ring of runs": [grid(cp=2, tp=2), SPLIT, columns(), sequences("ring", values={"*": (1, 3)}), ],
    "heads": [grid(cp=2, tp=2), columns(params=PARAMS), sequences("heads")],
    "sequences first": [grid(tp=2, cp=2), sequences(None), columns()],
    "microbatches": [grid(cp=2, tp=2), SPLIT, columns(), sequences()],
    **{
        f"replicas, {name}": [grid(data=2, cp=2, tp=2), columns(), sequences(), everywhere(8, **level)]
        for name, level in LEVELS.items()
    },
    "stages": [
        *(grid({"LAYER": [2 * i, 2 * i + 1]}, start=4 * i, tp=2, cp=2) for i in range(2)), SPLIT, columns(),
        sequences(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", marked(PROGRAMS, ["stages"]))
def test_two_axes_equal_one_device(name):
    report = report_of(PROGRAMS[name])
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows)


class Scored(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, WORDS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        with piper.annotate("LAYER", 0):
            x = x + x.flip(1).cumsum(1) / 4
        with piper.annotate("LAYER", 1):
            return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def test_what_changes_along_one_axis_changes_along_the_other_at_once():
    """Parts of runs along one, and of another dimension along the other, of one value."""
    batch = torch.randn(8, 6, DIM, dtype=torch.float64), tensors(8)[1]
    divided = columns(params={"head.weight": 0}, values={"*": (1, 3)}), sequences(None, values={"LAYER=0": 2})
    assert piper.verify(Scored().double(), batch, [grid(cp=2, tp=2), *divided]).verdict == "verified"


def test_masks_are_those_of_one_device():
    assert piper.verify(decoder(dropout=0.3), tensors(8), PROGRAMS["keys"]).verdict == "verified"


def test_each_axis_exchanges_what_it_would_by_itself():
    """Two sums a block forth and back along one; two gathers, and as many sums into parts on the way back,
    along the other.
    """
    dag = compiled_for([grid(cp=2, tp=2), columns(params=PARAMS), sequences("keys")]).dag
    nodes = [node for node in dag.of_type(Redistribute) if node.outputs[0].tensors[0].shape[:1] == (8,)]
    assert Counter(node.label for node in nodes if not isinstance(node, CutOut)) == {
        "allreduce.tp": 8, "allgather.cp": 4, "reducescatter.cp": 4
    }  # fmt: skip
    assert {node.stream for node in nodes if not isinstance(node, CutOut)} == {"tp", "cp"}
    gathered = next(node for node in nodes if node.label == "allgather.cp")
    assert dict(gathered.outputs[0].others).keys() == {"tp"}  # of heads that are divided still


def test_gradients_are_summed_over_those_who_have_terms():
    """A divided weight over the other axis and the replicas; a norm's over both axes that its values are
    divided along.
    """
    dag = compiled_for(PROGRAMS["replicas, plain"]).dag
    found = {
        name: dag.mesh_of(name)
        for update in dag.of_type(Update)
        for name in dag.value(update.inputs[0]).names
    }
    assert found["blocks.0.up.weight"].axes == ("data", "tp") and found["blocks.0.up.weight"].shape == (4, 2)
    assert found["norm.weight"].axes == ("data", "tp") and found["norm.weight"].size("data") == 4
    assert dag.spec_of("blocks.0.up.weight").shape == (16, 8) and dag.spec_of("norm.weight").shape == (8,)


def test_a_sum_over_too_few_is_found(monkeypatch):
    """As if members of the other axis had whole gradients."""
    monkeypatch.setattr("lightning_piper.ir.sharded_values.is_summed", lambda dag, output: False)
    monkeypatch.setattr("lightning_piper.ops.chunk.is_summed", lambda dag, output: False)
    with pytest.raises(VerificationError):
        report_of(PROGRAMS["keys"])


def test_a_change_along_another_axis_is_found():
    dag = compiled_for(PROGRAMS["keys"]).dag
    for node in [node for node in dag.of_type(Redistribute) if not isinstance(node, CutOut)][::4]:
        broken = dag.copy()
        broken.change(broken.nodes[node.id], axis="cp" if node.axis == "tp" else "tp")
        with pytest.raises(VerificationError):
            check(broken)


def test_one_dimension_has_one_axis(monkeypatch):
    """Whose part would come first? Said of directives; and where it follows from what operations do."""
    with pytest.raises(
        DirectiveError,
        match=r"directive 2 .*an earlier directive shards dimension 1 of values along 'tp'. Shard each",
    ):
        compiled_for([grid(cp=2, tp=2), columns(values={"*": 1}), sequences()])
    both = [grid(cp=2, tp=2), columns(), ShardWeights(filter={}, axis="cp", params={"blocks.0.up.weight": 0})]
    with pytest.raises(
        DirectiveError, match=r"shards blocks\.0\.up\.weight along 'tp'. Shard each parameter along one axis"
    ):
        compiled_for(both)
    monkeypatch.setattr(member_tensors, "_check_together", lambda *about: None)
    with pytest.raises(
        CaptureError,
        match=r"dimension 1 of aten\.add\.Tensor would be sharded along 'tp' and 'cp' at once\. Shard",
    ):
        compiled_for([grid(cp=2, tp=2), columns(values={"*": 1}), sequences()])


@pytest.mark.parametrize(
    "program, expected",
    [
        (
            [grid(cp=2, tp=2), columns(devices=[[0, 1], [2, 3]]), sequences()],
            "2 directives shard tensors, and their devices do not show",
        ),
        ([grid(tp=2), columns(), sequences()], r"has only the axes \['tp'\], but .* along 'cp'"),
        (
            [grid(cp=2, tp=2), columns(), sequences(axis="tp")],
            "several directives shard tensors along 'tp'. Combine them into one",
        ),
        (
            [
                grid({"LAYER": [0, 1]}, tp=2, cp=2),
                grid({"LAYER": [2, 3]}, start=4, tp=2, data=2),
                columns(),
                sequences(),
            ],
            r"directive 1 \(place\) has only the axes \['tp', 'data'\], but .* along 'cp'. Give "
            r"directive 1 a mesh with the axes \['tp', 'cp'\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(program, expected):
    with pytest.raises(DirectiveError, match=expected):
        compiled_for(program)


# Beside experts

ROUTED: dict[str, list[Any]] = {
    "heads": [grid(ep=2, tp=2), columns(params=HEADS), EXPERTS, everywhere(4)],
    "replicated first": [grid(tp=2, ep=2), columns(params=HEADS), everywhere(4), EXPERTS],
    "words": [grid(ep=2, tp=2), columns(params=HEADS | VOCABULARY), EXPERTS,
        everywhere(4, shard_optimizer=True)],
    "sequences": [grid(ep=2, tp=2), columns(params=HEADS, values={"LAYER=*": 1}), EXPERTS, everywhere(4)],
    "parts of sequences": [grid(ep=2, cp=2), sequences(), EXPERTS, everywhere(4)],
    "parts of runs": [grid(ep=2, cp=2), sequences(values={"*": (1, 3)}), EXPERTS, everywhere(4)],
    "microbatches": [grid(ep=2, tp=2), SPLIT, columns(params=HEADS), EXPERTS, everywhere(4)],
    "zero3": [grid(data=2, ep=2, tp=2), columns(params=HEADS), EXPERTS, everywhere(8, shard_params=True)],
    "all": [grid(ep=2, cp=2, tp=2), sequences(), columns(params=HEADS), EXPERTS,
        everywhere(8, shard_params=True)],
    "stages": [
        *(grid({"LAYER": i}, start=4 * i, ep=2, tp=2) for i in range(2)), SPLIT, columns(params=HEADS),
        EXPERTS,
        Replicate(filter={}, devices=[[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", marked(ROUTED, ["zero3"]))
def test_experts_and_tensors_are_divided_together(name):
    report = report_of(ROUTED[name], sparse)
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows)


def test_losses_with_several_terms_are_computed_outside_of_experts():
    """Gradients of scores are merged where parts of sequences begin."""
    program = [*ROUTED["parts of sequences"][:1], sequences("ring"), *ROUTED["parts of sequences"][2:]]
    report = piper.verify(sparse(label_smoothing=0.1), tensors(8), program)
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows)


def test_experts_are_owned_along_their_axis_and_tokens_travel_along_it():
    dag = compiled_for(ROUTED["zero3"], sparse).dag
    assert dag.spec_of("mixed.0.up").shape == (2, 16, 8) and dag.spec_of("attentions.0.q.weight").shape == (
        4,
        8,
    )
    assert dag.mesh_of("mixed.0.up").shape == (2, 2, 2) and dag.divided["mixed.0.up"] == ("ep",)
    assert {node.mesh.line("ep", 0) for node in dag.of_type(AllToAll)} == {(0, 2)}


@pytest.mark.parametrize(
    "program, expected",
    [
        (
            [grid(ep=2, tp=2), EXPERTS, Fixed(), columns(params=HEADS), everywhere(4)],
            "directive 1 .*a later directive shards weights or sequences. Move this",
        ),
        (
            [
                grid(ep=2, tp=2),
                columns(params=HEADS),
                ShardExperts(filter={"EP": "*"}, devices=[[0, 2], [1, 3]]),
                everywhere(4),
            ],
            "another directive shards weights or sequences. Place the chunks on a mesh",
        ),
    ],
)
def test_what_does_not_go_with_experts_is_refused(program, expected):
    with pytest.raises(DirectiveError, match=expected):
        compiled_for(program, sparse)


def test_a_dimension_that_no_value_has_is_refused():
    with pytest.raises(
        DirectiveError,
        match="field 'values': no region outputs a value with a dimension 5, because the outputs of all regions have at most 3",
    ):
        compiled_for([grid(cp=2), sequences(values={"*": 5})])


class Plain(L.LightningModule):
    """A model of sequences, with or without annotations."""

    def __init__(self, annotated: bool) -> None:
        super().__init__()
        self.first, self.last, self.annotated = nn.Linear(8, 8), nn.Linear(8, 8), annotated

    def training_step(self, batch, batch_idx):
        with piper.annotate("LAYER", 0) if self.annotated else contextlib.nullcontext():
            hidden = self.first(batch).relu()
        with piper.annotate("LAYER", 1) if self.annotated else contextlib.nullcontext():
            return self.last(hidden).square().mean()


@pytest.mark.parametrize("ends", ["", ", or leave cp out"], ids=["directives", "degrees"])
def test_sequences_of_a_step_of_one_region_are_refused(ends):
    program, batch = [grid(cp=2), sequences(None)], torch.randn(4, 6, 8)
    if ends:
        program = [*Degrees(cp=2, dp=1).program().directives]
    with pytest.raises(
        DirectiveError, match=f"one region.*Annotate parts of the step, such as the layers{ends} \\["
    ):
        piper.compile(Plain(False), batch, program)
    compiled = piper.compile(Plain(True), batch, program)
    values = [x for node in compiled.dag.nodes.values() for x in node.outputs if x.kind == Kind.ACTIVATION]
    assert (4, 3, 8) in {tuple(x.tensors[0].shape) for x in values}


def test_members_are_no_replicas():
    with pytest.raises(
        DirectiveError,
        match=r"work on the same samples, because they shard tensors along tp, cp. Remove the replicate",
    ):
        compiled_for([grid(cp=2, tp=2), columns(), sequences(), everywhere(4)])


def test_one_device_is_no_axis():
    with pytest.raises(DirectiveError, match=r"only one device along 'cp'. Give the axis two or more"):
        compiled_for([grid(cp=1, tp=2), columns(), sequences()])


@pytest.mark.parametrize("count", marked([5, 3], [3]))
def test_odd_batches_have_the_same_exchanges(count):
    """Also of attention whose gradient arrives in parts, in a region that is whole."""
    batch = tensors(count)
    program = [grid({}, cp=2, tp=2), SPLIT, columns(), sequences("keys", values={"LAYER=1": 1, "LAYER=2": 1})]
    assert (
        piper.verify(decoder(), batch, program if count == 5 else [program[0], *program[2:]]).verdict
        == "verified"
    )
