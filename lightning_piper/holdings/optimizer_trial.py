"""Decides by a trial whether an optimizer may run on shards: copies of the optimizer take a few steps on
small parameters, whole and in parts, with gradients that reveal a difference."""

from __future__ import annotations

import collections
import copy
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.module_copies import finalized
from lightning_piper.holdings.optimizer_slices import compute_updates, only, own_step

# In `reduced`: the size to which a large side becomes smaller, the size of other dimensions, and the number
# of elements that a large parameter keeps at least.
SIDE, FEW, LEAST = 128, 2, 8192
ROUNDING = 1e-12  # smaller gradients count as zero
# Torch's optimizers that treat each element independently, whatever the shape of its parameter is.
KNOWN = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD,
    torch.optim.Rprop,
)  # fmt: skip


@dataclass(frozen=True)
class GradientScenario:
    """A recipe for a trial: how to draw the initial parameters and the gradients of each step.

    Attributes:
        what: Description of the gradients for messages.
        steps: Number of steps.
        values: Factor on the initial values, which are drawn from a normal distribution.
        scales: Factors on the gradients of successive steps. After the last factor, the first one follows.
        orthogonal: Whether each row of a gradient is at right angles to the parameter's row; some optimizers test
            this (AdamP).
        gap: Whether the elements of the first shard have zero gradients.
    """

    what: str
    steps: int
    values: float
    scales: tuple[float, ...]
    orthogonal: bool = False
    gap: bool = False


# Some optimizers begin rectified, averaged or warmed-up steps after the fifth or the tenth step, and some
# clip norms from above or below. The scenarios reach all of these cases.
SCENARIOS = (
    GradientScenario("of several sizes", 12, 1.0, (0.1, 1.0, 10.0, 1.0)),
    GradientScenario("that are large", 3, 0.01, (1e4,)),
    GradientScenario("that are small", 3, 1.0, (1e-4,)),
    GradientScenario("at right angles to it", 3, 1.0, (1.0,), orthogonal=True),
    GradientScenario("that are zero in one shard", 3, 1.0, (1.0,), gap=True),
)


REACH = 100  # the largest setting that a trial takes for a number of steps


def scenarios_for(optimizer: Optimizer) -> tuple[GradientScenario, ...]:
    """Return the scenarios of an optimizer's trials. An optimizer may work in another way after as many steps as one of
    its settings says, such as `warmup_steps=16`. The first scenario reaches such steps."""
    settings = (optimizer.defaults, *optimizer.param_groups, vars(optimizer))
    numbers = [x for each in settings for x in each.values() if type(x) is int and x <= REACH]
    first, *others = SCENARIOS
    return replace(first, steps=max(first.steps, max(numbers, default=0) + 2)), *others


@dataclass(frozen=True)
class ParameterKind:
    """A kind of parameters: parameters of one group with the same attributes and the same shape in a trial.
    Piper assumes that an optimizer treats all parameters of a kind in the same way, and tries one of them.

    Attributes:
        group: Number of the parameters' group.
        like: A parameter of this kind.
        shape: Shape of the parameter in a trial.
    """

    group: int
    like: Tensor
    shape: tuple[int, ...]

    @property
    def cut(self) -> int:
        """Number of elements of the first of two shards, which ends within a row."""
        size = math.prod(self.shape)
        return min(size, size * 5 // 12 | 1)


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial of an optimizer over some steps. The number of a kind is its index among the
    kinds.

    Attributes:
        scenario: The scenario of the trial.
        before: Number of the kind -> initial parameter.
        params: Number of the kind -> final parameter.
        states: Number of the kind -> final state.
        grads: For each step, number of the kind -> gradient.
        optimizer: The copy that ran.
    """

    scenario: GradientScenario
    before: Mapping[int, Tensor]
    params: Mapping[int, Tensor]
    states: Mapping[int, dict[str, Any]]
    grads: Sequence[Mapping[int, Tensor]]
    optimizer: Optimizer

    def keeps_same(self, other: TrialResult) -> bool:
        """Return whether the copies of two trials have the same state outside of the states of parameters: options of
        groups, and attributes such as a number of steps."""
        own, others = (_beside_parameters(x.optimizer) for x in (self, other))
        return _have_same_content(own, others, set())


def kinds_to_try(optimizer: Optimizer, chosen: Sequence[Sequence[Tensor]]) -> Iterator[list[ParameterKind]]:
    """Yield the kinds of the parameters that require gradients and have elements, and then, if there are any, further
    kinds with larger shapes.

    An optimizer may treat large parameters in another way (`min_dim_size_to_factor=256`). A reduced shape grows
    until the optimizer runs the same operations on it as on the parameter.

    Args:
        optimizer: The optimizer; it is not changed.
        chosen: For each group of the optimizer, the parameters.
    """
    kinds = kinds_of(chosen)
    yield list(kinds.values())
    if type(optimizer) in KNOWN:
        return
    found: dict[Any, ParameterKind] = {}
    for (group, shape, marks), whole in kinds_of(chosen, whole=True).items():
        small, scale = kinds[group, reduced(shape), marks], 1
        wanted = _operations(optimizer, whole) if small.shape != shape else []
        while small.shape != shape and _operations(optimizer, small) != wanted:
            scale *= 2
            small = replace(whole, shape=reduced(shape, scale))
        if scale > 1:
            found.setdefault((group, small.shape, marks), small)
    if found:
        yield list(found.values())


def kinds_of(chosen: Sequence[Sequence[Tensor]], whole: bool = False) -> dict[Any, ParameterKind]:
    """Return the kinds of parameters by what distinguishes them: the group, the shape, and attributes set by the user
    (texts, numbers, None). The shapes are reduced, or with `whole`, the shapes of the parameters. `chosen` has the
    parameters of each group."""
    found: dict[Any, ParameterKind] = {}
    for group, params in enumerate(chosen):
        for p in params:
            marks = {k: v for k, v in vars(p).items() if isinstance(v, bool | int | float | str | None)}
            if p.requires_grad and p.numel():
                shape = tuple(p.shape) if whole else reduced(p.shape)
                found.setdefault((group, shape, repr(marks)), ParameterKind(group, p, shape))
    return found


def reduced(shape: Sequence[int], scale: int = 1) -> tuple[int, ...]:
    """Return a small shape in place of a large shape, such as (128, 128) in place of (1000, 300). Several
    large shapes often give the same small shape. The small shape keeps every property that optimizers often test.
    With a `scale`, large shapes are reduced less.

    The properties are the number of dimensions, whether each of the two largest is at least 128 (smaller
    matrices may not be worth special treatment), and whether the parameter has many elements. Some optimizers
    keep their state in blocks from 4,096 elements on.
    """
    largest = sorted(range(len(shape)), key=lambda i: -shape[i])[:2]
    sides = [
        (d if d <= FEW else 24 if d < SIDE else SIDE * scale) if i in largest else min(d, FEW * scale)
        for i, d in enumerate(shape)
    ]
    # A parameter with many elements keeps many, so its sides grow again.
    least = min(math.prod(shape), LEAST * scale**2)
    while math.prod(sides) < least:
        i = max(range(len(shape)), key=lambda i: shape[i] / sides[i])
        sides[i] = min(shape[i], -(-least * sides[i] // math.prod(sides)))
    return tuple(min(side, d) for side, d in zip(sides, shape, strict=True))


class _OperationNames(_torch.TorchDispatchMode):
    """A mode that appends the name of each operation to `names`."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(str(func))
        return func(*args, **(kwargs or {}))


def _operations(optimizer: Optimizer, kind: ParameterKind) -> list[str]:
    """Return the names of the operations of two steps on a parameter of a kind without data, and of two steps on
    its first shard. The name of an error ends such steps, for example if the optimizer reads a value."""
    names: list[str] = []
    for shape in (kind.shape, (kind.cut,)):
        p = nn.Parameter(torch.empty(shape, device="meta"))
        with isolate_rng(), _OperationNames(names):
            try:
                made = _copy_for({0: p}, [kind], optimizer)
                for _ in range(2):
                    _step(made, [(p, torch.empty_like(p))], apart=False)
            except Exception as error:
                names.append(type(error).__name__)
    return names


def run(
    optimizer: Optimizer,
    kinds: Sequence[ParameterKind],
    scenario: GradientScenario,
    device: torch.device,
    before: Mapping[int, Tensor] | None = None,
    grads: Sequence[Mapping[int, Tensor]] = (),
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    apart: bool = False,
    early: bool = False,
) -> TrialResult:
    """Run a copy of an optimizer for the steps of a scenario, on one parameter of each kind.

    Args:
        optimizer: The optimizer; it is not changed.
        kinds: The kinds of parameters.
        scenario: The number of steps, and how to draw initial parameters and gradients.
        device: The device to run on.
        before: Number of the kind -> initial parameter. Only these kinds run. None: draw initial parameters
            of all kinds.
        grads: For each step, number of the kind -> gradient. If empty, draw gradients.
        seed: Seed of the optimizer's random numbers.
        dtype: Dtype of the parameters.
        apart: Whether to update one parameter after another, each in its own step.
        early: Whether to compute the update of each parameter alone, and to apply all of them in the step.

    Raises:
        Exception: Any error of making a copy or of its step. A RuntimeError if the copy changes no parameter
            although a gradient is not zero, or runs the closure again.
    """
    draw = torch.Generator().manual_seed(len(kinds))
    if before is None:
        before = {i: _start(kind, scenario, draw).to(device, dtype) for i, kind in enumerate(kinds)}
    params = {i: nn.Parameter(value.clone()) for i, value in before.items()}
    seen = []  # the gradients of each step
    with isolate_rng():
        torch.manual_seed(seed)
        made = _copy_for(params, kinds, optimizer)
        for number in range(scenario.steps if params else 0):
            if not grads:
                scale = scenario.scales[number % len(scenario.scales)]
                given = {
                    i: scale * _gradient(kinds[i], p.detach(), scenario, draw) for i, p in params.items()
                }
            seen.append(grads[number] if grads else given)
            step = _early_step if early else partial(_step, apart=apart)
            step(made, [(p, seen[-1][i]) for i, p in params.items()])
    # Gradients at right angles to a number are rounding, and too small to move it.
    moving = any((grad.abs() > ROUNDING).any() for step in seen for grad in step.values())
    if moving and all(torch.equal(p, before[i]) for i, p in params.items()):
        raise RuntimeError("its steps changed none of the parameters")
    return TrialResult(
        scenario,
        before,
        {i: p.detach() for i, p in params.items()},
        {i: made.state[p] for i, p in params.items()},
        seen,
        made,
    )


def _copy_for(
    params: Mapping[int, nn.Parameter], kinds: Sequence[ParameterKind], optimizer: Optimizer
) -> Optimizer:
    """Return a new optimizer for the parameters of a trial, which get the attributes that the user has set. `params` has
    number of the kind -> parameter."""
    groups = [_options(group) for group in optimizer.param_groups]
    for number, group in enumerate(groups):
        group["params"] = [p for i, p in params.items() if kinds[i].group == number]
    for i, p in params.items():
        vars(p).update(vars(kinds[i].like))
    return remade(optimizer, groups)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group's options, without its parameters. The learning rate is 0.01, because a
    schedule may begin with a rate of 0."""
    found = {
        k: v.detach().clone() if isinstance(v, Tensor) else v
        for k, v in group.items()
        if k not in ("params", "param_names")
    }
    if "lr" in found:
        found["lr"] = torch.full_like(found["lr"], 0.01) if isinstance(found["lr"], Tensor) else 0.01
    return found


def _beside_parameters(optimizer: Optimizer) -> list[Any]:
    """Return the options of an optimizer's groups, and its attributes. The states of parameters are left out."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return [groups, {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "step")}]


def _have_same_content(one: Any, other: Any, compared: set[int]) -> bool:
    """Return whether two values are equal. Containers and objects are compared by their contents, and functions not at
    all. Entries of dicts whose keys are tensors, such as the states of parameters, are not compared either.

    Args:
        compared: Ids of objects that are compared already. The function adds to it.
    """
    if type(one) is not type(other):
        return False
    if id(one) in compared or isinstance(one, type) or inspect.isroutine(one):
        return True
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        own, others = ({k: v for k, v in x.items() if not isinstance(k, Tensor)} for x in (one, other))
        if own.keys() != others.keys():
            return False
        pairs = [(own[key], others[key]) for key in own]
    elif isinstance(one, list | tuple | collections.deque):
        if len(one) != len(other):
            return False
        pairs = list(zip(one, other, strict=True))
    elif hasattr(one, "__dict__"):
        pairs = [(vars(one), vars(other))]
    else:
        return bool(one == other) or one != one
    compared.add(id(one))
    return all(_have_same_content(*pair, compared) for pair in pairs)


def _start(kind: ParameterKind, scenario: GradientScenario, draw: torch.Generator) -> Tensor:
    value = scenario.values * torch.randn(kind.shape, dtype=torch.float64, generator=draw)
    value.view(-1)[value.numel() // 2 :] *= 5  # The norms of the two shards differ.
    return value


def _gradient(
    kind: ParameterKind, value: Tensor, scenario: GradientScenario, draw: torch.Generator
) -> Tensor:
    grad = torch.randn(kind.shape, dtype=torch.float64, generator=draw).to(value)
    if scenario.orthogonal:
        rows, along = (x.reshape(kind.shape[0] if len(kind.shape) > 1 else 1, -1) for x in (grad, value))
        rows -= (rows * along).sum(1, keepdim=True) / along.square().sum(1, keepdim=True) * along
    if scenario.gap:
        grad.view(-1)[: kind.cut] = 0
    return grad


def _step(optimizer: Optimizer, grads: Sequence[tuple[nn.Parameter, Tensor]], apart: bool) -> None:
    """Make a step as the Trainer does, in which the closure computes the gradients. `grads` has the
    parameters with their gradients.

    With `apart`, this function first calls the closure, and then makes one step for each parameter.

    Raises:
        RuntimeError: The optimizer calls the closure more than once.
    """
    calls = 0

    def closure() -> Any:
        nonlocal calls
        calls += 1
        for p, grad in grads:
            p.grad = grad.clone()
        return grads[0][1].new_ones(())

    closure()
    for p, _ in grads[:-1] if apart else ():
        with only(optimizer, [p]):
            own_step(optimizer)(optimizer)
    with only(optimizer, [p for p, _ in (grads[-1:] if apart else grads)]):
        optimizer.step(closure=closure)
    if calls > 2:  # one call above, and one by `step`
        raise RuntimeError("it runs the closure more than once")


def _early_step(optimizer: Optimizer, grads: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Make a step in which the update of each parameter is computed alone, before the step, from the last parameter
    to the first, as in a backward pass. `grads` has the parameters with their gradients.

    Raises:
        RuntimeError: The optimizer has changed a parameter before the step.
    """
    before = [p.detach().clone() for p, _ in grads]
    updates = [compute_updates(optimizer, {p: grad})[0] for p, grad in reversed(grads)]
    if not all(map(torch.equal, before, (p for p, _ in grads))):
        raise RuntimeError("it changes a parameter that it does not update")
    for p, grad in grads:
        p.grad = grad.clone()
    if not all(update.is_current(optimizer) for update in updates):
        raise RuntimeError("it changes its own settings")
    for update in updates:
        update.apply(optimizer)
    with only(optimizer, ()):
        optimizer.step()


def remade(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Return a new optimizer of the same class and settings over other groups, with the state that its
    constructor creates.

    If the class cannot be constructed from its defaults and the optimizer has no state yet, return a copy of
    the optimizer over these groups.

    Raises:
        Exception: An error of the constructor, if the optimizer has state; or an error of copying.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {k: v for k, v in optimizer.defaults.items() if anything or k in accepted}
    try:
        made = type(optimizer)([dict(group) for group in groups], **defaults)
    except Exception:
        if any(optimizer.state.values()):
            raise
        return _copied(optimizer, groups)
    for name, value in vars(optimizer).items():  # settings that are kept outside of the defaults
        if name in vars(made) and isinstance(value, bool | int | float | str | None):
            setattr(made, name, value)
    return made


def _copied(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Copy an optimizer with all its attributes, including an inner optimizer, over other groups."""
    made: Optimizer = object.__new__(type(optimizer))
    known: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(0)) for group in optimizer.param_groups for p in group["params"]
    }
    known[id(optimizer)] = made
    # The copy does not have the instance's `step`, a scheduler's wrapper that would step the original, and
    # the user's hooks (`_optimizer_..._hooks`).
    own = {k: v for k, v in vars(optimizer).items() if k != "step" and not k.startswith("_optimizer_")}
    known |= {id(x): x for x in finalized(own, known)}  # the end of a copy would run the user's code
    Optimizer.__setstate__(made, copy.deepcopy(own, known))
    made.param_groups[:] = [dict(group) for group in groups]
    return made
