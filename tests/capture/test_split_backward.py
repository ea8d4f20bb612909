"""The two passes of a region's split backward: what each pass computes and reads, and that together they are
B.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_piper.annotate import annotate
from lightning_piper.capture import capture
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import SPLIT_BACKWARD, Code, Interface, StepCode
from tests.groups import marked
from tests.models import CASES, MLP, captured, regression


def code_of(name: str, size: int | None = None) -> StepCode:
    return captured(name).step.at(size or captured(name).case.size)


def sources(code: StepCode, region: int, kind: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return the values that a pass reads: (pass that makes it, kind of value, names)."""
    refs = code.interface_of((region, kind)).inputs
    outputs = [(f"{p}{r}", code.interface_of((r, p)).outputs[i]) for r, p, i in refs]
    return [(made, out.kind, out.names if out.kind == "saved" else ()) for made, out in outputs]


def saved(code: StepCode, region: int, kind: str) -> dict[tuple[str, ...], int]:
    """Return the number of tensors in each bundle that a pass saves, by the readers of the bundle."""
    outputs = zip(
        code.interface_of((region, kind)).outputs, code.code_of((region, kind)).outputs, strict=True
    )
    return {out.names: len(specs) for out, specs in outputs if out.kind == "saved"}


def calls(code: Code) -> Counter[str]:
    """Count each operation that is not a view."""
    free = ("view", "reshape", "transpose", "permute", "expand", "squeeze", "slice", "select", "detach",
        "alias", "getitem", ".t.",
            "split", "unbind")  # fmt: skip
    names = [str(node.target) for node in code.graph.nodes if node.op == "call_function"]
    return Counter(name for name in names if not any(word in name for word in free))


def bundles(interface: Interface, code: Code, flat: tuple[Tensor, ...]) -> list[list[Tensor]]:
    rest = iter(flat)
    return [[next(rest) for _ in specs] for specs in code.outputs]


class Run:
    """A runner that runs passes one by one and keeps their results."""

    def __init__(self, code: StepCode, tensors: dict[str, Tensor], leaves: list[Tensor]) -> None:
        self.code, self.tensors, self.leaves = code, tensors, leaves
        self.made: dict[tuple[int, str, int], list[Tensor]] = {}

    def run(self, region: int, kind: str) -> None:
        interface, code = self.code.interface_of((region, kind)), self.code.code_of((region, kind))
        args = [x for ref in interface.inputs for x in self.made[ref]]
        args += [self.tensors[name] for name in interface.params + interface.buffers + interface.state]
        args += [self.leaves[i] for i in interface.batch]
        args += [torch.ones((), dtype=args[0].dtype)] * len(interface.seeds)
        torch.manual_seed(region)
        for i, bundle in enumerate(bundles(interface, code, code.run(args))):
            self.made[region, kind, i] = bundle


def assert_halves_are_the_whole(code: StepCode, tensors: dict[str, Tensor], leaves: list[Tensor]) -> int:
    """Run every backward pass whole and split on the same values, and compare all bits. Returns the number of
    backward passes that have both BI and BW.
    """
    run = Run(code, tensors, leaves)
    both = 0
    for region in code.regions:
        run.run(region.index, "F")
    for region in reversed(code.regions):
        split_passes = code.backward_passes_of(region.index)
        both += len(split_passes) == 2
        for kind in ("B", *split_passes) if split_passes else ():
            run.run(region.index, kind)
        for part in split_passes:
            for i, out in enumerate(code.interface_of((region.index, part)).outputs):
                if out.kind == "saved":
                    continue
                mine, whole = run.made[region.index, part, i], run.made[code.whole(region.index, part, i)]
                assert len(mine) == len(whole) > 0
                for x, y in zip(mine, whole, strict=True):
                    assert x.stride() == y.stride() and torch.equal(x, y), f"{part} {region.label} {out}"
    return both


@pytest.mark.parametrize("name", marked(CASES, [*CASES][::2]))
def test_the_halves_compute_what_the_whole_computes(name: str) -> None:
    case = captured(name)
    with case.case.context():
        assert_halves_are_the_whole(case.step.at(case.step.size), case.tensors, case.leaves)


@pytest.mark.parametrize("name", list(CASES))
def test_every_operation_runs_in_one_half(name: str) -> None:
    code = code_of(name)
    for region in code.regions:
        split_passes = code.backward_passes_of(region.index)
        if split_passes:
            total = sum((calls(code.code_of((region.index, part))) for part in split_passes), Counter[str]())
            assert total == calls(code.code[region.index, "B"])
            outputs = [
                out
                for part in split_passes
                for out in code.interface_of((region.index, part)).outputs
                if out.kind != "saved"
            ]
            assert sorted(outputs, key=str) == sorted(code.interfaces[region.index, "B"].outputs, key=str)


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_is_handed_over_in_vain(name: str) -> None:
    """All that F saves for a half, and all that BI hands over, is used there; and memory is handed over
    once.
    """
    case = captured(name)
    code = case.step.at(case.step.size)
    for key in code.split_passes:
        assert [
            x.name for x in code.code_of(key).graph.nodes if x.op == "placeholder" and not x.users
        ] == [], key
    run = Run(code, case.tensors, case.leaves)
    order = [(r.index, "F") for r in code.regions] + [
        (r.index, kind) for r in code.regions[::-1] for kind in ("B", "BI")
    ]
    with case.case.context():
        for key in [key for key in order if key in code.interfaces or key in code.split_passes]:
            run.run(*key)
    for (region, kind), (interface, _) in code.split_passes.items():
        handed = [
            x
            for i, out in enumerate(interface.outputs)
            if out.kind == "saved"
            for x in run.made[region, kind, i]
        ]
        assert len({x.untyped_storage().data_ptr() for x in handed}) == len(handed)


def test_a_stage_in_the_middle() -> None:
    code = code_of("gpt")
    assert [code.backward_passes_of(i) for i in range(3)] == [("BW",), ("BI", "BW"), ("BI", "BW")]
    both = [("BI",), ("BI", "BW")], [("BW",), ("BI", "BW")]
    for kind, names in zip(SPLIT_BACKWARD, both, strict=True):
        assert [n for made, _, n in sources(code, 1, kind) if made == "F1"] == names
    assert [made for made, what, _ in sources(code, 1, "BI") if what == "cotangent"] == ["B2"]
    # What comes from other regions enters by BI.
    assert [(made, what) for made, what, _ in sources(code, 1, "BW") if made != "F1"] == [("BI1", "saved")]
    # The weights are in the products that make gradients of inputs; gradients of weights need none.
    weights = [name for name in code.interface_of((1, "BI")).params if name.endswith("weight")]
    assert len(weights) >= 3 and code.interface_of((1, "BW")).params == ()
    products = [calls(code.code_of((1, kind)))["aten.mm.default"] for kind in ("B", *SPLIT_BACKWARD)]
    assert products[0] == products[1] + products[2] and min(products) > 0


def test_a_first_stage_has_only_gradients_of_weights() -> None:
    code = code_of("mlp")
    assert code.backward_passes_of(0) == ("BW",) and code.code_of((0, "BW")) is code.code[0, "B"]
    assert code.interface_of((0, "BW")) == code.interfaces[0, "B"] and (0, "BI") not in code.split_passes
    assert saved(code, 0, "F") == {("BW",): 1}


def test_a_stage_without_weights_has_only_gradients_of_inputs() -> None:
    code = code_of("residual")
    assert (
        code.backward_passes_of(1) == ("BI",)
        and code.code_of((1, "BI")) is code.code[1, "B"]
        and (1, "BW") not in code.split_passes
    )


def test_a_stage_without_gradient_has_neither() -> None:
    code = code_of("extractor")
    assert code.backward_passes_of(0) == () and [region for region, _ in code.split_passes] == [1]


def test_what_only_one_half_needs_is_in_a_bundle_of_its_own() -> None:
    """BI needs the error, BW the activation; what BW needs of the error is its gradient, which BI hands
    over.
    """
    code = code_of("mlp")
    assert saved(code, 1, "F") == {("BI",): 1, ("BW",): 1, ("BI", "BW"): 0}
    assert saved(code, 1, "BI") == {("BW",): 1}
    (error, activation), handed = code.code[1, "F"].outputs[2:4], code.code_of((1, "BI")).outputs[-1]
    assert error[0].shape == (4, 2) and activation[0].shape == (4, 6) and handed[0].shape == (4, 2)


def test_a_value_is_handed_over_and_not_its_views() -> None:
    """The gradient of the product enters both of its factors, transposed; BW makes its own view of it."""

    class Views(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
            with annotate("PP"):
                return F.mse_loss(self.second(h.view(2, 2, 6)).view(4, 2).t(), y.t())

    code = capture(Views(), regression(4)).at(4)
    assert saved(code, 1, "BI") == {("BW",): 1}
    targets = [{node.target for node in code.code_of((1, kind)).graph.nodes} for kind in SPLIT_BACKWARD]
    assert all(torch.ops.aten.t.default in views for views in targets)


def test_results_of_one_operation_stay_together() -> None:
    """The backward of a layer norm makes the gradients of its input and of its weights at once: BI runs
    it.
    """

    class Norm(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
            with annotate("PP"):
                return F.mse_loss(self.second(self.norm(h)), y)

    torch.manual_seed(0)
    module, batch = Norm(), regression(4)
    code = capture(module, batch).at(4)
    norm = "aten.native_layer_norm_backward.default"
    assert [calls(code.code_of((1, kind)))[norm] for kind in SPLIT_BACKWARD] == [1, 0]
    assert saved(code, 1, "BI") == {
        ("BW",): 3
    }  # both gradients of the norm, and that of the linear layer's output
    assert assert_halves_are_the_whole(code, dict(module.named_parameters()), list(batch)) == 1


def test_a_weight_that_a_region_uses_twice() -> None:
    class Twice(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _ = batch
            with annotate("PP"):
                h = self.a(x)
            with annotate("PP"):
                return self.b(torch.tanh(self.b(h))).square().mean()

    torch.manual_seed(0)
    module, batch = Twice(), regression(4)
    code = capture(module, batch).at(4)
    assert (
        calls(code.code_of((1, "BW")))["aten.mm.default"] == 2
        and calls(code.code_of((1, "BI")))["aten.mm.default"] == 2
    )
    assert assert_halves_are_the_whole(code, dict(module.named_parameters()), list(batch)) == 1


class _Noisy(torch.autograd.Function):
    """The identity, with a random gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.rand_like(gradient)


def test_random_numbers_of_the_backward_are_all_drawn_by_the_first_half() -> None:
    """One seed for B and BI: what a gradient of a weight draws, between what the gradients of inputs draw,
    stays the same.
    """

    class Noise(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
            with annotate("PP"):
                out = F.linear(
                    _Noisy.apply(h), _Noisy.apply(self.second.weight), _Noisy.apply(self.second.bias)
                )
                return F.mse_loss(_Noisy.apply(out), y)

    torch.manual_seed(0)
    module, batch = Noise(), regression(4)
    code = capture(module, batch).at(4)
    draws = [
        sum(n for name, n in calls(code.code_of((1, kind))).items() if "rand" in name)
        for kind in ("B", *SPLIT_BACKWARD)
    ]
    assert draws == [4, 4, 0]
    assert [code.interface_of((1, kind)).random for kind in ("B", *SPLIT_BACKWARD)] == [True, True, False]
    assert assert_halves_are_the_whole(code, dict(module.named_parameters()), list(batch)) == 1


@pytest.mark.parametrize(
    "name", marked([name for name, case in CASES.items() if case.size >= 4], [*CASES][::2])
)
@pytest.mark.parametrize("size", [1, pytest.param(3, marks=pytest.mark.long)])
def test_the_interfaces_are_those_of_every_batch_size(name: str, size: int) -> None:
    whole, part = code_of(name), code_of(name, size)
    assert whole.split_passes.keys() == part.split_passes.keys()
    for key in whole.split_passes:
        a, b = whole.interface_of(key), part.interface_of(key)
        assert (a.inputs, a.params, a.buffers, a.state, a.batch) == (
            b.inputs,
            b.params,
            b.buffers,
            b.state,
            b.batch,
        )
        assert [out.kind for out in a.outputs] == [out.kind for out in b.outputs]


def test_a_half_that_reads_other_parameters_at_another_size_cannot_be_had_there() -> None:
    """The whole pass reads them at every size, and can."""

    class Depends(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            with annotate("PP"):
                h = torch.tanh(self.first(x))
            with annotate("PP"):
                factor = self.second.weight if len(x) < 3 else torch.ones(2, 6)
                return F.mse_loss(self.second(h), y) + (self.second.weight * factor).sum()

    step = capture(Depends(), regression(4))
    assert step.at(4).split_passes.keys() == {(0, "BW"), (1, "BI"), (1, "BW")}
    assert step.at(2).interfaces[1, "B"].params == step.at(4).interfaces[1, "B"].params
    step.at(2).code_of((1, "BI"))
    with pytest.raises(
        CaptureError,
        match=r"BW of region PP=1 has a different structure for 2 samples than for the size captured",
    ):
        step.at(2).code_of((1, "BW"))
