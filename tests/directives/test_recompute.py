"""Backward passes that recompute values that forward passes would have saved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import lightning_piper as piper
from lightning_piper import Order, Place, Recompute, Replicate, Split, schedules
from lightning_piper.capture import capture
from lightning_piper.directives import parse
from lightning_piper.errors import CaptureError, DirectiveError, VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind
from lightning_piper.passes import prepared
from lightning_piper.plan import order
from lightning_piper.plan.instructions import Run
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.runtime.chunks import ChunkBinder
from lightning_piper.testing import Case, directive_suite
from lightning_piper.verify import Report, interpret
from tests import ring
from tests.axes import EXPERTS, HEADS, columns, everywhere, sparse
from tests.groups import marked
from tests.strategy.test_tensors import PROGRAMS as DIVIDED
from tests.tensors import Decoder, compiled_for, decoder, far, fit, grid, report_of, tensors

KEEP: dict[str, Any] = {"nothing": None, "products": ["*mm"], "half": 0.5, "inputs": 0.0, "fast": 1.0}
ONE = Place(filter={}, devices=[0])
TWO = Place(filter={}, devices=[0, 1])
SPLIT = Split(filter={}, dim_name="MB", num_microbatches=2)


def again(keep: Any = None, **chosen: Any) -> Recompute:
    return Recompute(filter=chosen, keep=keep)


def kept(dag: Any) -> int:
    """Return the bytes that first forward passes save for backward passes."""
    first = {chunk.id for chunk in dag.of_type(Chunk) if chunk.kind == "F" and chunk.tags.get("PASS") != "R"}
    backward = [chunk for chunk in dag.of_type(Chunk) if chunk.kind != "F"]
    refs = {
        ref
        for chunk in backward
        for ref in chunk.inputs
        if ref[0] in first and dag.value(ref).kind == Kind.SAVED
    }
    return sum(dag.value(ref).nbytes for ref in refs)


def verified(report: Report) -> None:
    own = next(row for row in report.rows if row.name == "recompute")
    assert report.verdict == "verified" and own.before.verdict == "bitwise equal", str(report)


@pytest.mark.parametrize("name", KEEP)
def test_it_keeps_less_and_makes_the_same_bits(name):
    verified(report_of([ONE, SPLIT, again(KEEP[name])]))
    sizes = [kept(compiled_for([ONE, SPLIT, *more]).dag) for more in ([again(KEEP[name])], [])]
    assert (
        sizes[0]
        < sizes[1] * {"nothing": 0.01, "products": 0.75, "half": 0.6, "inputs": 0.55, "fast": 0.75}[name]
    )


def test_a_larger_fraction_keeps_more():
    sizes = [kept(compiled_for([ONE, again(keep)]).dag) for keep in (0.0, 0.3, 0.6, 1.0)]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2


@pytest.mark.parametrize("keep", [None, ["*mm"], 0.2], ids=str)
def test_masks_are_drawn_alike(keep):
    report = piper.verify(decoder(dropout=0.3), tensors(8), [ONE, again(keep)])
    assert report.verdict == "verified" and report.rows[-1].single.verdict == "bitwise equal"


BW = [{"LAYER": 1, "MB": 0, "PASS": part} for part in ("BI", "BW")]
LATER = "a late half"  # a BW pass, which outputs no gradient
LATE = [{"LAYER": layer, "MB": 0, "PASS": part} for layer, part in [(3, "BI"), (2, "BI"), (3, "BW")]]
PROGRAMS: dict[str, list[Any]] = {
    **{
        f"{place} {level}": [TWO, SPLIT, *((again(), replicas) if place == "before" else (replicas, again()))]
        for level in ("shard_optimizer", "shard_grads", "shard_params")
        for place, replicas in (
            (place, Replicate(filter={}, devices=[0, 1], **{level: True}))
            for place in ("before", "behind")  # type: ignore[arg-type]
        )
    },
    "halves": [ONE, SPLIT, again(LAYER=1), Order(filters=BW)],
    LATER: [ONE, SPLIT, again(LAYER=2), Order(filters=LATE)],
    "halves first": [ONE, SPLIT, Order(filters=BW), again(LAYER=1)],
    "one microbatch": [ONE, SPLIT, again(LAYER=1, MB=0)],
    "columns": [*DIVIDED["two"], again()],
    "sequences": [*DIVIDED["sequence"][:-1], again(), DIVIDED["sequence"][-1]],
    "axes": [*DIVIDED["axes"], again()],
}


PARTS: dict[str, Any] = {"all": None, "but products": ["*mm"], "a part": 0.3}
QUICK = {("behind shard_params", "a part"), ("sequences", "all")}
QUICK |= {(name, "all") for name in ("halves first", LATER, "axes")}
# With `keep`, all microbatches run the same code. Names keep values in the same way as a fraction, so only
# every third program also has names.
GOES = [
    (name, part)
    for i, name in enumerate(PROGRAMS)
    for part in PARTS
    if (name != "one microbatch" or part == "all") and (part != "but products" or i % 3 == 0)
]


@pytest.mark.parametrize(
    "name, part", [pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.long) for pair in GOES]
)
def test_it_goes_with_all_else(name, part):
    changed = (
        Recompute(filter=each.filter, keep=PARTS[part]) if isinstance(each, Recompute) else each
        for each in PROGRAMS[name]
    )
    verified(report_of(list(changed)))


@pytest.mark.parametrize("keep", marked([None, 0.3], [0.3]), ids=str)
def test_experts_get_their_tokens_once(keep):
    program = [
        grid(ep=2, tp=2),
        columns(params=HEADS),
        EXPERTS,
        everywhere(4, shard_params=True),
        again(keep),
    ]
    verified(report_of(program, sparse))
    exchanges = [
        sum(node.label.startswith("alltoall") for node in compiled_for(each, sparse).dag.nodes.values())
        for each in (program, program[:-1])
    ]
    assert exchanges[0] == exchanges[1] > 0


@pytest.mark.parametrize("schedule", marked(["gpipe", "one_f_one_b", "zero_bubble"], ["zero_bubble"]))
def test_stages_recompute_when_their_gradient_is_there(schedule):
    program = [*getattr(schedules, schedule)(stages=2, microbatches=4), again(PP=0)]
    verified(ring.report_of(program))
    dag = ring.compiled_for(program).dag
    for second in (chunk for chunk in dag.of_type(Chunk) if chunk.tags.get("PASS") == "R"):
        (backward, *_) = dag.users(second)
        awaited = {ref[0] for ref in backward.inputs} - {second.id}
        assert awaited and awaited <= set(dag.graph.predecessors(second.id))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_second_passes_come_right_before_their_backward(schedule, monkeypatch):
    """Also on the last stage, whose backward passes wait for no other stage; the control lets them come as
    first passes do.
    """

    def early() -> list[str]:
        compiled = ring.compiled_for([*getattr(schedules, schedule)(stages=2, microbatches=4), again()])
        dag, found = compiled.dag, []
        for plan in compiled.plans.values():
            runs = [dag.nodes[i.node] for i in plan.instructions if isinstance(i, Run)]
            pairs = [(a, b) for a, b in itertools.pairwise(runs) if a.tags.get("PASS") == "R"]
            assert pairs
            found += [a.label for a, b in pairs if b not in dag.users(a)]
        return found

    assert not early()
    ranked = order.priority
    monkeypatch.setattr(
        order, "priority", lambda dag, node, height: (*ranked(dag, node, height)[:1], 0, 0, node.id)
    )
    assert bool(early()) == (schedule == "gpipe")  # the orders of 1F1B leave second passes no other place


class Counting(Decoder):
    """A module whose output depends on a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))

    def loss_of(self, batch: Any) -> Any:
        with piper.annotate("LAYER", 1):
            x = (self.embed(batch[0]) * self.scale.clone()).tanh().exp()
            self.scale.mul_(0.5)
        with piper.annotate("LAYER", 2):
            return self.head(x).logsumexp(-1).mean()


@pytest.mark.parametrize("keep", [None, 0.0], ids=str)
def test_second_passes_read_buffers_as_first_ones_did(keep, monkeypatch):
    """The control changes the module's buffers as soon as a forward pass has made new values."""
    torch.manual_seed(0)
    module = Counting().double().requires_grad_(False)
    module.embed.requires_grad_(True), module.head.requires_grad_(True)
    program = [ONE, SPLIT, again(keep)]
    compiled = piper.compile(module, tensors(8), program)
    expected = interpret(compiled.dag, tensors_of(module), list(tensors(8)))

    def executed() -> dict[str, torch.Tensor]:
        buffers = {"scale": module.scale.clone()}
        transport, cpu = LocalTransport(compiled.plans), torch.device("cpu")
        executor = Executor(compiled.plans[0], compiled.dag.step, tensors_of(module), buffers, transport, cpu)
        (result,) = run_local([executor], list(tensors(8)), seed=0)
        assert buffers["scale"] == 0.5  # it moves once a step
        return result.grads

    def same() -> bool:
        return all(torch.equal(x, expected.grads[name]) for name, x in executed().items())

    assert same()
    bind = ChunkBinder.bind

    def at_once(self: Any, run: Run) -> Any:
        bound, outputs = bind(self, run), self._whole.interface_of(run.key).outputs
        slots = [
            slot
            for slot, out in zip(run.writes, outputs, strict=True)
            if out.kind == Kind.BUFFER and slot is not None
        ]

        def in_place() -> None:
            bound()
            for slot in slots:
                self._buffers["scale"].copy_(self._slots[slot][0])

        return in_place

    monkeypatch.setattr(ChunkBinder, "bind", at_once)
    assert keep is not None or not same()  # without a second pass, nothing reads the module's buffers again


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers())}


def test_a_step_is_cut_for_a_program_once():
    """By whoever prepares it first: each cut is a trace."""
    step, program = capture(decoder(), tensors(8)), parse([*DIVIDED["two"], again(["*mm"])])
    cut = prepared(step, program)
    assert prepared(cut, program) is cut is not step
    assert prepared(cut, parse([*DIVIDED["two"], again(["*mm"]), again(0.5)])) is not cut


def test_an_order_may_name_second_passes():
    """Before the gradient is there, for instance; but not against the data."""
    second = {"LAYER": 1, "MB": 0, "PASS": "R"}
    verified(
        report_of([ONE, SPLIT, again(LAYER=1), Order(filters=[second, {"LAYER": 1, "MB": 1, "PASS": "B"}])])
    )
    with pytest.raises(DirectiveError, match=r"R\[LAYER=1,MB=0\]@0 -> \(data\) B\[LAYER=1,MB=0\]"):
        compiled_for([ONE, SPLIT, again(LAYER=1), Order(filters=[{**second, "PASS": "B"}, second])])


def test_a_second_pass_that_an_order_names_waits_for_no_gradient():
    """Layers of one device too, whose gradients come from the next one."""

    def first(*filters: Any) -> bool:
        compiled = piper.compile(decoder(), tensors(8), [ONE, SPLIT, again(), Order(filters=filters)])
        ids = [i.node for i in compiled.plans[0].instructions if isinstance(i, Run)]
        at = {
            (c.tags["LAYER"], c.tags["MB"], c.tags["PASS"]): ids.index(c.id)
            for c in compiled.dag.of_type(Chunk)
        }
        return at[1, 0, "R"] < at[3, 0, "B"]

    last = {"LAYER": 3, "MB": 0, "PASS": "B"}
    program = [ONE, SPLIT, again(), Order(filters=[{"LAYER": 1, "MB": 0, "PASS": "R"}, last])]
    verified(report_of(program))
    assert first(*program[-1].filters) and not first({"LAYER": 1, "MB": 0, "PASS": "F"}, last)


def test_a_second_pass_of_other_samples_is_found(monkeypatch):
    def lame(self: Any, dag: Any) -> None:
        original(self, dag)
        seconds = [chunk for chunk in dag.of_type(Chunk) if chunk.tags.get("PASS") == "R"]
        dag.change(seconds[0], slice=seconds[1].slice)

    original = Recompute.apply
    monkeypatch.setattr(Recompute, "apply", lame)
    with pytest.raises(VerificationError):
        compiled_for([ONE, SPLIT, again(LAYER=1)])


@pytest.mark.parametrize("keep", [None, ["*mm", "*attention*"], 0.2], ids=str)
def test_trainings_are_those_of_one_device(keep):
    module, other, less = decoder(), decoder(), decoder()
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    program = [TWO, again(keep), Replicate(filter={}, devices=[0, 1], shard_params=True)]
    fit(module, piper.PiperStrategy(program, transport="local"), max_epochs=2, **options)
    fit(other, "auto", max_epochs=2, **options)
    fit(less, "auto", max_epochs=1, **options)
    assert far(module, other) < 1e-12 < 1e-6 < far(less, other)


@pytest.mark.parametrize(
    "fields, expected",
    [
        (
            {"keep": 1.5},
            r'Give a list of patterns of operation names, such as \["\*mm"\], or a fraction from 0 to 1',
        ),
        ({"keep": float("nan")}, "fraction from 0 to 1"),
        ({"keep": []}, "or a fraction from 0 to 1"),
        ({"keep": [3]}, "Give a list of patterns"),
        ({"keep": True}, "Give a list of patterns"),
        ({"filter": {"LAYER": 9}}, "LAYER"),
        (
            {"filter": {"LAYER": 1, "MB": 0}, "keep": 0.5},
            "is not selected, but runs the same code as selected chunks of its region",
        ),
    ],
)
def test_what_is_wrong_is_refused(fields, expected):
    with pytest.raises(DirectiveError, match=expected):
        compiled_for([ONE, SPLIT, Recompute(**{"filter": {}, **fields})])


def test_names_of_no_operation_are_refused():
    with pytest.raises(
        CaptureError,
        match=r"the pattern 'mul_mat' in keep matches no operation of the selected regions\. "
        r"Give a pattern for one of their operations: .*mm",
    ):
        compiled_for([ONE, again(["mul_mat"])])


class Scaled(Decoder):
    """A module that makes a tensor from Python numbers."""

    def loss_of(self, batch: Any) -> Any:
        with piper.annotate("LAYER", 1):
            x = (self.embed(batch[0]) * torch.tensor([1.0, 2.0] * 4, dtype=torch.float64)).tanh().exp()
        with piper.annotate("LAYER", 2):
            return self.head(x).logsumexp(-1).mean()


@pytest.mark.parametrize("keep", [["*mm"], 0.0, 0.5], ids=str)
def test_constants_are_there_again(keep):
    torch.manual_seed(0)
    module = Scaled().double().requires_grad_(False)
    module.embed.requires_grad_(True), module.head.requires_grad_(True)  # the rest is not used
    assert piper.verify(module, tensors(8), [ONE, again(keep)]).verdict == "verified"


class Scoring(Decoder):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with piper.annotate("LAYER", 1):
            self.log("scores", self.embed(batch[0]).sum())


def test_validation_has_operations_of_its_own():
    torch.manual_seed(0)
    module = Scoring().double()
    trainer = fit(
        module, piper.PiperStrategy([ONE, again(["*mm"], LAYER=1)], transport="local"), max_epochs=1
    )
    assert "scores" in trainer.callback_metrics


def test_a_region_is_recomputed_once():
    with pytest.raises(
        DirectiveError, match=r"already recomputes the values of B\[LAYER=1\] \(R\[LAYER=1\]\)"
    ):
        compiled_for([ONE, again(LAYER=1), again(LAYER=[1, 2])])


def recomputes(case: Case, dag: Any) -> st.SearchStrategy[Recompute]:
    stages = sorted({chunk.tags["PP"] for chunk in dag.of_type(Chunk) if "PP" in chunk.tags}, key=str)
    filters = st.sampled_from([{}, *({"PP": stage} for stage in stages)])
    return st.builds(
        lambda chosen, keep: Recompute(filter=chosen, keep=keep), filters, st.sampled_from([None, 0.0, 0.5])
    )


# This suite is long. In `make test`, an example's directive runs the same suite.
TestRecompute = pytest.mark.long(directive_suite(Recompute, recomputes))


def test_it_trains_in_single_precision_too():
    torch.manual_seed(0)
    assert piper.verify(decoder().float(), tensors(8), [ONE, again(0.3)]).verdict == "verified"
