"""Degrees are the directives that one would write by hand."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper import schedules
from lightning_piper.degrees import even_cuts, requested_degrees
from lightning_piper.directives import to_json


class Net(L.LightningModule):
    def __init__(self, marked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.marked = marked
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for i, block in enumerate(self.blocks):
            if self.marked:
                with piper.annotate("PP", i // 2):
                    x = block(x)
            else:
                x = block(x)
        return nn.functional.mse_loss(x, y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batch(samples: int = 16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 8, generator=made, dtype=torch.float64) for _ in range(2)]


@pytest.mark.parametrize("args, fields, message", [
    (["ddp_2"], {}, "'ddp_2'.*Give 'ddp', 'zero1', 'zero2', 'zero3', 'auto', or the path of a JSON file"),
    (["zero3"], {"zero": 1}, "'zero3', zero=1.*: 'zero3' means zero=3. Leave one of them out"),
    (["ddp"], {"zero": 3, "dp": 2}, "'ddp', zero=3.*: 'ddp' means zero=0. Leave one of them out"),
    ([], {"dp": 3, "ep": 2}, "dp=3, ep=2: ep is not a divisor of dp. Give an ep that divides 3"),
    ([], {"pp": 4, "schedule": "dualpipev", "microbatches": 3}, "3 microbatches for 8 stages. Give at least 8"),
])  # fmt: skip
def test_a_strategy_reports_what_does_not_compose(args: Any, fields: Any, message: str) -> None:
    with pytest.raises(piper.DirectiveError, match=message):
        piper.PiperStrategy(*args, **fields)


def test_a_timeout_may_be_in_seconds() -> None:
    assert piper.PiperStrategy(timeout=90)._timeout == timedelta(seconds=90)
    for wrong in (0, -1, float("nan"), float("inf"), True, "60"):
        with pytest.raises(piper.PiperError, match=r"timeout=.*a positive number of seconds"):
            piper.PiperStrategy(timeout=wrong)  # type: ignore[arg-type]


GROUPS = [[0, 1], [2, 3]]
EVERYWHERE = [0, 1, 2, 3]


def before_orders(program: list[Any], *more: Any) -> list[Any]:
    at = next(i for i, each in enumerate(program) if isinstance(each, piper.Order))
    return [*program[:at], *more, *program[at:]]


HAND_WRITTEN = {
    "zero3": (
        {"dp": 4, "zero": 3},
        [piper.Place(EVERYWHERE), piper.Replicate(EVERYWHERE, shard_params=True)],
    ),
    "ddp": ({"dp": 4}, [piper.Place(EVERYWHERE), piper.Replicate(EVERYWHERE)]),
    "pp2": ({"pp": 2}, schedules.one_f_one_b(2, 4)),
    "gpipe": ({"pp": 2, "schedule": "gpipe", "microbatches": 8}, schedules.gpipe(2, 8)),
    "pp2 dp2": (
        {"pp": 2, "dp": 2, "zero": 1},
        before_orders(
            schedules.one_f_one_b(2, 4, devices=GROUPS), piper.Replicate(GROUPS, shard_optimizer=True)
        ),
    ),
    "ep2": (
        {"dp": 4, "ep": 2},
        [piper.Place(EVERYWHERE), piper.ShardExperts(devices=[[0, 1], [2, 3]]), piper.Replicate(EVERYWHERE)],
    ),
    "cp2": (
        {"cp": 2, "dp": 2},
        [
            piper.Place(EVERYWHERE),
            piper.ShardSequences(devices=[[0, 1], [2, 3]], axis="cp", stream="cp", values={"*": 1}),
            piper.Replicate(EVERYWHERE),
        ],
    ),
}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_degrees_are_the_program_written_by_hand(name: str) -> None:
    degrees, program = HAND_WRITTEN[name]
    assert to_json(piper.parallel(**degrees)) == to_json(program)


def test_other_degrees_are_another_program() -> None:
    """The negative control."""
    programs = [str(to_json(piper.parallel(**degrees))) for degrees, _ in HAND_WRITTEN.values()]
    assert len(set(programs)) == len(programs)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "zero": 3},
        {"pp": 2, "dp": 2},
        pytest.param({"pp": 2, "dp": 2, "tp": 2}, marks=pytest.mark.long),
    ],
)
def test_degrees_compute_what_one_device_computes(degrees: dict[str, int]) -> None:
    module, whole = Net(), batch()
    told = {"module": module, "batch": whole} if "tp" in degrees else {}
    piper.verify(module, whole, piper.parallel(**degrees, **told)).require()


def test_tensor_parallel_stages_are_those_of_the_directives() -> None:
    module, whole = Net(), batch()
    groups, lines = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    (_, shard) = piper.tensor_parallel(module, whole, 2)
    assert isinstance(shard, piper.ShardWeights)
    shard = dataclasses.replace(shard, devices=lines)
    program = before_orders(schedules.one_f_one_b(2, 4, devices=groups), shard, piper.Replicate(groups))
    assert to_json(piper.parallel(pp=2, dp=2, tp=2, module=module, batch=whole)) == to_json(program)


def test_a_module_without_stages_is_cut() -> None:
    module, whole = Net(marked=False), batch()
    with pytest.raises(piper.DirectiveError, match="matches nothing"):  # the negative control
        piper.verify(module, whole, piper.parallel(pp=2))
    program = piper.parallel(pp=2, module=module, batch=whole)
    piper.verify(module, whole, program).require()


def test_cuts_are_even() -> None:
    assert even_cuts([1, 1, 1, 1], 2) == (2,)
    assert even_cuts([4, 1, 1, 1, 1], 2) == (1,)
    assert even_cuts([1, 1, 4], 3) == (1, 2)
    assert even_cuts([1.0], 1) == ()


@pytest.mark.parametrize(
    "degrees, message",
    [
        ({"pp": 0}, "pp is 0"),
        ({"dp": (4, 2)}, "Give zero=1, 2 or 3, because the replicas of a group shard nothing"),
        ({"dp": (4, 1), "zero": 3}, r"dp is \(4, 1\)\. Give dp=4"),
        ({"dp": (4, 2, 2), "zero": 3}, "Give .groups of replicas, replicas of a group"),
        ({"dp": (4, 0), "zero": 3}, "Give .groups of replicas, replicas of a group"),
        ({"zero": 4}, "Give a ZeRO stage from 0 to 3"),
        ({"schedule": "other"}, "1f1b, interleaved"),
        ({"tp": 2}, "Give module and batch"),
        ({"tp": 2, "cp": 2}, "only one of tp, cp and ep may be above 1"),
        ({"dp": 3, "ep": 2}, "Give an ep that divides 3"),
        ({"recompute": 1}, "True or False"),
        ({"chunk_loss": 1}, "True or False"),
    ],
)
def test_wrong_degrees_are_refused(degrees: dict[str, Any], message: str) -> None:
    with pytest.raises(piper.DirectiveError, match=message):
        piper.parallel(**degrees)


def test_the_product_is_the_number_of_devices() -> None:
    found = requested_degrees(None, pp=2, tp=2)
    assert found is not None and found.for_devices(8).dp == 2
    with pytest.raises(piper.DirectiveError, match="pp=2 x tp=2 do not fit 6 devices"):
        found.for_devices(6)
    with pytest.raises(piper.DirectiveError, match="pp=2 x dp=2 = 4 do not fit 8 devices"):
        piper.PiperStrategy(pp=2, dp=2)._degrees.for_devices(8)  # type: ignore[union-attr]


def test_groups_of_replicas() -> None:
    """(groups, replicas of a group), as in torch's meshes ("replicate", "shard")."""
    assert piper.parallel(dp=(2, 4), zero=3) == [
        piper.Place(devices=range(8)),
        piper.Replicate(devices=list(range(8)), zero=3, shard_size=4),
    ]
    assert requested_degrees("zero3", dp=[2, 4]) == requested_degrees(None, dp=(2, 4), zero=3)
    found = requested_degrees("zero2", dp=[2, 2], pp=2)
    assert found is not None and found.for_devices(8) == found and str(found) == "pp=2, dp=(2, 2), zero=2"
    with pytest.raises(piper.DirectiveError, match=r"pp=2 x dp=\(2, 2\) = 8 do not fit 4 devices"):
        found.for_devices(4)
    assert piper.parallel(dp=(1, 4), zero=3) == piper.parallel(dp=4, zero=3)
    piper.verify(Net(), batch(), piper.parallel(pp=2, dp=(2, 2), zero=3, microbatches=2)).require()


def test_names_are_degrees() -> None:
    for level, name in enumerate(("ddp", "zero1", "zero2", "zero3")):
        found = requested_degrees(name)
        assert found is not None and found.for_devices(4).directives().directives == tuple(
            piper.parallel(dp=4, zero=level)
        )
    assert requested_degrees("zero3", zero=3, pp=2) == requested_degrees(None, zero=3, pp=2)
    assert requested_degrees("auto") is None and requested_degrees(None) is None
    with pytest.raises(piper.DirectiveError, match="directives and pp"):
        piper.PiperStrategy([piper.Place([0])], pp=2)


class ReadsTrainer(Net):
    """A step that reads the Trainer and the optimizer, and logs a number of the optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rate = self.optimizers().param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log("rate", rate)
        return super().training_step(batch, batch_idx) * (1 + self.trainer.global_step + rate)


def fitted(marked: bool = True, kind: type[Net] = Net, **arguments: Any) -> dict[str, torch.Tensor]:
    module = kind(marked)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=piper.PiperStrategy(transport="local", **arguments),
    )
    x, y = batch(32)
    trainer.fit(module, DataLoader(list(zip(x, y, strict=True)), batch_size=16))  # type: ignore[arg-type]
    return {name: param.detach().clone() for name, param in module.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize(
    "marked, degrees",
    [
        (True, {"pp": 2, "dp": 2, "zero": 2}),
        (False, {"pp": 2}),
        (True, {"tp": 2, "dp": 2}),
        (True, {"pp": 2, "dp": 2, "tp": 2}),
    ],
)
def test_the_strategy_takes_degrees(marked: bool, degrees: dict[str, Any]) -> None:
    expected = fitted(directives=[piper.Place([0])])
    for name, param in fitted(marked, **degrees).items():
        torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)


def test_a_step_that_reads_the_trainer_is_cut() -> None:
    """The copy of the module that is cut keeps its trainer."""
    expected = fitted(kind=ReadsTrainer, directives=[piper.Place([0])])
    for name, param in fitted(False, ReadsTrainer, pp=2).items():
        torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)
    other = fitted(directives=[piper.Place([0])])
    assert any(not torch.equal(param, expected[name]) for name, param in other.items())  # the control


class Contrastive(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = (self.blocks[i + 1](self.blocks[i](x)) for i, x in ((0, batch[0]), (2, batch[1])))
        scores = piper.gather_samples(first) @ piper.gather_samples(second).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize(
    "degrees", [{"pp": 2, "microbatches": 2}, {"tp": 2, "microbatches": 2}, {"tp": 2, "dp": 2}]
)
def test_degrees_of_a_step_that_gathers_samples(degrees: dict[str, Any]) -> None:
    """A region of the gathered samples may have a backward pass alone."""
    expected = fitted(False, Contrastive, directives=[piper.Place([0])])
    for name, param in fitted(False, Contrastive, **degrees).items():
        torch.testing.assert_close(param, expected[name], rtol=1e-12, atol=1e-14)


def test_the_strategy_refuses_wrong_degrees_at_once() -> None:
    with pytest.raises(piper.DirectiveError, match="pp is 0"):
        piper.PiperStrategy(pp=0)


def test_the_trainer_refuses_degrees_for_another_number_of_devices() -> None:
    with pytest.raises(
        piper.DirectiveError, match=r"pp=3 x dp=2 = 6 do not fit 4 devices. Give degrees whose"
    ):
        L.Trainer(accelerator="cpu", devices=4, strategy=piper.PiperStrategy(pp=3, dp=2), logger=False)
    L.Trainer(accelerator="cpu", devices=6, strategy=piper.PiperStrategy(pp=3, dp=2), logger=False)


class Apart(Net):
    """Four blocks, each under its own stage of `stages`; None is code without an annotation."""

    def __init__(self, *stages: int | None) -> None:
        super().__init__()
        self.stages = stages

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        for stage, block in zip(self.stages, self.blocks, strict=False):
            if stage is None:
                x = block(x)
            else:
                with piper.annotate("PP", stage):
                    x = block(x)
        with piper.annotate("PP", self.stages[-1] or 0):
            return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize(
    "stages, degrees, message",
    [
        ((1, 0), {}, r"PP=0 \(.*\) runs after PP=1 \(.*\), so the stages are not numbered in the order in which"),
        ((0, None, 1), {}, r"no stage runs the code at .*:\d+ \(x = block\(x\)\), with blocks.1.0.weight, .*, "
                           r"between PP=0 and PP=1. Annotate this code .*: with piper.annotate\('PP', 0\)"),
        ((0, None, 1), {"dp": 2}, r"no stage runs the code at .*, between PP=0 and PP=1. Annotate this code"),
        ((0, 1), {"dp": 2, "microbatches": 16}, "16 samples cannot be split into 16 microbatches for each of 2 "
                                                "replicas. Give at most 8 microbatches, or a batch of 32 samples"),
        ((0, 1, 2), {}, "2 stages, but Apart annotates PP=0, PP=1, PP=2. Annotate PP=0 to PP=1, or choose pp=3 .PIPER"),
        ((0, 2), {}, "2 stages, but Apart annotates PP=0, PP=2. Annotate PP=0 to PP=1 .PIPER"),
        ((0, 1), {"schedule": "zbv"}, r"4 stages \(schedule='zbv' has 2 on each device\), but Apart annotates PP=0, PP=1. "
                                      r"Annotate PP=0 to PP=3, or choose schedule='1f1b' \[PIPER"),
        ((0, 1, 2), {"schedule": "zbv"}, "Annotate PP=0 to PP=3, or choose pp=3 with schedule='1f1b' .PIPER"),
    ],
)  # fmt: skip
def test_errors_of_degrees_name_the_cause_in_the_module(
    stages: tuple[int | None, ...], degrees: dict[str, Any], message: str
) -> None:
    module, whole = Apart(*stages), batch()
    found = requested_degrees(None, pp=2, **degrees)
    assert found is not None
    with pytest.raises(piper.DirectiveError, match=message) as caught:
        piper.compile(module, whole, found.program(module, whole).directives)
    assert "directive" not in str(caught.value) and "pp=2" in str(caught.value)
    assert not getattr(caught.value, "__notes__", [])
    if stages != (0, 1, 2):  # the directives themselves are the user's own
        with pytest.raises(piper.DirectiveError, match=r"directive \d+ \(|the program places some regions"):
            piper.compile(module, whole, piper.parallel(**{"pp": 2, **degrees}))


def test_microbatches_have_an_equal_part_for_each_replica() -> None:
    module = Net()
    piper.verify(module, batch(6), piper.parallel(pp=2, dp=2, microbatches=2)).require()
    compiled = piper.compile(module, batch(), piper.parallel(pp=2, dp=2))
    sizes = [[len(part) for part in compiled.at(size).dag.microbatches() or ()] for size in (16, 12, 6)]
    assert sizes == [[2] * 8, [2, 2, 1, 1] * 2, [1, 1, 1] * 2]
    with pytest.raises(
        piper.DirectiveError, match=r"the batch has 7 samples, .*The first batch had 16.*drop_last=True"
    ):
        compiled.at(7)


class Repeated(Net):
    """Runs its blocks twice, first without gradients. If `outside` is set, it runs them once, between two uses of a
    parameter outside of them."""

    def __init__(self, outside: bool) -> None:
        super().__init__(marked=False)
        self.outside = nn.Parameter(torch.ones(8, dtype=torch.float64)) if outside else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.outside is None:
            with torch.no_grad():
                for block in self.blocks:
                    x = block(x)
            for block in self.blocks:
                x = block(x)
        else:
            x = x * self.outside
            for block in self.blocks:
                x = block(x)
            x = x * self.outside
        return nn.functional.mse_loss(x, y)


@pytest.mark.parametrize(
    "module, message",
    [
        (Repeated(False), "because the step returns to a module after it has run another. Mark the stages"),
        (Repeated(True), "because the step uses parameters outside of these modules. Mark the stages"),
        (Net(marked=False), "Net has only 4 blocks that can be stages. Give fewer stages"),
    ],
)
def test_too_few_blocks_for_the_stages(module: Net, message: str) -> None:
    stages = 2 if isinstance(module, Repeated) else 8
    with pytest.raises(piper.PiperError, match=message):
        piper.parallel(pp=stages, module=module, batch=batch())


def test_stages_of_repeated_modules_that_are_named() -> None:
    """The remedy of the error."""
    module = Repeated(False)
    piper.annotate_modules(module, "PP", [["blocks.[0-1]"], ["blocks.[2-3]"]])
    report = piper.verify(module, batch(), piper.parallel(pp=2, module=module, batch=batch()))
    assert "verified" in str(report)
