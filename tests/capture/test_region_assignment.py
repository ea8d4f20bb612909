"""The beginning and the end of regions, and the values that go from one region to another."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import StepCode
from lightning_piper.ops.build import build_dag
from lightning_piper.verify.interpreter import interpret
from tests.models import MLP, captured, regression


def code_of(name: str) -> StepCode:
    return captured(name).step.at(captured(name).case.size)


def made(code: StepCode, kind: str) -> dict[tuple[int, str], list[tuple[str, ...]]]:
    """Return a map: (region, pass) -> names of its outputs of a kind."""
    found = {
        key: [out.names for out in interface.outputs if out.kind == kind]
        for key, interface in code.interfaces.items()
    }
    return {key: names for key, names in found.items() if names}


def sources(code: StepCode, region: int, kind: str) -> list[tuple[str, str]]:
    """Return the values that a pass reads: (label of the pass that makes it, kind of value). For a saved
    value, the kind also names its readers.
    """
    found = []
    for r, p, i in code.interface_of((region, kind)).inputs:
        out = code.interface_of((r, p)).outputs[i]
        names = ":" + ",".join(out.names) if out.kind == "saved" else ""
        found.append((f"{p}[{code.regions[r].label}]", out.kind + names))
    return found


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("mlp", ["PP=0", "PP=1"]),
        ("gpt", ["PP=0", "PP=1", "PP=2"]),
        ("glue", ["PP=0", "PP=1"]),
        ("losses", ["PP=0", "PP=1"]),
        ("counting", ["PP=0", "PP=1"]),
        ("experts", ["PP=0", "PP=1", "PP=1,EP=0", "PP=1,EP=1", "PP=1", "PP=2"]),
        ("reentered", ["PP=0", "PP=1", "PP=0"]),
        ("untagged", ["untagged"]),
    ],
)
def test_regions_are_runs_of_equal_tags_and_glue_joins_them(name: str, labels: list[str]) -> None:
    code = code_of(name)
    assert [region.label for region in code.regions] == labels
    assert [region.index for region in code.regions] == list(range(len(labels)))
    assert {i for i, p in code.interfaces if p == "F"} == set(range(len(labels)))
    assert {i for i, p in code.interfaces if p == "B"} == {
        r.index for r in code.regions if name != "experts" or r.index != 4
    }


class InPlace(L.LightningModule):
    """A module that adds to its loss in place, as many do, after its stages or within the last stage."""

    def __init__(self, within: bool) -> None:
        super().__init__()
        self.first, self.second, self.within = nn.Linear(3, 4), nn.Linear(4, 1), within

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with annotate("PP", 0):
            h = self.first(batch).tanh()
        with annotate("PP", 1):
            out = self.second(h)
            loss = out.square().mean()
            if self.within:
                loss += 0.1 * out.abs().mean()
        loss += 0.1 * out.abs().sum()
        return loss


@pytest.mark.parametrize("within", [False, True])
def test_a_loss_that_is_added_to_in_place_stays_in_the_last_stage(within: bool) -> None:
    """torch makes such a result anew when the backward pass is done, marked like the last operation: of the
    first stage.
    """
    code = capture(InPlace(within), torch.randn(4, 3)).at(4)
    assert [region.label for region in code.regions] == ["PP=0", "PP=1"]
    assert made(code, "loss") == {(1, "F"): [("returned loss",), ("returned loss",)]}


def test_a_chain_of_two_stages() -> None:
    code = code_of("mlp")
    assert sources(code, 0, "F") == []
    assert sources(code, 1, "F") == [("F[PP=0]", "activation")]
    assert sources(code, 1, "B") == [
        ("F[PP=1]", "saved:BI"),
        ("F[PP=1]", "saved:BW"),
        ("F[PP=1]", "saved:BI,BW"),
    ]
    assert sources(code, 0, "B") == [("F[PP=0]", "saved:BW"), ("B[PP=1]", "cotangent")]
    assert made(code, "grad") == {
        (0, "B"): [("first.weight", "first.bias")],
        (1, "B"): [("second.weight", "second.bias")],
    }
    assert made(code, "loss") == {(1, "F"): [("returned loss",)]} and made(code, "log") == {
        (1, "F"): [("train_loss",)]
    }
    assert [key for key, interface in code.interfaces.items() if interface.seeds_gradient] == [(1, "B")]
    assert [interface.batch for interface in (code.interfaces[0, "F"], code.interfaces[1, "F"])] == [
        (0,),
        (1,),
    ]
    assert (
        code.interfaces[0, "F"].params == ("first.weight", "first.bias")
        and code.interfaces[0, "B"].params == ()
    )


def test_a_residual_skips_a_stage_in_both_directions() -> None:
    code = code_of("residual")
    assert sources(code, 2, "F") == [("F[PP=0]", "activation"), ("F[PP=1]", "activation")]
    assert sources(code, 1, "F") == [("F[PP=0]", "activation")]
    # The gradients of both uses are added where the second one is made, in stage 1.
    assert sources(code, 1, "B") == [
        ("F[PP=1]", "saved:BI"),
        ("B[PP=2]", "cotangent"),
        ("B[PP=2]", "cotangent"),
    ]
    assert sources(code, 0, "B") == [("F[PP=0]", "saved:BW"), ("B[PP=1]", "cotangent")]
    assert code.interfaces[1, "F"].params == () and "grad" not in [
        out.kind for out in code.interfaces[1, "B"].outputs
    ]


@pytest.mark.parametrize("name", ["used_twice", "tied"])
def test_neither_weights_nor_their_gradients_are_sent(name: str) -> None:
    """A parameter used in two regions enters both, transposed or not; what crosses depends on the batch."""
    code, other = code_of(name), captured(name).step.at(3)
    weight = {"used_twice": "a.weight", "tied": "embed.weight"}[name]
    users = [i for i, region in enumerate(code.regions) if weight in code.interfaces[i, "F"].params]
    assert users == [0, len(code.regions) - 1]
    crossing = [
        (key, out.kind, a[0].shape[0], b[0].shape[0])
        for key, interface in code.interfaces.items()
        for out, a, b in zip(interface.outputs, code.code[key].outputs, other.code[key].outputs, strict=True)
        if out.kind in ("activation", "cotangent")
    ]
    last = len(code.regions) - 1
    forward = [((i, "F"), "activation", 4, 3) for i in range(last)]
    assert sorted(crossing) == sorted(forward + [((i + 1, "B"), "cotangent", 4, 3) for i in range(last)])


def test_every_region_of_a_tied_parameter_contributes_in_a_bundle_of_its_own() -> None:
    assert made(code_of("used_twice"), "grad") == {
        (0, "B"): [("a.weight",), ("a.bias",)],
        (1, "B"): [("a.weight",), ("b.weight", "b.bias")],
    }
    tied = made(code_of("tied"), "grad")
    assert [key for key, bundles in tied.items() if ("embed.weight",) in bundles] == [(0, "B"), (2, "B")]
    assert captured("tied").step.params["embed.weight"].aliases == ("head.weight",)
    assert captured("tied").step.canonical["head.weight"] == "embed.weight"
    assert "head.weight" not in captured("tied").step.params


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    code = code_of("frozen")
    trained = {name for bundles in made(code, "grad").values() for names in bundles for name in names}
    assert trained == {"first.weight", "second.weight", "second.bias"}
    assert "mixing" in code.interfaces[0, "F"].params and "first.bias" in code.interfaces[0, "F"].params
    used = {name for interface in code.interfaces.values() for name in interface.params}
    assert set(captured("frozen").step.params) - used == {"unused.weight", "unused.bias"}
    assert not captured("frozen").step.params["mixing"].requires_grad


def test_constants_are_made_again_where_they_are_used() -> None:
    """The mask of these models and the slices of the batch are in every region that uses them, and cross
    nowhere.
    """
    glue = code_of("glue")
    assert glue.interfaces[0, "F"].batch == glue.interfaces[1, "F"].batch == (0,)
    assert made(glue, "activation") == {(0, "F"): [("mul_1",)]}
    assert glue.interfaces[1, "F"].buffers == ("scale",) and glue.interfaces[0, "F"].buffers == ()
    gpt = code_of("gpt")
    assert [len(names) for names in made(gpt, "activation").values()] == [1, 1]
    assert ["triu" in str(gpt.code[i, "F"].graph) for i in range(3)] == [False, True, True]


def test_work_after_the_regions_belongs_to_the_region_that_feeds_it() -> None:
    code = code_of("losses")
    assert made(code, "loss") == {(1, "F"): [("returned loss",)]}
    assert sources(code, 1, "F") == [("F[PP=0]", "activation"), ("F[PP=0]", "activation")]
    # The two terms meet in stage 1; the gradient of the penalty goes back from there.
    assert [key for key, interface in code.interfaces.items() if interface.seeds_gradient] == [(1, "B")]


def test_buffers_that_the_step_changes_are_state() -> None:
    code = code_of("conv")
    assert [len(code.interfaces[i, "F"].state) for i in (0, 1)] == [3, 3]
    assert made(code, "buffer")[0, "F"] == [
        ("one.1.running_mean", "one.1.running_var", "one.1.num_batches_tracked")
    ]
    glue = code_of("glue")
    assert glue.interfaces[1, "F"].state == () and made(glue, "buffer") == {}


def test_untagged_work_with_parameters_is_a_region_of_its_own() -> None:
    class Outside(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = self.first(x)
            return F.mse_loss(self.second(h), y)

    code = capture(Outside(), regression(4)).at(4)
    assert [region.label for region in code.regions] == ["PP=0", "untagged"]
    assert code.regions[1].source.endswith("(return F.mse_loss(self.second(h), y))")


def test_a_stage_without_gradient_has_no_backward_pass() -> None:
    code = code_of("extractor")
    assert sorted(code.interfaces) == [(0, "F"), (1, "B"), (1, "F")]
    assert "saved" not in [out.kind for out in code.interfaces[0, "F"].outputs]


def test_what_leads_to_no_result_is_not_computed() -> None:
    class Wasteful(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
                debug = h.sin()
            with annotate("PP"):
                _ = F.dropout(debug + 1, 0.5)
                return F.mse_loss(self.second(h), y)

    code = capture(Wasteful(), regression(4)).at(4)
    assert sources(code, 1, "F") == [("F[PP=0]", "activation")] and not code.interfaces[1, "F"].random
    assert "sin" not in str(code.code[0, "F"].graph)


def test_values_that_cross_are_dense_and_keep_their_memory_order() -> None:
    class Strides(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP", 0):
                wide = self.first(x).mean(-1, keepdim=True).expand(-1, 6)  # strides (1, 0)
                turned = (2 * self.first(x)).t()  # strides (1, 6)
            with annotate("PP", 1):
                return F.mse_loss(self.second(wide + turned.t()), y)

    module, batch = Strides(), regression(4)
    code = capture(module, batch).at(4)
    made = code.code[0, "F"].run([module.first.weight.detach(), module.first.bias.detach(), batch[0]])
    crossing = [
        specs[0]
        for out, specs in zip(code.interfaces[0, "F"].outputs, code.code[0, "F"].outputs, strict=True)
        if out.kind == "activation"
    ]
    assert [(spec.shape, spec.stride) for spec in crossing] == [((4, 6), (6, 1)), ((6, 4), (1, 6))]
    assert [(x.shape, x.stride()) for x in made[:2]] == [((4, 6), (6, 1)), ((6, 4), (1, 6))]


def test_one_sample_has_the_interface_of_many() -> None:
    """A batch of one takes other kernels inside (mm and add for addmm), which must not show outside."""

    class SequenceFirst(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with annotate("PP"):
                x = self.embed(batch).transpose(0, 1)
            with annotate("PP"):
                x = torch.tanh(self.inner(x)).flatten(0, 1)
            with annotate("PP"):
                x = x.unflatten(0, (5, -1)).transpose(0, 1)
                return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    module, batch = SequenceFirst(), torch.randint(0, 7, (4, 5))
    step = capture(module, batch)
    many, one = step.at(4), step.at(1)
    operations = [[str(node.target) for node in code.code[2, "F"].graph.nodes] for code in (many, one)]
    assert operations[0] != operations[1], "the control: inside they do differ"
    tensors = {name: x.detach() for name, x in module.named_parameters()}
    found = interpret(build_dag(step, 1), tensors, [batch[:1]])
    module.training_step(batch[:1], 0).backward()
    assert all(torch.equal(found.grads[name], x.grad) for name, x in module.named_parameters())


def test_each_size_is_traced_once() -> None:
    step = captured("mlp").step
    assert step.at(3) is step.at(3) and step.at(3) is not step.at(4)
    assert step.at(3).batch_specs[0].shape == (3, 4)


def test_a_larger_batch_of_the_same_step() -> None:
    step = captured("mlp").step
    larger = step.resized(6)
    assert (larger.size, step.size) == (6, 4) and larger.at(4) is step.at(4)
    assert build_dag(larger).size == 6 and not build_dag(larger).program.partial


def test_a_newer_torch_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "3.1.0+cpu")
    with pytest.warns(UserWarning, match="torch 3.1.0.* is newer than"):
        capture(MLP(), regression(4))
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    with pytest.raises(CaptureError, match="no training_step"):
        # and no warning, which would be an error here
        capture(nn.Linear(1, 1), regression(4))
