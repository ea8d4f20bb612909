"""Steps that cannot be captured: every error names the user's line or key and says what to do instead."""

from __future__ import annotations

import datetime
import functools
import inspect
import json
import logging
import random
import re
from collections import deque
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import random_split

from lightning_piper.capture import capture
from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.user_lines import member
from lightning_piper.errors import CaptureError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.build import build_dag
from tests.models import MLP, regression


class Probe(MLP):
    """An MLP whose step ends with a function of (self, x, h, loss, batch_idx). If the function returns a
    value, the step returns this value.
    """

    def __init__(self, end: Callable[..., Any]) -> None:
        super().__init__()
        self.end = end
        self.seen: list[Any] = []
        self.best, self.unknown = 1.0, float("nan")
        self.recent: deque[Any] = deque()
        self.table: dict[str, Any] = {"a": 1}
        self.plain = torch.ones(())
        self.register_buffer("scale", torch.ones(()))
        self.metrics = [torchmetrics.MeanMetric()]
        self.sizes = nn.Module()
        self.sizes.counts = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        h = torch.tanh(self.first(x))
        loss = self.second(h).square().mean()
        result = self.end(self, x, h, loss, batch_idx)
        return loss if result is None else result


def message(end: Callable[..., Any]) -> str:
    with pytest.raises(CaptureError) as caught:
        build_dag(capture(Probe(end), regression(4)))
    return str(caught.value)


def marked(end: Callable[..., Any]) -> str:
    """Return `file:line` of the marked line in `end`."""
    lines, first = inspect.getsourcelines(end)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if '# here' in line)} ("


def test_the_probe_itself_can_be_captured() -> None:
    assert list(build_dag(capture(Probe(lambda *_: None), regression(4))).of_type(Chunk))


# Values that are only known when the step runs


def item(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    scale = 2.0
    return loss * scale if loss.item() > 1 else loss  # here


def number(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * len(range(int(h.mean().detach())))  # here


def branch(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    if loss > 1:  # here
        return 2 * loss


def nonzero(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    rows = x[:, 0].nonzero()  # here
    return loss + rows.sum()


def boolean_mask(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return h[h > 0].mean()  # here


def inside_of_a_library(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    torchmetrics.utilities.data._flexible_bincount(x.long())  # here


@pytest.mark.parametrize("end", [item, number, branch, nonzero, boolean_mask, inside_of_a_library])
def test_a_value_is_asked_for(end: Callable[..., Any]) -> None:
    said = message(end)
    assert said.startswith(marked(end))
    assert re.search(r"no values while the step is captured|only known when the step runs", said)
    assert "torch.where" in said and re.search(r"move (it|the computation) to a hook", said)


# What would be done only once, or seen only then


def python_draw(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * random.random()  # here


def numpy_draw(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * float(np.random.rand())  # here


def python_seed(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    random.seed(3)  # here
    return loss


def numpy_seed(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    np.random.seed(3)  # here
    return loss


def seed_in_a_fork(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(3)  # here
        return loss * torch.rand(())


def restored_seed(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    before = torch.get_rng_state()
    torch.manual_seed(3)  # here
    loss = loss * torch.rand(())
    torch.set_rng_state(before)
    return loss


def old_gradient(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("norm", 0.0 if self.first.weight.grad is None else 1.0)  # here


def new_values(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.first.weight.data = 0.9 * self.first.weight.data  # here


def own_generator(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * torch.rand((), generator=GENERATOR)  # here


def json_index(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    json.dumps({"at": batch_idx})  # here
    return loss


def indented(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    json.dumps([batch_idx * 0.5], indent=1)  # here
    return loss


def json_value(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    json.dumps({"loss": loss.item()})  # here
    return loss


def seconds(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    datetime.timedelta(seconds=batch_idx)  # here
    return loss


def numpy_of(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * h.detach().numpy().sum()  # here


def array_of(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * float(np.asarray(h.detach()).sum())  # here


def stopping(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.trainer.should_stop = True  # here


def saving(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.trainer.save_checkpoint("now")  # here


GENERATOR = torch.Generator()


@pytest.mark.parametrize(("end", "words"), [
    (python_draw, "training_step draws random numbers in Python, or sets a seed (random). A"),
    (numpy_draw, "training_step draws random numbers in Python, or sets a seed (numpy.random). A"),
    (python_seed, "training_step draws random numbers in Python, or sets a seed (random). A"),
    (numpy_seed, "If it sets a seed, remove this call"),
    (seed_in_a_fork, "training_step sets or advances torch's seed in Python"),
    (restored_seed, "training_step sets or advances torch's seed in Python"),
    (old_gradient, "training_step reads the gradient of first.weight, which belongs to the previous step"),
    (new_values, "training_step replaces the values of first.weight"),
    (own_generator, "training_step draws from its own torch.Generator"),
    (json_index, "this line gives a number that depends on batch_idx to code that accepts only Python's own numbers"),
    (indented, "this line gives a number that depends on batch_idx to code that accepts only Python's own numbers"),
    (seconds, "Move the line to a hook, such as on_train_batch_start"),
    (json_value, "this line needs the value of a tensor as a Python number"),
    (numpy_of, "this line makes a numpy array of a tensor, but tensors have no values while the step is captured"),
    (array_of, "Compute with tensors, or make the array in a hook"),
    (stopping, "training_step sets self.trainer.should_stop"),
    (saving, "training_step calls self.trainer.save_checkpoint()"),
])  # fmt: skip
def test_what_would_be_done_once(end: Callable[..., Any], words: str) -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr, index]
    module = Probe(end)
    module.trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, barebones=True
    )
    with pytest.raises(CaptureError) as error:
        build_dag(capture(module, regression(4)))
    assert str(error.value).startswith(marked(end)) and words in str(error.value)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes()), (
        "others draw what they would have drawn"
    )  # type: ignore[union-attr, index]


def test_a_value_that_json_does_not_know_keeps_its_error() -> None:
    def dump(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
        json.dumps({"of": object()})

    with pytest.raises(TypeError, match="Object of type object is not JSON serializable"):
        build_dag(capture(Probe(dump), regression(4)))


@pytest.mark.parametrize("draw", [
    lambda loss: loss * torch.rand((), generator=torch.default_generator),  # what torch's own functions pass
    lambda loss: loss * len(random_split(range(4), [3, 1])[0]),
])  # fmt: skip
def test_the_default_generator_is_not_an_own_generator(draw: Callable[[Tensor], Tensor]) -> None:
    step = capture(Probe(lambda self, x, h, loss, batch_idx: draw(loss)), regression(4))
    assert list(build_dag(step).of_type(Chunk))


def test_a_fork_of_the_generators_without_a_seed_is_captured() -> None:
    def forked(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
        with torch.random.fork_rng():
            return loss * torch.rand(())

    assert list(build_dag(capture(Probe(forked), regression(4))).of_type(Chunk))


def test_an_unused_batch_index_is_fine() -> None:
    step = capture(Probe(lambda self, x, h, loss, batch_idx: (batch_idx, loss)[1]), regression(4))
    assert list(build_dag(step).of_type(Chunk))


# Python state


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda self, loss: self.seen.append(loss.detach()), "self.seen"),
        (lambda self, loss: self.recent.append(1), "self.recent"),
        (lambda self, loss: self.table.update(a=2), "self.table"),
        (lambda self, loss: self.table.update(b=loss), "self.table"),
        (lambda self, loss: setattr(self, "best", self.best * 0.9), "self.best"),
        (lambda self, loss: setattr(self.sizes, "counts", self.sizes.counts + 1), "self.sizes.counts"),
        (lambda self, loss: setattr(self, "last_loss", loss), "self.last_loss"),
        (lambda self, loss: setattr(self, "plain", loss.detach()), "self.plain"),
    ],
)  # fmt: skip
def test_python_state_is_changed(change: Callable[..., Any], names: str) -> None:
    said = message(lambda self, x, h, loss, batch_idx: change(self, loss) and None)
    assert said.startswith(f"training_step changes {names}. ") and "register_buffer" in said


class Cached(Probe):
    @functools.cached_property
    def factor(self) -> float:
        return 2.0


def test_a_cached_property_is_computed() -> None:
    module = Cached(lambda self, x, h, loss, batch_idx: loss * self.factor)
    with pytest.raises(CaptureError, match=r"computes the cached property self\.factor for the first time"):
        build_dag(capture(module, regression(4)))
    assert module.factor == 2.0  # read once before, as the error says
    build_dag(capture(module, regression(4)))


def test_a_batch_that_contains_itself() -> None:
    batch: list[Any] = [torch.ones(4, 8)]
    batch.append(batch)
    with pytest.raises(CaptureError, match="nested too deeply, or contains itself"):
        capture(Probe(lambda *_: None), batch)


def test_a_member_is_shown_as_code() -> None:
    paths = {"a.0.b": "self.a[0].b", "a.0": "self.a[0]", "a.0.1": "self.a[0][1]", "a0.b1": "self.a0.b1"}
    assert [*map(member, paths)] == [*paths.values()]


def test_a_buffer_is_replaced() -> None:
    said = message(lambda self, x, h, loss, batch_idx: setattr(self, "scale", loss.detach()))
    assert (
        said.startswith("training_step replaces the buffer self.scale,")
        and "Write into the buffer instead: self.scale.copy_(...)" in said
    )


def test_a_buffer_is_replaced_by_a_tensor_of_another_shape() -> None:
    """A copy of another shape would fail."""
    said = message(lambda self, x, h, loss, batch_idx: setattr(self, "scale", h.detach()))
    assert "Register it as a tensor of its final shape" in said


def test_a_parameter_is_replaced() -> None:
    """A write in place would be refused as well, so the fix is another one than for a buffer."""
    said = message(
        lambda self, x, h, loss, batch_idx: setattr(self.first, "weight", nn.Parameter(torch.ones(6, 8)))
    )
    assert said.startswith("training_step replaces the parameter self.first.weight,") and "in a hook" in said


PARAMETER_CHANGES: dict[str, Callable[..., Any]] = {
    "requires_grad": lambda self, *_: setattr(self.first.weight, "requires_grad", False),
    "hook": lambda self, *_: self.first.weight.register_hook(torch.neg) and None,
}


@pytest.mark.parametrize("change", PARAMETER_CHANGES)
def test_a_parameter_is_changed_for_the_next_steps(change: str) -> None:
    said = message(PARAMETER_CHANGES[change])
    assert "requires_grad of the parameter self.first.weight, or registers a gradient hook on it" in said


def within_hooks(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Callable[..., Any]:
    def end(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return loss.square()

    return end


def test_hooks_of_saved_tensors() -> None:
    """A trace ignores them, so they may not change values."""
    said = message(within_hooks(lambda x: x, lambda x: 2.0 * x))
    assert "enters saved_tensors_hooks" in said and "test_errors.py" in said


def test_hooks_of_saved_tensors_around_the_step() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: 2.0 * x):
        said = message(lambda self, x, h, loss, batch_idx: loss)
    assert said.startswith("training_step runs inside of saved_tensors_hooks")
    with torch.autograd.graph.save_on_cpu():
        capture(Probe(lambda self, x, h, loss, batch_idx: loss), regression(8)).at(8)


def offloaded(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Tensor:
    self.first.requires_grad_(False)
    hook = self.second.weight.register_hook(torch.neg)
    with torch.autograd.graph.save_on_cpu():
        loss = loss + checkpoint(torch.square, h, use_reentrant=False).mean()
    self.first.requires_grad_(True)
    hook.remove()
    return loss


def test_a_step_may_undo_its_changes_of_parameters_and_use_the_hooks_of_torch() -> None:
    step = capture(Probe(offloaded), regression(8))
    step.at(8)


def test_a_parameter_is_created() -> None:
    said = message(lambda self, x, h, loss, batch_idx: setattr(self, "late", nn.Parameter(torch.ones(6))))
    assert (
        said.startswith("training_step creates the parameter self.late,") and "Create it in __init__" in said
    )


def test_a_parameter_is_changed() -> None:
    def clip(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> None:
        with torch.no_grad():
            self.first.weight.clamp_(-1, 1)

    said = message(clip)
    assert "the step changes the parameter first.weight in place" in said and "only the optimizer" in said


def test_a_tensor_that_is_no_buffer_is_used() -> None:
    def use(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Tensor:
        return loss * self.plain  # here

    said = message(use)
    assert (
        said.startswith(marked(use))
        and "neither in the batch nor a parameter or buffer" in said
        and "register_buffer" in said
    )


# The result


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda loss, h: h, r"a loss of shape \(4, 6\). Return a scalar"),
        (lambda loss, h: loss.detach(), "a loss with requires_grad=False"),
        (
            lambda loss, h: {"loss": loss, "h": h},
            r"a dict with keys \['h', 'loss'\]\. Return only the loss, or",
        ),
        (lambda loss, h: {"value": loss}, r"a dict with keys \['value'\]"),
        (lambda loss, h: {"loss": None}, "training_step returned None"),
        (lambda loss, h: 1.5, "training_step returns a float. Return the loss"),
        (lambda loss, h: loss.item(), "training_step returns a float. Return the loss"),
    ],
)
def test_the_result_is_no_loss(result: Callable[..., Any], says: str) -> None:
    with pytest.raises(CaptureError, match=says):
        build_dag(capture(Probe(lambda self, x, h, loss, batch_idx: result(loss, h)), regression(4)))


def test_none_is_no_loss() -> None:
    class Nothing(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(CaptureError, match=r"returned None\. A captured step needs a loss for every batch"):
        build_dag(capture(Nothing(), regression(4)))


# Logging


def log_a_metric(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("key", self.metrics[0])  # here


def log_a_matrix(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("key", h)  # here


def log_twice(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("key", loss)
    self.log_dict({"other": loss, "key": 2 * loss})  # here


def log_a_median(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("key", loss, reduce_fx=torch.median)  # here


def log_an_array_mean(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    self.log("key", loss, reduce_fx=np.mean)  # here


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (
            log_an_array_mean,
            "reduced by reduce_fx=numpy.mean cannot be merged over microbatches. Give one of 'mean'",
        ),
        (
            log_a_metric,
            "a MeanMetric cannot be logged inside a captured step. Log a tensor, a number, or a metric "
            "object",
        ),
        (log_a_matrix, "the value has shape (4, 6). Log a single number"),
        (log_twice, "is called twice in one step. Give each call its own name"),
        (log_a_median, "cannot be merged over microbatches. Give one of 'mean', 'sum', 'max' and 'min'"),
    ],
)
def test_a_log_call_is_refused(end: Callable[..., Any], says: str) -> None:
    said = message(end)
    assert said.startswith(marked(end)) and "self.log('key')" in said and says in said


# Errors of the user's own


class Odd(Exception):
    """An error class that only the user has."""


def bad_label(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    raise ValueError("bad label")


def odd(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    raise Odd("mine")


def claim(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    assert x.shape[1] == 5, "mine"


def key(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return self.table["missing"]


def divide(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss * (1 / 0)


def in_torch(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return nn.functional.mse_loss(h, h, reduction="middle")


def memory(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    ("end", "kind", "says"),
    [
        (bad_label, ValueError, "bad label"),
        (odd, Odd, "mine"),
        (claim, AssertionError, "mine"),
        (key, KeyError, "missing"),
        (divide, ZeroDivisionError, "division by zero"),
        (in_torch, ValueError, "middle is not a valid value for reduction"),
        (memory, RuntimeError, "out of memory"),
    ],
)
def test_what_the_step_raises_reaches_the_caller(
    end: Callable[..., Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        build_dag(capture(Probe(end), regression(4)))
    assert type(caught.value) is kind
    assert caught.value.__notes__ == [
        "raised while training_step was captured for 4 samples, with tensors that have no values"
    ]
    assert is_oom_error(caught.value) is (end is memory)


def shapes(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    return loss + h @ h  # here


def reworded(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
    try:
        return 2 * loss if loss.item() > 1 else loss
    except Exception as error:
        raise ValueError("no value") from error  # here


@pytest.mark.parametrize("end", [shapes, reworded])
def test_what_may_come_from_the_capture_is_a_capture_error(end: Callable[..., Any]) -> None:
    said = message(end)
    assert said.startswith(marked(end)) and "cannot be captured as one graph" in said


def test_a_tensor_kept_in_a_tuple_is_read_by_the_next_step() -> None:
    def keep(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Any:
        before = getattr(self, "hidden", (None,))[0]
        self.hidden = (h.detach(),)
        return loss if before is None else loss + before.mean()

    said = message(keep)
    assert "self.hidden" in said and "register_buffer" in said and "AssertionError" not in said


def test_a_sparse_gradient() -> None:
    class Sparse(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(
                (batch[0] + self.embed(torch.zeros(len(batch[0]), dtype=torch.long)), batch[1]), 0
            )

    with pytest.raises(CaptureError, match=r"gradient of embed.weight is sparse.*sparse=False"):
        build_dag(capture(Sparse(), regression(4)))


def test_a_module_without_a_step() -> None:
    with pytest.raises(CaptureError, match=r"Linear has no training_step. Give a LightningModule"):
        capture(nn.Linear(2, 2), regression(4))


# Structure


def test_regions_that_depend_on_the_batch_size() -> None:
    class Moody(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch[0].shape[0] > 2:
                self.log("large", loss)
            return loss

    step = capture(Moody(), regression(4))
    step.at(4), step.at(3)
    with pytest.raises(
        CaptureError,
        match=r"different structure for 2 samples than for 4 .*independent of the batch size, or choose",
    ):
        step.at(2)


def test_an_operation_that_fails_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """With the user's line. torch would log a traceback of its own beside it, as the control shows."""

    def end(self: Any, x: Tensor, h: Tensor, loss: Tensor, batch_idx: int) -> Tensor:
        return loss + (x @ x[:3]).sum()  # here

    def logged() -> list[str]:
        return [record.name for record in caplog.records if record.levelno >= logging.WARNING]

    told = message(end)
    assert marked(end) in told and "RuntimeError: a and b must have same reduction dim" in told
    assert not logged()
    with _torch.FakeTensorMode(), pytest.raises(RuntimeError, match="same reduction dim"):
        torch.ones(4, 3) @ torch.ones(5, 4)
    assert logged() == ["torch._subclasses.fake_tensor"]


CAUGHT = {
    "a number": lambda x: x.item() > 0.5,
    "a truth": lambda x: bool(x > 0.5),
    "a shape": lambda x: x.reshape(1).nonzero().shape[0] > 0,
    "a list": lambda x: x.reshape(1).tolist()[0] > 0.5,
}


@pytest.mark.parametrize("what", CAUGHT)
def test_a_refusal_that_the_step_catches_is_none_of_its_errors(what: str) -> None:
    """Else the step would be captured as what it does after an error that no device raises."""

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss = self.net(batch).mean()
            try:
                return loss * 2 if CAUGHT[what](loss) else loss
            except Exception:
                return loss * 7

    with pytest.raises(
        CaptureError, match=r"(needs the value of a tensor|are only known when the step runs)"
    ):
        capture(Catches(), torch.randn(2, 4)).at(2)
