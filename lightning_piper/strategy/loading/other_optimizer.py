"""The error of an optimizer that has loaded the state of another optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_piper.common.lightning_packages import is_a
from lightning_piper.errors import PiperError

# Other entries of parameter groups than the options of an optimizer.
_BESIDE = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


class NamingOptimizers:
    """A context in which an error of an optimizer that has loaded the state of another optimizer names both
    optimizers. Plain torch raises a KeyError or a TypeError, either while it loads the state or in the next step.

    Raises:
        PiperError: The code of an optimizer has raised such an error, and its parameter groups do not have its options.
        Exception: Any other error of the code in this context.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._named = optimizers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, KeyError | TypeError):
            return
        for optimizer in self._named:
            own = optimizer.optimizer if is_a(optimizer, LightningOptimizer) else optimizer
            others = _options_of_another(own, error)
            if others is not None and _raised_in(own, error):
                saved = (
                    f"an optimizer with the options {', '.join(others)}" if others else "another optimizer"
                )
                lacks = (
                    f"does not find {error} in the state that it has loaded"
                    if isinstance(error, KeyError)
                    else f"cannot work with the state that it has loaded ({error})"
                )
                raise PiperError(
                    f"{type(own).__name__} {lacks}, because {saved} has saved this state. Resume with the optimizer that "
                    "saved the checkpoint [PIPER-K003]"
                ) from error


def _raised_in(optimizer: Optimizer, error: Exception) -> bool:
    """Return whether the code of an optimizer's class, or of a base class, raised an error."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    own = [cls for cls in type(optimizer).__mro__ if cls not in (Optimizer, object)]
    methods = [inspect.unwrap(each) for cls in own for each in vars(cls).values() if inspect.isfunction(each)]
    files = {method.__code__.co_filename for method in methods}
    return at is not None and at.tb_frame.f_code.co_filename in files


def _options_of_another(optimizer: Optimizer, error: Exception) -> list[str] | None:
    """Return the options of the optimizer's groups that are not its own options. Return None if nothing shows that
    they come from another optimizer.

    The groups show it if they do not have all own options. They also show it if they have other options, and the state
    of the parameters does not have the entry that the error names.
    """
    options = getattr(optimizer, "defaults", {}).keys()
    for group in optimizer.param_groups:
        others = sorted(map(str, group.keys() - options - _BESIDE))
        kept = [optimizer.state[p] for p in group["params"] if optimizer.state.get(p)]
        lacks = isinstance(error, KeyError) and any(error.args[0] not in state for state in kept)
        if options - group.keys() or (others and lacks):
            return others
    return None
