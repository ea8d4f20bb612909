"""Steps that cannot be captured, in programs that divide them: the calls of annotated modules are captured,
and the rest runs uncaptured.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.capture import PartlyCaptured
from lightning_piper.capture.cutting import graph_cut
from lightning_piper.capture.eager.eager_remainder import EagerRemainder, RemainderLog
from lightning_piper.session.eager.partial_capture import _logged
from tests.distributed.processes import launch_trainings
from tests.groups import marked
from tests.strategy.fitting import QUIET
from tests.strategy.partial_capture import (
    KINDS,
    LIMIT,
    Body,
    Branch,
    Listed,
    Measured,
    Named,
    data,
    fit,
    made,
    named,
    program,
    train,
)

ROUNDING = 2e-15  # the largest difference measured is 1.1e-16, with the older processor settings, too
LEVELS = {"replicas": {}, "zero3": {"shard_params": True}}


def local(directives: Any, **options: Any) -> piper.PiperStrategy:
    return piper.PiperStrategy(directives, transport="local", **options)


def far(one: Branch, other: Branch) -> float:
    return max(
        float((x - y).abs().max())
        for x, y in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


EACH = [(kind, level) for kind in KINDS for level in (None, *LEVELS)]


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
@pytest.mark.parametrize("kind, level", marked(EACH, [*EACH[::3], ("Branch", "replicas"), ("Tied", "zero3")]))
def test_it_trains_as_one_device_that_accumulates(kind, level):
    module, alone = made(kind), made(kind, parts=4)
    fit(module, local(program(kind, None if level is None else LEVELS[level])))
    fit(alone, "auto")
    assert far(module, alone) < ROUNDING
    assert far(module, made(kind)) > 1e-3  # it trains
    if kind == "Branch":
        assert len(module.seen) == 2 * 3 * 4


def test_compile_does_it_too():
    """`piper.compile` has plans of the stages, and its rest is in the last one; a program that cuts nothing
    has no graph.
    """
    module, batch = made("Branch"), next(iter(data()))
    with pytest.warns(
        UserWarning,
        match=r"captured in part. Reason: .*partial_capture.py.* training_step runs uncaptured, except self.body",
    ):
        compiled = piper.compile(module, batch, program("Branch"))
    assert (
        isinstance(compiled.step, PartlyCaptured) and sorted(compiled.plans) == [0, 1] and module.seen == []
    )
    assert {"temperature", "body.last.weight"} <= compiled.params_on(
        1
    ) and "body.first.weight" in compiled.params_on(0)
    with pytest.raises(piper.CaptureError, match="needs the value of a tensor") as refused:
        piper.compile(module, batch, [piper.Place(filter={}, devices=[0])])
    assert "PiperStrategy runs the step uncaptured, like DDP" in refused.value.__notes__[0]


class Unmarked(Branch):
    """Without annotations."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.body, self.temperature, self.seen = Body().double(), nn.Parameter(torch.ones(())), []


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_degrees_train_as_the_directives_that_one_would_write():
    by_degrees, by_hand, other = made("Branch"), made("Branch"), made("Branch")
    fit(by_degrees, piper.PiperStrategy(pp=2, transport="local"))
    fit(by_hand, local(schedules.one_f_one_b(2, 4)))
    fit(other, local(schedules.one_f_one_b(2, 1)))
    assert far(by_degrees, by_hand) == 0 and by_degrees.seen == by_hand.seen
    assert far(by_degrees, other) > 1e-6  # the branch depends on the loss of a microbatch
    with pytest.raises(piper.CaptureError, match="needs the value of a tensor"):
        fit(made("Branch"), piper.PiperStrategy(pp=2, transport="local", capture="always"))


def test_degrees_of_a_step_captured_in_part_that_do_not_fit_it():
    module, batch = made("Branch"), next(iter(data()))
    with pytest.raises(piper.DirectiveError, match="4 stages, but Branch annotates PP=0, PP=1"):
        piper.parallel(pp=4, module=module, batch=batch)
    with pytest.raises(piper.CaptureError, match="needs the value of a tensor"):
        piper.parallel(pp=2, tp=2, module=module, batch=batch)
    unmarked = Unmarked()
    with pytest.raises(piper.CaptureError, match="needs the value of a tensor") as refused:
        piper.parallel(pp=2, module=unmarked, batch=batch)
    assert "calls no annotated module" in refused.value.__notes__[-1]
    assert module.seen == unmarked.seen == []


class Extras(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        loss, rows = found["loss"].detach(), batch[0]
        inside = {
            "rows": (rows, rows[:, 0].tolist()),
            "loss": loss,
            "number": loss.item(),
            "array": rows.numpy(),
        }
        return {
            **found,
            "mean": loss,
            "note": "text",
            "sizes": [len(rows)],
            "shape": rows.sum(0),
            "inside": inside,
        }

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found = outputs


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_each_batch_brings_what_it_carries_and_what_the_rest_writes_costs_no_capture(monkeypatch):
    captures, begin = [], PartlyCaptured.__init__
    monkeypatch.setattr(
        PartlyCaptured,
        "__init__",
        lambda self, *given, **named: captures.append(self) or begin(self, *given, **named),
    )
    stages = [piper.Place(filter={"PP": i}, devices=[i]) for i in range(2)]
    found = {}
    for name, strategy in (("stages", local(stages)), ("alone", "auto")):
        module = found[name] = Named().double()
        torch.manual_seed(0)
        loader = DataLoader(data().dataset, batch_size=8, collate_fn=named)
        L.Trainer(
            accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, precision="64-true", **QUIET
        ).fit(module, loader)
    assert (
        found["stages"].steps == 6
        and found["stages"].texts == found["alone"].texts
        and len(set(found["alone"].texts)) == 24
    )
    assert found["stages"].objects == found["alone"].objects and len(captures) == 1
    with pytest.raises(
        piper.PiperError, match=r"batch\['texts'\] is a list with an entry for each of 8 samples"
    ):
        trainer = L.Trainer(
            accelerator="cpu", devices=1, strategy=local(program("Branch")), max_epochs=1, **QUIET
        )
        trainer.fit(Named().double(), loader)


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_what_a_step_returns_beside_the_loss_is_joined():
    module = Extras().double()
    fit(module, local(program("Branch")))
    found = module.found
    assert found["inputs"].shape == (8, 4) and found["note"] == "text" and found["sizes"] == [2]
    assert float(found["mean"]) == pytest.approx(float(found["loss"]), rel=1e-14)
    assert [x.shape for x in found["shape"]] == [(4,)] * 4  # of no rows: one of each microbatch
    inside = found["inside"]
    assert inside["rows"][0].equal(found["inputs"]) and inside["rows"][1] == found["inputs"][:, 0].tolist()
    assert (
        inside["number"] == pytest.approx(float(found["loss"]), rel=1e-14)
        and float(inside["loss"]) == inside["number"]
    )
    assert [x.shape for x in inside["array"]] == [(2, 4)] * 4


def test_a_logged_value_counts_by_its_batch_size():
    def log(value, samples, **kwargs):
        return RemainderLog("x", torch.tensor(value), kwargs, samples)

    ((_, value, kwargs),) = _logged([log(1.0, 4, batch_size=3), log(5.0, 4, batch_size=1)])
    assert value == 2.0 and kwargs == {"batch_size": 4}
    ((_, value, kwargs),) = _logged([log(1.0, 6), log(5.0, 2)])
    assert value == 2.0 and kwargs == {"batch_size": 8}


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_the_parts_are_told_apart():
    """A control: with other microbatches, the branch is another one."""
    module, whole = made("Branch"), made("Branch", parts=1)
    fit(module, local(program("Branch")))
    fit(whole, "auto")
    assert far(module, whole) > 1e-3


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_accumulation_clipping_and_verification():
    for options, verify in (
        ({"accumulate_grad_batches": 2}, "static"),
        ({"gradient_clip_val": 0.1}, "first_batch"),
    ):
        module, alone = made("Branch"), made("Branch", parts=4)
        fit(module, local(program("Branch"), verify=verify), **options)
        fit(alone, "auto", **options)
        assert far(module, alone) < ROUNDING
        assert len(module.seen) == 2 * 3 * 4  # what the verification has run left nothing


def test_it_is_told_which_line_it_is_and_what_runs_as_it_is():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(made("Twice"), local(program("Twice")))
    (said,) = [str(w.message) for w in caught if "captured in part" in str(w.message)]
    assert (
        "partial_capture.py" in said
        and "if near" in said
        and "training_step runs uncaptured, except self.body(...)" in said
    )


def test_verify_says_that_it_is_executed():
    batch = (torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64))
    module = made("Structured")
    found = piper.verify(module, batch, program("Structured"))
    assert (
        found.verdict == "executed" and "training_step runs uncaptured, except self(...)" in found.conclusion
    )
    assert all(row.single.verdict != "differs" for row in found.rows) and module.seen == []
    with pytest.warns(UserWarning, match="partial_capture.py"):
        assert piper.compile(module, batch, program("Structured")).step.executed


class Late(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.body.first(batch[0])
        loss = self.loss(self.body.last(hidden), batch[1]) * self.temperature
        return loss + hidden.mean()


class Penalized(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.body(batch[0]) * self.temperature, batch[1])
        return loss + sum(x.pow(2).sum() for x in self.body.parameters())


class Noisy(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.randn_like(batch[0])
        return self.loss(self.body(batch[0] + noise) * self.temperature, noise)


class Skipped(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss if loss.item() > LIMIT else None


class WithoutLoss(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"value": super().training_step(batch, batch_idx)["loss"]}


class Written(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.body(batch[0]) * 1.0
        found = self.body(batch[0])
        found[found.abs() > 1e9] = 0 if out.sum().item() > -1e9 else 1
        return self.loss(found * self.temperature, batch[1])


class Normed(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.body(batch[0])
        return self.loss(self.norm(out if out.sum().item() > -1e9 else out * 2) * self.temperature, batch[1])


class Counting(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.counted()
        return found

    def counted(self) -> None:
        self.count = self.count + 1


class Pointed(Counting):
    def counted(self) -> None:
        self.count.data = self.count + 1


class Replaced(Counting):
    """A model that replaces a parameter of a module whose call is captured."""

    def counted(self) -> None:
        self.body.first.bias = nn.Parameter(torch.zeros(8))


class Clipped(Counting):
    def counted(self) -> None:
        self.body.first.weight.data.clamp_(-1, 1)


class Doubled(Branch):
    """A model whose step changes its own parameter once, after autograd has used it."""

    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        loss = super().loss(out, target)
        self.change(self.temperature)
        return loss

    def change(self, x: nn.Parameter) -> None:
        x.data.mul_(2)


class DoubledOnce(Doubled):
    def change(self, x: nn.Parameter) -> None:
        with torch.no_grad():
            torch._foreach_mul_([x], 2.0)


class Read(Doubled):
    """The control: it only reads the parameter's data, and changes a copy."""

    def change(self, x: nn.Parameter) -> None:
        x.data.clone().mul_(2)


class Again(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"]
        return loss + self.body(batch[1]).mean()


class Unused(Branch):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)


class Raising(Branch):
    def loss(self, out: Tensor, target: Tensor) -> Tensor:
        loss = F.mse_loss(out, target)
        if loss.item() > -1:
            raise LookupError("a loss of the user's own")
        return loss


class Together(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.all_gather(found["loss"])
        return found


class Metric(Branch):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("metric", nn.Identity())
        return found


REFUSED = {
    Late: (
        piper.PiperError,
        "reads the result of self.body.first(...), which was passed to another captured call",
    ),
    Penalized: (
        piper.PiperError,
        "reads 'body.first.weight', which belongs to a module whose call is captured",
    ),
    Clipped: (piper.PiperError, "training_step reads 'body.first.weight'"),
    Noisy: (piper.CaptureError, "draws random numbers before it calls a captured module"),
    Skipped: (piper.PiperError, "training_step returned None"),
    WithoutLoss: (piper.PiperError, "training_step returns a dict as its loss"),
    Written: (piper.PiperError, "changes the result of a captured call in place"),
    Normed: (piper.PiperError, "changes the buffer norm.num_batches_tracked in code that runs uncaptured"),
    Counting: (piper.PiperError, "changes the buffer count in code that runs uncaptured"),
    Pointed: (piper.PiperError, "changes the buffer count in code that runs uncaptured"),
    Doubled: (piper.PiperError, "(x.data.mul_(2)): training_step changes the parameter temperature"),
    DoubledOnce: (piper.PiperError, "(torch._foreach_mul_([x], 2.0)): training_step changes the parameter"),
    Replaced: (piper.PiperError, "changes the parameter body.first.bias in code that runs uncaptured"),
    Again: (
        piper.PiperError,
        "this happens in self.body(...). During the capture, training_step called this module fewer times",
    ),
    Unused: (piper.PiperError, "has not used other.bias, other.weight"),
    Raising: (LookupError, "a loss of the user's own"),
    Together: (piper.PiperError, "training_step communicates"),
    Metric: (piper.PiperError, "self.log('metric')"),
}


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_the_rest_may_not_do_is_refused(kind):
    error, words = REFUSED[kind]
    with pytest.raises(error) as found:
        fit(kind().double(), local(program("Branch")))
    assert words in "\n".join([str(found.value), *getattr(found.value, "__notes__", [])])
    if kind is Raising:
        assert any("F[PP=1,MB=0]" in note for note in found.value.__notes__)


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_the_rest_may_read_what_it_may_not_change():
    module, alone = Read().double(), made("Branch", parts=4)
    module.load_state_dict(alone.state_dict())
    fit(module, local(program("Branch")))
    fit(alone, "auto")
    assert far(module, alone) < ROUNDING


def test_a_program_may_refuse_it():
    with pytest.raises(piper.CaptureError, match=r"loss\.item"):
        fit(made("Branch"), local(program("Branch"), capture="always"))


_backward = EagerRemainder.backward


def of_calls(self, gradient, kept, trained):
    made = _backward(self, gradient, kept, trained)
    return [x * (i < len(trained) - len(self.trained)) for i, x in enumerate(made)]


SEEDED = {
    "the gradients without the weight of their part": (graph_cut, "_weigh_gradients", lambda *given: None),
    "the gradients of what calls returned alone": (EagerRemainder, "backward", of_calls),
}


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
@pytest.mark.parametrize("what", SEEDED)
def test_seeded_bugs_show(what, monkeypatch):
    alone = made("Branch", parts=4)
    fit(alone, "auto")
    monkeypatch.setattr(*SEEDED[what])
    module = made("Branch")
    fit(module, local(program("Branch")))
    assert far(module, alone) > 1e-4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial_capture")
    return launch_trainings(2, train, folder / "run", folder)


def test_stages_over_processes(ranks):
    alone = made("Branch", parts=4)
    fit(alone, "auto")
    for rank in ranks:
        found = rank["stages"]["values"]
        assert max(float((x - found[name]).abs().max()) for name, x in alone.state_dict().items()) < ROUNDING
        assert rank["stages"]["seen"] == ranks[0]["stages"]["seen"] and rank["stages"]["seen"].keys() == {
            "loss",
            "worst",
        }
    assert ranks[0]["stages"]["seen"]["worst"] > ranks[0]["stages"]["seen"]["loss"]
    assert [rank["stages"]["kept"] for rank in ranks] == [0, 2 * 3 * 4]  # the rest runs with the last stage


def test_metric_objects_that_the_rest_updates_are_computed_by_all(ranks):
    alone = Measured().double()
    fit(alone, "auto")
    for rank in ranks:
        assert rank["measured"][:-1] == alone.found and len(set(alone.found)) == 3
        assert rank["measured"][-1] == alone.found[-1]  # computed after the fit


def test_metric_objects_outside_of_the_module_are_refused(ranks):
    for rank in ranks:
        assert "training_step updates a MeanMetric, which is not a submodule" in rank["listed"]


@pytest.mark.filterwarnings("ignore:training_step is captured in part")
def test_in_one_process_metric_objects_outside_of_the_module_are_updated():
    module = Listed().double()
    fit(module, local(program("Branch")))
    assert module.listed[0].update_count == 2 * 3 * 4


def test_shards_of_parameters_over_processes(ranks):
    for rank in ranks:
        for name, value in rank["ddp"]["values"].items():
            assert torch.allclose(rank["sharded"]["values"][name], value, rtol=0, atol=ROUNDING), name
        assert (
            rank["sharded"]["seen"] == pytest.approx(rank["ddp"]["seen"], rel=1e-6)
            and "mean" in rank["ddp"]["seen"]
        )
        assert rank["sharded"]["held"] == 0 < rank["ddp"]["held"]  # between steps no process has them whole
