"""Refuse a step that has effects outside of Python's objects: files, programs, threads, connections, records of
experiment trackers. The captured step would not repeat them.

A step that was given an open file or connection does not need these calls. `object_content` knows such objects.
"""

from __future__ import annotations

import contextlib
import enum
import fnmatch
import os
import sys
import types
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_piper.capture.proxies.deferred_numbers import Namespace
from lightning_piper.capture.torch_private._torch import CHECKS_FILE
from lightning_piper.capture.torch_private._torch_calls import hooks_of_saved_tensors
from lightning_piper.capture.user_code.replaced_attribute import checked_calls
from lightning_piper.common.user_lines import is_installed, user_line
from lightning_piper.errors import CaptureError

_LIBRARIES = (str(Path(__file__).parents[2]) + "/", str(Path(torch.__file__).parent) + "/")
_PYTHON = str(Path(contextlib.__file__).parent) + "/"
_STREAMS = (1, 2)  # a step may print


class _Packages(enum.Enum):
    """Whether a function of an installed package may have an effect in a step."""

    CACHE = enum.auto()  # only on a file of a cache; the first argument is the file
    ALLOWED = enum.auto()
    REFUSED = enum.auto()


class _Effect(NamedTuple):
    """Calls that have an effect.

    Attributes:
        action: the effect, in the words of the error. `{}` stands for the name of the function.
        module, kind: the functions are in this module, or are methods of this class of the module.
        names: glob patterns of the functions, separated by spaces.
    """

    action: str
    packages: _Packages
    module: str
    kind: str | None
    names: str


_OPENS, _SENDS = "opens a file to write into it", "sends data to another program"
_CALLS, _SETS = "calls {}()", "changes torch's settings by {}()"
_EFFECTS = (
    _Effect(_OPENS, _Packages.CACHE, "builtins", None, "open"),
    _Effect(_OPENS, _Packages.CACHE, "io", None, "open"),  # pathlib calls this
    _Effect(_OPENS, _Packages.CACHE, "os", None, "open"),
    _Effect(_OPENS, _Packages.CACHE, "torch.serialization", None, CHECKS_FILE),  # then C++ opens the file
    _Effect("writes into a file", _Packages.CACHE, "os", None, "truncate"),
    _Effect("renames a file", _Packages.CACHE, "os", None, "rename replace link symlink"),
    _Effect("removes a file", _Packages.CACHE, "os", None, "remove unlink rmdir"),
    _Effect("makes a folder", _Packages.CACHE, "os", None, "mkdir"),
    _Effect("makes a file", _Packages.CACHE, "os", None, "mkfifo mknod"),
    _Effect("changes the attributes of a file", _Packages.CACHE, "os", None, "chmod chown utime setxattr"),
    _Effect("writes into a file", _Packages.ALLOWED, "os", None, "write writev pwrite* ftruncate sendfile"),
    _Effect("changes the working directory", _Packages.ALLOWED, "os", None, "chdir fchdir"),
    _Effect("starts a program", _Packages.ALLOWED, "os", None, "system fork forkpty posix_spawn*"),
    _Effect("starts a program", _Packages.ALLOWED, "subprocess", "Popen", "__init__"),
    _Effect("starts a process", _Packages.ALLOWED, "multiprocessing.process", "BaseProcess", "start"),
    _Effect("starts a thread", _Packages.ALLOWED, "threading", "Thread", "start"),
    _Effect(_SETS, _Packages.ALLOWED, "torch", None, "set_default_device set_num_threads set_flush_denormal"),
    _Effect(
        _SETS, _Packages.ALLOWED, "torch", None, "use_deterministic_algorithms set_deterministic_debug_mode"
    ),
    _Effect(_SETS, _Packages.ALLOWED, "torch", None, "set_float32_matmul_precision"),
    _Effect(_SENDS, _Packages.REFUSED, "socket", "socket", "connect connect_ex send sendall sendto sendmsg"),
    _Effect("opens a database", _Packages.REFUSED, "sqlite3", None, "connect"),
    _Effect(_CALLS, _Packages.REFUSED, "torch.utils.tensorboard", "SummaryWriter", "add_*"),
    _Effect(_CALLS, _Packages.REFUSED, "torch.utils.tensorboard", "FileWriter", "add_*"),
    _Effect(_CALLS, _Packages.REFUSED, "tensorboardX", "SummaryWriter", "add_*"),
    _Effect(_CALLS, _Packages.REFUSED, "wandb", None, "log*"),
    _Effect(_CALLS, _Packages.REFUSED, "wandb", "Run", "log*"),
    _Effect(_CALLS, _Packages.REFUSED, "mlflow", None, "log_*"),
    _Effect(_CALLS, _Packages.REFUSED, "mlflow", "MlflowClient", "log_*"),
)


@contextlib.contextmanager
def refusing_effects(step: str, namespaces: Iterable[Namespace] = ()) -> Iterator[None]:
    """Within this context, the calls in `_EFFECTS`, and hooks of the user for saved tensors, raise an error in this
    thread.

    `logging`, torch and Piper may have effects, and so may installed packages, as `_Packages` says. Calls by other
    functions of Python's library count as calls of their caller. `trainer_proxy` refuses calls of `self.logger`.

    Args:
        step: the name of the step that is traced.
        namespaces: globals dicts, each with names that the step calls (`from os import remove`).
    """
    _check_hooks_around(step)
    checked: dict[int, Any] = {}  # id of a function -> the function that checks its calls
    saving = torch.autograd.graph.saved_tensors_hooks
    with contextlib.ExitStack() as stack:
        stack.enter_context(checked_calls(saving, "__enter__", partial(_check_saved_tensors_hooks, step)))
        for effect in _EFFECTS:
            module = sys.modules.get(effect.module)  # a module that nobody has imported has no callers
            owner = module if effect.kind is None else getattr(module, effect.kind, None)
            if owner is None:
                continue
            names = set(dir(owner) if isinstance(owner, type) else vars(owner))  # a class inherits methods
            for pattern in effect.names.split():
                for name in fnmatch.filter(names, pattern) if "*" in pattern else names & {pattern}:
                    if callable(own := getattr(owner, name)):
                        check = partial(_check, step, effect, name)
                        stack.enter_context(checked_calls(owner, name, check))
                        checked[id(own)] = getattr(owner, name)
        for globals_, called in namespaces:
            for name in [x for x in called if id(globals_.get(x)) in checked]:
                stack.callback(globals_.__setitem__, name, globals_[name])
                globals_[name] = checked[id(globals_[name])]
        yield


def _check_hooks_around(step: str) -> None:
    """Raise a `CaptureError` if hooks of the user for saved tensors are active around the step, such as around `fit`."""
    hooks = hooks_of_saved_tensors()
    if hooks is not None and not _are_of_torch(hooks):
        raise CaptureError(
            f"{step} runs inside of saved_tensors_hooks, but the backward pass of a captured step does not call such "
            "hooks. To save memory, use the directive Recompute or Offload [PIPER-C003]"
        )


def _check_saved_tensors_hooks(step: str, entered: torch.autograd.graph.saved_tensors_hooks) -> None:
    """Raise a `CaptureError` if the step enters `saved_tensors_hooks`, because a trace ignores these hooks."""
    if not _are_of_torch((entered.pack_hook, entered.unpack_hook)):
        raise CaptureError(
            f"{user_line()}: {step} enters saved_tensors_hooks, but the backward pass of a captured step does not call "
            "such hooks. To save memory, use the directive Recompute or Offload [PIPER-C003]"
        )


def _are_of_torch(hooks: tuple[Any, Any]) -> bool:
    """Return whether hooks for saved tensors are torch's own, such as in `checkpoint` and `save_on_cpu`. These do not
    change values."""
    return all(str(getattr(x, "__module__", "")).partition(".")[0] == "torch" for x in hooks)


def _check(step: str, effect: _Effect, name: str, *args: Any, **kwargs: Any) -> None:
    """Raise a `CaptureError` if a call of the function `name` has an effect that the step may not have."""
    if _is_harmless(name, args, kwargs) or not _is_users(sys._getframe(2), effect.packages, args):
        return
    function = ".".join(filter(None, (effect.module, effect.kind, name)))
    advice = "Log the value by self.log, or call it" if effect.action == _CALLS else "Do it"
    raise CaptureError(
        f"{user_line()}: {step} {effect.action.format(function)}. A captured step would do this only while Piper "
        f"captures it. {advice} in a hook, such as on_train_batch_end or on_validation_batch_end [PIPER-C003]"
    )


def _is_harmless(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of a function only reads a file, prints, makes a folder that exists, or makes a database
    in memory."""
    first, second = (*args, None, None)[:2]
    if isinstance(first, str) and first in (os.devnull, ":memory:"):
        return True
    match name:
        case "open":  # `os.open` has flags, and perhaps a mode of permissions
            how = kwargs.get("flags", second)
            how = kwargs.get("mode", "r") if how is None else how
            return not (how & (os.O_WRONLY | os.O_RDWR) if isinstance(how, int) else set(how) & set("wax+"))
        case "write" | "writev":
            return first in _STREAMS
        case "mkdir":
            return os.path.isdir(kwargs.get("path", first))
        case _ if name == CHECKS_FILE:
            return not isinstance(first, str | os.PathLike)
    return False


def _is_users(frame: types.FrameType | None, packages: _Packages, args: tuple[Any, ...]) -> bool:
    """Return whether the user's code runs this frame, directly or through Python's standard library. The frame of
    an installed package counts as the user's if `packages` does not allow the package the call."""
    while frame is not None:
        file, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if name != torch.serialization.__name__:  # `torch.save` is called for the caller
            if file.startswith((*_LIBRARIES, "<frozen importlib")) or name.partition(".")[0] == "logging":
                return False
            if is_installed(file):
                return packages is _Packages.REFUSED or (packages is _Packages.CACHE and not _is_cache(args))
            if not file.startswith((_PYTHON, "<frozen")):
                return True
        frame = frame.f_back
    return False


def _is_cache(args: tuple[Any, ...]) -> bool:
    """Return whether the first argument names a file in a folder of caches: a hidden folder of the home folder,
    `XDG_CACHE_HOME`, `__pycache__`, or beside installed packages. Also return True if it names no file."""
    if not args or not isinstance(args[0], str | bytes | os.PathLike):
        return True
    path = Path(os.path.abspath(os.fsdecode(args[0])))
    if "__pycache__" in path.parts or is_installed(str(path)):
        return True
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches and path.is_relative_to(caches):
        return True
    home = Path(os.path.expanduser("~"))
    return path.is_relative_to(home) and path.relative_to(home).parts[0].startswith(".")
