"""The static check: it accepts the graphs that the directives make, and names the fault of a graph that was
tampered with.

Every edited graph that can still be executed is executed as well, to show that the check refuses graphs that
give other numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.directives import parse
from lightning_piper.errors import VerificationError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.communication.reduce import AllReduce
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.samples import Concat, Cut
from lightning_piper.ops.update import Accumulate, Update
from lightning_piper.passes import apply_program, complete
from lightning_piper.schedules import gpipe, one_f_one_b
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.dags import build, chunk, order, place, run, split
from tests.models import CASES, MLP, regression

PIPELINE = one_f_one_b(2, 2)
BASES: dict[str, tuple[str, list[Any]]] = {
    "mlp": ("mlp", PIPELINE),
    "experts": ("experts", gpipe(3, 2)),
    "tied": ("tied", gpipe(3, 2)),
    "conv": ("conv", gpipe(2, 3)),
    "logs": ("logs", gpipe(2, 2)),
    "part": ("gpt", [split(2, PP=1), *place(0, 1, 2)]),
    "one device": ("mlp", [split(2)]),
}


def base(name: str) -> TrainingDAG:
    model, program = BASES[name]
    dag = build(model, *program)
    complete(dag)
    return dag


def node(dag: TrainingDAG, kind: type[Node], **attributes: Any) -> Any:
    """The first node of a type with these tags and attributes."""
    for found in dag.of_type(kind):
        if all(
            found.tags.get(k) == v if k in ("PP", "MB", "EP") else getattr(found, k) == v
            for k, v in attributes.items()
        ):
            return found
    raise AssertionError(f"no {kind.__name__} with {attributes}")


def total(dag: TrainingDAG, parameter: str) -> Accumulate:
    """The first sum over slices of a parameter's gradient."""
    return next(a for a in dag.of_type(Accumulate) if parameter in a.outputs[0].names)


def updates(dag: TrainingDAG, name: str) -> list[Update]:
    return [u for u in dag.of_type(Update) if name in dag.value(u.inputs[0]).names]


def swap_inputs(dag: TrainingDAG, a: Node, b: Node, i: int = 0, j: int = 0) -> None:
    """Let the input `i` of `a` be the input `j` of `b`."""
    dag.rewire(a, inputs=(*a.inputs[:i], b.inputs[j], *a.inputs[i + 1 :]))


def receive_of_another_microbatch(dag: TrainingDAG) -> None:
    swap_inputs(dag, chunk(dag, "F[PP=1,MB=0]"), chunk(dag, "F[PP=1,MB=1]"))


def send_of_another_microbatch(dag: TrainingDAG) -> None:
    swap_inputs(dag, node(dag, Send, PP=0, MB=0), node(dag, Send, PP=0, MB=1))


def gradient_of_another_microbatch(dag: TrainingDAG) -> None:
    first, second = chunk(dag, "B[PP=0,MB=0]"), chunk(dag, "B[PP=0,MB=1]")
    swap_inputs(dag, first, second, 1, 1)


def saved_of_another_microbatch(dag: TrainingDAG) -> None:
    swap_inputs(dag, chunk(dag, "B[PP=1,MB=1]"), chunk(dag, "B[PP=1,MB=0]"))


def inputs_exchanged(dag: TrainingDAG) -> None:
    """Exchange the input of expert 1 and its weights from the gate."""
    reader = chunk(dag, "F[PP=1,EP=1,MB=0]")
    a, b, c = reader.inputs
    dag.rewire(reader, inputs=(c, b, a))


def contribution_dropped(dag: TrainingDAG) -> None:
    sum_ = total(dag, "first.weight")
    dag.rewire(sum_, inputs=sum_.inputs[:-1])


def contribution_doubled(dag: TrainingDAG) -> None:
    sum_ = total(dag, "second.weight")
    dag.rewire(sum_, inputs=(*sum_.inputs, sum_.inputs[0]))


def contribution_of_another_region(dag: TrainingDAG) -> None:
    swap_inputs(dag, total(dag, "experts.0.weight"), total(dag, "experts.1.weight"))


def all_contributions_of_another_region(dag: TrainingDAG) -> None:
    dag.rewire(total(dag, "experts.0.weight"), inputs=total(dag, "experts.1.weight").inputs)


def update_of_another_region(dag: TrainingDAG) -> None:
    dag.rewire(updates(dag, "experts.0.weight")[0], inputs=((total(dag, "experts.1.weight").id, 0),))


def node_removed(dag: TrainingDAG) -> None:
    dag.remove([chunk(dag, "B[PP=0,MB=1]")])


def node_removed_and_all_traces(dag: TrainingDAG) -> None:
    gone = chunk(dag, "B[PP=0,MB=1]")
    sum_ = total(dag, "first.weight")
    dag.rewire(sum_, inputs=tuple(ref for ref in sum_.inputs if ref[0] != gone.id))
    dag.remove([gone])


def wrong_samples(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "F[PP=0,MB=1]"), slice=Slice(0, 2))


def wrong_samples_in_the_last_stage(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "F[PP=1,MB=0]"), slice=Slice(2, 4))


def wrong_region(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "F[PP=1,EP=0,MB=0]"), region=chunk(dag, "F[PP=1,EP=1,MB=0]").region)


def transfer_removed(dag: TrainingDAG) -> None:
    recv = node(dag, Recv, PP=0, MB=0)
    send = dag.nodes[recv.inputs[0][0]]
    for reader in dag.users(recv):
        dag.substitute(reader, (recv.id, 0), send.inputs[0])
    dag.remove([recv, send])


def chunk_moved(dag: TrainingDAG) -> None:
    dag.change(chunk(dag, "B[PP=1,MB=0]"), devices=(0,))


def update_moved(dag: TrainingDAG) -> None:
    dag.change(updates(dag, "first.weight")[0], devices=(1,))


def receive_of_another_channel(dag: TrainingDAG) -> None:
    dag.change(node(dag, Recv, PP=0, MB=0), peers=(1,))


def two_receives_of_one_send(dag: TrainingDAG) -> None:
    dag.add(dataclasses.replace(node(dag, Recv, PP=0, MB=0), id=-1))


def state_of_an_early_slice(dag: TrainingDAG) -> None:
    late, middle = chunk(dag, "F[PP=0,MB=2]"), chunk(dag, "F[PP=0,MB=1]")
    dag.rewire(late, state=middle.state)


def state_of_the_step_before(dag: TrainingDAG) -> None:
    late = chunk(dag, "F[PP=0,MB=1]")
    dag.rewire(late, state=(None,) * len(late.state))


def state_of_another_buffer(dag: TrainingDAG) -> None:
    late, other = chunk(dag, "F[PP=0,MB=1]"), chunk(dag, "F[PP=1,MB=0]")
    place_ = next(i for i, value in enumerate(other.outputs) if value.kind == "buffer")
    dag.rewire(late, state=((other.id, place_), *late.state[1:]))


def buffers_of_an_early_slice(dag: TrainingDAG) -> None:
    early = chunk(dag, "F[PP=0,MB=0]")
    place_ = next(i for i, value in enumerate(early.outputs) if value.kind == "buffer")
    dag.rewire(updates(dag, "one.1.running_mean")[0], inputs=((early.id, place_),))


def metrics_edit(dag: TrainingDAG, keep: Callable[[list[int]], list[int]]) -> None:
    """Keep the inputs of the last stage's metrics whose indices `keep` returns; an index may repeat."""
    metrics = node(dag, Metrics, PP=1)
    kept = keep(list(range(len(metrics.inputs))))
    dag.change(metrics, metrics=tuple(metrics.metrics[i] for i in kept))
    dag.change(
        metrics, slices=tuple(metrics.slices[i] for i in kept), terms=tuple(metrics.terms[i] for i in kept)
    )
    dag.rewire(metrics, inputs=tuple(metrics.inputs[i] for i in kept))


def metric_dropped(dag: TrainingDAG) -> None:
    metrics_edit(dag, lambda indices: indices[1:])


def metric_doubled(dag: TrainingDAG) -> None:
    metrics_edit(dag, lambda indices: [0, *indices])


def metric_weighed_wrongly(dag: TrainingDAG) -> None:
    metrics = node(dag, Metrics, PP=1)
    dag.change(metrics, slices=(Slice(0, 4), *metrics.slices[1:]))


def metrics_exchanged(dag: TrainingDAG) -> None:
    metrics = node(dag, Metrics, PP=1)
    highest = max(metrics.metrics)
    dag.change(metrics, metrics=tuple({0: highest, highest: 0}.get(m, m) for m in metrics.metrics))


def metrics_of_a_region_not_reported(dag: TrainingDAG) -> None:
    reduce = node(dag, AllReduce)
    dag.rewire(reduce, inputs=reduce.inputs[:1])


def metrics_of_a_region_reported_twice(dag: TrainingDAG) -> None:
    reduce = node(dag, AllReduce)
    dag.rewire(reduce, inputs=(*reduce.inputs, reduce.inputs[0]))


def report_of_what_only_one_device_has(dag: TrainingDAG) -> None:
    reduce, report = node(dag, AllReduce), node(dag, StepReport)
    dag.rewire(report, inputs=reduce.inputs)
    dag.remove([reduce])


def reduction_without_a_member(dag: TrainingDAG) -> None:
    dag.change(node(dag, AllReduce), devices=(1,))


def report_removed(dag: TrainingDAG) -> None:
    dag.remove([node(dag, StepReport)])


def report_doubled(dag: TrainingDAG) -> None:
    dag.add(dataclasses.replace(node(dag, StepReport), id=-1))


def update_removed(dag: TrainingDAG) -> None:
    dag.remove(updates(dag, "second.weight"))


def update_removed_on_one_device(dag: TrainingDAG) -> None:
    dag.remove([u for u in updates(dag, "embed.weight") if u.devices == (2,)])


def tied_summand_dropped(dag: TrainingDAG) -> None:
    for update in updates(dag, "embed.weight"):
        dag.rewire(update, inputs=update.inputs[:1])


def tied_summand_doubled_on_one_device(dag: TrainingDAG) -> None:
    update = updates(dag, "embed.weight")[0]
    dag.rewire(update, inputs=(update.inputs[0], update.inputs[0]))


def circle(dag: TrainingDAG) -> None:
    dag.order(chunk(dag, "B[PP=0,MB=0]"), chunk(dag, "F[PP=0,MB=0]"), 3)


def wait_removed(dag: TrainingDAG) -> None:
    reader = chunk(dag, "F[PP=1,MB=0]")
    dag.graph.remove_edge(reader.inputs[0][0], reader.id)


def cut_moved(dag: TrainingDAG) -> None:
    cut = node(dag, Cut)
    dag.change(cut, start=cut.start + 1, stop=cut.stop + 1)


def cuts_exchanged(dag: TrainingDAG) -> None:
    first, second, *_ = dag.of_type(Cut)
    before = first.start, first.stop
    dag.change(first, start=second.start, stop=second.stop)
    dag.change(second, start=before[0], stop=before[1])


def pieces_joined_in_reverse(dag: TrainingDAG) -> None:
    join = node(dag, Concat)
    dag.rewire(join, inputs=join.inputs[::-1])


def piece_joined_twice(dag: TrainingDAG) -> None:
    join = node(dag, Concat)
    dag.rewire(join, inputs=(join.inputs[0], join.inputs[0]))


@dataclass(frozen=True)
class Edit:
    """An edit, and what the check says of it. If `runs`, the edited graph can still be executed and gives
    other numbers.
    """

    base: str
    apply: Callable[[TrainingDAG], None]
    says: str
    runs: bool = True


EDITS = [
    Edit("mlp", receive_of_another_microbatch,
         r"F\[PP=1,MB=0\] %\d+ on device 1 \(directive 2, split\) works on samples 0:2 but reads .* of "
         r"F\[PP=0\] of samples 2:4"),
    Edit("mlp", send_of_another_microbatch,
         r"F\[PP=1,MB=0\] .* works on samples 0:2 but reads activation tanh of F\[PP=0\] of samples 2:4"),
    Edit("mlp", gradient_of_another_microbatch,
         r"B\[PP=0,MB=0\] .* works on samples 0:2 but reads cotangent mm of B\[PP=1\] of samples 2:4"),
    Edit("mlp", saved_of_another_microbatch,
         r"B\[PP=1,MB=1\] .* works on samples 2:4 but reads saved BI of F\[PP=1\] of samples 0:2"),
    Edit("experts", inputs_exchanged,
         r"F\[PP=1,EP=1,MB=0\] .* reads activation .* of F\[PP=1,EP=0\], but its region reads activation "
         r"addmm of F\[PP=0\]"),
    Edit("mlp", contribution_dropped,
         r"gradient of first.weight, first.bias \(update .* on device 0\): of grad .* of B\[PP=0\], samples "
         r"2:4 are missing"),
    Edit("mlp", contribution_doubled,
         r"gradient of second.weight, second.bias .*: samples 0:2 count 2 times"),
    Edit("experts", contribution_of_another_region,
         r"adds grad experts.0.weight, experts.0.bias of B\[PP=1,EP=0\] to grad experts.1.weight, "
         r"experts.1.bias of B\[PP=1,EP=1"),
    Edit("experts", all_contributions_of_another_region,
         r"gradient of experts.0.weight, experts.0.bias \(update .*\): the node sums grad experts.1.*, but one "
         r"device sums grad experts.0"),
    Edit("experts", update_of_another_region, r"experts.0.weight is used on device 1, but no update changes "
                                              r"it there"),
    Edit("mlp", node_removed, r"accumulate %\d+ on device 0 reads %\d+.0, which does not exist", runs=False),
    Edit("mlp", node_removed_and_all_traces, r"B\[PP=0\]: samples 2:4 are missing"),
    Edit("mlp", wrong_samples,
         r"F\[PP=1,MB=1\] .* works on samples 2:4 but .* of samples 0:2\n.*\n  F\[PP=0\]: samples 2:4 are "
         r"missing"),
    Edit("mlp", wrong_samples_in_the_last_stage,
         r"F\[PP=1,MB=0\] .* works on samples 2:4 but reads activation tanh of F\[PP=0\] of samples 0:2"),
    Edit("experts", wrong_region, r"F\[PP=1,EP=0,MB=0\] .*, but its region reads activation add of "
                                  r"F\[PP=1,EP=0\]"),
    Edit("mlp", transfer_removed,
         r"F\[PP=1,MB=0\] .* on device 1 .* reads activation:tanh of F\[PP=0,MB=0\] .* on device 0 "
         r".*, but no send and receive bring it to device 1",
         runs=False),
    Edit("mlp", chunk_moved,
         r"B\[PP=1,MB=0\] %\d+ on device 0 .* reads saved:BI of F\[PP=1,MB=0\] .* on device 1 .*, but no "
         r"send and receive bring it to device 0", runs=False),
    Edit("mlp", update_moved,
         r"update %\d+ on device 1 reads grad:first.weight,first.bias of accumulate .* on device 0, but no "
         r"send and receive bring it to device 1", runs=False),
    Edit("mlp", receive_of_another_channel,
         r"recv %\d+ on device 1 .* receives from send %\d+ on device 0 .*, which does not send to "
         r"it", runs=False),
    Edit("mlp", two_receives_of_one_send, r"send %\d+ on device 0 .* has 2 readers, but it needs "
                                          r"one", runs=False),
    Edit("conv", state_of_an_early_slice,
         r"F\[PP=0,MB=2\] .* reads buffer one.1.running_mean from buffer .* of F\[PP=0\], not from the "
         r"slice that ends at 6"),
    Edit("conv", state_of_the_step_before,
         r"F\[PP=0,MB=1\] .* reads buffer one.1.running_mean as it was before the step, not as the samples "
         r"before 3 left it"),
    Edit("conv", state_of_another_buffer, r"F\[PP=0,MB=1\] .* reads buffer one.1.running_mean from buffer "
                                          r"two.1", runs=False),
    Edit("conv", buffers_of_an_early_slice,
         r"buffers one.1.running_mean, .*: update .* keeps the value after sample 3, not after 8"),
    Edit("mlp", metric_dropped, r"metric returned loss \(metrics .*\): samples 0:2 are missing"),
    Edit("mlp", metric_doubled, r"metric returned loss \(metrics .*\): samples 0:2 count 2 times"),
    Edit("mlp", metric_weighed_wrongly, r"metrics .* declares its input loss returned loss of F\[PP=1\] as returned "
                                        r"loss of samples 0:4"),
    Edit("logs", metrics_exchanged, r"metrics .* declares its input loss returned loss of F\[PP=1\] as twice of samples "
                                    r"0:2"),
    Edit("logs", metrics_of_a_region_not_reported, r"report .* does not take every region's metrics exactly "
                                                   r"once"),
    Edit("logs", metrics_of_a_region_reported_twice, r"report .* does not take every region's metrics "
                                                     r"exactly once"),
    Edit("mlp", report_of_what_only_one_device_has,
         r"report %\d+ on device 0,1 reads metrics.* on device 1, but no send and "
         r"receive bring it", runs=False),
    Edit("mlp", reduction_without_a_member,
         r"report %\d+ on device 0,1 reads metrics.* of allreduce %\d+ on device 1", runs=False),
    Edit("mlp", report_removed, r"the step has 0 reports of the loss, but it needs one", runs=False),
    Edit("mlp", report_doubled, r"the step has 2 reports of the loss", runs=False),
    Edit("mlp", update_removed, r"second.weight is used on device 1, but no update changes it there"),
    Edit("one device", update_removed, r"second.weight is used on device 0, but no update changes it there"),
    Edit("tied", update_removed_on_one_device, r"embed.weight is used on device 2, but no update changes it "
                                               r"there", runs=False),
    Edit("tied", tied_summand_dropped,
         r"gradient of embed.weight \(update .*\): the node sums grad embed.weight of B\[PP=2\], but one device "
         r"sums grad embed.weight of B\[PP=0\], grad embed.weight of B\[PP=2\]"),
    Edit("tied", tied_summand_doubled_on_one_device, r"gradient of embed.weight \(update .* on device 0\): "
                                                     r"the node sums", runs=False),
    Edit("mlp", circle, r"nodes wait for each other in a circle: .*F\[PP=0,MB=0\] %\d+ on device "
                        r"0", runs=False),
    Edit("mlp", wait_removed, r"F\[PP=1,MB=0\] .* reads %\d+.0, but no edge makes this node wait for "
                              r"%\d+", runs=False),
    Edit("part", cut_moved, r"F\[PP=1,MB=0\] .* works on samples 0:2 but reads activation add of F\[PP=0\] "
                            r"of samples 1:3"),
    Edit("part", cuts_exchanged, r"F\[PP=1,MB=0\] .* works on samples 0:2 but reads activation add of "
                                 r"F\[PP=0\] of samples 2:4"),
    Edit("part", pieces_joined_in_reverse, r"concat %\d+ .* joins samples 2:4, 0:2, which do not follow "
                                           r"each other"),
    Edit("part", piece_joined_twice, r"concat %\d+ .* joins samples 0:2, 0:2, which do not follow each "
                                     r"other"),
]  # fmt: skip


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: f"{edit.base}-{edit.apply.__name__}")
def test_a_tampered_graph_is_refused_and_computes_something_else(edit: Edit) -> None:
    dag, model = base(edit.base), BASES[edit.base][0]
    check(dag)
    clean = run(model, dag)
    edit.apply(dag)
    with pytest.raises(VerificationError, match=edit.says) as caught:
        check(dag)
    assert str(caught.value).startswith("the training DAG does not compute what one device computes:\n  ")
    if edit.runs:
        assert compare(clean, run(model, dag), {}).verdict == "differs"


def test_the_interpreter_notices_devices_that_disagree() -> None:
    dag = base("tied")
    tied_summand_doubled_on_one_device(dag)
    with pytest.raises(
        VerificationError,
        match=r"the gradient of 'embed.weight' differs between the devices \[0, 2\]\. If you wrote",
    ):
        run("tied", dag)


def test_a_long_list_of_problems_is_cut() -> None:
    dag = build("gpt", *gpipe(3, 4))
    for reader in list(dag.of_type(Chunk)):
        dag.change(reader, slice=Slice(0, 1))
    with pytest.raises(VerificationError) as caught:
        check(dag)
    *lines, code = str(caught.value).splitlines()
    assert code.endswith("Otherwise, report this [PIPER-V001]")
    assert len(lines) == 12 and lines[-1].endswith("more") and lines[-1].strip().startswith("... and")


@pytest.mark.parametrize("name", list(CASES))
def test_every_captured_step_passes(name: str) -> None:
    check(build(name))
    check(build(name, split(3)))


@pytest.mark.parametrize("after", range(6))
def test_every_graph_on_the_way_passes(after: int) -> None:
    first, second, third = place(0, 1, 2)
    program = [
        first,
        split(2, PP=1),
        second,
        third,
        order({"PP": 1, "MB": 1, "PASS": "F"}, {"PP": 1, "MB": 0}),
    ]
    check(build("tied", *program[:after]))


def test_a_smaller_batch_passes() -> None:
    for size in (1, 2, 3):
        check(build("mlp", *gpipe(2, 3), size=size))
    check(build("conv", *gpipe(2, 3), size=5))


def test_a_parameter_that_another_device_only_reads_is_updated_there() -> None:
    """A weight of stage 0 is used without a gradient in stage 1: its copy there would go stale without an
    update.
    """

    class Watches(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
            with annotate("PP"):
                self.log("norm", self.first.weight.detach().norm())
                return F.mse_loss(self.second(h), y)

    step = capture(Watches(), regression(4))
    for places in (place(0, 1), place(0, 1)[::-1]):
        dag = apply_program(build_dag(step), parse([*places, split(2)]))
        check(dag)
        assert [u.devices for u in updates(dag, "first.weight")] == [(0,), (1,)]
        assert [u.devices for u in updates(dag, "second.weight")] == [(1,)]
        dag.remove(u for u in updates(dag, "first.weight") if u.devices == (1,))
        with pytest.raises(
            VerificationError, match=r"first.weight is used on device 1, but no update changes it there"
        ):
            check(dag)
    one = apply_program(build_dag(step), gpipe(2, 2, devices=[0, 0]))
    assert [u.devices for u in updates(one, "first.weight")] == [(0,)]


@pytest.mark.parametrize("microbatch", [0, 1])
def test_equal_outputs_of_one_microbatch_do_not_prove_those_of_another(microbatch):
    dag = base("one device")
    check(dag)
    wrong = next(c for c in dag.of_type(Chunk) if c.kind == "F" and c.tags["MB"] == microbatch)
    value = wrong.outputs[0]
    twice = dataclasses.replace(value.tensors[0], shape=tuple(2 * size for size in value.tensors[0].shape))
    dag.change(wrong, outputs=(dataclasses.replace(value, tensors=(twice,)), *wrong.outputs[1:]))
    with pytest.raises(VerificationError, match=rf"F\[PP=0,MB={microbatch}\].* declares .* its code makes"):
        check(dag)
