"""`place`, and the end of a program."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_piper.capture import capture
from lightning_piper.directives import parse
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.metrics import StepReport
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import apply_program, complete
from lightning_piper.verify.static_check import check
from tests.dags import Fixed, b, build, chunk, f, order, place, run, shape, split
from tests.models import MLP, captured, regression
from tests.reference import differences


def test_all_that_follows_from_a_chunk_goes_with_it() -> None:
    dag = build("mlp", *place(0, 1))
    for node in dag.nodes.values():
        if not isinstance(node, Send | Recv | AllReduce | StepReport):
            assert node.devices == ({"PP=0": (0,), "PP=1": (1,)}[f"PP={node.tags['PP']}"])
            assert node.placed_by == node.tags["PP"]


def test_one_transfer_serves_all_readers_on_a_device() -> None:
    """Stages 1 and 2 both read what stage 0 made."""
    apart, together = build("residual", *place(0, 1, 2)), build("residual", *place(0, 1, 1))
    first = chunk(apart, "F[PP=0]").id
    assert sorted(s.peers[0] for s in apart.of_type(Send) if s.inputs == ((first, 0),)) == [1, 2]
    assert [
        s.peers[0] for s in together.of_type(Send) if s.inputs[0][0] == chunk(together, "F[PP=0]").id
    ] == [1]
    received = next(r for r in together.of_type(Recv) if r.peers == (0,))
    assert [user.label for user in together.users(received)] == ["F[PP=1]", "F[PP=2]"]


def test_sends_and_receives_come_in_pairs() -> None:
    dag = build("gpt", *place(0, 1, 2))
    assert len(list(dag.of_type(Send))) == 4
    for recv in dag.of_type(Recv):
        send = dag.nodes[recv.inputs[0][0]]
        assert isinstance(send, Send) and (send.peers, recv.peers) == (recv.devices, send.devices)
        assert (send.stream, recv.stream) == ("send", "recv") and send.outputs == recv.outputs


def test_a_tied_parameter_has_one_update_on_each_device_with_equal_sums() -> None:
    dag = build("tied", *place(0, 1, 2))
    updates = [u for u in dag.of_type(Update) if dag.value(u.inputs[0]).names == ("embed.weight",)]
    assert [u.devices for u in updates] == [(0,), (2,)]

    def summands(update: Update) -> list[str]:
        sources = []
        for node in (dag.nodes[ref[0]] for ref in update.inputs):
            if isinstance(node, Recv):
                node = dag.nodes[dag.nodes[node.inputs[0][0]].inputs[0][0]]
            assert isinstance(node, Accumulate)
            sources.append(f"PP={node.tags['PP']}")
        return sources

    assert summands(updates[0]) == summands(updates[1]) == ["PP=2", "PP=0"]
    assert differences(run("tied", dag), run("tied", build("tied"))) == []


def test_a_tied_parameter_on_one_device_has_one_update() -> None:
    dag = build("tied", *place(0, 1, 0))
    assert [u.devices for u in dag.of_type(Update) if dag.value(u.inputs[0]).names == ("embed.weight",)] == [
        (0,)
    ]


@pytest.mark.parametrize("name", ["mlp", "gpt", "tied", "experts", "conv", "losses", "reentered"])
def test_places_before_and_after_a_split_give_one_graph(name: str) -> None:
    stages = 1 + max(region.tags["PP"] for region in captured(name).step.at(4).regions)
    before = build(name, *place(*range(stages)), split(2))
    after = build(name, split(2), *place(*range(stages)))
    assert shape(before) == shape(after)
    assert differences(run(name, before), run(name, after)) == []
    assert shape(before) != shape(build(name, *place(*range(stages)), split(4))), (
        "the control: other graphs differ"
    )


def test_parts_of_a_stage_may_be_placed_one_by_one() -> None:
    """Experts away from the rest of their stage, the passes of a stage in two directives, microbatches in two
    directives.
    """
    groups: list[tuple[Any, int]] = [(1, 1), ("-", 0), (0, 2)]
    experts = build(
        "experts", *({"op": "place", "filter": {"EP": ep}, "devices": [device]} for ep, device in groups)
    )
    check(experts)
    assert chunk(experts, "B[PP=1,EP=1]").devices == (1,) and chunk(experts, "B[PP=2]").devices == (0,)
    passes = [
        {"op": "place", "filter": {"PASS": kind, "PP": stage}, "devices": [stage]}
        for kind in "FB"
        for stage in (0, 1)
    ]
    assert shape(build("mlp", *passes)) == shape(build("mlp", *place(0, 1)))
    pieces = [
        {"op": "place", "filter": {"MB": i, "PP": stage}, "devices": [stage]}
        for stage in (0, 1)
        for i in (0, 1)
    ]
    assert shape(build("mlp", split(2), *pieces)) == shape(build("mlp", split(2), *place(0, 1)))


def test_the_stream_of_a_chunk() -> None:
    dag = build("mlp", {"op": "place", "filter": {"PP": 0}, "devices": [0], "stream": "side"})
    assert [c.stream for c in dag.of_type(Chunk)] == ["side", "compute", "compute", "side"]


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (
            [{"op": "place", "filter": {"PP": 2}, "devices": [0]}],
            "directive 0 (place): field 'filter': {PP: 2} matches nothing. Choose from the step's tags: PASS in {B, F}; PP "
            "in {0, 1}",
        ),
        (
            [*place(0), {"op": "place", "filter": {}, "devices": [1]}],
            "directive 1 (place): field 'filter': F[PP=0] is already on device 0 (directive 0). Place each "
            "chunk once",
        ),
        (
            [
                {"op": "place", "filter": f(0), "devices": [0]},
                {"op": "place", "filter": b(0), "devices": [1]},
            ],
            "directive 1 (place): field 'devices': B[PP=0] would be on device 1, but F[PP=0] is on 0. Place "
            "all passes of a microbatch on the same device, because the backward pass reads saved values",
        ),
    ],
)
def test_refused(program: list[Any], says: str) -> None:
    with pytest.raises(DirectiveError, match=re.escape(says)):
        build("mlp", *program)


def test_a_place_comes_before_an_order() -> None:
    with pytest.raises(
        DirectiveError,
        match=r"F\[PP=0\] is already ordered by directive 0. Move this directive before that order",
    ):
        build("mlp", order(f(0), b(0)), Fixed(), *place(0))


def test_a_place_comes_before_a_recompute() -> None:
    says = (
        r"directive 0 makes second forward passes that wait for B\[PP=1\]. Move this directive before the "
        r"recompute"
    )
    with pytest.raises(DirectiveError, match=says):
        build(
            "mlp",
            {"op": "recompute", "filter": {"PP": 0}},
            Fixed(),
            {"op": "place", "filter": {"PP": 1}, "devices": [0]},
        )


# The end of a program


def test_a_program_without_a_place_runs_on_device_0() -> None:
    dag = build("mlp", split(2))
    complete(dag)
    assert dag.devices() == (0,) and all(node.devices == (0,) for node in dag.nodes.values())
    assert not list(dag.of_type(Send)) and not list(dag.of_type(AllReduce))
    check(dag)


def test_a_finished_program_is_left_alone() -> None:
    dag = build("mlp", *place(1, 0))
    text = str(dag)
    complete(dag)
    assert str(dag) == text


def test_a_region_left_without_a_place_is_named_with_its_line() -> None:
    dag = build("gpt", *place(0), {"op": "place", "filter": {"PP": 2}, "devices": [1]})
    source = captured("gpt").step.at(4).regions[1].source
    with pytest.raises(DirectiveError) as caught:
        complete(dag)
    said = str(caught.value)
    assert (
        f"leaves 1 without a device: PP=1 ({source}, with " in said
        and 'Add a place with the filter {"PP": 1}' in said
    )
    assert source.startswith(__file__.replace("directives/test_place.py", "models.py:"))


class LogsAWeight(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("size", self.first.weight.norm())
        return loss


def test_code_that_reads_a_parameter_belongs_to_the_stage_that_has_it() -> None:
    """The stage before the code is PP=1, but the parameter is of PP=0."""
    dag = apply_program(build_dag(capture(LogsAWeight(), regression(4))), parse(place(0, 1)))
    with pytest.raises(DirectiveError) as caught:
        complete(dag)
    assert "as a part of the stage that has first.weight: with piper.annotate('PP', 0)" in str(caught.value)
    assert 'or add a place with the filter {"PP": "-"}' in str(caught.value)


def test_devices_are_numbered_without_gaps() -> None:
    dag = build("mlp", *place(0, 2))
    with pytest.raises(DirectiveError, match=r"on devices 0, 2. Use devices 0 to 1, without gaps"):
        complete(dag)
