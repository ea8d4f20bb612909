"""`compile`: a module, a batch and a program to a DAG and plans, without any process."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.compiler import Compiled, compile, compile_step
from lightning_piper.directives import Place, Replicate, Split, parse
from lightning_piper.errors import CaptureError, DirectiveError, PiperError, VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.order import Barrier
from lightning_piper.passes import Done, Pass
from lightning_piper.schedules import dualpipe, gpipe, interleaved_one_f_one_b, one_f_one_b, zbv
from lightning_piper.verify import hook
from tests.dags import build, place, split
from tests.models import CASES, captured

compiler = sys.modules[compile.__module__]


def of(name: str, program: Any, **options: Any) -> Compiled:
    return compile_step(captured(name).step, tuple(parse(program)), **options)


def test_a_module_a_batch_and_a_program() -> None:
    c = captured("mlp")
    compiled = piper.compile(c.module, c.batch, one_f_one_b(2, 2))
    assert str(compiled.dag) == str(build("mlp", *one_f_one_b(2, 2)))
    assert compiled.program == tuple(one_f_one_b(2, 2))
    assert sorted(compiled.plans) == [0, 1]
    for device, plan in compiled.plans.items():
        assert (plan.device, plan.devices, plan.size) == (device, (0, 1), 4)
        assert str(plan).splitlines()[0].startswith(f"device {device} of 0,1, 4 samples")
    assert all(p.grad is None for p in c.module.parameters())


def by_stage(zero: Any) -> list[Any]:
    """Return two stages of two replicas, each stage at its own ZeRO stage."""
    groups = [[0, 1], [2, 3]]
    return [
        *(Place(devices, filter={"PP": stage}) for stage, devices in enumerate(groups)),
        *(Replicate(filter={"PP": stage}, zero=zero[stage]) for stage in range(2)),
    ]


@pytest.mark.parametrize(
    "name, program, head, params",
    [
        ("mlp", [], "1 device", "44"),
        ("mlp", [Split(2)], "1 device: 2 microbatches", "44"),
        ("mlp", one_f_one_b(2, 2), "2 devices: 2 stages, 2 microbatches", "44 (by stage: 30 / 14)"),
        ("mlp", [Place([0, 1]), Replicate()], "2 devices: 2 replicas", "44"),
        ("mlp", [Place([0, 1]), Replicate(zero=3)], "2 devices: 2 replicas, ZeRO-3", "44"),
        ("mlp", by_stage([0, 0]), "4 devices: 2 stages x 2 replicas", "44 (by stage: 30 / 14)"),
        (
            "mlp",
            [*by_stage([0, 1]), Split(2)],
            "4 devices: 2 stages x 2 replicas, ZeRO-0 and ZeRO-1, 2 microbatches in each replica",
            "44 (by stage: 30 / 14)",
        ),
        ("mlp", [Split(2, filter={"PP": 1})], "1 device: 1 or 2 microbatches, by region", "44"),
    ],
)
def test_the_summary_says_how_devices_share_the_work(name: str, program: Any, head: str, params: str) -> None:
    compiled = of(name, program)
    assert compiled.checked is not None
    assert repr(compiled) == f"<Compiled training_step on {head}>"
    assert dataclasses.replace(compiled, checked=0.0123).summary().split("\n  ") == [
        f"training_step on {head}",
        f"parameters: {params}",
        "checked in 12.3 ms: the graph after each directive, and all plans, without running them",
    ]
    unchecked = of(name, program, verify=False)
    assert unchecked.summary().splitlines()[2:] == ["  not checked (verification is off)"]


class Layers(LightningModule):
    """Stages of 20 parameters, or of none, and a last layer of 5 parameters without a tag."""

    def __init__(self, *trained: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) if each else nn.Tanh() for each in trained)
        self.last = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for stage, layer in enumerate(self.layers):
            with piper.annotate("PP", stage):
                batch = layer(batch)
        return self.last(batch).square().mean()


LAST = Place([0], filter={"PP": "-"})


@pytest.mark.parametrize(
    "program, head, sizes",
    [
        (interleaved_one_f_one_b(4, 2, stages_per_device=2), "2 devices: 4 stages", "25 / 20 / 0 / 20"),
        (zbv(4, 2), "2 devices: 4 stages", "25 / 20 / 0 / 20"),
        (dualpipe(4, 8), "4 devices: 4 stages", "25 / 20 / 0 / 20"),
        (
            [Place([i // 2], filter={"PP": [i, i + 1]}) for i in (0, 2)],
            "2 devices: 4 stages",
            "25 / 20 / 0 / 20",
        ),
        (
            [Place([1 - i // 2], filter={"PP": [i, i + 1]}) for i in (0, 2)],
            "2 devices: 4 stages",
            "20 / 20 / 5 / 20",
        ),
        ([Place([1], filter={"PP": "*"})], "2 devices: 5 stages", "20 / 20 / 0 / 20 / 5"),
        ([Place([0], filter={"PP": "*"})], "1 device: 4 stages", "25 / 20 / 0 / 20"),
    ],
)
def test_the_summary_counts_stages_and_not_devices(program: Any, head: str, sizes: str) -> None:
    places = max(i for i, each in enumerate(program) if isinstance(each, Place)) + 1
    program = [*program[:places], LAST, *program[places:]]
    said = piper.compile(Layers(True, True, False, True), torch.randn(8, 4), program).summary().split("\n  ")
    assert said[0].partition(", ")[0] == f"training_step on {head}"
    assert said[1] == f"parameters: 65 (by stage: {sizes})"


def test_stages_that_share_a_layer_both_count_it() -> None:
    module = Layers(True, True)
    module.layers[1] = module.layers[0]
    said = piper.compile(module, torch.randn(8, 4), [*one_f_one_b(2, 2)[:2], LAST]).summary()
    assert "parameters: 25 (by stage: 25 / 20, 20 of them in several stages)" in said


@pytest.mark.parametrize(
    "name, program, left",
    [
        ("dropout", [], "random numbers (one device draws other numbers)"),
        ("conv", [Split(2)], "batch norms over a microbatch (PP=0 ("),
        ("conv", [], None),
    ],
)
def test_the_summary_says_what_is_not_proved(name: str, program: Any, left: str | None) -> None:
    found = [line for line in of(name, program).summary().splitlines() if "not proved" in line]
    if left is None:
        assert not found
    else:
        assert len(found) == 1 and found[0].startswith(f"  not proved: {left}")


def test_directives_may_be_json_or_a_file(tmp_path: Path) -> None:
    c = captured("mlp")
    program = [*place(1, 0), split(2)]
    path = tmp_path / "program.json"
    path.write_text(json.dumps(program))
    expected = str(of("mlp", program).dag)
    assert (
        str(compile(c.module, c.batch, path).dag) == str(compile(c.module, c.batch, program).dag) == expected
    )


def test_options_reach_the_capture() -> None:
    c = captured("autocast")
    plain, cast = (
        compile(c.module, c.batch, [], context=context) for context in (CASES["mlp"].context, c.case.context)
    )
    assert ["bfloat16" in str(x.dag) for x in (plain, cast)] == [False, True]


def test_nothing_looks_for_garbage_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(compiler, "check_plans", lambda plans, image: seen.append(gc.isenabled()))
    of("mlp", one_f_one_b(2, 2))
    assert (seen, gc.isenabled()) == ([False], True)
    gc.disable()
    try:
        of("mlp", one_f_one_b(2, 2))
        assert not gc.isenabled()  # it is left to who has said so
    finally:
        gc.enable()


def test_a_program_without_a_place_gives_one_plan() -> None:
    assert sorted(of("untagged", []).plans) == sorted(of("gpt", [split(4)]).plans) == [0]


@pytest.mark.parametrize("name", list(CASES))
def test_every_model_compiles(name: str) -> None:
    c = captured(name)
    regions = c.step.at(c.case.size).regions
    stages = 1 + max((region.tags["PP"] for region in regions if region.tags), default=-1)
    compiled = of(name, gpipe(stages, 2) if stages else [split(2)])
    assert sorted(compiled.plans) == list(range(max(stages, 1)))
    run = [
        line.split()[1]
        for plan in compiled.plans.values()
        for line in str(plan).splitlines()
        if line.startswith("run ")
    ]
    assert sorted(run) == sorted(f"%{chunk.id}" for chunk in compiled.dag.of_type(Chunk)), (
        "every chunk runs once, on one device"
    )


# Other batch sizes


def test_the_same_program_at_another_size() -> None:
    compiled = of("mlp", gpipe(2, 4))
    smaller = compiled.at(3)
    assert (smaller.dag.size, smaller.dag.program.partial, smaller.dag.program.absent) == (
        3,
        True,
        {"MB": {3}},
    )
    assert smaller.program == compiled.program and smaller.plans[0].size == 3
    assert compiled.at(4) is compiled
    assert len(list(smaller.dag.of_type(Chunk))) == 12 < len(list(compiled.dag.of_type(Chunk))) == 16


# What a device holds


def test_parameters_and_buffers_lie_where_they_are_used() -> None:
    conv = of("conv", gpipe(2, 2))
    assert {name.split(".")[0] for name in conv.params_on(0)} == {"one"} and {
        n.split(".")[0] for n in conv.params_on(1)
    } == {"two"}
    assert conv.buffers_on(0) == {"one.1.running_mean", "one.1.running_var", "one.1.num_batches_tracked"}
    assert conv.params_on(0) | conv.params_on(1) == set(conv.step.params)
    tied = of("tied", gpipe(3, 2))
    assert [("embed.weight" in tied.params_on(device)) for device in range(3)] == [True, False, True]
    assert (
        of("glue", gpipe(2, 2)).buffers_on(1) == {"scale"}
        and of("glue", gpipe(2, 2)).buffers_on(0) == frozenset()
    )
    frozen = of("frozen", gpipe(2, 2))
    assert "mixing" in frozen.params_on(0) and not any(
        "unused" in name for d in (0, 1) for name in frozen.params_on(d)
    )
    assert conv.params_on(7) == frozenset()


# Why a node is there


def explanation(compiled: Compiled, text: str) -> list[str]:
    """Return the explanation of the node whose line in the DAG contains a text."""
    (node,) = (node for node, line in lines(compiled).items() if text in line)
    return compiled.explain(node).splitlines()


def lines(compiled: Compiled) -> dict[int, str]:
    return {int(line.split()[0][1:]): line for line in str(compiled.dag).splitlines()[1:]}


def test_a_node_is_explained() -> None:
    compiled = of("mlp", gpipe(2, 2))
    line, source = lines(compiled), captured("mlp").step.at(4).regions[1].source
    assert line[19].startswith("%19 B[PP=1,MB=0] 0:2 @1 (%17.2, %17.3, %17.4) -> ") and line[19].endswith(
        " #2 after %18"
    )
    assert explanation(compiled, " B[PP=1,MB=0]") == [
        line[19],
        "  made by directive 2: {'op': 'split', 'filter': {}, 'dim_name': 'MB', 'num_microbatches': 2}",
        "  placed by directive 1: {'op': 'place', 'filter': {'PP': 1}, 'devices': [1]}",
        "    its filter {PP: 1} matches {PP: 1}",
        f"  region 1 begins at {source}",
        f"  waits for {line[17]}",
        f"  waits for {line[18]}",
        f"  before {line[4]}",
        f"  before {line[20]}",
        f"  before {line[27]}",
    ]
    assert "  made by the capture" in explanation(compiled, " report ")
    assert "  made by directive 1: {'op': 'place', 'filter': {'PP': 1}, 'devices': [1]}" in explanation(
        compiled, " allreduce "
    )


def test_a_message_is_explained_by_the_edge_that_it_serves() -> None:
    compiled = of("mlp", gpipe(2, 2))
    (node,) = (i for i, line in lines(compiled).items() if " send to 1 [PP=0,MB=0]" in line)
    text = compiled.explain(node)
    (made,) = (i for i, line in lines(compiled).items() if " F[PP=0,MB=0]" in line)
    (read,) = (i for i, line in lines(compiled).items() if " F[PP=1,MB=0]" in line)
    assert f" from %{made} F[PP=0,MB=0] to %{read} F[PP=1,MB=0]" in text and "  carries activation:" in text
    assert f"    its filter {{PP: 1}} matches {{PP: 1}} of %{read} F[PP=1,MB=0]" in text


def test_a_node_that_is_not_there() -> None:
    with pytest.raises(KeyError, match=r"has no node 999. Run print\(compiled.dag\) to list its nodes"):
        of("mlp", []).explain(999)


# Errors


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ([{"op": "plac"}], r"directive 0 \(op 'plac'\): field 'op' is unknown"),
        ([*place(0), split(9)], r"directive 1 \(split\): .* at most 4"),
        (place(0), "leaves 1 without a device: PP=1"),
        (place(0, 3), "without gaps"),
    ],
)
def test_directive_errors(program: Any, says: str) -> None:
    c = captured("mlp")
    with pytest.raises(DirectiveError, match=says):
        compile(c.module, c.batch, program)


def test_a_wrong_program_is_found_before_the_capture() -> None:
    with pytest.raises(DirectiveError):
        compile(torch.nn.Linear(1, 1), None, [{"op": "plac"}])
    with pytest.raises(CaptureError):
        compile(torch.nn.Linear(1, 1), None, [])
    with pytest.raises(CaptureError, match="Linear has no training_step"):
        piper.verify(torch.nn.Linear(1, 1), torch.ones(1, 1), [])


def test_a_device_for_which_torch_was_not_built_is_refused() -> None:
    c = captured("mlp")
    with pytest.raises(CaptureError, match=r"compile\(device='mtia'\) is not usable\. .* built: 'cpu'"):
        compile(c.module, c.batch, [], device="mtia")


def test_all_errors_are_piper_errors() -> None:
    assert all(issubclass(error, PiperError) for error in (CaptureError, DirectiveError, VerificationError))
    assert not issubclass(DirectiveError, CaptureError)


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `place` lose a transfer, as a bug would."""
    from lightning_piper.ops.communication.p2p import Recv

    right = Place.apply

    def wrong(self: Place, dag: Any) -> None:
        right(self, dag)
        for recv in list(dag.of_type(Recv)):
            send = dag.nodes[recv.inputs[0][0]]
            for reader in dag.users(recv):
                dag.substitute(reader, (recv.id, 0), send.inputs[0])
            dag.remove([recv, send])

    monkeypatch.setattr(Place, "apply", wrong)


def test_a_broken_rewrite_is_found_after_its_directive(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    checked: list[int] = []
    right = hook.check
    monkeypatch.setattr(hook, "check", lambda dag, final=False: (checked.append(1), right(dag, final)))
    with pytest.raises(
        VerificationError,
        match=r"after directive 1 \(place\), (.|\n)*no send and receive bring it to device",
    ):
        of("mlp", gpipe(2, 2))
    assert len(checked) == 3, "after the capture, after the first place, after the second"


def test_every_stage_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for owner, name in ((hook, "check"), (hook, "check_orders"), (compiler, "check_plans")):
        monkeypatch.setattr(owner, name, lambda *_, final=False, name=name: calls.append(name))
    of("mlp", gpipe(2, 2))
    # After the capture and three directives, after two that only order, and the finished program.
    assert calls == ["check"] * (1 + 3) + ["check_orders"] * 2 + ["check", "check_plans"]
    calls.clear()
    of("mlp", gpipe(2, 2), verify=False)
    assert calls == []


@pytest.mark.parametrize(
    "also, checked",
    [
        (lambda dag: None, "check_orders"),
        (lambda dag: dag.add(Barrier()), "check_orders"),
        (lambda dag: dag.change(next(dag.of_type(Chunk)), stream="compute"), "check"),
        (lambda dag: dag.duplicate(next(dag.of_type(Chunk))), "check"),
        (lambda dag: setattr(dag, "mean_of_replicas", True), "check"),
        (lambda dag: dag.policies.update({0: dag.policies}), "check"),
    ],
    ids=["nothing", "barrier", "field", "node", "setting", "entry"],
)
def test_only_passes_that_only_order_skip_the_rules_of_nodes(
    also: Any, checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("check", "check_orders"):
        monkeypatch.setattr(hook, name, lambda *_, final=False, name=name: calls.append(name))
    dag, static_check = build("mlp", *gpipe(2, 2)), hook.StaticCheck()
    for run in (lambda dag: None, also):
        run(dag)
        static_check(dag, Done(Pass("own", "bitwise", run), "bitwise", 0.0))
    assert calls == ["check", checked]
