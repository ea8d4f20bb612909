"""The error of an optimizer that has loaded the state of another optimizer."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator

from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from lightning_piper.common.lightning_packages import is_a
from lightning_piper.errors import PiperError

# Other entries of parameter groups than the options of an optimizer.
_BESIDE = {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}


@contextlib.contextmanager
def naming_optimizers(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Within this context, an error of an optimizer that does not find an entry in the state of another optimizer
    names both optimizers. Plain torch raises a KeyError, either while it loads the state or in the next step.

    Raises:
        PiperError: An optimizer does not find an entry, and its parameter groups do not have all its options.
        Exception: Any other error of the code in this context.
    """
    try:
        yield
    except KeyError as error:
        for optimizer in optimizers:
            own = optimizer.optimizer if is_a(optimizer, LightningOptimizer) else optimizer
            others = _options_of_another(own)
            if others is not None and _raised_in(own, error):
                saved = (
                    f"an optimizer with the options {', '.join(others)}" if others else "another optimizer"
                )
                raise PiperError(
                    f"{type(own).__name__} does not find {error} in the state that it has loaded, because {saved} has "
                    "saved this state. Resume with the optimizer that saved the checkpoint [PIPER-K003]"
                ) from error
        raise


def _raised_in(optimizer: Optimizer, error: KeyError) -> bool:
    """Return whether the code of an optimizer's class, or of a base class, raised an error."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    own = [cls for cls in type(optimizer).__mro__ if cls not in (Optimizer, object)]
    methods = [inspect.unwrap(each) for cls in own for each in vars(cls).values() if inspect.isfunction(each)]
    files = {method.__code__.co_filename for method in methods}
    return at is not None and at.tb_frame.f_code.co_filename in files


def _options_of_another(optimizer: Optimizer) -> list[str] | None:
    """Return the options of the optimizer's groups that are not its own options; None if the groups have all its own
    options, as they do unless a loaded state has replaced them."""
    options = getattr(optimizer, "defaults", {}).keys()
    group = next((group for group in optimizer.param_groups if options - group.keys()), None)
    return None if group is None else sorted(map(str, group.keys() - options - _BESIDE))
