"""Tensors divided along an axis: programs that equal one device, errors, and findings."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper import Place, Replicate, ShardWeights, Split
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.errors import CaptureError, DirectiveError, VerificationError
from lightning_piper.ir.mesh import Mesh
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind, Replicated, Sharded
from lightning_piper.ops.communication.gather import Parameters
from lightning_piper.ops.communication.redistribute import CutOut, Redistribute
from lightning_piper.ops.update import Update
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.groups import marked
from tests.tensors import (
    PARAMS,
    VOCABULARY,
    compiled_for,
    decoder,
    divided,
    replicas,
    report_of,
    stages,
    tensors,
)

TWO = Place(filter={}, devices=[0, 1])
FOUR = Place(filter={}, devices=[0, 1, 2, 3])
PROGRAMS: dict[str, list[Any]] = {
    "two": [TWO, divided([0, 1])],
    "four": [FOUR, divided([0, 1, 2, 3])],
    "sequence": [TWO, divided([0, 1], sequence=True)],
    "microbatches": [TWO, Split(filter={}, dim_name="MB", num_microbatches=2),
        divided([0, 1], sequence=True)],
    "stages": [*stages([[0, 1], [2, 3]]), divided([[0, 1], [2, 3]])],
    "stages of sequences": [*stages([[0, 1], [3, 2]]), divided([[1, 0], [2, 3]], sequence=True)],
    "words": [TWO, divided([0, 1], params=VOCABULARY)],
    "words of sequences": [*stages([[0, 1], [3, 2]]),
        divided([[1, 0], [2, 3]], sequence=True, params=PARAMS | VOCABULARY)],
    "zero1": replicas({"shard_optimizer": True}),
    "zero3": replicas({"shard_params": True}),
    "all": [
        *stages([[0, 1, 2, 3], [4, 5, 6, 7]]), divided([[0, 2], [1, 3], [4, 6], [5, 7]], sequence=True),
        Replicate(filter={}, devices=[[0, 1, 2, 3], [4, 5, 6, 7]], shard_params=True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", marked(PROGRAMS, [*PROGRAMS][::2]))
def test_it_equals_one_device(name):
    report = report_of(PROGRAMS[name])
    assert report.verdict == "verified" and all(row.single.verdict != "differs" for row in report.rows)
    assert next(row for row in report.rows if row.name == "capture").single.verdict != "differs"


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_are_those_of_one_device(sequence):
    """Of values that are whole, and of parts of them, all draw one mask."""
    report = piper.verify(decoder(dropout=0.3), tensors(8), [TWO, divided([0, 1], sequence=sequence)])
    assert report.verdict == "verified"


def compiled(program: Any, **options: Any) -> Any:
    return piper.compile(decoder(**options), tensors(8), program) if options else compiled_for(program)


def test_values_change_where_weights_say_and_nowhere_else():
    """Two sums a block on the way forth, and two on the way back; nothing else travels."""
    found = [node for node in compiled(PROGRAMS["two"]).dag.of_type(Redistribute)]
    assert [node.label for node in found] == ["allreduce.tp"] * 8
    kinds = {
        kind: [n for n in found if n.outputs[0].kind == kind] for kind in (Kind.ACTIVATION, Kind.COTANGENT)
    }
    assert {kind: len(nodes) for kind, nodes in kinds.items()} == {Kind.ACTIVATION: 4, Kind.COTANGENT: 4}


def test_a_divided_sequence_travels_in_parts():
    found = [
        node.label
        for node in compiled(PROGRAMS["sequence"]).dag.of_type(Redistribute)
        if node.outputs[0].tensors[0].shape
    ]
    assert "allreduce.tp" not in found and found.count("reducescatter.tp") == 8  # but for the loss
    assert any(isinstance(node, CutOut) for node in compiled(PROGRAMS["sequence"]).dag.of_type(Redistribute))


def test_members_have_parts_of_parameters_gradients_and_states():
    found = compiled(PROGRAMS["zero1"])
    held = {name: found.dag.spec_of(name).shape for name in found.step.params}
    assert held["blocks.0.attention.q.weight"] == (4, 8) and held["blocks.0.attention.q.bias"] == (4,)
    assert held["blocks.0.attention.out.weight"] == (8, 4) and held["blocks.0.attention.out.bias"] == (8,)
    assert found.step.params["blocks.0.down.weight"].spec.dim_order == (1, 0)


# What is refused


@pytest.mark.parametrize(
    ("program", "error", "match"),
    [
        (
            [TWO, divided([0, 1], params={"*.qq.weight": 0})],
            DirectiveError,
            r"directive 1 .*'params': '\*.qq.weight' "
            r"matches no",
        ),
        (
            [TWO, divided([0, 1], values={"LAYERS=*": 1})],
            DirectiveError,
            r"'values': 'LAYERS=\*' matches no region. Give a label or pattern of regions, such as "
            r".*LAYER=0",
        ),
        (
            [TWO, divided([0, 1], params={"embed.weight": 2})],
            DirectiveError,
            "which does not have a dimension 2. Give it dimension",
        ),
        (
            [TWO, divided([0, 1], params={"*.q.weight": "0"})],
            DirectiveError,
            "Give names or patterns with dimensions",
        ),
        ([FOUR, divided([0, 1, 2, 3], params={"position": 0})], DirectiveError, "position has shape"),
        (
            [TWO, divided([0, 1], params={"norm.weight": 0})],
            CaptureError,
            "layer_norm.*cannot work on shards of norm.weight",
        ),
        (
            [Place([0, 1], axes=["cp"]), divided(None)],
            DirectiveError,
            "no place of the program has an axis 'tp'",
        ),
        (
            [TWO, Replicate(filter={}, devices=[0, 1]), divided([0, 1])],
            DirectiveError,
            "Remove the replicate, or place the chunks on a mesh with replicas",
        ),
        ([TWO, divided([0, 1]), divided([0, 1])], DirectiveError, "Combine them into one directive"),
    ],
)
def test_it_is_refused(program, error, match):
    with pytest.raises(error, match=match):
        compiled(program)


def test_heads_that_cannot_be_divided_are_kept_whole_or_refused():
    """Three members cannot have two heads: what the heads need is gathered, and the result is that of one
    device.
    """
    report = piper.verify(decoder(heads=1), tensors(4), [TWO, divided([0, 1])])
    assert report.verdict == "verified"


# Seeded faults


def dag_of(name: str) -> Any:
    found = compiled(PROGRAMS[name]).dag
    return found.copy()


def test_what_reads_a_sum_before_it_is_taken_is_found():
    dag = dag_of("two")
    for node in list(dag.of_type(Redistribute)):
        reader = dag.users(node)[0]
        broken = dag.copy()
        broken.substitute(broken.nodes[reader.id], (node.id, 0), node.inputs[0])
        with pytest.raises(
            VerificationError, match=r"as P\(sum\), but its code takes R: change the placement first"
        ):
            check(broken)


@pytest.mark.parametrize("change", ["before", "after", "axis", "mesh"])
def test_another_change_than_the_step_says_is_found(change):
    dag = dag_of("sequence")
    other = {"before": Replicated(), "after": Sharded(2), "axis": "data", "mesh": Mesh.flat(2)}[change]
    for node in list(dag.of_type(Redistribute)):
        broken = dag.copy()
        broken.change(broken.nodes[node.id], **{change: other})
        if getattr(node, change) != other:
            with pytest.raises(VerificationError):
                check(broken)


def test_weights_of_norms_whose_gradients_nobody_sums_are_found():
    """In a divided sequence each member has those of its own part: statically, and by what they are."""
    dag = dag_of("sequence")
    update = next(u for u in dag.of_type(Update) if "norm.weight" in dag.value(u.inputs[0]).names)
    (total,) = (dag.nodes[ref[0]] for ref in update.inputs)
    broken = dag.copy()
    broken.substitute(broken.nodes[update.id], (total.id, 0), total.inputs[0])
    with pytest.raises(VerificationError, match="norm"):
        check(broken, final=True)


def test_a_replicated_weight_counts_once():
    """Members that have the same gradients do not add them."""
    module, batch = decoder(), tensors(8)
    found = piper.compile(
        module, batch, [FOUR, divided([[0, 1], [2, 3]]), Replicate(filter={}, devices=[0, 1, 2, 3])]
    )
    update = next(u for u in found.dag.of_type(Update) if "head.weight" in found.dag.value(u.inputs[0]).names)
    summed = found.dag.nodes[update.inputs[0][0]]
    assert [summed.members(place) for place in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    broken = found.dag.copy()
    node = broken.nodes[summed.id]
    bucket = dataclasses.replace(node.outputs[0].bucket, mesh=Mesh.flat(4))
    broken.change(node, outputs=(dataclasses.replace(node.outputs[0], bucket=bucket),))
    with pytest.raises(VerificationError, match=r"shards, but \d+ replica"):
        check(broken, final=True)
    tensors_of = {name: x.detach() for name, x in [*module.named_parameters(), *module.named_buffers()]}
    wrong = interpret(broken, tensors_of, batch).grads["head.weight"]
    right = interpret(found.dag, tensors_of, batch).grads["head.weight"]
    assert torch.allclose(wrong, 2 * right)


def test_chunks_run_on_parts():
    found = compiled(PROGRAMS["two"])
    for chunk in found.dag.of_type(Chunk):
        grads = [v for v in chunk.outputs if v.kind == Kind.GRAD and v.others]
        assert all(spec.shape[0] in (4, 16, 8) for v in grads for spec in v.tensors)


def test_a_program_reads_back():
    program = [TWO, divided([0, 1], sequence=True)]
    assert program[1].to_json()["params"] == PARAMS
    assert ShardWeights(**{k: v for k, v in program[1].to_json().items() if k != "op"}) == program[1]


def test_a_filter_selects_all_that_reads_what_is_divided():
    with pytest.raises(
        DirectiveError,
        match=r"LAYER=2 also reads blocks.1.attention.q.weight, but the filter does not select it",
    ):
        compiled([TWO, divided([0, 1], filter={"LAYER": [0, 1]})])
    some = {
        f"blocks.0.{pattern.removeprefix('*.')}": dim
        for pattern, dim in {"*.up.weight": 0, "*.down.weight": 1}.items()
    }
    report = report_of([TWO, divided([0, 1], filter={"LAYER": 1}, params=some)])
    assert report.verdict == "verified"


def test_a_parameter_that_nobody_uses_stays_whole():
    module = decoder()
    module.blocks[0].spare = torch.nn.Linear(8, 8).double()
    program = [TWO, divided([0, 1], params=PARAMS | {"*.spare.weight": 0})]
    assert piper.verify(module, tensors(8), program).verdict == "verified"
    found = piper.compile(module, tensors(8), program).dag
    assert "blocks.0.spare.weight" not in found.divided and found.spec_of("blocks.0.spare.weight").shape == (
        8,
        8,
    )


class Turned(L.LightningModule):
    """A model that takes rows by another dimension between its products, so that gradients are parts of runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (torch.nn.Linear(8, 8) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("LAYER", 0):
            x = self.first(batch)
        with piper.annotate("LAYER", 1):
            x = x + self.second(x.transpose(1, 2).reshape(x.shape)).view(x.shape) / 2
        with piper.annotate("LAYER", 2):
            return self.head(x).square().mean()


def test_gradients_may_come_in_parts_of_runs():
    torch.manual_seed(0)
    module, batch = Turned().double(), torch.randn(8, 4, 8, dtype=torch.float64)
    params = {"first.weight": 0, "second.weight": 1, "second.bias": 0, "head.weight": 0}
    assert piper.verify(module, batch, [TWO, divided([0, 1], params=params)]).verdict == "verified"
    found = piper.compile(module, batch, [TWO, divided([0, 1], params=params)]).dag
    layers = [region.tags["LAYER"] for region in found.regions]
    assert layers == sorted(layers)  # what is added goes where it belongs


class Outside(L.LightningModule):
    """A model with annotated stages and unannotated work after them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 12)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP", 0):
            hidden = self.up(batch[0]).relu()
        with piper.annotate("PP", 1):
            scores = self.head(hidden)
        self.log("hits", (scores.argmax(-1) == batch[1]).double().mean())
        self.log("hidden", hidden.softmax(-1).pow(2).mean())
        return torch.nn.functional.cross_entropy(scores, batch[1])


def test_work_outside_of_annotations_is_cut_with_the_region_that_it_follows():
    torch.manual_seed(0)
    module, batch = Outside().double(), (torch.randn(4, 8, dtype=torch.float64), torch.arange(4))
    groups = [[0, 1], [2, 3]]
    program = [Place(filter={"PP": i}, devices=group) for i, group in enumerate(groups)]
    program += [divided(groups, params={"*.weight": 0})]
    assert piper.verify(module, batch, program).verdict == "verified"
    dag = piper.compile(module, batch, program).dag
    changes = list(dag.of_type(Redistribute))
    assert {node.tags["PP"]: node.devices for node in changes} == {0: (0, 1), 1: (2, 3)} and len(changes) > 4
    assert all("PP" in chunk.tags for chunk in dag.of_type(Chunk))


class Evaluated(L.LightningModule):
    """A model that does not train any parameter of `up`, so the training step is cut at other places than the
    forward-only step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.LayerNorm(8)
        self.up.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.norm(self.down(self.up(batch).relu())).relu().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("levels", [{}, {"shard_optimizer": True}, {"shard_params": True}], ids=str)
@pytest.mark.parametrize("values", marked([None, {"*": 1}], [{"*": 1}]), ids=str)
def test_an_evaluation_reads_the_shards_that_training_keeps(levels, values):
    torch.manual_seed(0)
    module, batch = Evaluated().double(), torch.randn(4, 6, 8, dtype=torch.float64)
    place, _, replicate = replicas(levels)
    division = divided(None, params={"up.weight": 0, "down.weight": 1}, values=values)
    training = piper.compile(module, batch, [place, division, replicate])
    step = capture(module.eval(), batch, name="validation_step")
    dag = compile_step(step, training.program, training=training.dag).dag
    kept = {node.outputs[0].bucket: node.kept for node in training.dag.of_type(Parameters)}
    found = {node.outputs[0].bucket: node.kept for node in dag.of_type(Parameters)}
    assert found.items() <= kept.items() and (found == kept or levels != {"shard_params": True})
    names = {name for bucket in found for name in bucket.names}
    assert names == (
        {*dict(module.named_parameters())} if levels else {"up.weight", "up.bias", "down.weight"}
    )
    with torch.no_grad():
        alone = module.training_step(batch, 0)
    tensors_of = {n: x.detach() for n, x in module.named_parameters()}
    assert torch.allclose(interpret(dag, tensors_of, [batch]).metrics["loss"], alone, rtol=0, atol=1e-14)
    moved = tensors_of | {"up.weight": tensors_of["up.weight"].roll(1, 0)}
    assert not torch.allclose(interpret(dag, moved, [batch]).metrics["loss"], alone, rtol=0, atol=1e-6)


class Score(L.LightningModule):
    """A model with weights whose dimensions have one element."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 1)
        self.scale = torch.nn.Parameter(torch.randn(1, 1, 8))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.down(self.up(batch * self.scale).relu()).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("degree", [2, 8])
def test_a_dimension_of_one_element_stands_before_the_divided_one(degree):
    torch.manual_seed(0)
    module, batch = Score().double(), torch.randn(2, 4, 8, dtype=torch.float64)
    devices = list(range(degree))
    program = [
        Place(filter={}, devices=devices),
        divided(devices, params={"up.weight": 0, "down.weight": 1, "scale": 2}),
    ]
    assert piper.verify(module, batch, program).verdict == "verified"
    buckets = {
        node.outputs[0].bucket for node in piper.compile(module, batch, program).dag.of_type(Parameters)
    }
    shapes = {
        name: spec.shape
        for bucket in buckets
        for name, spec in zip(bucket.names, bucket.tensors, strict=True)
    }
    assert shapes["down.weight"] == (1, 16 // degree) and shapes["scale"] == (1, 1, 8 // degree)


class Labeled(L.LightningModule):
    """A model whose labels are one row for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP", 0):
            hidden = batch[0].tanh() * self.head.weight.mean()
        with piper.annotate("PP", 1):
            scores = self.head(hidden).flatten(0, 1)
            return torch.nn.functional.cross_entropy(scores, batch[1].flatten(), label_smoothing=0.1)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_what_is_exchanged_is_the_same_for_all_sizes(microbatches):
    """A microbatch of one sample has no runs of samples; what one node exchanges for all may not depend on
    it.
    """
    batch = torch.randn(4, 6, 8, dtype=torch.float64), torch.randint(0, 8, (4, 6))
    program = [
        TWO,
        Split(filter={}, dim_name="MB", num_microbatches=microbatches),
        divided([0, 1], params={}, values={"*": 1}),
    ]
    if microbatches == 2:
        assert piper.verify(Labeled().double(), batch, program).verdict == "verified"
        return
    with pytest.raises(
        CaptureError,
        match=r"for 1 sample than for 4 .*choose microbatches of more than one sample",
    ):
        piper.compile(Labeled().double(), batch, program)


class SecondAlone(L.LightningModule):
    """Two stages, of which the validation runs only the second."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        with piper.annotate("PP", 0):
            hidden = self.down(self.up(batch[0]).tanh())
        with piper.annotate("PP", 1):
            return (self.head(hidden) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        with piper.annotate("PP", 1):
            self.log("error", (self.head(batch[0]) - batch[1]).square().mean())


def test_a_step_may_lack_the_regions_of_the_filter():
    program = [
        Place([0, 1], axes=["tp"]),
        piper.ShardWeights(filter={"PP": 0}, params={"up.weight": 0, "down.weight": 1}),
    ]
    batch = (torch.randn(4, 4), torch.randn(4, 1))
    whole, divided_one = (
        piper.compile(SecondAlone(), batch, program, step=step)
        for step in ("validation_step", "training_step")
    )
    assert len(whole.plans) == len(divided_one.plans) == 2
