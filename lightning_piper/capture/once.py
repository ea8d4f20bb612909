"""Graphs of steps, each traced once: by this process, by another one of this machine, or in an earlier run.

    rehearse the step -> digest of what it does -> graph: known here, in a file, or made and written down

It is made of what the rehearsal has noted (`calls.py`), or by a trace.

Only the graph comes from elsewhere. What the step reads and logs, and what it returns beside tensors, is of the rehearsal, in this
process and on this day.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from lightning_piper import cache
from lightning_piper.capture import _torch
from lightning_piper.capture.kept import Grows
from lightning_piper.capture.reads import Drawn
from lightning_piper.capture.rehearsal import notes_of
from lightning_piper.capture.unchanged import attributes, check_unchanged, restored
from lightning_piper.capture.written import NotData, read, written
from lightning_piper.errors import CaptureError

REFUSED = b""  # in the place of a graph that cannot be written: nobody waits for it
MANY = 64  # graphs that a process remembers
_known: dict[str, bytes] = {}


def traced_once(
    module: nn.Module, step: Any, inputs: Sequence[torch.Tensor], device: torch.device,
    without_data: Callable[[Any], AbstractContextManager[None]], trace: Callable[[], Graph],
) -> Graph:  # fmt: skip
    """The graph of a step.

    Args:
        module: the user's.
        step: gives its results; see `trace.Step`.
        inputs: it is given tensors like these.
        device: for which it is traced.
        without_data: lets the module have tensors of a fake mode meanwhile: a rehearsal has its own, for it may write to them.
        trace: makes the graph where it is not known.
    """

    def rehearsed() -> tuple[str, Graph | None, torch.device]:
        mode = _torch.FakeTensorMode()
        with restored(module), without_data(mode), mode:
            _untie(module)
            others = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
            own = torch.empty((), device=device).device  # with its number
            before = attributes(module)
            digest, graph = notes_of(step, others, own)
            if step.keeps:
                check_unchanged(module, before, step.name)  # also by hooks of the backward pass
        return digest, graph, own

    try:
        digest, graph, own = rehearsed()
    except (Grows, Drawn, CaptureError, *_torch.WITHOUT_VALUES):  # what the step does is refused, and may have been done
        raise
    except Exception:  # a trace says what is wrong, if anything is
        return trace()
    if graph is not None:
        return _graph(digest, own, lambda: graph, lambda: True)
    return _graph(digest, own, trace, lambda: rehearsed()[0] == digest)


def _untie(module: nn.Module) -> None:
    """Let places that hold one tensor hold one each, as in a trace, which names tensors by their places."""
    seen: set[int] = set()
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, x in store.items():
                if id(x) in seen and x is not None:
                    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                    store[name] = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made  # type: ignore[assignment]
                seen.add(id(x))


def forget() -> None:
    """The graphs that this process remembers, not those of files."""
    _known.clear()


def _graph(digest: str, own: torch.device, trace: Callable[[], Graph], same: Callable[[], bool]) -> Graph:
    """The graph of a step that does what the digest stands for. `same`: does it still?"""
    name = hashlib.sha256(f"{VERSIONS}\n{digest}".encode()).hexdigest()
    path = cache.folder("graphs") / name
    content = _known.get(name) or cache.read(path)
    graph = _read(content, own)
    if graph is None and content != REFUSED:
        with cache.alone(path):  # others wait, and read what this one writes
            content = cache.read(path)
            graph = _read(content, own)
            if graph is None and content != REFUSED:
                content, graph = _made(path, own, trace, same)
    if graph is None:
        return trace()
    if content:
        while len(_known) >= MANY and name not in _known:
            del _known[next(iter(_known))]
        _known[name] = content
    return graph


def _read(content: bytes | None, own: torch.device) -> Graph | None:
    try:
        return read(content, own) if content else None
    except NotData:
        return None


def _made(path: Path, own: torch.device, trace: Callable[[], Graph], same: Callable[[], bool]) -> tuple[bytes, Graph]:
    """Make it, and write it down. What was written goes on, so that a first run has what a later one reads."""
    graph = trace()
    if not same():  # it follows a clock or a file, say, and the graph may be that of another time
        return REFUSED, graph
    try:
        content = written(graph, own)
        graph = read(content, own)
    except NotData:
        content = REFUSED
    cache.write(path, content)
    return content, graph


def _versions() -> str:
    """Of all that makes a graph out of what a step does."""
    package = Path(__file__).parents[1]
    sources = hashlib.sha256()
    for source in sorted(package.rglob("*.py")) or sorted(package.rglob("*.pyc")):  # or is it there without?
        sources.update(source.read_bytes())
    about = torch.__version__, torch.version.git_version, sys.version, sys.platform, sources.hexdigest()
    return "\n".join(about)


VERSIONS = _versions()  # as of now: the package may be replaced by another version while this one, which was imported, runs
