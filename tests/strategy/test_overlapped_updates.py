"""Updates that overlap the backward pass, under Lightning's Trainer: with the bits of updates after it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, optim

import lightning_piper as piper
from lightning_piper.holdings.elementwise import goes_in_parts
from lightning_piper.holdings.optimizer_slices import ComputedUpdate, EarlyUpdates, compute_updates
from tests.groups import marked
from tests.strategy import sharded
from tests.strategy.fitting import Batches, distance, same, trainer, values
from tests.strategy.optimizers import MuonAndAdamW
from tests.strategy.sharded import Job, fit
from tests.strategy.test_muon import EXACT, PAIR, ROUNDING, TEN, Words, batches, launched

CPU = torch.device("cpu")


def overlapped(zero: int = 1, overlap: bool = True, **options: Any) -> list[Any]:
    return [
        piper.Place([0, 1]),
        piper.Replicate(
            filter={"LAYER": "*"}, zero=zero, shard_by="parameter", overlap_update=overlap, **options
        ),
        piper.Replicate(filter={"LAYER": "-"}, zero=zero),
    ]


@dataclasses.dataclass
class Applied:
    """How many updates were applied that were computed early, and how many were not."""

    early: int = 0
    late: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Applied]:
    found, is_current = Applied(), ComputedUpdate.is_current

    def counted(self: ComputedUpdate, optimizer: optim.Optimizer) -> bool:
        current = is_current(self, optimizer)
        if any(p is self.param for p in watched):
            found.early += current
            found.late += not current
        return current

    take, watched = EarlyUpdates.take, list[Tensor]()

    def watching(self: EarlyUpdates, optimizer: optim.Optimizer, params: Any) -> None:
        watched.extend(params.values())  # not those of trials
        take(self, optimizer, params)

    with (
        mock.patch.object(ComputedUpdate, "is_current", counted),
        mock.patch.object(EarlyUpdates, "take", watching),
    ):
        yield found


def trained(
    program: list[Any] | None,
    change: Callable[[Any], None] = lambda module: None,
    transport: str = "local",
    steps: int = 3,
    widths: tuple[int, ...] = (16, 24, 16),
    accumulate: str = "batches",
    verify: str = "static",
    callbacks: list[Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The values after some updates."""
    torch.manual_seed(0)
    module = Words(widths, lambda: True)
    change(module)
    strategy: Any = "auto"
    if program is not None:
        strategy = piper.PiperStrategy(program, transport=transport, accumulate=accumulate, verify=verify)  # type: ignore[arg-type]
    run, _ = trainer(strategy, callbacks or [], max_steps=steps, **{**EXACT, **options})
    run.fit(module, Batches(batches(steps * options.get("accumulate_grad_batches", 1))))
    return values(module)


def both(**options: Any) -> tuple[dict[str, Tensor], Applied]:
    """The values with overlapped updates, after a comparison with updates after the backward pass and with one
    device."""
    zero = options.pop("zero", 1)
    one, after = trained(None, **options), trained(overlapped(zero, overlap=False), **options)
    with counting() as applied:
        found = trained(overlapped(zero), **options)
    assert same(after, found)
    assert distance(one, found) < ROUNDING
    return found, applied


def with_schedule(module: Any) -> None:
    """A learning rate that changes after each update."""
    make = module.configure_optimizers

    def configure() -> Any:
        own = make()
        schedule = optim.lr_scheduler.LambdaLR(own, lambda step: 1 / (1 + step))
        return {"optimizer": own, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure


# Six parameters of each of three blocks, in three updates.
ALL = 54


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("batches_in_update", [1, 2])
def test_overlapped_updates_have_the_bits_of_later_ones(zero: int, batches_in_update: int) -> None:
    _, applied = both(zero=zero, accumulate_grad_batches=batches_in_update)
    assert applied == Applied(ALL, 0)


def test_learning_rates_of_a_schedule_are_those_of_the_step() -> None:
    constant, _ = both()
    found, applied = both(change=with_schedule)
    assert applied == Applied(ALL, 0)
    assert distance(constant, found) > 1e-4


@pytest.mark.parametrize("verify", ["determinism", "first_batch"])
def test_steps_that_run_several_times_update_once(verify: str) -> None:
    one = trained(None)
    with counting() as applied:
        assert distance(one, trained(overlapped(), verify=verify)) < ROUNDING
    assert applied == Applied(ALL, 0)


def test_a_step_that_is_not_finished_changes_nothing() -> None:
    """A gradient of the second batch is NaN: parameters and states keep the values of the first update."""
    modules: list[Any] = []

    def poisoned(module: Any) -> None:
        modules.append(module)
        change_between(lambda module: poison(module) if module.global_step == 1 else None)(module)

    def poison(module: Any) -> None:
        def hook(grad: Tensor) -> None:
            grad.fill_(float("nan"))

        module.poison = module.head.weight.register_hook(hook)

    one = trained(None, steps=1)
    with pytest.raises(piper.PiperError, match="NaN"):
        trained(overlapped(), poisoned)
    (module,) = modules
    assert distance(one, values(module)) < ROUNDING


def change_between(work: Callable[[Any], None]) -> Callable[[Any], None]:
    """Run code between the plan and the backward pass: where the optimizer drops gradients."""

    def change(module: Any) -> None:
        make = module.configure_optimizers

        def configure() -> Any:
            own = make()
            drop = own.zero_grad

            def zero_grad(*arguments: Any, **options: Any) -> None:
                work(module)
                drop(*arguments, **options)

            own.zero_grad = zero_grad
            return own

        module.configure_optimizers = configure

    return change


def halve_rates(module: Any) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] /= 2


@pytest.mark.filterwarnings("ignore:.*PIPER-W031")
@pytest.mark.parametrize("work, late", [(halve_rates, ALL), (lambda module: None, 0)])
def test_an_update_from_other_settings_is_not_used(work: Callable[[Any], None], late: int) -> None:
    _, applied = both(change=change_between(work))
    assert applied == Applied(ALL - late, late)


def test_an_update_that_is_not_used_is_a_warning() -> None:
    with pytest.warns(UserWarning, match="changed after the backward pass.*PIPER-W031"):
        trained(overlapped(), change_between(halve_rates))


def test_an_update_that_ignores_a_change_is_noticed() -> None:
    """Without the comparison of settings, the result is that of other learning rates."""
    one = trained(None, change_between(halve_rates))
    with mock.patch("lightning_piper.holdings.optimizer_slices._alike", lambda one, other: True):
        found = trained(overlapped(), change_between(halve_rates))
    assert distance(one, found) > 1e-4


def test_an_update_before_the_last_batch_of_an_accumulation_is_noticed() -> None:
    begin = EarlyUpdates.begin
    with (
        mock.patch.object(EarlyUpdates, "begin", lambda self, last, accumulates: begin(self, True, False)),
        counting() as applied,
        pytest.warns(UserWarning, match="PIPER-W031"),
    ):
        trained(overlapped(2), accumulate_grad_batches=2)
    assert applied.late == ALL


@pytest.mark.parametrize("seed", marked(range(6), (0,)))
def test_any_shapes_on_a_simulated_accelerator(seed: int) -> None:
    """Its streams run in a random order, and it names a read that does not wait for its value."""
    drawn = random.Random(seed)
    widths = tuple(drawn.randint(1, 40) for _ in range(drawn.randint(2, 4)))
    zero = drawn.choice([1, 2, 3])
    size = drawn.choice([0.0005, 0.003, 25])
    one = trained(None, widths=widths)
    with counting() as applied:
        found = trained(overlapped(zero, bucket_size=size), widths=widths, transport="simulated")
    assert distance(one, found) < ROUNDING
    assert applied == Applied(18 * len(widths), 0)


class Branches(Words):
    """The second batch uses a block that the first one does not use."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embedding(batch["tokens"])
        for block in self.blocks[: 1 + batch_idx % 2]:
            x = x + block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten())


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_that_later_batches_add_are_updated_after_the_backward_pass(zero: int) -> None:
    """No program shards them, so they have no owner."""

    def change(module: Any) -> None:
        module.__class__ = Branches

    _, applied = both(zero=zero, change=change)
    assert applied == Applied(18, 0)  # of the first block


def test_gradients_that_are_nan_do_not_count_as_changed() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.tensor([1.0, float("nan"), 2.0])
    (update,) = compute_updates(optimizer, {parameter: parameter.grad})
    assert update.is_current(optimizer)
    parameter.grad[0] = float("nan")
    assert not update.is_current(optimizer)


TWO = [
    *(Job(f"zero{z}", f"dp2 zero{z} overlapped", options=EXACT, change=PAIR) for z in (1, 2, 3)),
    *(
        Job(
            f"accumulated, zero{z}",
            f"dp2 zero{z} overlapped",
            options={**EXACT, "accumulate_grad_batches": 2},
            change=PAIR,
        )
        for z in (1, 2, 3)
    ),
    Job("torch's Muon", "dp2 zero1 overlapped", options=EXACT, change=sharded.with_muon),
    Job("saved", "dp2 zero1 overlapped", options=TEN, save=True, change=PAIR),
]
FOUR = [
    Job("four", "dp4 zero1 overlapped", options=EXACT, change=PAIR),
    Job("stages", "pp2 dp2 zero1 overlapped", options=EXACT, change=PAIR),
    Job("groups", "dp2x2 zero1 overlapped", options=EXACT, change=PAIR),
    Job("resumed", "dp4 zero1 overlapped", options=TEN, resume="saved, process, step=5.ckpt", change=PAIR),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("overlapped")


def train_early(rank: int, jobs: list[Job], folder: Path) -> list[dict[str, Any]]:
    """Train; an update that is computed again is an error."""
    warnings.filterwarnings("error", message="overlap_update")
    with counting() as applied:
        found = sharded.train(rank, jobs, folder)
    assert applied.early and not applied.late
    return found


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return launched(TWO, folder, train_early)


@pytest.fixture(scope="module")
def four(folder: Path, two: Any) -> dict[str, list[dict[str, Any]]]:
    return launched(FOUR, folder, train_early)


def check(job: Job, ranks: list[dict[str, Any]], folder: Path) -> None:
    one = fit(dataclasses.replace(job, save=False), folder, None)
    for rank in ranks:
        assert "error" not in rank, rank
        assert len(rank["losses"]) == len(one["losses"])
        assert distance(one["values"], rank["values"]) < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("job", TWO, ids=lambda job: job.name)
def test_two_processes_train_as_one_device(job: Job, two: Any, folder: Path) -> None:
    check(job, two[job.name], folder)


@pytest.mark.long
@pytest.mark.parametrize("job", FOUR, ids=lambda job: job.name)
def test_four_processes_train_as_one_device(job: Job, four: Any, folder: Path) -> None:
    check(job, four[job.name], folder)


class Reads(L.Callback):
    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        pass


def with_method(name: str) -> Callable[[Any], None]:
    """The module overrides a hook of Lightning."""

    def change(module: Any) -> None:
        own = getattr(L.LightningModule, name)
        kind = type(module)
        module.__class__ = type("Overrides", (kind,), {name: lambda self, *a, **k: own(self, *a, **k)})

    return change


def with_tensor_hook(module: Any) -> None:
    module.head.weight.register_hook(lambda grad: grad)


class Together(MuonAndAdamW):
    """The update of a parameter depends on the parameters before it."""

    def _adam(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super()._adam(state, grad) * (1 + self.calls)


def with_calls(module: Any) -> None:
    module.configure_optimizers = lambda: Together(
        [{"params": module.matrices, "matrices": True}, {"params": [module.head.bias]}], lr=0.02
    )


class Slow(MuonAndAdamW):
    """Updates change after many steps, which the optimizer counts itself."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.counted: Any = {"steps": [0]}

    def step(self, closure: Any = None) -> Any:
        self.counted["steps"].append(0)
        self.slow = len(self.counted["steps"]) > 10_000
        return super().step(closure)

    def _adam(self, state: dict[str, Any], grad: Tensor) -> Tensor:
        return super()._adam(state, grad) * (0.1 if self.slow else 1)


def with_own_count(module: Any) -> None:
    module.configure_optimizers = lambda: Slow(
        [{"params": module.matrices, "matrices": True}, {"params": [module.head.bias]}], lr=0.02
    )


def with_two_optimizers(module: Any) -> None:
    module.automatic_optimization = False
    make = module.configure_optimizers
    module.configure_optimizers = lambda: (make(), optim.SGD([module.head.bias], lr=0.1))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "clipping": ({"gradient_clip_val": 0.5}, "gradient_clip_val=0.5 changes gradients .*S014"),
    "tokens": ({"accumulate": "tokens"}, "accumulate='tokens' weights the gradients .*S014"),
    "callback": ({"callbacks": [Reads()]}, r"Reads\.on_after_backward may change .*S014"),
    **{
        name: ({"change": with_method(name)}, rf"Overrides\.{name} may change .*S014")
        for name in (
            "optimizer_step",
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "on_before_backward",
            "configure_gradient_clipping",
            "backward",
        )
    },
    "gradient hook": ({"change": with_tensor_hook}, r"hook.*'?head\.weight"),
    "calls": ({"change": with_calls}, "Together computes the same numbers.*S014|Together must update"),
    "own count": ({"change": with_own_count}, "Slow .* counts the same steps.*S014"),
    "manual": ({"change": with_two_optimizers}, "manual optimization"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_gradients_is_refused_before_the_first_step(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises(piper.PiperError, match=message):
        trained(overlapped(), **options)


def test_the_same_fits_run_without_overlap() -> None:
    for name in ("clipping", "callback", "optimizer_step"):
        trained(overlapped(overlap=False), steps=1, **REFUSED[name][0])


# The optimizer alone

OPTIMIZERS: dict[str, Callable[[list[Tensor]], optim.Optimizer]] = {
    "Muon": lambda params: optim.Muon(params, lr=0.1),
    "AdamW": lambda params: optim.AdamW(params, lr=0.1, amsgrad=True),
    "fused": lambda params: optim.AdamW(params, lr=0.1, fused=True),
    "tensor": lambda params: optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adafactor": lambda params: optim.Adafactor(params, lr=0.1),
    "own": lambda params: MuonAndAdamW(
        [{"params": params[:1], "matrices": True}, {"params": params[1:]}], lr=0.1
    ),
}


def snapshot(optimizer: optim.Optimizer) -> list[Any]:
    """Copies of all values that a step may change."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params if p.grad is not None]
    states = [x for p in params for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
    return [x.detach().clone() for x in [*params, *grads, *states]]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_computed_update_changes_nothing_until_it_is_applied(name: str) -> None:
    torch.manual_seed(0)
    start = [torch.randn(5, 3), torch.randn(4, 6)]
    ours, plain = (
        [torch.nn.Parameter(x.clone()) for x in start],
        [torch.nn.Parameter(x.clone()) for x in start],
    )
    early, after = OPTIMIZERS[name](ours), OPTIMIZERS[name](plain)
    assert goes_in_parts(early, [group["params"] for group in early.param_groups], CPU, early=True)
    for step in range(4):
        grads = [torch.randn_like(x) for x in start]
        for p, q, grad in zip(ours, plain, grads, strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        before = snapshot(early)
        skipped = compute_updates(early, {p: 2 * grad for p, grad in zip(ours, grads, strict=True)})
        found = [compute_updates(early, {p: grad})[0] for p, grad in zip(ours, grads, strict=True)]
        assert all(map(torch.equal, before, snapshot(early))) and len(before) == len(snapshot(early))
        assert not any(update.is_current(early) for update in skipped)  # of other gradients
        assert all(update.is_current(early) for update in found)
        for update in found:
            update.apply(early)
        after.step()
        assert same(dict(enumerate(ours)), dict(enumerate(plain))), step
        assert early.state_dict()["state"].keys() == after.state_dict()["state"].keys()
    assert all(map(torch.equal, snapshot(early), snapshot(after)))
