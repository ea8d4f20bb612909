"""Errors of directives on the graph of a step."""

from __future__ import annotations

from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.degrees import requested_degrees
from lightning_piper.directives import parse
from lightning_piper.schedules import dualpipe, one_f_one_b
from tests.dags import Fixed
from tests.errors.case import GROUPS, PLACES, REPLICATE, SPLIT, Case, Cases, batch, net, program

TITLE = "Directives on the graph"
INTRO = """Piper raises these errors when it applies a directive to the graph of the step, directly after the capture. \
The step has two stages and 8 samples."""


def on(what: str, changes: list[tuple[str, str]], *directives: object) -> Case:
    """Return a case with another module."""
    return Case(
        what, lambda: compile_step(capture(net("pass", *changes), batch()), tuple(parse(list(directives))))
    )


def ordered(*filters: object) -> dict[str, object]:
    return {"op": "order", "filters": list(filters)}


def degrees(**numbers: int) -> None:
    """A step with a layer between the stages, under degrees."""
    module, found = net("pass", *BETWEEN), requested_degrees(None, **numbers)
    assert found is not None
    compile_step(capture(module, batch()), found.program(module, batch()).directives)


AGAIN = {"op": "recompute", "filter": {}}
F0, B0, F1, B1 = ({"PP": i, "PASS": kind} for i in (0, 1) for kind in "FB")
BATCH_NORM = [
    ("torch.tanh(self.first(x))", "F.batch_norm(self.first(x), self.mean, self.var, training=True)"),
    (
        'self.register_buffer("scale", torch.ones(()))',
        'self.register_buffer("mean", torch.zeros(6)); self.register_buffer("var", torch.ones(6))',
    ),
]
TIED = [("self.second(h)", "F.linear(h @ self.first.weight, self.first.weight[:1])")]
BACKWARDS = [
    ('with piper.annotate("PP", 0)', 'with piper.annotate("PP", 2)'),
    ('with piper.annotate("PP", 1)', 'with piper.annotate("PP", 0)'),
    ('with piper.annotate("PP", 2)', 'with piper.annotate("PP", 1)'),
]
BETWEEN = [
    ("self.seen,", "self.middle, self.seen,"),
    ("[], torch.ones(())", "nn.Linear(6, 6), [], torch.ones(())"),
    (
        '        with piper.annotate("PP", 1)',
        '        h = self.middle(h)\n        with piper.annotate("PP", 1)',
    ),
]
ROWS = [
    ("self.first(x))", "self.first(x)).reshape(-1, 3)"),
    ("self.second(h)", "self.second(h.reshape(-1, 6))"),
]


def whole_batch() -> None:
    module = net("pass", *BATCH_NORM)
    compile_step(capture(module, batch(), whole_norms=True), tuple(one_f_one_b(2, 2)))


def entered_again() -> None:
    """Apply a pipeline to a step that uses stage 0 before and after stage 1."""
    line = 'with piper.annotate("PP", 0): loss = loss + self.first(x).mean()'
    compile_step(capture(net(line), batch()), tuple(one_f_one_b(2, 2)))


CASES: Cases = [
    program("a filter does not match a chunk", {"op": "place", "filter": {"PP": 2}, "devices": [0]}),
    program("a stage is placed twice", *PLACES, {"op": "place", "filter": {"PP": 1}, "devices": [0]}),
    program("a stage is placed after the order that names it and a directive of another package",
        ordered(F0, B0), Fixed(), *PLACES),
    program("forward and backward of a stage on different "
            "devices", {"op": "place", "filter": F0, "devices": [0]},
            {"op": "place", "filter": B0, "devices": [1]}),
    program("stages on groups of different sizes", {"op": "place", "filter": {"PP": 0}, "devices": [0, 1]},
        PLACES[1]),
    program("a stage without a place", PLACES[0]),
    on("stages that are not numbered in the order of the step", BACKWARDS, *one_f_one_b(2, 2)),
    on("a layer between two stages without an annotation", BETWEEN, *PLACES),
    Case("the same with degrees, `PiperStrategy(pp=2)`", lambda: degrees(pp=2)),
    Case("an order where the step comes back to a stage that it has left", entered_again),
    program("devices with a gap", PLACES[0], {"op": "place", "filter": {"PP": 1}, "devices": [2]}),
    program("more microbatches than samples", *PLACES, {**SPLIT, "num_microbatches": 16}),
    on("microbatches of a backward pass that is not linear in the gradient of the loss",
       [("return loss", "loss.register_hook(lambda grad: grad.clamp(max=0.3)); return "
                        "loss")], *PLACES, SPLIT),
    program("two splits of a batch use the same tag", *PLACES, SPLIT, SPLIT),
    program("one pass of a stage is split alone", *PLACES, {**SPLIT, "filter": F0}),
    program("`split` after the order and a directive of another package", *PLACES, ordered(F0, B0), Fixed(), SPLIT),
    program("`split` after the recompute and a directive of another package", *PLACES, AGAIN, Fixed(), SPLIT),
    program("an order names a pass twice", *PLACES, ordered(F0, {"PP": 0})),
    program("an order contradicts the data flow", *PLACES, ordered(B0, F0)),
    Case("an order of microbatches contradicts statistics of the whole batch", whole_batch),
    program("two orders contradict each other", *PLACES, SPLIT,
            ordered({**B0, "MB": 0}, {**F0, "MB": 1}), ordered({**F1, "MB": 1}, {**B1, "MB": 0})),
    program("an order between chunks of two devices, without data "
            "between them", *PLACES, SPLIT, ordered({**F1, "MB": 0}, {**F0, "MB": 1})),
    program("`BI` after another order has named `B`", *PLACES, ordered(F1, B1),
        ordered(F1, {"PP": 1, "PASS": "BI"})),
    program("`B` after another order has split it into `BI` and `BW`", *PLACES,
            ordered(F1, {"PP": 1, "PASS": "BI"}), ordered({"PP": 0, "PASS": "F"}, {"PP": 1, "PASS": "B"})),
    program("`BI` in a place", {"op": "place", "filter": {"PASS": "BI"}, "devices": [0]}),
    program("groups of devices without a `replicate`", *GROUPS),
    program("`replicate` without `place`", REPLICATE),
    program("`replicate` of one stage only", *GROUPS, {**REPLICATE, "filter": {"PP": 0}}),
    program("`replicate` and `place` name different groups", *GROUPS,
        {**REPLICATE, "devices": [[0, 1], [2, 3]]}),
    program("a stage is replicated twice", *GROUPS, REPLICATE, REPLICATE),
    program("replicas do not divide the batch", {"op": "place", "filter": {}, "devices": [0, 1, 2]},
            {"op": "replicate", "filter": {}, "devices": [0, 1, 2]}),
    program("replicas do not divide the microbatches", *GROUPS, {**SPLIT, "num_microbatches": 8}, REPLICATE),
    on("`replicate` of a step that changes buffers", BATCH_NORM, *GROUPS, REPLICATE),
    program("a device has different replica indices in two directives",
            *GROUPS, {**REPLICATE, "filter": {"PP": 0}, "devices": [0, 2]},
            {**REPLICATE, "filter": {"PP": 1}, "devices": [2, 0]}),
    program("stages with different numbers of replicas", *GROUPS,
        {**REPLICATE, "filter": {"PP": 0}, "devices": [0, 2]},
            {**REPLICATE, "filter": {"PP": 1}, "devices": [1, 3, 5]}),
    on("a tied parameter is sharded in one stage and whole in the other",
       TIED, *GROUPS,
       {**REPLICATE, "filter": {"PP": 0}, "shard_optimizer": True}, {**REPLICATE, "filter": {"PP": 1}}),
    on("a split region has an output without a dimension of samples",
       ROWS, {**SPLIT, "filter": {"PP": 0}}),
    on("microbatches from both ends of a model with running statistics", BATCH_NORM, *dualpipe(2, 4)),
]  # fmt: skip
