"""Region tags: which numbers regions get, where they nest, and what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, nn

from lightning_piper.annotate import annotate, annotate_modules, numbering
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError


class Net(nn.Module):
    """Four layers in a row. A test gives a function of (self, input) that runs around them."""

    def __init__(self, run: Callable[[Net, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        self.head = nn.Linear(3, 1)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.run or Net.forward)(self, batch).mean()


def tags(module: nn.Module) -> list[dict[str, int]]:
    """Return the tags of the regions, in trace order."""
    return [dict(region.tags) for region in capture(module, torch.ones(2, 3)).at(2).regions]


def test_entries_are_numbered_in_trace_order_per_tag() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = net.layers[0](x)
        with annotate("EP"):
            x = net.layers[1](x)
        with annotate("PP"):
            x = net.layers[2](x)
        with annotate("EP"):
            return net.head(x)

    net = Net(run)
    assert tags(net) == [{"PP": 0}, {"EP": 0}, {"PP": 1}, {"EP": 1}]
    assert tags(net) == [{"PP": 0}, {"EP": 0}, {"PP": 1}, {"EP": 1}], (
        "a second capture starts from zero again"
    )


def test_an_explicit_index_is_kept_and_does_not_count() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP", 7):
            x = net.layers[0](x)
        with annotate("PP"):
            x = net.layers[1](x)
        with annotate("PP", 3):
            x = net.layers[2](x)
        with annotate("PP"):
            return net.head(x)

    assert tags(Net(run)) == [{"PP": 7}, {"PP": 0}, {"PP": 3}, {"PP": 1}]


def test_contexts_nest_and_the_innermost_wins_for_one_tag() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP", 0):
            x = net.layers[0](x)
            with annotate("EP", 2):
                x = net.layers[1](x)
                with annotate("PP", 5):
                    x = net.layers[2](x)
            return net.head(x)

    assert tags(Net(run)) == [{"PP": 0}, {"PP": 0, "EP": 2}, {"PP": 5, "EP": 2}, {"PP": 0}]


def test_one_region_for_neighbors_with_equal_tags_and_another_after_an_interruption() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP", 0):
            x = net.layers[0](x)
        with annotate("PP", 0):
            x = net.layers[1](x)
        with annotate("PP", 1):
            x = net.layers[2](x)
        with annotate("PP", 0):
            return net.head(x)

    assert tags(Net(run)) == [{"PP": 0}, {"PP": 1}, {"PP": 0}]


def test_a_region_knows_the_line_that_opened_it() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP"):
            return net(x)

    (region,) = capture(Net(run), torch.ones(2, 3)).at(2).regions
    assert region.source == f"{__file__}:{run.__code__.co_firstlineno + 1}"


def test_outside_of_a_capture_nothing_happens() -> None:
    with fx_traceback.preserve_node_meta():
        with annotate("PP"):
            assert "custom" not in fx_traceback.current_meta
        with numbering(), annotate("PP"):  # the control: inside of one, the tag is there
            assert fx_traceback.current_meta["custom"]["piper"] == {"PP": 0}
        assert "custom" not in fx_traceback.current_meta
        with annotate("PP"):
            assert "custom" not in fx_traceback.current_meta


def test_numbering_ends_with_an_exception() -> None:
    with fx_traceback.preserve_node_meta():
        with pytest.raises(ZeroDivisionError), numbering():
            raise ZeroDivisionError
        with annotate("PP"):
            assert "custom" not in fx_traceback.current_meta


@pytest.mark.parametrize("tag", ["", "PASS", 3, None, ["PP"]])
def test_a_tag_is_a_string_that_is_not_reserved(tag: Any) -> None:
    with pytest.raises(CaptureError, match="Give a string of 1 to 100 printable characters, other than PASS"):
        annotate(tag)


@pytest.mark.parametrize("index", [-1, 1.0, True, "0"])
def test_an_index_is_a_number_from_zero(index: Any) -> None:
    with pytest.raises(
        CaptureError, match=r"annotate\('PP'\): index .* is not usable. Give an integer from 0 to 2147483647"
    ):
        annotate("PP", index)


# annotate_modules


def test_modules_are_tagged_by_globs() -> None:
    net = Net()
    annotate_modules(net, "PP", [["layers.[0-1]"], ["layers.2", "head"]])
    assert tags(net) == [{"PP": 0}, {"PP": 1}]
    assert [region.source for region in capture(net, torch.ones(2, 3)).at(2).regions] == [
        "module layers.0",
        "module layers.2",
    ]


def test_modules_and_blocks_of_two_tags_nest() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = net.layers[0](x)
        with annotate("PP"):
            return net.head(net.layers[2](net.layers[1](x)))

    net = Net(run)
    annotate_modules(net, "EP", [["layers.1"], ["hea?"]])
    assert tags(net) == [{"PP": 0}, {"PP": 1, "EP": 0}, {"PP": 1}, {"PP": 1, "EP": 1}]


def test_annotated_modules_compute_the_same_and_can_be_copied_and_pickled() -> None:
    net, x = Net(), torch.randn(2, 3)
    before = net(x)
    annotate_modules(net, "PP", [["layers.*"], ["head"]])
    for twin in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert torch.equal(twin(x), before)
        assert tags(twin) == [{"PP": 0}, {"PP": 1}]


def test_an_exception_inside_of_a_module_leaves_no_context_open() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if self.failing:
                raise ValueError("inside")
            return x

    net = Net()
    net.layers[1] = Fails()
    annotate_modules(net, "PP", [["layers.0"], ["layers.1"], ["layers.2", "head"]])
    net.layers[1].failing = True
    with fx_traceback.preserve_node_meta(), numbering():
        with pytest.raises(ValueError, match="inside"):
            net(torch.ones(2, 3))
        assert "custom" not in fx_traceback.current_meta
    net.layers[1].failing = False
    assert tags(net) == [{"PP": 0}, {"PP": 2}]


def test_a_capture_that_fails_inside_of_a_module_leaves_no_context_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While torch traces, modules call no hooks after an exception."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    def capture_it() -> None:
        model = Net()
        model.layers[1] = Fails()
        annotate_modules(model, "PP", [["layers.0"], ["layers.1"]])
        with pytest.raises(CaptureError, match="this line needs the value of a tensor"):
            tags(model)

    complaints: list[str] = []  # of contexts that only the garbage collector closes, when it is too late
    monkeypatch.setattr(sys, "unraisablehook", lambda found: complaints.append(repr(found.exc_value)))
    capture_it()
    gc.collect()
    assert complaints == []


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        (
            [["layers.0"], ["layers.7"]],
            r"groups\[1\] pattern 'layers.7' matches no module of Net. Give a pattern of its modules: layers.0, ",
        ),
        (
            [["layers.*"], ["head", "*.1"]],
            r"module 'layers.1' is matched by groups 0 and 1. Name each module in one group",
        ),
        (["layers.0", "head"], r"groups\[0\] is the string 'layers.0'. Give a list of strings"),
    ],
)
def test_wrong_groups_are_refused_and_leave_no_hook(groups: Any, says: str) -> None:
    net = Net()
    with pytest.raises(CaptureError, match=says):
        annotate_modules(net, "PP", groups)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())


def test_a_container_is_not_offered_as_a_pattern() -> None:
    for model, fix in (
        (Net(), r"Give a pattern of its modules: layers\.0, layers\.1, layers\.2, head \["),
        (nn.ModuleList(), r"Write piper\.annotate in its forward method"),
    ):
        with pytest.raises(CaptureError, match=fix):
            annotate_modules(model, "PP", [["decoder"]])
    annotate_modules(net := Net(), "PP", [["layers.0", "layers.1", "layers.2"], ["head"]])
    assert tags(net) == [{"PP": 0}, {"PP": 1}]


def test_annotate_modules_refuses_a_reserved_tag() -> None:
    with pytest.raises(CaptureError, match="tag 'PASS' is not usable"):
        annotate_modules(Net(), "PASS", [["head"]])
