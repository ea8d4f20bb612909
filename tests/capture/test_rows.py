"""Code of divided experts: it works for any number of rows, and only if each operation works on each row
separately.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.capture.cutting import row_independence
from lightning_piper.errors import CaptureError
from lightning_piper.routing import ROWS
from tests.errors.dividing import GELU, MOE, batch, experts
from tests.groups import marked


def captured(*changes: tuple[str, str]) -> Any:
    """Capture a module whose tokens also get gradients."""
    return capture(
        experts(("(x[order], counts)", "((x * self.router.weight[:1])[order], counts)"), *changes), batch()
    )


SHAPED = (
    GELU,
    GELU + "; n = rows.shape[0]; rows = rows.view(n, 2, 3).transpose(1, 2).reshape(n * 6).view(n, 6)",
)
MADE = (
    GELU,
    GELU
    + "; rows = rows + torch.ones(rows.shape[0], 1) * torch.zeros_like(rows).new_full((rows.shape[0], 6), "
    "0.5)",
)


@pytest.mark.parametrize("changes", [(), (SHAPED,), (MADE,)], ids=["plain", "views", "made"])
def test_code_runs_for_any_number_of_rows(changes: tuple[tuple[str, str], ...]) -> None:
    """Traced for 8 tokens, it gives for 0, 3 and 20 what the module's own operations give, forward and
    backward, bitwise.
    """
    step = captured(*changes)
    code = step.at(8, (2,))
    (region,) = code.routed
    forward, backward = code.code[region, "F"], code.code[region, "B"]
    module = step.module
    for sizes in ([0, 0], [3, 0], [7, 13]):
        n = sum(sizes)
        rows = torch.randn(n, 8, requires_grad=True)
        up, down = (x.detach()[:2].clone().normal_().requires_grad_() for x in (module.up, module.down))
        arrived = torch.tensor([sizes, [0, 0]])
        out, *saved = forward.run(
            _ordered(code, region, rows=rows.detach(), counts=arrived, up=up.detach(), down=down.detach())
        )
        hidden = torch.relu(piper.grouped_linear(rows, up, torch.tensor(sizes)))
        if changes == (SHAPED,):
            hidden = hidden.view(n, 2, 3).transpose(1, 2).reshape(n * 6).view(n, 6)
        if changes == (MADE,):
            hidden = hidden + 0.5
        meant = piper.grouped_linear(hidden, down, torch.tensor(sizes))
        assert torch.equal(out, meant)
        cotangent = torch.randn(n, 8)
        meant.backward(cotangent)
        names = code.interfaces[region, "B"].params
        params = {"up": up.detach(), "down": down.detach()}
        made = backward.run([*saved, cotangent, *(params[name] for name in names)])
        grads = dict(zip(("up", "down"), made, strict=False))
        assert code.interfaces[region, "B"].outputs[0].names == ("up", "down")
        assert torch.equal(grads["up"], up.grad) and torch.equal(grads["down"], down.grad)  # type: ignore[arg-type]
        assert torch.equal(made[2], rows.grad)  # type: ignore[arg-type]


def _ordered(code: Any, region: int, **given: torch.Tensor) -> list[torch.Tensor]:
    interface = code.interfaces[region, "F"]
    directions = {"counts": "counts", "dispatch": "rows"}
    return [given[directions[direction]] for direction in interface.arrives] + [
        given[name] for name in interface.params
    ]


def test_specs_are_those_of_the_balanced_case() -> None:
    code = captured().at(8, (2,))
    (region,) = code.routed
    for kind in "FB":
        for specs in code.code[region, kind].outputs:
            assert all(size < ROWS for spec in specs for size in (*spec.shape, *spec.stride))
    assert code.code[region, "F"].outputs[0][0].shape == (8, 8)


def test_a_region_is_what_stands_between_dispatch_and_combine() -> None:
    """Also where the annotation holds more: sorting before it, weighting after it."""
    step = captured(
        ("self.down, sizes))", "self.down, sizes)) * 2"),
    )
    code = step.at(8)
    assert [dict(region.tags) for region in code.regions] == [{"PP": 0}, *[{"PP": 0, "EP": 0}] * 3, {"PP": 0}]
    assert list(code.routed) == [2]
    assert code.interfaces[2, "F"].arrives.count("dispatch") == 1
    assert code.interfaces[2, "F"].leaves[0] == "combine"
    assert code.routed[2].params == ("up", "down")


@pytest.mark.parametrize(
    "line, said",
    [
        ("rows = rows - rows.mean(0)", "aten.mean.dim"),
        ("rows = rows * rows.sum()", "aten.sum.default"),
        ("rows = rows / rows.norm(dim=0)", "aten.linalg_vector_norm.default"),
    ],
)
def test_what_couples_rows_is_refused(line: str, said: str) -> None:
    with pytest.raises(CaptureError, match=f"{said} between dispatch and combine"):
        captured((GELU, f"{GELU}; {line}")).at(8, (2,))
    captured((GELU, f"{GELU}; {line}")).at(8)  # on one device it is nobody's business


MEET = [
    "rows = rows.softmax(0)", "rows = rows.flip(0)", "rows = rows[torch.arange(rows.shape[0]).roll(1)]",
    "rows = rows + (rows - rows.roll(1, 0)).nan_to_num()", "rows = rows + rows.argsort(0)",
    "rows = rows * (rows >= rows.amax(0))", "rows = rows + sizes.max()",
]  # fmt: skip
MEET_TOO = [
    "rows = rows.cumsum(0)", "rows = (rows @ rows.t()) @ rows", "rows = rows.sort(0).values",
    # These paths do not carry NaN.
    "rows = rows + (rows > 0).cumsum(0)", "rows = torch.where(rows > rows.roll(1, 0), rows, 0)",
    "rows = rows + rows.argsort(0).argsort(0)", "rows = rows + (rows > 0).long().roll(1, 0)",
    "rows = rows + (rows > 0).long().flip(0)", "rows = rows + rows.cummax(0).indices",
    "rows = rows.nan_to_num().sort(0).values", "rows = rows + torch.ones_like(rows[:, :1]).cumsum(0)",
]  # fmt: skip


@pytest.mark.parametrize("line", marked([*MEET, *MEET_TOO], MEET[::2]))
def test_rows_that_meet_are_refused(line: str) -> None:
    """Also where as many come out as go in, and where a row's place or the number of rows is all that
    counts.
    """
    with pytest.raises(CaptureError, match=r"moe\.py:2[23] \(rows"):
        captured((GELU, f"{GELU}; {line}")).at(8, (2,))
    captured((GELU, f"{GELU}; {line}")).at(8)


APART = [
    "rows = F.layer_norm(rows, (6,))", "rows = torch.cat([rows, rows], 1)[:, :6]",
    "rows = rows * (rows > rows.mean(1, keepdim=True))",
    "rows = rows + self.up[:, 0, :6].repeat_interleave(sizes, dim=0, output_size=rows.shape[0])",
]  # fmt: skip
APART_TOO = [
    "rows = rows.softmax(-1)", "rows = rows.cumsum(1).flip(1)", "rows = rows.sqrt()", "rows = rows.log()",
    "rows = rows.round()",
    "rows = rows / rows.norm(dim=1, keepdim=True)", "rows = rows.to(torch.bfloat16).float()",
    "rows = rows + rows.argsort(1).argsort(1)", "rows = F.silu(rows) * rows.flip(1)",
]  # fmt: skip


@pytest.mark.parametrize("line", marked([*APART, *APART_TOO], APART))
def test_what_works_on_each_row_is_accepted(line: str) -> None:
    assert captured((GELU, f"{GELU}; {line}")).at(8, (2,)).routed


@pytest.mark.parametrize(
    "line, refused",
    [("boxes.softmax(1)", True), ("boxes - boxes.mean(0)", True), ("boxes.softmax(2)", False)],
)
def test_places_that_meet_are_refused(line: str, refused: bool) -> None:
    boxes = (
        "boxes = torch.zeros(4, 8, 8).scatter_add(0, chosen.view(1, -1, 1).expand(1, 8, 8), x.unsqueeze(0))"
    )
    step = captured(
        ("counts = F.one_hot(chosen, 4).sum(0)", f"{boxes}"),
        (
            "rows, sizes = piper.dispatch((x * self.router.weight[:1])[order], counts)",
            "boxes = piper.dispatch(boxes)",
        ),
        (GELU, f"rows = torch.bmm({line}, self.up.transpose(1, 2))"),
        ("piper.grouped_linear(rows, self.down, sizes)", "torch.bmm(rows, self.down.transpose(1, 2))"),
        ("rows * score[order].unsqueeze(1)", "rows.sum(0)[order] * score[order].unsqueeze(1)"),
    )
    if refused:
        with pytest.raises(CaptureError, match="the result for one token's row depends on other rows"):
            step.at(8, (2,))
    else:
        step.at(8, (2,))


@pytest.mark.parametrize(
    "line, refused", [("rows.flip(0)", True), ("rows.cumsum(0)", True), ("rows.flip(1)", False)]
)
def test_whole_numbers_are_rows_too(line: str, refused: bool) -> None:
    step = captured(
        ("((x * self.router.weight[:1])[order], counts)", "((x > 0).long()[order], counts)"),
        (GELU, f"rows = {line}.float(); {GELU}"),
    )
    if refused:
        with pytest.raises(CaptureError, match="the result for one token's row depends on other rows"):
            step.at(8, (2,))
    else:
        step.at(8, (2,))


def test_as_many_rows_go_back_as_came() -> None:
    with pytest.raises(CaptureError, match=r"combine gets \d+ rows for \d+ dispatched rows"):
        captured(("sizes))\n        with", "sizes).repeat(2, 1))[:len(x)]\n        with")).at(8, (2,))


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []
    depends_across_rows = row_independence._RowTrial.depends_across_rows
    monkeypatch.setattr(
        row_independence._RowTrial,
        "depends_across_rows",
        lambda self: (tried.append(True), depends_across_rows(self))[1],
    )
    start = '        with piper.annotate("PP", 0), piper'
    end = '        with piper.annotate("PP", 0):\n            out'
    region = MOE[MOE.index(start) : MOE.index(end)]
    again = region.replace("x[order]", "rows + x[order]")
    for second, count in ((again, 1), (again.replace("relu", "tanh"), 2)):
        tried.clear()
        captured((end, second + end)).at(8, (2, 2))
        assert len(tried) == count


def test_a_number_of_rows_in_arithmetic_is_refused() -> None:
    with pytest.raises(CaptureError, match="calculates with the number of rows"):
        captured((GELU, f"{GELU}; rows = rows / rows.shape[0]")).at(8, (2,))
