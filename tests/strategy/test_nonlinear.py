"""Steps whose backward pass is not linear in the gradient of the loss. In replicas they train as under DDP,
and as on one device if nothing is split. With microbatches they are refused, unless the split accepts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper.capture import capture
from lightning_piper.errors import DirectiveError, PiperError
from lightning_piper.search.costs.microbatch_check import meets
from tests.strategy.fitting import Batches, local, trainer

STAGES = [piper.Place(filter={"PP": i}, devices=[i]) for i in range(2)]
SPLIT = piper.Split(filter={}, dim_name="MB", num_microbatches=2)
ACCEPTED = dataclasses.replace(SPLIT, accept_nonlinear=True)
KINDS = ("penalty", "loss_clamped", "clamped", "ones")


def replicas(**levels: bool) -> list[Any]:
    return [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1], **levels)]


class Penalty(torch.autograd.Function):
    """Adds the gradient of a penalty on the scores to the gradient of the loss, whatever that gradient is."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scores: Tensor) -> Tensor:
        ctx.scores = scores.detach()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, ctx.scores / ctx.scores.numel()


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.ones_like(grad)


class Net(L.LightningModule):
    """Classifies tokens, of which some do not count, so that the loss is a ratio. A second term of the loss
    is a mean over samples.
    """

    def __init__(self, kind: str, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(10, 8).double(), nn.Linear(8, 10).double()
        self.kind, self.factor = kind, factor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with piper.annotate("PP", 0):
            h = self.words(batch[0])
        with piper.annotate("PP", 1):
            scores = self.head(h)
            if self.kind == "clamped":
                scores.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            loss = (
                F.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), ignore_index=0)
                + 0.1 * scores.square().mean()
            )
        if self.kind == "loss_clamped":
            loss.register_hook(lambda grad: grad.clamp(max=0.3))
        return {"penalty": lambda: Penalty.apply(loss, scores), "ones": lambda: Ones.apply(loss)}.get(
            self.kind, lambda: loss
        )()

    def backward(self, loss: Tensor) -> None:
        (loss * self.factor).backward()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def batches() -> list[Any]:
    drawn = torch.Generator().manual_seed(0)
    return [[torch.randint(0, 10, (4, 6), generator=drawn) for _ in range(2)] for _ in range(4)]


def fit(module: Net, strategy: Any, accumulate: int = 1) -> dict[str, Tensor]:
    fitting, _ = trainer(strategy, accumulate_grad_batches=accumulate, max_steps=-1, max_epochs=1)
    fitting.fit(module, Batches(batches()))
    return {name: x.detach().clone() for name, x in module.named_parameters()}


def by_hand(kind: str, parts: int, accumulate: int = 1, microbatches: int = 1) -> dict[str, Tensor]:
    """What DDP gives for replicas that each have one of `parts` of the batch, and for which the mean over
    microbatches is taken.
    """
    module = Net(kind)
    optimizer = module.configure_optimizers()
    for i, batch in enumerate(batches()):
        for part in range(parts * microbatches):
            loss = module.training_step([x.chunk(parts * microbatches)[part] for x in batch], i)
            made = torch.autograd.grad(loss / accumulate, list(module.parameters()))
            for param, grad in zip(module.parameters(), made, strict=True):
                grad = grad / (parts * microbatches)
                param.grad = grad if param.grad is None else param.grad + grad
        if (i + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: x.detach() for name, x in module.named_parameters()}


def distance(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


LEVELS: Sequence[dict[str, bool]] = (
    {},
    {"shard_optimizer": True},
    {"shard_grads": True},
    {"shard_params": True},
)


@pytest.mark.filterwarnings("ignore:.*not linear")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_train_as_under_ddp(kind: str, accumulate: int) -> None:
    wanted = by_hand(kind, 2, accumulate)
    for levels in LEVELS:
        assert distance(fit(Net(kind), local(replicas(**levels)), accumulate), wanted) < 1e-12, levels
    assert (distance(wanted, by_hand("plain", 2, accumulate)) > 1e-3) == (
        kind != "ones" or accumulate > 1
    )  # it is 1 anyhow


def test_the_same_step_without_it_keeps_its_weights(recwarn: pytest.WarningsRecorder) -> None:
    """A ratio is that of the whole batch there, which DDP's mean is not."""
    found = fit(Net("plain"), local(replicas()))
    assert distance(found, by_hand("plain", 1)) < 1e-12 < 1e-4 < distance(found, by_hand("plain", 2))
    assert not [x for x in recwarn if "not linear" in str(x.message)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_splits_nothing_is_one_device(
    kind: str, accumulate: int, recwarn: pytest.WarningsRecorder
) -> None:
    wanted = by_hand(kind, 1, accumulate)
    for program in ([], STAGES):
        assert distance(fit(Net(kind), local(program), accumulate), wanted) < 1e-12
    assert not [x for x in recwarn if "not linear" in str(x.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_microbatches_are_refused_unless_they_are_accepted(kind: str) -> None:
    with pytest.raises(
        DirectiveError,
        match=rf"directive 2 \(split\): field 'num_microbatches': .* 2 microbatches .*{__file__}:\d+ \(.*accept_nonl",
    ):
        fit(Net(kind), local([*STAGES, SPLIT]))
    with pytest.warns(UserWarning, match=rf"not linear in the gradient of the loss: aten.*{__file__}"):
        found = fit(Net(kind), local([*STAGES, ACCEPTED]))
    assert distance(found, by_hand(kind, 1, microbatches=2)) < 1e-12
    assert fit(Net("plain"), local([*STAGES, SPLIT]))


@pytest.mark.parametrize("kind", KINDS)
def test_verify_names_it(kind: str) -> None:
    for program in ([*STAGES, SPLIT], replicas()):
        report = piper.verify(Net(kind), batches()[0], program)
        assert report.verdict == "verified except"
        assert f"({__file__}:" in report.conclusion
        assert "is not linear in the gradient of the loss" in report.conclusion
    assert piper.verify(Net(kind), batches()[0], STAGES).verdict == "verified"
    assert piper.verify(Net("plain"), batches()[0], [*STAGES, SPLIT]).verdict == "verified"


def test_a_search_splits_no_such_step() -> None:
    for kind in ("plain", "clamped"):
        cut: Any = SimpleNamespace(step=capture(Net(kind), batches()[0]))
        assert meets(cut) == (kind == "clamped")


def test_a_hook_that_comes_later_is_named_when_it_comes(recwarn: pytest.WarningsRecorder) -> None:
    class Later(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert not [x for x in recwarn if "not linear" in str(x.message)] or batch_idx > 2
            self.kind = "clamped" if batch_idx >= 2 else "plain"

    fit(Later("plain"), local(replicas()))
    assert len([x for x in recwarn if "not linear" in str(x.message)]) == 1


def test_another_factor_in_backward_is_refused() -> None:
    assert distance(fit(Net("plain", 0.5), local(STAGES)), by_hand("plain", 1)) > 1e-3
    with pytest.raises(
        PiperError,
        match=r"backward multiplied the loss of training_step by 0\.5.*clamp.*Multiply the loss in",
    ):
        fit(Net("clamped", 0.5), local(STAGES))


def test_batches_cannot_weigh_as_one() -> None:
    with pytest.raises(PiperError, match=r'accumulate="tokens".*not linear in this gradient.*clamp'):
        fit(Net("clamped"), local(STAGES, accumulate="tokens"), 2)


class Typed(L.LightningModule):
    """Has a hook that is typed into an interpreter, so that its code has no file."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.head, typed = nn.Linear(4, 4), {"__name__": "__main__"}
        exec(f"def hook(grad): return {code}", typed)
        self.typed = typed["hook"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.head(batch)
        scores.register_hook(self.typed)
        return scores.square().mean()


@pytest.mark.parametrize(("code", "linear"), [("grad.clamp(-0.01, 0.01)", False), ("grad * 2", True)])
def test_hooks_without_a_file(code, linear):
    with contextlib.nullcontext() if linear else pytest.raises(DirectiveError, match=r"aten\.clamp"):
        piper.compile(Typed(code), torch.ones(4, 4), [SPLIT])
