"""Programs for training, applied to forward-only steps: in one process they compute the same bits as the step
itself.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import lightning_piper as piper
from lightning_piper.directives import Replicate
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Slice
from lightning_piper.ops.communication.gather import AllGather
from lightning_piper.ops.metrics import Metrics, StepReport
from lightning_piper.ops.results import Result
from lightning_piper.ops.samples import Cut
from lightning_piper.ops.update import Update
from lightning_piper.plan import compile_plans
from lightning_piper.schedules import dualpipe, dualpipev, gpipe, interleaved_one_f_one_b, one_f_one_b, zbv
from lightning_piper.verify import interpret
from lightning_piper.verify.static_check import check
from tests.forward import GROUPS, Steps, eager, examples, forward_of, leaves_of, replicated, run
from tests.groups import marked

DP = [piper.Place(filter={}, devices=[0, 1]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)]
PROGRAMS = {
    "one device": [],
    "gpipe": gpipe(2, 4),
    "1f1b": one_f_one_b(2, 2),
    "dualpipe": dualpipe(2, 4),
    "v": zbv(2, 2),
    "halves": [*gpipe(2, 2)[:3], piper.Order(filters=[{"PP": 0, "PASS": "BI"}, {"PP": 0, "PASS": "BW"}])],
    "dp": [*DP, Replicate(filter={}, devices=[0, 1])],
    "mesh": [piper.Place(filter={}, devices=[[0], [1]], axes=("one", "other")), *DP[1:],
        Replicate(filter={}, devices=[0, 1])],
    "zero1": [*DP, Replicate(filter={}, devices=[0, 1], shard_optimizer=True)],
    "pp dp": replicated(),
    "pp zero2": replicated(shard_grads=True),
    "pp zero3": replicated(shard_params=True),
    "mixed": [*replicated()[:-1], Replicate(filter={"PP": 0}, devices=GROUPS[0], shard_params=True),
              Replicate(filter={"PP": 1}, devices=GROUPS[1], shard_optimizer=True)],
}  # fmt: skip
# If microbatches run on several device groups, a batch norm in training mode raises an error.
FROZEN = ("dualpipe", "dp", "mesh", "zero1", "pp dp", "pp zero2", "pp zero3", "mixed")


class Frozen(Steps):
    """A module whose batch norm always uses the running statistics, and does not change them."""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def module_for(name):
    return Frozen() if name in FROZEN else Steps()


@functools.cache
def compiled_for(name, fit):
    return forward_of(PROGRAMS[name], "validation_step", module_for(name), fit)


@pytest.mark.parametrize("fit", [False, True], ids=["alone", "in a fit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_device_has_what_the_step_gives(name, fit):
    module, batch = module_for(name), examples()
    compiled = compiled_for(name, fit)
    results = run(compiled, module, list(batch))
    local_batch = 8 // compiled.dag.replicas
    assert len(results) == len(compiled.plans)
    logged = {}
    for device, result in enumerate(results):
        replica = compiled.plans[device].replica
        mine = [x[replica * local_batch : (replica + 1) * local_batch] for x in batch]
        wanted, logged[replica] = eager(module, "validation_step", mine)
        found = compiled.step.at(local_batch).rebuild(
            [result.results[str(i)] for i in range(len(result.results))]
        )
        assert found["number"] == 0 and found["given"][1] is None
        for x, y in zip(leaves_of(found), leaves_of(wanted), strict=True):
            assert torch.equal(x, y)
        assert torch.equal(result.metrics, results[0].metrics) and not result.grads
    losses, largest = ([logs[key] for logs in logged.values()] for key in ("val_loss", "largest"))
    assert results[0].metrics[0] == sum(loss / len(losses) for loss in losses)
    assert results[0].metrics[1] == max(largest)
    other, _ = eager(module, "validation_step", examples(7))
    assert not torch.equal(found["out"][:, :1], other["out"][:, :1])


@pytest.mark.parametrize("name", marked(PROGRAMS, [*PROGRAMS][::2]))
def test_the_interpreter_agrees(name):
    module, batch, compiled = module_for(name), examples(), compiled_for(name, False)
    tensors = {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}
    outcome, results = interpret(compiled.dag, tensors, list(batch), 3), run(compiled, module, list(batch))
    for device, result in enumerate(results):
        wanted = outcome.results[compiled.plans[device].replica]
        assert wanted.keys() == result.results.keys() and all(
            torch.equal(wanted[k], x) for k, x in result.results.items()
        )
        assert torch.equal(torch.stack(list(outcome.metrics.values())), result.metrics)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "pp zero3"])
@pytest.mark.parametrize("fit", [False, True], ids=["alone", "in a fit"])
def test_the_places_are_those_of_training_and_the_batch_is_whole(name, fit):
    dag, training = compiled_for(name, fit).dag, compiled_for(name, True).training
    first = {c.tags["PP"]: c.devices for c in training.of_type(Chunk) if c.tags["MB"] == 0}
    assert {c.tags["PP"]: c.devices for c in dag.of_type(Chunk)} == first
    assert [c.slice for c in dag.of_type(Chunk)] == [Slice(0, dag.local_batch_size)] * 2
    assert not list(dag.of_type(Update)) and not list(dag.of_type(Cut))
    assert len(list(dag.of_type(AllGather))) == (2 if name == "pp zero3" else 0)
    assert dag.devices() == ((0, 1, 2, 3) if name == "pp zero3" else (0, 1))


def test_a_fit_keeps_its_shards():
    """Also where only the optimizer is sharded: between steps, no device has all parameters up to date."""
    training = compile_plans(compiled_for("mixed", True).training)
    for device, plan in compiled_for("mixed", True).plans.items():
        assert plan.shards == training[device].shards and plan.shards
    alone = compiled_for("mixed", False).plans
    assert [bool(alone[device].shards) for device in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "pp dp"])
def test_untagged_code_goes_where_its_parameters_are(name):
    module, batch = module_for(name), examples()
    compiled = forward_of(PROGRAMS[name], "predict_step", module, fit=True)
    (chunk,) = compiled.dag.of_type(Chunk)
    assert chunk.devices == (tuple(GROUPS[0]) if name == "pp dp" else (0,))
    for device, result in enumerate(run(compiled, module, list(batch))):
        plan = compiled.plans[device]
        mine = [x.narrow(0, plan.replica * plan.local_batch_size, plan.local_batch_size) for x in batch]
        assert torch.equal(result.results["0"], eager(module, "predict_step", mine)[0])


def test_untagged_code_without_parameters_follows_its_inputs_and_readers():
    class Glued(Steps):
        def validation_step(self, batch, batch_idx):
            with piper.annotate("OTHER"):
                before = batch[0] * 2
            out = self(before)
            with piper.annotate("OTHER"):
                after = out + 1
            with piper.annotate("ALONE"):
                return after, batch[1].exp()

    dag = forward_of(one_f_one_b(2, 2), "validation_step", Glued()).dag
    where = {dag.regions[c.region].label: c.devices for c in dag.of_type(Chunk)}
    assert [c.devices for c in dag.of_type(Chunk)] == [(0,), (0,), (1,), (1,), (0,)], where


def test_a_step_that_does_nothing():
    module = Steps()
    for fit in (False, True):
        results = run(forward_of(one_f_one_b(2, 2), "test_step", module, fit), module, list(examples()))
        assert [(r.results, r.metrics.tolist()) for r in results] == [({}, []), ({}, [])]


@pytest.mark.parametrize("program, devices", [
    (interleaved_one_f_one_b(4, 4, 2), [0, 1, 0, 1]),
    (dualpipev(4, 4), [0, 1, 1, 0]),
    (zbv(4, 4), [0, 1, 1, 0]),
    (dualpipe(4, 8), [0, 1, 2, 3]),
])  # fmt: skip
def test_several_stages_on_a_device(program, devices):
    class Deep(Steps):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(4, 2 if i == 3 else 4).double() for i in range(4)
            )

        def forward(self, x):
            for stage, layer in enumerate(self.layers):
                with piper.annotate("PP", stage):
                    x = torch.tanh(layer(x))
            return x

    module = Deep()
    compiled = forward_of(program, "validation_step", module)
    assert [c.devices[0] for c in compiled.dag.of_type(Chunk)] == devices
    wanted, _ = eager(module, "validation_step", examples())
    assert torch.equal(run(compiled, module, list(examples()))[0].results["0"], wanted["out"])


# Refusals


def test_a_step_without_a_placed_region_is_refused():
    with pytest.raises(
        DirectiveError,
        match=r"selects a region of this step\. Its regions are untagged\. Use the same piper\.annotate",
    ):
        forward_of(one_f_one_b(2, 2), "predict_step")


def test_untagged_code_with_parameters_of_two_devices_is_refused():
    class Apart(Steps):
        def predict_step(self, batch, batch_idx):
            return self.second(self.first(batch[0]))

    with pytest.raises(
        DirectiveError,
        match=r"the code at .* reads first.weight, which is on device 0, and second.weight",
    ):
        forward_of(one_f_one_b(2, 2), "predict_step", Apart(), fit=True)


def test_untagged_code_with_a_parameter_of_both_devices_and_parameters_of_each_is_refused():
    class Tied(Steps):
        def __init__(self):
            super().__init__()
            self.tied = torch.nn.Parameter(torch.ones(()))  # the first parameter that the region reads

        def training_step(self, batch, batch_idx):
            with piper.annotate("PP", 0):
                h = self.tied * self.first(batch[0])
            with piper.annotate("PP", 1):
                return torch.nn.functional.mse_loss(self.tied * self.second(h), batch[1])

        def predict_step(self, batch, batch_idx):
            return self.second(self.tied * self.first(batch[0]))

    with pytest.raises(
        DirectiveError,
        match=r"reads first.weight, which is on device 0, and second.weight, which is on device 1",
    ):
        forward_of(one_f_one_b(2, 2), "predict_step", Tied(), fit=True)


def remove(dag, kind):
    dag.remove([next(node for node in dag.of_type(kind) if node.devices == (0,))])


def exchange(dag):
    """Exchange the results of two passes with the same shapes."""
    result = next(dag.of_type(Result))
    dag.rewire(result, inputs=((result.inputs[0][0], 1),))


def shrink(dag):
    chunk = next(dag.of_type(Chunk))
    dag.change(chunk, slice=Slice(0, 4))


EDITS = {
    "a device gets no results": (
        lambda dag: remove(dag, Result),
        "device 0 returns the results nothing, but the step returns",
    ),
    "no results": (
        lambda dag: dag.remove(list(dag.of_type(Result))),
        "returns the results nothing, but the step returns",
    ),
    "something else": (exchange, "returns log largest of F.PP=1., but it may return one result of a region"),
    "some samples": (shrink, "samples 4:8 are missing"),
    "nothing is logged": (
        lambda dag: dag.remove(list(dag.of_type(Metrics))),
        "some metrics are made by no region|does not exist",
    ),
    "a device reports nothing": (
        lambda dag: dag.change(next(dag.of_type(StepReport)), devices=(1,)),
        "does not reach all devices",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_tampered_with_is_refused(edit):
    change, words = EDITS[edit]
    dag = compiled_for("1f1b", False).dag.copy()
    check(dag, final=True)
    change(dag)
    with pytest.raises(VerificationError, match=words):
        check(dag, final=True)


def test_a_directive_of_ones_own_is_applied_as_in_training_unless_it_says_otherwise():
    seen = []

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Watch(piper.Directive):
        op = "watch forward"
        contract = "bitwise"

        def apply(self, dag):
            seen.append(dag.forward_only)

    forward_of([*one_f_one_b(2, 2), Watch()], "validation_step", fit=True)
    assert seen == [False, True]
