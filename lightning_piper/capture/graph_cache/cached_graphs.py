"""Graphs of steps, each traced only once: by this process, by another process of this machine, or in an
earlier run.

    run on fake tensors -> digest of the operations -> graph: in memory, in a file, or made and stored

The graph is made from the operations that the run has noted (`graph_builder.py`), or by a trace.

Only the graph is reused. The run in this process gives all other results: the reads, the logs, and returned
values other than tensors.
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
from lightning_piper.capture.graph_cache.serialization import NotSerializable, deserialize, serialize
from lightning_piper.capture.graph_cache.tracing_run import log_operations
from lightning_piper.capture.python_state.side_effects import ContainerGrowth
from lightning_piper.capture.python_state.state_protection import (
    attributes,
    check_unchanged,
    restoring_attributes,
)
from lightning_piper.capture.python_state.state_reads import RandomDraw, without_drawing
from lightning_piper.capture.torch_private import _torch
from lightning_piper.errors import CaptureError

REFUSED = b""  # stored if the graph cannot be written; other processes then do not wait for it
MANY = 64  # the most graphs that a process keeps in memory
_known: dict[str, bytes] = {}


def traced_once(
    module: nn.Module,
    step: Any,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
    without_data: Callable[[Any], AbstractContextManager[None]],
    trace: Callable[[], Graph],
) -> Graph:
    """Return the graph of a step.

    Args:
        module: the user's module.
        step: returns its results; see `step_trace.TracedStep`.
        inputs: tensors like the step's inputs.
        device: the device of the trace.
        without_data: inside, the module has tensors of a given fake mode. Each run needs new ones, because it
            may write to them.
        trace: makes the graph if it is not known.
    """

    def tracing_run() -> tuple[str, Graph | None, torch.device]:
        mode = _torch.FakeTensorMode()
        # The capture refuses a step that draws random numbers, so it needs no full trace.
        with without_drawing(), restoring_attributes(module), without_data(mode), mode:
            _untie(module)
            others = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
            ]
            own = torch.empty((), device=device).device  # with its index
            before = attributes(module)
            digest, graph = log_operations(step, others, own)
            if step.keeps:
                # Hooks of the backward pass may have changed attributes.
                check_unchanged(module, before, step.name)
        return digest, graph, own

    try:
        digest, graph, own = tracing_run()
    # Piper refuses the step, or must learn from this first.
    except (ContainerGrowth, RandomDraw, CaptureError, *_torch.WITHOUT_VALUES):
        raise
    except Exception:  # the trace reports what is wrong, if anything is
        return trace()
    if graph is not None:
        return _graph(digest, own, lambda: graph, lambda: True)
    return _graph(digest, own, trace, lambda: tracing_run()[0] == digest)


def _untie(module: nn.Module) -> None:
    """Give each name of a tied parameter or buffer a tensor of its own, as in a trace, which names tensors by
    their places."""
    seen: set[int] = set()
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, x in store.items():
                if id(x) in seen and x is not None:
                    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                    store[name] = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made  # type: ignore[assignment]
                seen.add(id(x))


def forget() -> None:
    """Forget the graphs in memory; files keep theirs."""
    _known.clear()


def _graph(digest: str, own: torch.device, trace: Callable[[], Graph], same: Callable[[], bool]) -> Graph:
    """Return the graph of a step with this digest. `same` checks whether the step still has it."""
    name = hashlib.sha256(f"{VERSIONS}\n{digest}".encode()).hexdigest()
    path = cache.folder("graphs") / name
    content = _known.get(name) or cache.read(path)
    graph = _read(content, own)
    if graph is None and content != REFUSED:
        with cache.alone(path):  # other processes wait, and read what this one writes
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
        return deserialize(content, own) if content else None
    except NotSerializable:
        return None


def _made(
    path: Path, own: torch.device, trace: Callable[[], Graph], same: Callable[[], bool]
) -> tuple[bytes, Graph]:
    """Make the graph and store it. Returns the graph read back from its content, so that the first run uses
    what later runs read."""
    graph = trace()
    if not same():  # it depends on a clock or a file, for example, so the graph may differ next time
        return REFUSED, graph
    try:
        content = serialize(graph, own)
        graph = deserialize(content, own)
    except NotSerializable:
        content = REFUSED
    cache.write(path, content)
    return content, graph


def _versions() -> str:
    """Versions of all code that turns a step's operations into a graph."""
    package = Path(__file__).parents[2]
    sources = hashlib.sha256()
    # An installation may lack sources.
    for source in sorted(package.rglob("*.py")) or sorted(package.rglob("*.pyc")):
        sources.update(source.read_bytes())
    about = torch.__version__, torch.version.git_version, sys.version, sys.platform, sources.hexdigest()
    return "\n".join(about)


# Computed at import, because another version may replace the package's files while this one runs.
VERSIONS = _versions()
