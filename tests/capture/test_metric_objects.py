"""Metric objects in steps: the recorded calls, their arguments in the graph, and uses that raise an error."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import MultitaskWrapper

from lightning_piper.capture import capture, flatten
from lightning_piper.capture.metrics.metric_objects import metric_objects
from lightning_piper.capture.metrics.sample_dicts import stack_dicts
from lightning_piper.capture.proxies.data_dependent_shapes import PerSampleList
from lightning_piper.capture.proxies.numbers import NumberInputs
from lightning_piper.capture.python_state.state_locations import Guards
from lightning_piper.capture.python_state.state_recorder import StateRecorder
from lightning_piper.compiler import compile_step
from lightning_piper.directives import Place, Split
from lightning_piper.errors import CaptureError, VerificationError
from lightning_piper.ir.metric_calls import MetricLog
from lightning_piper.ops.arguments import Arguments
from lightning_piper.runtime import Executor, LocalTransport, run_local
from lightning_piper.verify import check, interpret
from tests.forward import Steps
from tests.groups import marked


class Net(Steps):
    def __init__(self):
        super().__init__()
        self.acc, self.mean = MulticlassAccuracy(2), MeanMetric()
        self.some = MetricCollection(
            {"acc": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)}, prefix="some_"
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.log("acc", self.acc(out, y))
        self.log("loss", loss)
        self.mean.update(loss.detach(), weight=len(y))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        self.log_dict(self.some(out, y))
        self.mean.update((out > 0).sum() * 2)
        return loss


def batch(size=8):
    g = torch.Generator().manual_seed(0)
    return torch.randn(size, 4, generator=g, dtype=torch.float64), torch.randint(2, (size,), generator=g)


def values(module):
    return {n: x.detach() for n, x in [*module.named_parameters(), *module.named_buffers()]}


def program(microbatches=3):
    places = [Place(filter={"PP": 0}, devices=[0]), Place(filter={"PP": 1}, devices=[1])]
    return [*places, Split(filter={}, dim_name="MB", num_microbatches=microbatches)]


def test_calls_are_noted_in_their_order():
    module = Net()
    before = [type(part) for part in module.modules()]
    code = capture(module, batch()).at(8)
    said = [f"{event.after} {event}" for event in code.metrics.events]
    assert said == [
        "0 acc.forward(acc 0, acc 1)", "0 self.log('acc', MetricResult(call=0, keys=())) "
                                       "[]", "1 mean.update(mean 2)",
        "1 self.log('mean', mean) [\"('on_epoch', True)\", \"('on_step', "
        "False)\"]", "1 some.forward(some 3, some 4)",
        "1 self.log(None, MetricResult(call=2, keys=())) []", "1 mean.update(mean 5)",
    ]  # fmt: skip
    weighings = {
        name: None if term is None else code.terms[term].weighing for name, term in code.metrics.terms.items()
    }
    assert (weighings["acc 0"], weighings["mean 2"], weighings["mean 5"]) == (None, "ratio", "sum")
    assert code.metrics.used == {0, 2} and "test_metric_objects.py" in code.metrics.calls[0].where
    args, kwargs = code.metrics.calls[1].arguments(["loss"], None)
    assert (args, kwargs) == (("loss",), {"weight": 8})
    assert [type(part) for part in module.modules()] == before
    assert not module.acc.update_called and module.acc.tp.shape == (2,)


def run(module, size, microbatches):
    """Return the arguments that metric objects get from the executors and from the reference interpreter."""
    captured = capture(module, batch(size))
    compiled = compile_step(captured, program(microbatches))
    transport, tensors = LocalTransport(compiled.plans), values(module)
    params = {n: x for n, x in tensors.items() if n in captured.params}
    buffers = {n: x.clone() for n, x in tensors.items() if n in captured.buffers}
    executors = [
        Executor(plan, compiled.step, params, buffers, transport, torch.device("cpu"))
        for plan in compiled.plans.values()
    ]
    first, second = run_local(executors, flatten(batch(size))[0], seed=0)
    return first.results, second.results, interpret(compiled.dag, tensors, flatten(batch(size))[0]).results[0]


@pytest.mark.parametrize("size, microbatches", [(8, 1), (8, 3), (9, 3)])
def test_arguments_are_those_of_the_whole_batch(size, microbatches):
    module = Net()
    x, y = batch(size)
    with torch.no_grad():
        out = module(x)
        loss = F.cross_entropy(out, y)
    wanted = {
        "acc 0": out,
        "acc 1": y,
        "mean 2": loss,
        "some 3": out,
        "some 4": y,
        "mean 5": 2 * (out > 0).sum(),
    }
    first, second, interpreted = run(module, size, microbatches)
    assert not first  # they stay where they are made
    assert second.keys() == interpreted.keys() == wanted.keys()
    for name, x in wanted.items():
        assert torch.equal(second[name], interpreted[name])
        torch.testing.assert_close(second[name], x, rtol=1e-14, atol=1e-15)
    # Negative control: a mean without weights is another one where microbatches differ.
    if (size, microbatches) == (8, 3):
        parts = [F.cross_entropy(out[a:b], y[a:b]) for a, b in ((0, 3), (3, 6), (6, 8))]
        assert not torch.allclose(sum(parts) / 3, loss, rtol=1e-3)


class Ranking(Net):
    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.mean.update(torch.arange(len(out)).repeat_interleave(2))
        self.mean.update(torch.arange(len(out)) + batch[1])
        self.mean.update(torch.rand(len(out)))
        return F.cross_entropy(out, batch[1])


def test_what_counts_rows_counts_those_of_the_whole_batch():
    whole = capture(Ranking(), batch()).at(8).metrics.whole
    assert {name: find(flatten(batch())[0]).tolist() for name, find in whole.items()} == {
        "mean 0": [i // 2 for i in range(16)]  # the others have samples in them, or random numbers
    }
    # Negative control: each microbatch counts its own.
    assert run(Ranking(), 8, 2)[0]["mean 0"].tolist() == [i // 2 for i in range(8)] * 2


class Members(Net):
    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.some.update(out, batch[1])
        for name, metric in self.some.items():
            self.log(name, metric)
        self.log("f1", self.some["some_f1"])
        return F.cross_entropy(out, batch[1])


def test_members_of_a_collection_are_linked_when_the_step_has_run():
    module = Members()
    module.some.update(torch.eye(2), torch.arange(2))
    module.some._state_is_copy = True  # as after a look at its items
    code = capture(module, batch()).at(8)
    assert [f"{call.metric}.{call.method}" for call in code.metrics.calls] == [
        "some.update",
        "some.values",
        "some.values",
    ]
    assert module.some._state_is_copy


def selecting(use):
    class Selecting(Net):
        def training_step(self, batch, batch_idx):
            x, y = batch
            out = self(x)
            return use(self, out, y, x[:, 0] > 0) or F.cross_entropy(out, y)

        def validation_step(self, batch, batch_idx):
            out = self(batch[0])
            return {"right": out[batch[0][:, 0] > 0].argmax(-1)}

    return Selecting()


SELECTED = [
    lambda module, out, y, mask: module.acc(out[mask], y[mask]),
    lambda module, out, y, mask: module.acc(
        out[mask].softmax(-1)[:, :2].detach().cpu(), y[mask].int().flatten()
    ),
    lambda module, out, y, mask: module.acc(2 * out[mask, :] + 1, torch.masked_select(y, mask)),
    lambda module, out, y, mask: [
        (kept := out * 1),
        (some := kept[mask]),
        kept.neg_(),
        module.acc(some, y[mask]),
    ],
]


@pytest.mark.parametrize("use", marked(SELECTED, SELECTED[2:]))
def test_arguments_may_be_selected_by_values(use):
    module = selecting(lambda *args: use(*args) is None or None)
    (x, y), results = batch(), run(module, 8, 2)[1]
    (call,) = capture(module, batch()).at(8).metrics.calls
    (preds, target), _ = call.arguments([results[name] for name in call.tensors], None)
    found = MulticlassAccuracy(2, average="micro")(preds, target)
    mask = x[:, 0] > 0
    assert len(preds) == mask.sum() and 0 < mask.sum() < 8
    with torch.no_grad():
        assert found == (module(x)[mask].argmax(-1) == y[mask]).float().mean()


def test_what_is_selected_may_be_returned():
    code = capture(selecting(None), batch(), name="validation_step").at(8)
    out, mask = torch.eye(2).repeat(4, 1), torch.arange(8) > 4
    assert code.rebuild([out, mask])["right"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "use",
    [
        lambda module, out, y, mask: F.cross_entropy(out[mask], y[mask]),
        lambda module, out, y, mask: out[mask].mean(),
        lambda module, out, y, mask: module.log("x", out[mask].mean()),
        lambda module, out, y, mask: len(out[mask]),
        lambda module, out, y, mask: out[mask].add_(1),
        lambda module, out, y, mask: out.add_(out[mask].sum()),
        lambda module, out, y, mask: list(out[mask]),
        lambda module, out, y, mask: out[mask].shape[0] * out.mean(),
        lambda module, out, y, mask: F.dropout(out[mask]),
        lambda module, out, y, mask: float(out[mask].sum()),
        lambda module, out, y, mask: module.acc(F.relu(out[mask], inplace=True), y[mask]),
    ],
)
def test_what_is_selected_leads_nowhere_else(use):
    with pytest.raises(
        CaptureError, match=r"test_metric_objects.py:\d+ .*the result of .* depends on tensor values"
    ):
        capture(selecting(use), batch()).at(8)


def wrong_order(dag, node):
    dag.rewire(node, inputs=node.inputs[::-1])


def lost(dag, node):
    dag.rewire(node, inputs=node.inputs[:-1])


def twice(dag, node):
    dag.rewire(node, inputs=(*node.inputs, node.inputs[-1]))


def nowhere(dag, node):
    dag.remove([node])


def again(dag, node):
    dag.add(Arguments(inputs=node.inputs, tags=node.tags, devices=node.devices))


def of_another(dag, node):
    first, *rest = node.inputs
    dag.rewire(node, inputs=((first[0], first[1] + 1), *rest))


@pytest.mark.parametrize("change, words", [
    (wrong_order, "joins acc 0, acc 1 of samples 6:8, 3:6, 0:3, not each of 0:8 once and in order"),
    (lost, "of samples 0:3, 3:6, not each of 0:8"), (twice, "of samples 0:3, 3:6, 6:8, 6:8, not"),
    (nowhere, "metric objects get mean 2, mean 5 and some 3, some 4, but in the step they get acc 0, acc 1 "
              "and"),
    (again, "metric objects get acc 0, acc 1 and acc 0, acc "
            "1"), (of_another, "it may join slices of one output only"),
])  # fmt: skip
def test_the_static_check_sees_what_is_wrong(change, words):
    dag = compile_step(capture(Net(), batch()), program()).dag
    check(dag, final=True)
    change(dag, next(dag.of_type(Arguments)))
    with pytest.raises(VerificationError, match=words):
        check(dag, final=True)


class Running(nn.Module):
    """An object with tensors that the graph contains is not a metric object."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def update(self):
        """Update as a metric does."""

    compute = reset = update


class Tasks(Net):
    """A dict of metric objects with keys of its own, but no collection."""

    def __init__(self):
        super().__init__()
        self.tasks = MultitaskWrapper({"acc": MulticlassAccuracy(2), "f1": MulticlassF1Score(2)})

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        found = self.tasks({"acc": out, "f1": out}, {"acc": y, "f1": y})
        self.log("f1", found["f1"])
        return F.cross_entropy(out, y)


def test_a_wrapper_with_keys_is_captured():
    code = capture(Tasks(), batch()).at(8)
    assert [call.metric for call in code.metrics.calls] == ["tasks"]


def test_what_is_a_metric_object():
    module = Net()
    module.running, module.other = Running(), nn.ModuleDict()
    assert list(metric_objects(module)) == ["acc", "mean", "some", "some.acc", "some.f1"]


def test_states_of_metric_objects_in_a_dict_are_not_watched():
    module = Net()
    module.by_name = {"mean": module.mean, "other": (other := nn.Identity())}
    watched = StateRecorder(module, Guards(), NumberInputs()).objects
    assert id(other) in watched and id(module.mean) not in watched


class Returned(Net):
    def validation_step(self, batch, batch_idx):
        found = self.some(self(batch[0]), batch[1])
        return {"acc": self.acc(self(batch[0]), batch[1]).detach(), **found}


def test_what_objects_give_may_be_returned():
    code = capture(Returned(), batch(), name="validation_step").at(8)
    found = code.rebuild([], lambda computed: computed)
    assert {key: (x.call, x.keys) for key, x in found.items()} == {
        "acc": (1, ()), "some_acc": (0, ("some_acc",)), "some_f1": (0, ("some_f1",)),
    }  # fmt: skip
    assert code.metrics.used == {0, 1}


def using(use):
    class Using(Net):
        def training_step(self, batch, batch_idx):
            loss = F.cross_entropy(self(batch[0]), batch[1])
            use(self, self.acc(self(batch[0]), batch[1]), loss)
            return loss

    return Using


@pytest.mark.parametrize(
    "use",
    [
        lambda module, acc, loss: acc + loss,
        lambda module, acc, loss: loss * acc,
        lambda module, acc, loss: torch.stack([acc, loss]),
        lambda module, acc, loss: bool(acc > 0.5),
        lambda module, acc, loss: acc.median(),
        lambda module, acc, loss: float(acc),
        lambda module, acc, loss: acc * loss.item(),
    ],
)
def test_what_an_object_gives_is_not_known_yet(use):
    with pytest.raises(
        CaptureError, match=r"test_metric_objects.py:\d+ .*computes with the result of self.acc, .* Log it"
    ) as caught:
        capture(using(use)(), batch()).at(8)
    assert "lambda" in str(caught.value)


class Both(Metric):
    """Returns a dict."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, out, y):
        self.total += out.sum()

    def compute(self):
        return {"sum": self.total, "twice": self.total * 2}


class Collected(Net):
    def __init__(self, use):
        super().__init__()
        self.both, self.use = MetricCollection([Both(), MulticlassAccuracy(2)]), use
        self.alone = Both()

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        self.use(self, out, batch[1])
        return F.cross_entropy(out, batch[1])


@pytest.mark.parametrize(
    "use",
    [
        lambda module, out, y: module.log("sum", module.both(out, y)["sum"]),
        lambda module, out, y: module.log("sum", module.both(out, y).get("sum", 0.0)),
        lambda module, out, y: "sum" in module.both(out, y) and module.log("sum", 1.0),
    ],
)
def test_the_keys_of_a_dict_in_a_collection_are_not_known_yet(use):
    said = (
        r"test_metric_objects.py:\d+ .*asks for the key 'sum' in the result of self.both. .* only the keys of its "
        r"metrics are known: Both, MulticlassAccuracy. A metric that returns a dict has other keys. Log the whole"
    )
    with pytest.raises(CaptureError, match=said):
        capture(Collected(use), batch()).at(8)


@pytest.mark.parametrize(
    "use",
    [
        lambda module, out, y: module.log_dict(module.both(out, y)),
        lambda module, out, y: module.log("sum", module.alone(out, y)["sum"]),
        lambda module, out, y: module.log("acc", module.both(out, y)["MulticlassAccuracy"]),
        lambda module, out, y: module.log("acc", module.both(out, y).get("MulticlassAccuracy")),
    ],
)
def test_known_keys_and_whole_dicts_are_captured(use):
    code = capture(Collected(use), batch()).at(8)
    assert any(isinstance(event, MetricLog) for event in code.metrics.events)


def test_arithmetic_with_what_an_object_gives():
    def use(module, acc, loss):
        precision, recall = module.some(loss.expand(2), loss.expand(2)).values()
        module.log_dict({"error": 1 - acc, "percent": acc * 100, "mean": abs(-acc).mean()})
        module.log("f", 2 * precision * recall / (precision + recall))
        print(f"{acc:.2f}")

    metrics = capture(using(use)(), batch()).at(8).metrics
    calls = [torch.tensor(0.25), {"some_acc": 0.5, "some_f1": 0.25}]
    found = {
        event.name: float(event.value.of(calls)) for event in metrics.events if isinstance(event, MetricLog)
    }
    assert found == {"error": 0.75, "percent": 25.0, "mean": 0.25, "f": 1 / 3} and metrics.used == {0, 1}
    assert all("0x" not in str(event) for event in metrics.events)  # the same text in all processes


def test_two_logs_of_one_name_are_refused():
    kind = using(lambda module, acc, loss: (module.log("x", acc), module.log("x", loss)))
    with pytest.raises(CaptureError, match=r"self.log\('x'\) is called twice"):
        capture(kind(), batch()).at(8)


def test_a_name_is_not_made_of_what_is_not_known():
    kind = using(lambda module, acc, loss: module.log(f"acc {acc}", acc))
    with pytest.raises(
        CaptureError,
        match=r"this line makes a text of the value of a tensor",
    ):
        capture(kind(), batch()).at(8)


def test_arguments_that_no_plan_can_bring():
    kind = using(lambda module, acc, loss: module.mean.update(object()))
    with pytest.raises(
        CaptureError,
        match=r"the call of self.mean holds an object\. A captured step .* Convert it before the call",
    ):
        capture(kind(), batch()).at(8)


class Changing(Net):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.acc.update(out, y)
        self.mean.update(self.norm.running_mean)
        self.some.update(out, y)
        out = out * 1
        self.mean.update(out)
        loss = F.cross_entropy(out, y)
        out.detach().add_(1)
        return loss


def test_objects_share_what_they_get_and_nothing_else_does():
    module = Changing()
    _, found, interpreted = run(module, 8, 1)
    x, y = batch()
    with torch.no_grad():
        out = module(x)
    for name in ("acc 0", "some 3", "mean 5"):
        torch.testing.assert_close(found[name], out, rtol=1e-14, atol=1e-15)
        assert torch.equal(found[name], interpreted[name])
    assert found["acc 0"] is not y and found["acc 0"].data_ptr() == found["some 3"].data_ptr()
    assert (
        found["mean 2"].data_ptr() != module.norm.running_mean.data_ptr()
        and found["acc 1"].data_ptr() != y.data_ptr()
    )


class Ignoring(Net):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1], ignore_index=0)
        self.mean.update(loss)
        return loss


def test_a_mean_over_what_is_not_ignored():
    """Its weights follow from the batch."""
    module = Ignoring()
    _, found, interpreted = run(module, 8, 3)
    x, y = batch()
    assert y[3:6].eq(0).all() and not y.eq(0).all()  # nothing counts in a microbatch
    with torch.no_grad():
        out = module(x)
        wanted = F.cross_entropy(out, y, ignore_index=0)
        parts = [
            F.cross_entropy(out[a:b], y[a:b], ignore_index=0) * (b - a) / 8
            for a, b in ((0, 3), (3, 6), (6, 8))
        ]
    assert torch.equal(found["mean 0"], interpreted["mean 0"])
    torch.testing.assert_close(found["mean 0"], wanted, rtol=1e-14, atol=0)
    assert not torch.allclose(sum(parts), wanted, rtol=1e-3)


class Detecting(Steps):
    """A module that gives a metric a dict for each sample. `entry` makes the dict."""

    def __init__(self, entry):
        super().__init__()
        self.mean, self.entry = MeanMetric(), entry

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.mean.update([self.entry(out, i) for i in range(len(x))])
        return F.cross_entropy(out, y)


@pytest.mark.parametrize("entry", [
    lambda out, i: {"boxes": out[i], "score": out[i].sum(), "sure": out[i][out[i] > 0], "what": "image"},
    lambda out, i: {"inside": [out[i]]},
])  # fmt: skip
def test_a_dict_for_each_sample_is_joined_over_microbatches(entry):
    module = Detecting(entry)
    dag = compile_step(capture(module, batch()), program(4)).dag
    (call,) = dag.code.metrics.calls
    assert len(call.tensors) <= 4 and len(dag.step.at(2).metrics.calls[0].tensors) == len(call.tensors)
    out = interpret(dag, values(module), flatten(batch())[0])
    ((found,), _) = call.arguments([out.results[0][name] for name in call.tensors], lambda item: None)
    logits = module(batch()[0])
    wanted = [entry(logits, i) for i in range(8)]
    assert [entry.pop("what", None) for entry in found] == [entry.pop("what", None) for entry in wanted]
    torch.testing.assert_close(found, wanted)


FORMS = [
    lambda out, i: {"boxes": out[i][: i + 1]},  # tensors of several shapes
    lambda out, i: {"boxes": out[i], "number": i},
    lambda out, i: {"boxes": out[i], str(i): out[i]},
    lambda out, i: {"boxes": out[i][out[i] > 0] if i else out[i][out[i] < 0].abs()},
    lambda out, i: [out[i]],
]  # fmt: skip


@pytest.mark.parametrize("entry", marked(FORMS, FORMS[:2]))
def test_dicts_of_several_forms_are_not(entry):
    module = Detecting(entry)
    (call,) = capture(module, batch()).at(8).metrics.calls
    assert len(call.tensors) >= 8
    with pytest.raises(
        CaptureError, match=r"passes \d+ tensors to self.mean.update for 2 samples, and \d+ for 8"
    ):
        compile_step(capture(module, batch()), program(4))


class Empty(Steps):
    """A module that gives a metric an empty list, in a batch without samples."""

    def __init__(self):
        super().__init__()
        self.mean = Collecting()

    def training_step(self, batch, batch_idx):
        self.mean.update([])
        return self(torch.ones(2, 4, dtype=torch.float64)).sum() * batch


class Collecting(MeanMetric):
    def update(self, entries):
        super().update(float(len(entries)))


def test_an_empty_list_stays_a_list():
    """Also if the batch does not have a tensor with dimensions, so that its number of samples is 0."""
    for samples in (0, 1):
        assert stack_dicts([], samples) == []
    (call,) = capture(Empty(), torch.tensor(2.0, dtype=torch.float64)).at(0).metrics.calls
    assert call.tensors == ()
    assert isinstance(stack_dicts([{"a": torch.ones(2)}], 1), PerSampleList), "the control"


def test_a_method_that_a_captured_step_cannot_call_is_named() -> None:
    class Syncs(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.acc = torch.nn.Linear(4, 1), MeanMetric()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.acc.sync(distributed_available=lambda: True)
            return self.layer(batch).mean()

    with pytest.raises(CaptureError, match=r"training_step calls sync\(\) of a metric object"):
        capture(Syncs(), torch.zeros(4, 4)).at(4)
