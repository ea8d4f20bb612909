"""Keep graphs of steps, so that each graph is made only once: by this process, by another process of this
machine, or in an earlier run.

    run on fake tensors -> digest of the operations -> graph: in memory, in a file, or new and then stored

A new graph is built from the operations that the run has recorded (`graph_builder.py`), or by a trace.

Only the graph is reused. All other results come from the run in this process: the reads, the logs, and
returned values other than tensors.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from lightning_piper import cache
from lightning_piper.capture.graph_cache.operation_results import OperationResults
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
from lightning_piper.errors import CaptureError, LongStepError

# The content of the file for a graph that cannot be written. A process that reads it makes the graph immediately,
# without waiting for another process.
REFUSED = b""
MANY = 64  # the most graphs that a process keeps in memory
_known: dict[str, bytes] = {}  # name of a graph's file -> content of the file
# Modules whose blocks differ. Their next runs note the operations of each block.
_differing: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def traced_once(
    module: nn.Module,
    step: Any,
    inputs: Sequence[torch.Tensor],
    device: torch.device,
    without_data: Callable[[Any], AbstractContextManager[None]],
    trace: Callable[[], Graph],
) -> Graph:
    """Return the graph of a step: a known graph if the step has the same operations, otherwise a new graph.

    The graph is a new object. To find out the operations, the step first runs on fake tensors. If this run
    fails with an error that is not listed below, the function calls `trace`: the error may be the step's own, or
    the run cannot record an operation.

    Args:
        module: the user's module. Its Python attributes are restored after the run.
        step: a module that returns the step's results; see `step_trace.TracedStep`. If the operations could be
            recorded, `step.digest` is their digest afterwards. If it is `step.known`, the graph is empty.
        inputs: tensors like the step's inputs.
        device: the device of the trace.
        without_data: Returns a context in which the module has new tensors of the given fake mode. Each run
            needs new tensors, because the step may write to them.
        trace: Returns a new graph. It is called if the graph is not known and the run's operations do not
            determine it.

    Raises:
        ContainerGrowth, RandomDraw, CaptureError: Piper cannot capture the step, or must trace it again with
            placeholders for Python state.
        Exception: any error of `trace`.
    """

    def tracing_run(
        blocks: Sequence[nn.Module], is_known: Callable[[str], bool] = lambda digest: False
    ) -> tuple[str, Callable[[], Graph | None] | None, torch.device]:
        """Run the step on fake tensors.

        Args:
            blocks: repeated blocks whose operations are noted once.
            is_known: whether the graph of a digest is known.

        Returns:
            (Digest of the step's operations, a function that makes its graph, device of the trace with its
            index). See `log_operations`.
        """
        mode = _torch.FakeTensorMode()
        # `without_drawing` raises `RandomDraw` if the step draws random numbers in Python. The capture
        # rejects such a step, so it needs no trace.
        with without_drawing(), restoring_attributes(module), without_data(mode), mode:
            _untie(module)
            others = [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs
            ]
            own = torch.empty((), device=device).device  # a device with its index
            before = attributes(module)
            _results.read()
            digest, build = log_operations(step, others, own, blocks, is_known, _results)
            _results.write()
            if step.keeps and build is not None:
                # Hooks of the backward pass, which has run, may have changed attributes.
                check_unchanged(module, before, step.name)
        return digest, build, own

    blocks = () if module in _differing else tuple(step.blocks.values())
    try:
        try:
            digest, build, own = tracing_run(blocks, lambda found: found == step.known or _is_known(found))
        except (ContainerGrowth, RandomDraw, LongStepError):
            raise
        except Exception:
            if not blocks:
                raise
            # The blocks differ, or the text of this error is different without replay.
            _differing.add(module)
            blocks = ()
            digest, build, own = tracing_run(blocks, _is_known)
    # The caller handles these errors: Piper cannot capture the step, or traces it again with placeholders for
    # the Python state that the error names.
    except (ContainerGrowth, RandomDraw, CaptureError, *_torch.WITHOUT_VALUES):
        raise
    except Exception:  # if the step itself has an error, the trace raises it again
        return trace()

    def make() -> tuple[Graph, Callable[[], bool]]:
        # Without `build`, the graph was known, but its file can no longer be read.
        found = tracing_run(blocks)[1] if build is None else build
        if found is not None and (built := found()) is not None:
            return built, lambda: True
        # A step that depends on a clock or a file, for example, may have another graph next time.
        return trace(), lambda: tracing_run(blocks)[0] == digest

    step.digest = digest
    if digest == step.known:
        return Graph()
    return _graph(digest, own, make)


def _untie(module: nn.Module) -> None:
    """Give each name of a tied parameter or buffer a separate fake tensor, because a trace also has a separate
    input for each name. The module is changed."""
    seen: set[int] = set()
    for part in module.modules():
        for store in (part._parameters, part._buffers):
            for name, x in store.items():
                if id(x) in seen and x is not None:
                    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                    store[name] = nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made  # type: ignore[assignment]
                seen.add(id(x))


def _name(digest: str) -> str:
    """Return the name of the file for the graph of a step with this digest."""
    return hashlib.sha256(f"{VERSIONS}\n{digest}".encode()).hexdigest()


def _is_known(digest: str) -> bool:
    """Return whether the graph of a step with this digest is in memory or in a file."""
    name = _name(digest)
    return bool(_known.get(name) or cache.read(cache.folder("graphs") / name))


def forget() -> None:
    """Forget the graphs in memory. Graphs in files stay."""
    _known.clear()


def _graph(digest: str, own: torch.device, make: Callable[[], tuple[Graph, Callable[[], bool]]]) -> Graph:
    """Return the graph of a step with this digest: from memory, from a file, or new. Keep its content in
    memory and in a file, if the graph can be written.

    While this process makes a graph, other processes that need the same graph wait, and then read its file.

    Args:
        own: the device of the trace, with its index.
        make: returns (a new graph, a function). The function returns whether other runs of the step with this
            digest have this graph.
    """
    name = _name(digest)
    path = cache.folder("graphs") / name
    content = _known.get(name) or cache.read(path)
    graph = _read(content, own)
    if graph is None and content != REFUSED:
        with cache.exclusive(path):  # other processes wait, and then read the graph that this process writes
            content = cache.read(path)
            graph = _read(content, own)
            if graph is None and content != REFUSED:
                content, graph = _made(path, own, make)
    if graph is None:
        return make()[0]
    if content:
        while len(_known) >= MANY and name not in _known:
            del _known[next(iter(_known))]
        _known[name] = content
    return graph


def _read(content: bytes | None, own: torch.device) -> Graph | None:
    """Return the graph that a file's content describes. Return None if there is no content, if it is
    `REFUSED`, or if it is not valid."""
    try:
        return deserialize(content, own) if content else None
    except NotSerializable:
        return None


def _made(
    path: Path, own: torch.device, make: Callable[[], tuple[Graph, Callable[[], bool]]]
) -> tuple[bytes, Graph]:
    """Make a graph, and write it to the file `path`; see `_graph`.

    Returns:
        (Content of the file, graph). The graph is read from this content, so that the first run uses the same
        graph as later runs. If the graph cannot be written, the content is `REFUSED`, and the graph is the
        new one. If the step no longer has its digest, the result is the same, but no file is written.
    """
    graph, same = make()
    if not same():
        return REFUSED, graph
    try:
        content = serialize(graph, own)
        graph = deserialize(content, own)
    except NotSerializable:
        content = REFUSED
    cache.write(path, content)
    return content, graph


def _versions() -> str:
    """Return a text that identifies the versions of all code that turns a step's operations into a graph."""
    package = Path(__file__).parents[2]
    sources = hashlib.sha256()
    # An installation may have compiled files only.
    for source in sorted(package.rglob("*.py")) or sorted(package.rglob("*.pyc")):
        sources.update(source.read_bytes())
    about = torch.__version__, torch.version.git_version, sys.version, sys.platform, sources.hexdigest()
    return "\n".join(about)


# Computed at import, because another version may replace the package's files while this one runs.
VERSIONS = _versions()
_results = OperationResults(VERSIONS)
