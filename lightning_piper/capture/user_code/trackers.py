"""Refuse a step that sends records to an experiment tracker, because the captured step would not send them
again."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

# (package, class or None for the package itself, beginning of the names of functions that send records)
_TRACKERS = (
    ("torch.utils.tensorboard", "SummaryWriter", "add_"),
    ("tensorboardX", "SummaryWriter", "add_"),
    ("wandb", None, "log"),
    ("wandb", "Run", "log"),
    ("mlflow", None, "log_"),
    ("mlflow", "MlflowClient", "log_"),
)


@contextlib.contextmanager
def refusing_trackers(step: str) -> Iterator[None]:
    """Within this context, functions of experiment trackers raise an error in this thread. Trackers that nobody has
    imported are skipped. `trainer_proxy` refuses calls of `self.logger`.

    Args:
        step: the name of the step that is traced.
    """
    thread = threading.get_ident()

    def refusing(own: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                raise CaptureError(
                    f"{user_line()}: {step} calls {name}(). A captured step would do this only while Piper captures "
                    "it. Log the value by self.log, or call the tracker in a hook, such as on_train_batch_end"
                    " [PIPER-C003]"
                )
            return own(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for package, kind, beginning in _TRACKERS:
            owner = sys.modules.get(package)
            owner = getattr(owner, kind, None) if kind is not None else owner
            for name in [name for name in vars(owner or object) if name.startswith(beginning)]:
                if callable(own := getattr(owner, name)):
                    shown = ".".join(filter(None, (package, kind, name)))
                    stack.enter_context(replaced_attribute(owner, name, refusing(own, shown)))
        yield
