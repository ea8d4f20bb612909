"""A capture does not change the module, even if it fails."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_piper import verify
from lightning_piper.capture import capture
from lightning_piper.capture.python_state.state_protection import attributes, check_unchanged
from lightning_piper.errors import CaptureError
from lightning_piper.ops.build import build_dag
from tests.groups import marked
from tests.models import CASES, MLP, ConvNet, fresh, images, regression


def picture(module: nn.Module) -> list[Any]:
    """Return all state of a module: values by content, and objects by identity."""
    found: list[Any] = [type(module), type(module).__dict__.get("log"), type(module).__mro__]
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            content = (
                list(value.items())
                if isinstance(value, dict)
                else list(value)
                if isinstance(value, list)
                else value
            )
            found.append((name, key, id(value), repr(content)))
        for x in [*part._parameters.values(), *part._buffers.values()]:
            if x is not None:
                found += [
                    (id(x), id(x.grad), type(x), x.requires_grad, x.device, x._version),
                    x.detach().clone().tolist(),
                ]
    return found


def prepared(name: str) -> tuple[L.LightningModule, Any]:
    """Return a module in an unusual state: with gradients, hooks, a part in evaluation mode, and Python
    attributes.
    """
    module, batch = fresh(name)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    children = list(module.children())
    children[0].eval()
    children[0].register_forward_hook(lambda module, args, output: None)
    module.notes = [1, {"a": 2}]
    return module, batch


@pytest.mark.parametrize(
    "name",
    marked(
        ["mlp", "conv", "tied", "logs", "recurrent", "constants", "counting", "dropout"],
        ["conv", "tied", "counting", "dropout"],
    ),
)
def test_a_capture_changes_nothing(name: str) -> None:
    module, batch = prepared(name)
    before = picture(module)
    assert before == picture(module)
    step = capture(module, batch, context=CASES[name].context)
    step.at(step.size)
    step.at(step.size // 2)
    assert picture(module) == before


def test_a_verification_changes_nothing() -> None:
    module, batch = prepared("conv")
    before, leaves = picture(module), [x.clone() for x in batch.values()]
    assert verify(module, batch, [{"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 2}]).ok
    assert picture(module) == before
    assert all(torch.equal(a, b) for a, b in zip(leaves, batch.values(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda self, x: setattr(self, "notes", None),
        lambda self, x: self.notes.append(1),
        lambda self, x: self.train(),
        lambda self, x: self.eval(),
        lambda self, x: setattr(self, "extra", x),
        lambda self, x: self.one[1].running_mean.add_(1),
        lambda self, x: delattr(self, "notes"),
        lambda self, x: setattr(self.one[0].weight, "grad", None),
        lambda self, x: self.one.register_forward_hook(lambda *_: None),
        lambda self, x: self.one[0].weight.requires_grad_(False),
    ],
)  # fmt: skip
def test_the_picture_shows_changes(change: Any) -> None:
    """The control: what the tests look at does change when something is changed."""
    module, batch = prepared("conv")
    before = picture(module)
    change(module, batch["image"])
    assert picture(module) != before


class Breaks(ConvNet):
    """A module that changes all kinds of state, and then cannot be captured."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        self.notes.append(loss)
        self.recent[0] = loss
        self.counter = 1
        self.cached = loss
        self.loss = loss
        self.one[1].extra = loss
        return loss * loss.item() if self.how == "late" else loss


@pytest.mark.parametrize("how", ["late", "by its changes"])
def test_a_failed_capture_changes_nothing(how: str) -> None:
    module, batch = Breaks(), images(4)
    module.notes, module.recent, module.how = [1, 2], {0: None}, how
    before = picture(module)
    with pytest.raises(CaptureError):
        build_dag(capture(module, batch))
    assert picture(module) == before


@pytest.mark.parametrize("works", [True, False])
def test_a_capture_leaves_torch_as_it_was(works: bool) -> None:
    def settings() -> list[Any]:
        flags = [torch.is_grad_enabled(), torch.compiler.is_exporting(), torch.compiler.is_compiling()]
        return [
            *flags,
            torch.is_autocast_enabled("cpu"),
            torch.utils._python_dispatch._get_current_dispatch_mode(),
        ]

    class Fails(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss if works else loss.item()

    before = settings()
    step = capture(Fails(), regression(4), context=lambda: torch.autocast("cpu", torch.bfloat16))
    if works:
        step.at(4)
    else:
        with pytest.raises(CaptureError):
            step.at(4)
    assert settings() == before


def test_the_module_still_trains_after_a_capture() -> None:
    module, batch = fresh("recurrent")
    with torch.random.fork_rng():
        before = module.training_step(batch, 0)
        capture(module, batch).at(4)
        after = module.training_step(batch, 0)
    assert torch.equal(before, after)
    after.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_evaluation_mode_is_captured_as_it_is() -> None:
    """A part in evaluation mode (a frozen batch norm) changes no statistics."""

    def changed(module: nn.Module) -> set[str]:
        outputs = [
            out
            for interface in capture(module, images(8)).at(8).interfaces.values()
            for out in interface.outputs
        ]
        return {name.split(".")[0] for out in outputs if out.kind == "buffer" for name in out.names}

    module, _ = fresh("conv")
    assert changed(module) == {"one", "two"}
    module.one.eval()
    assert changed(module) == {"two"}


def test_a_set_that_is_filled_again_in_another_order_is_the_same() -> None:
    module, _ = fresh("mlp")
    module.seen = set(range(100))
    for number in range(100):
        if number not in (9, 16):
            module.seen.discard(number)
    before, order = attributes(module), list(module.seen)
    content = {*module.seen}
    module.seen.clear()
    module.seen.update(content)
    assert list(module.seen) != order, "in a smaller set"
    check_unchanged(module, before, "training_step")
    module.seen.add(17)
    with pytest.raises(CaptureError, match=r"changes self\.seen"):
        check_unchanged(module, before, "training_step")


def set_none(module: Any) -> None:
    module.new = None


def remove(module: Any) -> None:
    del module.notes


def replace_object(module: Any) -> None:
    module.held = object()


def share(module: Any) -> None:
    module.notes = module.others


@pytest.mark.parametrize("change", [set_none, remove, replace_object, share], ids=lambda f: f.__name__)
def test_a_new_a_removed_and_a_replaced_attribute_are_seen(change: Any) -> None:
    module, _ = fresh("mlp")
    module.notes, module.others, module.held = [], [], object()
    before = attributes(module)
    module.notes = []  # a new list with equal content is not a change
    check_unchanged(module, before, "training_step")
    change(module)
    with pytest.raises(CaptureError, match=r"training_step changes self\.(new|notes|held)"):
        check_unchanged(module, before, "training_step")
