"""Messages of directives and schedules, each with a program that triggers it and the fix that it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn

import lightning_piper as piper
from lightning_piper import Place
from lightning_piper.directives import parse
from lightning_piper.schedules import Action, dualpipev, fitted, from_csv, gpipe, to_csv
from lightning_piper.schedules.timing import StageCosts, timed
from tests.directives.test_fixes import BOTH, Parts, compiled, place
from tests.errors import dividing

ONE, TWO = [place({}, 0)], [place({}, *BOTH)]
PARTS = [{"PP": 0}, {"PP": "-"}, {"PP": 1}]


def averaged(*averages: str) -> list[Any]:
    parts = zip(PARTS, averages, strict=True)
    return [*TWO, *(piper.Replicate(filter=part, average=average) for part, average in parts)]


def ordered(*passes: str) -> list[Any]:
    split = piper.Order(filters=[{"PP": 0, "PASS": "BI"}, {"PP": 0, "PASS": "BW"}])
    return [*ONE, split, piper.Order(filters=[{"PP": 0, "PASS": each} for each in passes])]


def experts(module: Any, batch: Any) -> object:
    program = [*TWO, piper.Replicate(), piper.ShardExperts(filter={}, devices=[0, 1])]
    if module is not None:
        program[-1] = piper.ShardExperts(filter={"EP": "*"}, devices=[0, 1])
    return piper.compile(module or Parts(), batch, program)


def row(*cells: tuple[int, str]) -> list[tuple[Action, ...]]:
    return [(Action(stage, kind, 0),) for stage, kind in cells]


class Backwards(Parts):
    """Stage 1 runs before stage 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with piper.annotate("PP", 1):
            h = self.layers[0](batch).tanh()
        with piper.annotate("PP", 0):
            return self.layers[1](h).square().mean()


def backwards(order: piper.Order) -> object:
    return piper.compile(Backwards(), torch.randn(4, 4), [*ONE, order])


class Ends(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.down(self.up(batch).relu()).square().mean()


class Measured(Parts):
    def __init__(self, what: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.what, self.measure = what, torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.layers[0](batch)
        self.measure(self.what(h.detach()))
        return h.square().mean()


def measured(what: Callable[[torch.Tensor], torch.Tensor]) -> object:
    return piper.compile(Measured(what), torch.randn(4, 4), [piper.Split(2)])


class Weighed(Parts):
    def __init__(self, denominator: Callable[[int], int]) -> None:
        super().__init__()
        self.denominator = denominator

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers[0](batch).sum() / self.denominator(len(batch))


def weighed(denominator: Callable[[int], int], microbatches: int) -> object:
    return piper.compile(Weighed(denominator), torch.randn(4, 4), [piper.Split(microbatches)])


def sharded(*program: Any) -> object:
    return piper.compile(Ends(), torch.randn(4, 4), list(program))


def few(samples: int, microbatches: int) -> object:
    program = [*TWO, piper.Replicate(), piper.Split(microbatches)]
    return piper.compile(Parts(), torch.randn(samples, 4), program)


def smaller(samples: int) -> object:
    program = [*TWO, piper.Split(4), piper.Replicate()]
    return piper.compile(Parts(), torch.randn(8, 4), program).at(samples)


class Entered(Parts):
    def __init__(self, *stages: int) -> None:
        super().__init__()
        self.stages = stages

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for stage, layer in zip(self.stages, self.layers, strict=False):
            with piper.annotate("PP", stage):
                batch = layer(batch).tanh()
        with piper.annotate("PP", self.stages[-1]):
            return batch.square().mean()


def entered(*stages: int) -> object:
    order = piper.Order(filters=[{"PP": i, "PASS": "F"} for i in (0, 1)])
    return piper.compile(Entered(*stages), torch.randn(4, 4), [*ONE, order])


def across(*filters: Any) -> object:
    return compiled(
        place({"PP": 0}, 0),
        place({"PP": "-"}, 0),
        place({"PP": 1}, 1),
        piper.Split(2),
        piper.Order(filters=filters),
    )


def orders(*passes: str) -> piper.Order:
    first: list[Any] = [{"PP": 1, "PASS": each} for each in passes]
    return piper.Order(filters=[*first, {"PP": 0, "PASS": passes[-1]}] if len(passes) == 1 else first)


def inside(changed: str, after: str = "rows * score") -> object:
    module = dividing.experts(("torch.relu(", changed), ("rows * score", after))
    return piper.compile(module, dividing.batch(), [*TWO, piper.Replicate(), DIVIDED])


COPIES = piper.Order(filters=[{"PP": 0, "PASS": "F"}, {"PP": 0, "PASS": "STORE"}])
DIVIDED = piper.ShardExperts(filter={"EP": "*"}, devices=[0, 1])
MESH = Place(devices=[[0, 1], [2, 3]], axes=["dp", "tp"])
WEIGHT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
CONTEXT = piper.ShardSequences(values={"*": 1}, axis="cp")
COSTS = [StageCosts(1, 1, 1)] * 2
WEIGHTS: dict[str, Any] = {"params": {"layers.0.weight": 0}, "attention": "heads"}
CASES: dict[str, tuple[Callable[[], object], str, Callable[[], object]]] = {
    "zero": (
        lambda: piper.Replicate(zero=4),
        r"4 is not a level of ZeRO\. Give a level of ZeRO from 0 to 3",
        lambda: piper.Replicate(zero=3),
    ),
    "average": (
        lambda: compiled(*averaged("batch", "replicas", "batch")),
        r"'replicas' here, but 'batch' in an earlier replicate\. Give all replicate directives the same average",
        lambda: compiled(*averaged("replicas", "replicas", "replicas")),
    ),
    "split backward pass": (
        lambda: compiled(*ordered("F", "B")),
        r"directive 1 has split B into BI and BW, such as B[IW]\[PP=0\]\. Name BI and BW instead",
        lambda: compiled(*ordered("F", "BI", "BW")),
    ),
    "tag of microbatches": (
        lambda: compiled(*ONE, piper.Split(2), piper.Split(2)),
        r"already has MB=0\. Give a new tag",
        lambda: compiled(*ONE, piper.Split(2), piper.Split(2, dim_name="UB")),
    ),
    "recompute a part": (
        lambda: compiled(*ONE, piper.Split(2), piper.Recompute(filter={"PP": 0, "MB": 0}, keep=0.5)),
        r"With keep, select whole regions: leave PASS and the tags of microbatches out of the filter",
        lambda: compiled(*ONE, piper.Split(2), piper.Recompute(filter={"PP": 0}, keep=0.5)),
    ),
    "no experts": (
        lambda: experts(None, torch.randn(4, 4)),
        r"no region of the step dispatches tokens to experts\. Mark where tokens enter and leave the experts",
        lambda: experts(dividing.experts(), dividing.batch()),
    ),
    "attention without values": (
        lambda: parse([piper.ShardWeights(**WEIGHTS)]),
        r"'heads' needs sharded values\. Shard sequences: values=\{'\*': 1\}",
        lambda: parse([piper.ShardWeights(**WEIGHTS, values={"*": 1})]),
    ),
    "few microbatches": (
        lambda: dualpipev(4, 2),
        r"dualpipev: 2 microbatches for 4 stages\. Give at least 4 microbatches",
        lambda: dualpipev(4, 4),
    ),
    "bytes": (
        lambda: StageCosts(1, 1, 1, saved=-1),
        r"StageCosts\(saved=-1\)\. Give bytes, an integer >= 0",
        lambda: StageCosts(1, 1, 1, saved=0),
    ),
    "a stage on two ranks": (
        lambda: timed([row((0, "F"), (1, "F"), (1, "B")), row((0, "B"))], COSTS),
        r"timed: stage 0 is on rank 0 and on rank 1\. Put each stage on one rank",
        lambda: timed([row((0, "F"), (0, "B")), row((1, "F"), (1, "B"))], COSTS),
    ),
    "directives and degrees": (
        lambda: piper.PiperStrategy(ONE, pp=2),
        r"PiperStrategy: directives and pp are given\. Remove the directives, or remove pp",
        lambda: (piper.PiperStrategy(ONE), piper.PiperStrategy(pp=2)),
    ),
    "no copies": (
        lambda: compiled(*ONE, COPIES),
        r"matches nothing\. Add an offload of these chunks, or remove this filter",
        lambda: (compiled(*ONE, COPIES, piper.Offload(filter={"PP": 0})), compiled(*ONE)),
    ),
    "a whole backward pass": (
        lambda: compiled(place({"PASS": "BI"}, 0)),
        r"B\[PP=1\] is not split\. Name B instead, or leave PASS out of the filter",
        lambda: compiled(*ONE),
    ),
    "a group of devices": (
        lambda: compiled(*TWO, piper.Replicate(devices=[])),
        r"\[\] is not a list of distinct devices\. Give distinct device indices >= 0, such as \[0, 1\]",
        lambda: compiled(*TWO, piper.Replicate(devices=[0, 1])),
    ),
    "nothing sharded": (
        lambda: compiled(*TWO, piper.Replicate(zero=0, shard_size=2)),
        r"the directive shards nothing\. Give zero=1, 2 or 3, or remove shard_size",
        lambda: (
            compiled(*TWO, piper.Replicate(zero=1, shard_size=2)),
            compiled(*TWO, piper.Replicate(zero=0)),
        ),
    ),
    "updates overlap nothing": (
        lambda: compiled(*TWO, piper.Replicate(overlap_update=True)),
        r"Give shard_by='parameter' with zero=1, 2 or 3, or remove overlap_update",
        lambda: compiled(*TWO, piper.Replicate(overlap_update=True, shard_by="parameter", zero=1)),
    ),
    "values offloaded twice": (
        lambda: compiled(*ONE, piper.Offload(), piper.Offload(states=True)),
        r"directive 1 already offloads the values that the selected passes save\. Give saved=False",
        lambda: compiled(*ONE, piper.Offload(), piper.Offload(states=True, saved=False)),
    ),
    "replicas of shards": (
        lambda: sharded(
            Place(devices=[0, 1]), piper.ShardWeights(params=WEIGHT, devices=[0, 1]), piper.Replicate()
        ),
        r"Remove the replicate, or place the chunks on a mesh with replicas, such as "
        r"Place\(devices=\[\[0, 1\], \[2, 3\]\], axes=\['dp', 'tp'\]\), and leave devices out of the other directives",
        lambda: sharded(MESH, piper.ShardWeights(params=WEIGHT), piper.Replicate()),
    ),
    "a mesh for two directives": (
        lambda: sharded(MESH, piper.ShardWeights(params=WEIGHT), CONTEXT, piper.Replicate()),
        r"Give directive 0 a mesh with the axes \['dp', 'tp', 'cp'\], such as "
        r"Place\(devices=\[\[\[0, 1\], \[2, 3\]\], \[\[4, 5\], \[6, 7\]\]\], axes=\['dp', 'tp', 'cp'\]\)",
        lambda: sharded(
            Place(devices=[[[0, 1], [2, 3]], [[4, 5], [6, 7]]], axes=["dp", "tp", "cp"]),
            piper.ShardWeights(params=WEIGHT),
            CONTEXT,
            piper.Replicate(),
        ),
    ),
    "experts without a place": (
        lambda: piper.compile(dividing.experts(), dividing.batch(), [DIVIDED]),
        r"is not placed yet\. Place it on one of the groups \[\[0, 1\]\]",
        lambda: piper.compile(dividing.experts(), dividing.batch(), [*TWO, piper.Replicate(), DIVIDED]),
    ),
    "the batch in the experts": (
        lambda: inside("batch[0].mean() * torch.relu("),
        r"Pass a tensor with one row for each token through piper\.dispatch, and use any other tensor after",
        lambda: inside("torch.relu(", "batch[0].mean() * rows * score"),
    ),
    "a backward pass before its forward pass": (
        lambda: backwards(piper.Order(filters=[{"PP": 0, "PASS": "B"}, {"PP": 1, "PASS": "F"}])),
        r"closes a cycle: .*@0\. Remove or reverse one of the orders in this cycle",
        lambda: backwards(piper.Order(filters=[{"PP": 1, "PASS": "F"}, {"PP": 0, "PASS": "B"}])),
    ),
    "stages in another order": (
        lambda: backwards(piper.Order(filters=[{"PP": 0, "PASS": "F"}, {"PP": 1, "PASS": "F"}])),
        r"Number the stages in that order: piper\.annotate\('PP', 0\) before piper\.annotate\('PP', 1\)",
        lambda: compiled(*ONE, piper.Order(filters=[{"PP": 0, "PASS": "F"}, {"PP": 1, "PASS": "F"}])),
    ),
    "a denominator of one sample": (
        lambda: weighed(lambda n: n - 1, 4),
        r"A denominator such as len\(x\) - 1 is 0 with 1 sample: use larger microbatches",
        lambda: weighed(lambda n: n - 1, 2),
    ),
    "a metric of pairs of samples": (
        lambda: measured(lambda h: h @ h.T),
        r"self\.measure gets a tensor of shape \[4, 4\] for 4 samples, .*Pass tensors with one dimension that grows",
        lambda: measured(lambda h: h.square().sum(1)),
    ),
    "a least denominator": (
        lambda: weighed(lambda n: max(n, 3), 4),
        r"Divide by len\(x\), or declare .*: piper\.mean\(values, mask\.sum\(\)\) \[PIPER-C012\]",
        lambda: weighed(lambda n: n, 4),
    ),
    "a mesh without axes": (
        lambda: parse([Place([[[0, 1], [2, 3]]])]),
        r"mesh without names of its axes\. Give one list of devices, or axes with one name for each of its 3 dimensions",
        lambda: parse([Place([[[0, 1], [2, 3]]], axes=["dp", "cp", "tp"]), Place([0, 1, 2, 3])]),
    ),
    "too few names of axes": (
        lambda: parse([Place([[0, 1], [2, 3]], axes=["dp"])]),
        r"has 1 name, but \[\[0, 1\], \[2, 3\]\] has 2 dimensions\. Give one name for each level of lists",
        lambda: parse([Place([[0, 1], [2, 3]], axes=["dp", "tp"])]),
    ),
    "devices with a gap": (
        lambda: compiled(place({"PP": 0}, 3), place({"PP": 1}, 1), place({"PP": "-"}, 1)),
        r"regions on devices 1, 3\. Use devices 0 to 1, without gaps",
        lambda: compiled(place({"PP": 0}, 0), place({"PP": 1}, 1), place({"PP": "-"}, 1)),
    ),
    "passes on two devices": (
        lambda: compiled(place({"PASS": "F"}, 0), place({"PASS": "B"}, 1)),
        r"but F\[PP=0\] is on 0\. Place all passes of a microbatch on the same device",
        lambda: compiled(place({"PASS": "F"}, 0), place({"PASS": "B"}, 0)),
    ),
    "other groups": (
        lambda: compiled(*TWO, piper.Replicate(devices=[2, 3])),
        r"on which F\[PP=0\] is placed\. Give the place and the replicate the same groups",
        lambda: compiled(*TWO, piper.Replicate(devices=[0, 1])),
    ),
    "a device at two positions": (
        lambda: parse([piper.Replicate(devices=[[0, 1], [1, 2]])]),
        r"replica 1 in one group and replica 0 in another\. Give the device the same position in all groups",
        lambda: parse([piper.Replicate(devices=[[0, 1], [2, 1]])]),
    ),
    "a size of groups": (
        lambda: compiled(*TWO, piper.Replicate(zero=1, shard_size=3)),
        r"2 replicas cannot be divided into groups of 3\. Give 2 \[",
        lambda: compiled(*TWO, piper.Replicate(zero=1, shard_size=2)),
    ),
    "few samples for replicas": (
        lambda: few(6, 4),
        r"6 samples cannot be split into 4 microbatches for each of 2 replicas\. Give at most 3 microbatches, or a batch of 8",
        lambda: (few(6, 3), few(8, 4)),
    ),
    "one sample": (
        lambda: few(1, 1),
        r"the batch has 1 sample, which cannot .* over 2 replicas\. Give a multiple of 2 samples \[",
        lambda: few(2, 1),
    ),
    "a smaller batch": (
        lambda: smaller(3),
        r"The first batch had 8 samples\. Leave out .* DataLoader\(drop_last=True\), or give a multiple of 2 samples \[",
        lambda: (smaller(2), smaller(4)),
    ),
    "a stage entered again": (
        lambda: entered(0, 1, 0),
        r"The step enters PP=0 at .*, again at .*\. Give the second part the index of the part before it",
        lambda: entered(0, 1, 1),
    ),
    "one pass of a region": (
        lambda: compiled(*ONE, piper.Split(2, filter={"PASS": "F"})),
        r"selects F\[PP=0\] but not B\[PP=0\]\. Select both",
        lambda: compiled(*ONE, piper.Split(2, filter={"PASS": ["F", "B"]})),
    ),
    "an order across devices": (
        lambda: across({"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}),
        r"but no data flows from one to the other\. Name chunks of one device, or a chunk and a chunk that reads its result",
        lambda: (
            across({"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "B"}),
            across({"PP": 0, "MB": 0, "PASS": "F"}, {"PP": 1, "MB": 0, "PASS": "F"}),
        ),
    ),
    "B and its parts": (
        lambda: compiled(*ONE, orders("B"), orders("BI", "BW")),
        r"but directive 1 orders it as B\. Name BI and BW in all orders, or B in all of them",
        lambda: (compiled(*ONE, orders("BI"), orders("BI", "BW")), compiled(*ONE, orders("B"))),
    ),
    "a fetch before the values": (
        lambda: compiled(*ONE, piper.Offload(ahead={"PASS": "F"})),
        r"before the values to fetch have been stored\. Give a number of chunks instead, such as ahead=1",
        lambda: compiled(*ONE, piper.Offload(ahead=1)),
    ),
    "a part of B": (
        lambda: compiled(*ONE, piper.Offload(filter={"PASS": "BI"})),
        r"B\[PP=1\] is not split\. Put an order that names BI or BW before this directive",
        lambda: compiled(*ONE, orders("BI", "BW"), piper.Offload(filter={"PASS": "BI"})),
    ),
    "recomputed twice": (
        lambda: compiled(*ONE, piper.Recompute(), piper.Recompute(filter={"PP": 0})),
        r"already recomputes the values of B\[PP=0\] .*\. Recompute each region only once",
        lambda: compiled(*ONE, piper.Recompute(filter={"PP": 1}), piper.Recompute(filter={"PP": 0})),
    ),
    "no pass": (
        lambda: from_csv(",\n,"),
        r"the schedule has no pass\. Give a row of actions such as '0F0,0B0' for each rank",
        lambda: from_csv("0F0,0B0"),
    ),
    "other tags": (
        lambda: to_csv(gpipe(2, 2, tag="S")),
        r"\{'S': 0, 'MB': 0, 'PASS': 'F'\} is not one cell\. .*, or the names of other tags \(tag=, dim_name=\)",
        lambda: to_csv(gpipe(2, 2, tag="S"), tag="S"),
    ),
    "little memory": (
        lambda: fitted([StageCosts(1, 1, 1, saved=5)] * 2, 2, memory=[9, 3]),
        r"rank 1 needs memory=5, but has 3\. Give memory=5 \[",
        lambda: fitted([StageCosts(1, 1, 1, saved=5)] * 2, 2, memory=5),
    ),
    "a module without a batch": (
        lambda: piper.parallel(pp=2, module=Parts()),
        r"parallel: module is given without batch\. Give both, or neither",
        lambda: (piper.parallel(pp=2), piper.parallel(pp=2, module=Parts(), batch=torch.randn(4, 4))),
    ),
}


def check_fix(wrong: Callable[[], object], says: str, fixed: Callable[[], object]) -> None:
    """Check that a mistake gives a message, and that the fix in the message works."""
    with pytest.raises(piper.PiperError, match=says):
        wrong()
    fixed()


@pytest.mark.parametrize("name", CASES)
def test_the_fix_of_a_message_works(name: str) -> None:
    check_fix(*CASES[name])


def test_a_long_schedule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_piper.schedules.csv_files.FILE", 10)
    with pytest.raises(
        piper.PiperError, match=r"the text has 15 characters, but at most 10 are read\. Give a shorter"
    ):
        from_csv("0F0,0F1,0B0,0B1")
    from_csv("0F0,0B0")
