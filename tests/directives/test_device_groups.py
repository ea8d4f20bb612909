"""Regions with several device groups: each device runs some of the microbatches, and all copies of a
parameter stay equal.
"""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper import verify
from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.directives import Place, Replicate, Split, accumulating, parse
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.metrics import Metrics
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import apply_program, complete
from lightning_piper.plan import check_plans, compile_plans
from lightning_piper.schedules import dualpipe, gpipe, zbv
from lightning_piper.testing import Spec, case
from lightning_piper.testing.equivalence import assert_same, run_interpreter, run_plans, single_device
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static_check import check
from tests.dags import Fixed, b, build, f, order, run, shape, split
from tests.models import fresh
from tests.reference import differences

Group = tuple[int, ...]


def place(device: int | list[int], **condition: Any) -> dict[str, Any]:
    return {"op": "place", "filter": condition, "devices": device if isinstance(device, list) else [device]}


# Two stages and four microbatches: the even microbatches run from device 0 to 1, the odd microbatches from 1
# to 0.
CROSSING = [
    split(4),
    place(0, PP=0, MB=[0, 2]),
    place(1, PP=0, MB=[1, 3]),
    place(1, PP=1, MB=[0, 2]),
    place(0, PP=1, MB=[1, 3]),
]


def updates(dag: TrainingDAG, name: str) -> list[Update]:
    return [u for u in dag.of_type(Update) if name in dag.value(u.inputs[0]).names]


def summands(dag: TrainingDAG, update: Update) -> list[tuple[Group, list[int]]]:
    """Return the groups whose sums an update adds up, and the microbatches of each group."""
    found = []
    for ref in update.inputs:
        total = dag.nodes[dag.source(ref)[0]]
        assert isinstance(total, Accumulate)
        found.append((total.devices, [int(dag.nodes[term[0]].tags["MB"]) for term in total.inputs]))
    return found


def test_each_home_sums_its_own_microbatches_and_all_add_up_the_same() -> None:
    dag = build("mlp", *CROSSING)
    for name in ("first.weight", "second.weight"):
        found = updates(dag, name)
        assert sorted(u.devices for u in found) == [(0,), (1,)]
        first, second = ([0, 2], [1, 3])
        one = (0,) if name == "first.weight" else (1,)
        other = (1,) if name == "first.weight" else (0,)
        assert [summands(dag, u) for u in found] == [[(one, first), (other, second)]] * 2
    moved = [(s.devices, s.peers) for s in dag.of_type(Send) if dag.value(s.inputs[0]).kind == "grad"]
    assert sorted(moved) == [((0,), (1,)), ((0,), (1,)), ((1,), (0,)), ((1,), (0,))]
    complete(dag)
    check(dag, final=True)


def without_metrics(dag: TrainingDAG) -> Any:
    return {key: n for key, n in shape(dag).items() if not any("loss" in str(part) for part in key)}


@pytest.mark.parametrize(
    "placing",
    [
        CROSSING[1:],
        CROSSING[:0:-1],
        [CROSSING[2], CROSSING[4], CROSSING[3], CROSSING[1]],
        [place(d, PP=s, MB=mb) for mb in (3, 0, 2, 1) for s, d in ((0, mb % 2), (1, 1 - mb % 2))],
    ],
)
def test_places_in_any_order_give_one_graph(placing: list[Any]) -> None:
    """Also when a group gets its microbatches one by one, and a sum its terms out of their order."""
    dag = build("mlp", CROSSING[0], *placing)
    check(dag)
    for name in ("first.weight", "second.weight"):
        expected = [summands(build("mlp", *CROSSING), u) for u in updates(build("mlp", *CROSSING), name)]
        assert [summands(dag, u) for u in updates(dag, name)] == expected
        assert sorted(u.devices for u in updates(dag, name)) == [(0,), (1,)]
    # All but the metrics, which are put together where the first of them was placed.
    assert without_metrics(dag) == without_metrics(build("mlp", *CROSSING))
    assert differences(run("mlp", dag), run("mlp", build("mlp", *CROSSING))) == []


def test_metrics_are_put_together_on_one_device() -> None:
    """Of a maximum, groups could not add up their parts: the scalars are sent."""
    dag = build("logs", *CROSSING)
    metrics = list(dag.of_type(Metrics))
    assert {m.devices for m in metrics} == {(0,), (1,)} and len(metrics) == 2
    sent = [s for s in dag.of_type(Send) if dag.value(s.inputs[0]).kind in ("loss", "log")]
    assert sent
    assert run("logs", dag).metrics == run("logs", build("logs", split(4))).metrics


def spec(*blocks: str, stages: tuple[int, ...] = (0, 1)) -> Spec:
    return Spec(blocks, stages)


CROSSED = [Split(filter={}, dim_name="MB", num_microbatches=4), *parse(CROSSING)[1:]]


BLOCKS = [("linear", "residual"), ("tied", "tied"), ("frozen", "linear"), ("dropout", "dropout"),
    ("auxiliary", "attention"),
          ("conv", "skip"), ("batchnorm", "linear"), ("linear", "batchnorm")]  # fmt: skip


@pytest.mark.parametrize(
    "blocks", [x if i in (1, 3, 7) else pytest.param(x, marks=pytest.mark.long) for i, x in enumerate(BLOCKS)]
)
def test_homes_compute_what_one_device_computes(blocks: tuple[str, ...]) -> None:
    one = case(spec(*blocks), 8)
    dag = apply_program(build_dag(one.step), CROSSED)
    complete(dag)
    check(dag, final=True)
    outcome = run_interpreter(one, dag)
    slices = dag.microbatches()
    assert slices is not None
    assert_same(single_device(one.spec, 8, slices), outcome, "float64", 8 * 8)
    assert_same(outcome, run_plans(one, dag), "bitwise")


def test_exact_models_are_bitwise_equal() -> None:
    """Where sums are exact, their order does not show."""
    one = case(Spec(("linear", "tied", "tied"), (0, 0, 1), exact=True), 8)
    dag = apply_program(build_dag(one.step), CROSSED)
    complete(dag)
    assert_same(
        interpret(accumulating(one.step, dag.microbatches() or ()), one.tensors, one.leaves),
        run_interpreter(one, dag),
        "exact",
    )


def test_a_report_says_which_place_re_associates() -> None:
    module, batch = fresh("mlp")
    report = verify(module, batch, CROSSING)
    assert report.ok, str(report)
    assert [row.contract for row in report.rows[2:-1]] == [
        "bitwise",
        "reassociated",
        "bitwise",
        "reassociated",
    ]
    plainly = verify(module, batch, [split(4), place(0, PP=0), place(1, PP=1)])
    assert [row.contract for row in plainly.rows[2:-1]] == ["bitwise", "bitwise"]


def test_running_statistics_cross_homes_and_come_to_all_of_them() -> None:
    """Each microbatch begins with what the one before left, on whichever device; the last value reaches
    both.
    """
    one = case(spec("batchnorm", "linear"), 8)
    dag = apply_program(build_dag(one.step), CROSSED)
    complete(dag)
    check(dag, final=True)
    name = next(n for n in one.tensors if n.endswith("running_mean"))
    assert sorted(u.devices for u in updates(dag, name)) == [(0,), (1,)]
    states = [s for s in dag.of_type(Send) if dag.value(s.inputs[0]).kind == "buffer"]
    assert len(states) == 4, "0 to 1 to 0 to 1, and the last one back"
    dag.remove(u for u in updates(dag, name) if u.devices == (0,))
    with pytest.raises(
        VerificationError, match=r"running_mean.* is used on device 0, but no update changes it there"
    ):
        check(dag)


def test_an_order_against_the_chain_of_statistics_is_refused() -> None:
    """DualPipe would run both directions at once, but the second half continues the statistics of the
    first.
    """
    one = case(spec("batchnorm", "linear"), 8)
    with pytest.raises(DirectiveError, match=r"this order closes a cycle: .*->"):
        apply_program(build_dag(one.step), dualpipe(2, 8))


def test_a_nested_split_keeps_the_groups() -> None:
    one = case(spec("linear", "batchnorm"), 8)
    dag = apply_program(build_dag(one.step), [*CROSSED, Split(filter={}, dim_name="UB", num_microbatches=2)])
    complete(dag)
    check(dag, final=True)
    assert {
        chunk.devices for chunk in dag.of_type(Chunk) if chunk.tags["PP"] == 0 and chunk.tags["MB"] == 1
    } == {(1,)}
    outcome = run_interpreter(one, dag)
    assert_same(single_device(one.spec, 8, dag.microbatches() or ()), outcome, "float64", 64)
    assert_same(outcome, run_plans(one, dag), "bitwise")


def test_a_part_that_is_split_alone() -> None:
    """Stage 1 runs whole; what the groups of stage 0 make is joined where it is."""
    one = case(spec("linear", "residual"), 8)
    program = [
        Split(filter={"PP": 0}, dim_name="MB", num_microbatches=2),
        Place(filter={"PP": 1}, devices=[2]),
        *(Place(filter={"PP": 0, "MB": mb}, devices=[mb]) for mb in (0, 1)),
    ]
    dag = apply_program(build_dag(one.step), program)
    complete(dag)
    check(dag, final=True)
    assert_same(run_interpreter(one, dag), run_plans(one, dag), "bitwise")


GROUPS = [[0, 2], [1, 3]]
CROSSED_GROUPS = [
    CROSSED[0],
    *(Place(filter=p.filter, devices=GROUPS[p.devices[0]]) for p in CROSSED[1:] if isinstance(p, Place)),
]
LEVELS: list[dict[str, Any]] = [{}, {"shard_optimizer": True}, {"shard_grads": True}, {"shard_params": True}]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: next(iter(level), "whole"))
@pytest.mark.parametrize(
    "blocks",
    [
        ("tied", "tied"),
        *(
            pytest.param(blocks, marks=pytest.mark.long)
            for blocks in (("linear", "residual"), ("frozen", "tied"))
        ),
    ],
)
def test_homes_may_be_groups_over_which_the_batch_is_divided(
    blocks: tuple[str, ...], level: dict[str, Any]
) -> None:
    one = case(spec(*blocks), 8)
    dag = apply_program(
        build_dag(one.step),
        [*CROSSED_GROUPS, Replicate(filter={}, devices=GROUPS, bucket_size=1e-4, **level)],
    )
    complete(dag)
    check(dag, final=True)
    assert {u.devices for u in dag.of_type(Update)} == {(0, 2), (1, 3)}
    outcome = run_interpreter(one, dag)
    assert_same(single_device(one.spec, 8, dag.microbatches() or ()), outcome, "float64", 128)
    assert_same(outcome, run_plans(one, dag), "bitwise")


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: next(iter(level), "whole"))
def test_a_parameter_that_another_device_only_reads_is_gathered_and_updated_there(
    level: dict[str, Any],
) -> None:
    step = watching()
    program = [Place(filter={"PP": s}, devices=g) for s, g in enumerate(GROUPS)]
    for filters in ([{}], [{"PP": 0}, {"PP": 1}], [{"PP": 1}, {"PP": 0}]):
        replicate = [Replicate(filter=which, devices=GROUPS, **level) for which in filters]
        dag = apply_program(build_dag(step), [*program, *replicate])
        complete(dag)
        check(dag, final=True)
        check_plans(compile_plans(dag))
        assert {u.devices for u in updates(dag, "layers.0.weight")} == {(0, 2), (1, 3)}


class Watching(L.LightningModule):
    """A module whose stage 1 uses a weight of stage 0 without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with annotate("PP", 0):
            x = torch.tanh(self.layers[0](batch))
        with annotate("PP", 1):
            return F.linear(self.layers[1](x), self.layers[0].weight.detach()).square().mean()


def watching() -> Any:
    return capture(Watching(), torch.randn(8, 4))


# A tied embedding along a V


def test_a_tied_embedding_on_a_v_has_one_copy_and_sends_no_gradient() -> None:
    """The first and the last stage of a V are on one device."""
    dag = build("tied", *zbv_of_three(), size=4)
    complete(dag)
    check(dag, final=True)
    assert [u.devices for u in updates(dag, "embed.weight")] == [(0,)]
    assert not [s for s in dag.of_type(Send) if dag.value(s.inputs[0]).kind == "grad"]
    users = {c.devices for c in dag.of_type(Chunk) if "embed.weight" in dag.interface(c).params}
    assert users == {(0,)}
    straight = build("tied", *gpipe(3, 4), size=4)
    assert [s.peers for s in straight.of_type(Send) if dag_kind(straight, s) == "grad"] == [(0,), (2,)], (
        "the control: both ways"
    )


def zbv_of_three() -> list[Any]:
    """Return ZB-V of four stages for a model with three stages: the two stages in the middle are one stage."""
    return [place(0, PP=[0, 2]), place(1, PP=1), split(4)]


def dag_kind(dag: TrainingDAG, send: Send) -> str:
    return dag.value(send.inputs[0]).kind


def test_zbv_of_a_tied_model() -> None:
    one = case(Spec(("tied", "linear", "residual", "tied"), (0, 1, 2, 3)), 8)
    dag = apply_program(build_dag(one.step), zbv(4, 4))
    complete(dag)
    check(dag, final=True)
    assert not [s for s in dag.of_type(Send) if dag_kind(dag, s) == "grad"]
    assert len(updates(dag, "shared.weight")) == 1 and updates(dag, "shared.weight")[0].devices == (0,)


# Refusals and negative controls


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            [place(0, MB=0)],
            "directive 0 (place): field 'filter': {MB: 0} matches nothing. Choose from the step's tags: PASS in {B, F}; PP "
            "in {0, 1}",
        ),
        (
            [split(2), place(0, PP=0, MB=0, PASS="F"), place(1, PP=0, PASS="B")],
            "B[PP=0,MB=0] would be on device 1, but F[PP=0,MB=0] is on 0. Place all passes of a microbatch "
            "on the same device",
        ),
        (
            [split(2), place(0, MB=0), place([0, 1], MB=1)],
            "[0, 1] is a group of 2, but F[PP=0,MB=0] is on a group of 1. Place every region",
        ),
        (
            [split(2), place(0, MB=0), place(1, PP=0)],
            "F[PP=0,MB=0] is already on device 0 (directive 1). Place each chunk once",
        ),
        (
            [
                split(2),
                place([0, 1], MB=0),
                place([2, 3], MB=1),
                {"op": "replicate", "filter": {"MB": 0}, "devices": [0, 1]},
            ],
            "directive 3 (replicate): field 'devices': the filter selects passes of region PP=0, but its pass "
            "F[PP=0,MB=1] is on [2, 3]. Add the group [2, 3] to the groups [[0, 1]]",
        ),
        (
            [split(2), place([0, 1], MB=0), {"op": "replicate", "filter": {"MB": 0}, "devices": [0, 1]}],
            "but its pass F[PP=0,MB=1] is not placed yet. Place all passes of the region before this directive",
        ),
        (
            [*CROSSING, order(f(0, 0), b(0, 0)), Fixed(), split(2, "UB")],
            "is already ordered by directive 5. Move this directive before that order",
        ),
    ],
)
def test_refused(program: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build("mlp", *program)


def test_a_microbatch_without_a_home_is_named() -> None:
    with pytest.raises(
        DirectiveError, match=r"some microbatches of PP=0, but .* filter \{\"PP\": 0, \"MB\": \[1, 3\]\}"
    ):
        complete(build("mlp", *CROSSING[:2], *CROSSING[3:]))


def drop_group(dag: TrainingDAG) -> None:
    for update in updates(dag, "first.weight"):
        dag.rewire(update, inputs=update.inputs[:1])


def twice(dag: TrainingDAG) -> None:
    """Let both groups add the first microbatch."""
    one, other = (dag.nodes[dag.source(ref)[0]] for ref in updates(dag, "first.weight")[0].inputs)
    if other.devices == (1,):
        send = dag.add(
            Send(inputs=one.inputs[:1], outputs=one.outputs, devices=(0,), peers=(1,), stream="send")
        )
        recv = dag.add(
            Recv(inputs=((send.id, 0),), outputs=one.outputs, devices=(1,), peers=(0,), stream="recv")
        )
        dag.rewire(other, inputs=((recv.id, 0), *other.inputs))


def exchanged(dag: TrainingDAG) -> None:
    update = updates(dag, "first.weight")[1]
    dag.rewire(update, inputs=update.inputs[::-1])


def one_home_twice(dag: TrainingDAG) -> None:
    for update in updates(dag, "first.weight"):
        dag.rewire(update, inputs=update.inputs[:1] * 2)


def term_left_out(dag: TrainingDAG) -> None:
    total = dag.nodes[dag.source(updates(dag, "first.weight")[0].inputs[1])[0]]
    dag.rewire(total, inputs=total.inputs[1:])


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            drop_group,
            r"gradient of first.weight.* samples 1:2 are missing: add what the chunk of these samples makes",
        ),
        (twice, r"gradient of first.weight.* samples 0:1 count 2 times: take each sample once"),
        (
            exchanged,
            r"gradient of first.weight.*: update .* on device 0.* and update .* on device 1.* must add up the "
            r"same values in the same order",
        ),
        (one_home_twice, r"gradient of first.weight.* samples 0:1 count 2 times"),
        (term_left_out, r"gradient of first.weight.* samples 1:2 are missing"),
    ],
)
def test_wrong_sums_over_groups_are_found(edit: Any, says: str) -> None:
    dag = build("mlp", *CROSSING)
    check(dag)
    edit(dag)
    with pytest.raises(VerificationError, match=says):
        check(dag)


def test_work_grows_with_the_graph() -> None:
    """Nodes are as many as the microbatches ask for, whatever the number of groups."""
    sizes = []
    for count in (4, 8, 16):
        dag = apply_program(build_dag(case(spec("linear", "linear"), 16).step), dualpipe(2, count))
        sizes.append(len(dag.nodes))
    assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0])
