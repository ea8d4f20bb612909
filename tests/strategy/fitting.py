"""Fits for tests: a quiet Trainer, the values that it logs at each step, and the same training done by hand
with the interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar
from unittest import mock

import lightning as L
import torch
from torch import Tensor

import lightning_piper as piper
from lightning_piper import compiler
from lightning_piper.capture import CapturedStep, capture, flatten
from lightning_piper.holdings import optimizer
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.update import Accumulate
from lightning_piper.session import programs
from lightning_piper.verify import interpret

T = TypeVar("T")
QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
PROGRAM = tuple(piper.schedules.one_f_one_b(stages=2, microbatches=4))


class Batches:
    """An iterable over given batches. (Lightning takes a list for several loaders.)"""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Counted(Batches):
    """Batches whose number is known in advance."""

    def __len__(self) -> int:
        return len(self.items)


class Record(L.Callback):
    """Records the loss and the logged values of every step and of every epoch."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.logged: list[dict[str, Tensor]] = []
        self.epochs: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(outputs["loss"].clone())
        self.logged.append({k: v.clone() for k, v in trainer.callback_metrics.items()})

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.epochs.append({k: v.clone() for k, v in trainer.callback_metrics.items()})


def trainer(
    strategy: Any = "auto", callbacks: Sequence[L.Callback] = (), **options: Any
) -> tuple[L.Trainer, Record]:
    record = Record()
    options = {**QUIET, "accelerator": "cpu", "devices": 1, "max_steps": 5, **options}
    return L.Trainer(strategy=strategy, callbacks=[record, *callbacks], **options), record


def local(program: Any = PROGRAM, **options: Any) -> piper.PiperStrategy:
    return piper.PiperStrategy(list(program), transport="local", **options)


# The captured steps, by what makes two steps alike. The steps keep their modules alive, so that the addresses
# in the keys of `_code_of` stay valid.
STEPS: dict[Any, CapturedStep] = {}
TRIED: dict[Any, Any] = {}
OF_A_TRAINING = re.compile(
    r"__\w+__|(on|configure|optimizer|lr_scheduler)_\w+|\w+_dataloader|backward|piper_init_parameters|prepare_data|setup|teardown"
    r"|(load_)?state_dict|transfer_batch_to_device"
)


def captured_once(
    module: Any,
    batch: Any,
    device: Any,
    context: Any,
    name: str = "training_step",
    loader: int | None = None,
    **more: Any,
) -> CapturedStep:
    """Like `capture`, but code traced for one module serves all modules like it and all batches, and is not
    traced again to see whether it has changed. Outside of a fit, steps are traced as usual.
    """
    found = capture(module, batch, device, context, name, loader, **more)
    if module._trainer is None:
        return found
    trained = tuple(x.requires_grad for x in module.parameters())
    modes = (tuple(x.training for x in module.modules()), module.trainer.sanity_checking)
    alike = (_code_of(type(module)), repr(list(module.named_children())))
    key = (*alike, trained, modes, module.trainer.precision, repr(found.batch_spec.specs), name, loader)
    first = STEPS.setdefault(key, found)
    found._codes, found._first, found._symbolic = first._codes, first._first, first._symbolic
    found.retrace = lambda: None  # type: ignore[method-assign]
    return found


def _code_of(cls: type) -> tuple[tuple[str, int], ...]:
    """The attributes of a class that a step may use. Hooks are excluded, because the modules of tests differ
    in hooks more often than in their steps.
    """
    own = cls.__mro__[: cls.__mro__.index(L.LightningModule)]
    return tuple(
        (name, id(x)) for c in own for name, x in vars(c).items() if not OF_A_TRAINING.fullmatch(name)
    )


def trace(
    module: Any,
    batch: Any,
    sizes: Sequence[int],
    *kind: Any,
    degrees: Iterable[Any] = (),
    precision: Any = "32-true",
) -> None:
    """Trace a step before ranks are forked, so that none of them has to.

    Args:
        kind: the method, and for one that is not `training_step` the index of its loader, None where there is
            one.
        sizes: of batches and of their parts, the largest first, which is that of `batch`.
        degrees: over how many devices experts are divided: one sample of each.
    """
    module.trainer = L.Trainer(accelerator="cpu", precision=precision, **QUIET)
    plugin = module.trainer.precision_plugin
    training = kind[0] == "training_step"
    module, batch = plugin.convert_module(module.train(training)), plugin.convert_input(batch)
    context = plugin.train_step_context if training else plugin.forward_context
    step = captured_once(module, batch, torch.device("cpu"), context, *kind)
    for size in sizes:
        step.at(size)
    for degree in degrees:
        step.at(1, degree)


def tried_once(function: Callable[..., T]) -> Callable[..., T]:
    """Cache the results of a function of an optimizer, so that optimizers like one that was accepted are not
    tried again. An optimizer that was refused is tried again.
    """

    def found(optimizer: Any, chosen: Any, device: Any) -> T:
        groups = [
            {name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups
        ]
        params = [[(x.shape, x.dtype) for x in group] for group in chosen]
        key = (function, type(optimizer), repr(groups), repr(params))
        if key not in TRIED:
            TRIED[key] = function(optimizer, chosen, device)
        return TRIED[key]

    return found


def sharing_captures(work: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function with several trainings of one model: the model is traced once and its optimizer is
    tried once, which would otherwise take most of the time.
    """
    for module, name, replacement in (
        (compiler, "capture", captured_once),
        (programs, "capture", captured_once),
        (optimizer, "state_keys", tried_once(optimizer.state_keys)),
        (optimizer, "sees_others", tried_once(optimizer.sees_others)),
    ):
        work = mock.patch.object(module, name, replacement)(work)
    return work


def traced_once(work: Callable[..., T]) -> Callable[..., T]:
    """Decorates a function with trainings of steps that read no state that changes. The package traces a step
    again now and then to see whether it has changed, which would take most of the time of a short training.
    The tests of guards check that.
    """
    return mock.patch.object(CapturedStep, "retrace", lambda self: None)(work)


def values(module: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the module's values. Values of other processes become tensors on the meta device, because
    placeholders cannot be written to a file.
    """
    return {
        name: torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_meta else x.detach().clone()
        for name, x in module.state_dict().items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest value of the tensor in which it occurs."""
    assert a.keys() == b.keys()
    pairs = [(a[n].double(), b[n].double()) for n in a]
    return max(float((x - y).abs().max() / x.abs().max().clamp_min(1e-12)) for x, y in pairs)


def apart(found: Any, wanted: Any, where: str = "") -> dict[str, float]:
    """The relative distances of all numbers, by the path to each. All other values must be equal."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        return {k: v for key in wanted for k, v in apart(found[key], wanted[key], f"{where}/{key}").items()}
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        return {
            k: v
            for i, (x, y) in enumerate(zip(found, wanted, strict=True))
            for k, v in apart(x, y, f"{where}/{i}").items()
        }
    if isinstance(wanted, float | Tensor):
        x, y = torch.as_tensor(found).double(), torch.as_tensor(wanted).double()
        assert x.shape == y.shape, where
        return {where: float((x - y).abs().max() / y.abs().max().clamp_min(1e-3))}
    assert found == wanted, where
    return {}


def by_hand(
    module: L.LightningModule, batches: Sequence[Any], seed: int, program: Any = PROGRAM, drop: bool = False
) -> list[Tensor]:
    """Train `module` with the reference interpreter, one optimizer step a batch; returns the losses.

    `drop` leaves the last microbatch out of one gradient.
    """
    optimizers = module.configure_optimizers()
    optimizer = optimizers["optimizer"] if isinstance(optimizers, dict) else optimizers
    schedulers = [optimizers["lr_scheduler"]["scheduler"]] if isinstance(optimizers, dict) else []
    compiled = piper.compile(module, batches[0], list(program))
    names = {compiled.step.canonical[n]: x for n, x in [*module.named_parameters(), *module.named_buffers()]}
    losses = []
    for i, batch in enumerate(batches):
        leaves, batch_spec = flatten(batch)
        dag = compiled.at(batch_spec.size).dag
        if drop:
            node = next(iter(dag.of_type(Accumulate)))
            if len(node.inputs) > 1:
                dag.rewire(node, inputs=node.inputs[:-1])
        outcome = interpret(dag, {n: x.detach() for n, x in names.items()}, leaves, seed + i)
        optimizer.zero_grad()
        for name, grad in outcome.grads.items():
            names[name].grad = grad.clone()
        with torch.no_grad():
            for name, value in outcome.buffers.items():
                names[name].copy_(value)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(outcome.metrics[LOSS].float())
    return losses
