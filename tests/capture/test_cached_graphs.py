"""A step that was traced before is not traced again, and a step that does anything else is."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_piper as piper
from lightning_piper import cache
from lightning_piper.capture import capture
from lightning_piper.capture.graph_cache import cached_graphs, tracing_run
from lightning_piper.capture.graph_cache.serialization import NotSerializable, deserialize, serialize
from lightning_piper.capture.joint.trace_text import text_of
from lightning_piper.capture.joint.traced_graph import TracedGraph
from lightning_piper.capture.steps.settled_trace import TraceArguments
from lightning_piper.capture.torch_private import _torch
from lightning_piper.capture.tracing.step_trace import TracedStep
from lightning_piper.errors import CaptureError
from lightning_piper.testing.models import BLOCKS, Model, Spec, make_batch
from tests.groups import marked

CPU = torch.device("cpu")
SPEC = Spec(tuple(BLOCKS), tuple(range(len(BLOCKS))), loss="terms")


class Scaled(torch.autograd.Function):
    by = 2.0  # only the backward pass reads this value

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * Scaled.by


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.drop = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.1)
        self.register_buffer("seen", torch.zeros(2))
        self.scale, self.places, self.stage, self.still, self.log_as = 1.5, [1.0, 2.0], 0, False, "loss"
        self.act: Callable[[Tensor], Tensor] = torch.relu

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        with piper.annotate("PP", self.stage):
            x = self.act(self.first(batch[0]))
        with piper.annotate("PP", 1), torch.set_grad_enabled(not self.still):
            y = self.second(self.drop(Scaled.apply(x))) * self.scale + torch.tensor(self.places)
        self.seen.view(1, 2).add_(y.detach().mean(0))  # a change for which a step is traced
        loss = (y + self.first.bias.sum()).square().mean()
        self.log(self.log_as, loss)
        return loss


def batch(size: int = 4) -> tuple[Tensor]:
    return (torch.zeros(size, 3),)


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list with an entry for each trace. The cache is empty in the beginning."""
    found: list[int] = []
    own = _torch.functional_graph

    def counted(*args: Any) -> torch.fx.Graph:
        found.append(1)
        return own(*args)

    monkeypatch.setattr(_torch, "functional_graph", counted)
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    cached_graphs.forget()
    yield found
    cached_graphs.forget()


def trace(module: L.LightningModule, given: Any) -> TracedGraph:
    step = capture(module, given)
    return step._trace(TraceArguments(step.size))[0]


def described(graph: torch.fx.Graph) -> list[str]:
    """Return all parts of a graph that are read later. Operations are numbered in their order."""
    numbers: dict[Any, int] = {}

    def spec(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.shape} {value.stride()} {value.dtype} {value.device}"
        return str([spec(x) for x in value]) if isinstance(value, list | tuple) else repr(value)

    lines = []
    for node in graph.nodes:
        number = numbers.setdefault(node.meta.get("seq_nr"), len(numbers))
        constant = getattr(graph.owning_module, node.target).tolist() if node.op == "get_attr" else ""
        about = [node.meta.get(key) for key in ("partitioner_tag", "custom", "desc")]
        made = node.op, node.name, node.target, node.args, node.kwargs, spec(node.meta.get("val"))
        lines.append(f"{made} {number} {constant} {about}")
    return lines


def test_a_comparison_with_the_first_trace_needs_no_graph(
    traces: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, found, own = capture(Net(), batch()), [], cached_graphs._graph
    step.at(step.size)

    def graph(digest: str, *args: Any) -> torch.fx.Graph:
        found.append(digest)
        return own(digest, *args)

    monkeypatch.setattr(cached_graphs, "_graph", graph)
    step.retrace()
    assert not found
    assert not step._trace(TraceArguments(step.size, known=step._first[0][3]))[0].graph.nodes
    assert step._trace(TraceArguments(step.size, known="another digest"))[0].graph.nodes
    assert found


@pytest.mark.parametrize(
    ("module", "given"),
    [(Net(), batch()), pytest.param(Model(SPEC), make_batch(SPEC, 4), marks=pytest.mark.long)],
    ids=["net", "all blocks"],
)
def test_graph_from_a_file_is_the_graph_that_was_traced(module, given, traces, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TracedStep, "has_tracing_run", False)
        plain = trace(module, given)
    trace(module, given)
    assert len(traces) == 2
    cached_graphs.forget()  # as in a process that begins
    found = trace(module, given)
    assert len(traces) == 2
    assert described(found.graph) == described(plain.graph)
    assert (found.plain, found.logs) == (plain.plain, plain.logs)
    assert text_of(found).lines == text_of(plain).lines


def other_backward(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaled, "by", 3.0)


CHANGES: dict[str, Callable[[Net, pytest.MonkeyPatch], object]] = {
    "code": lambda net, _: setattr(net, "act", torch.tanh),
    "a number": lambda net, _: setattr(net, "scale", 2.5),
    "a constant": lambda net, _: setattr(net, "places", [1.0, 3.0]),
    "a mark": lambda net, _: setattr(net, "stage", 2),
    "what takes gradients": lambda net, _: net.second.weight.requires_grad_(False),
    "without gradients": lambda net, _: setattr(net, "still", True),
    "a backward pass": other_backward,
    "dropout": lambda net, _: setattr(net.drop, "p", 0.2),
    "a dtype": lambda net, _: net.double(),
    "a mode": lambda net, _: net.eval(),
    "versions": lambda _, monkeypatch: monkeypatch.setattr(cached_graphs, "VERSIONS", "others"),
}


@pytest.mark.parametrize("change", marked(CHANGES, [*CHANGES][::2]))
def test_a_step_that_does_something_else_is_traced(change, traces, monkeypatch):
    first = trace(Net(), batch())
    trace(Net(), batch())
    assert len(traces) == 1
    net = Net()
    CHANGES[change](net, monkeypatch)
    given = tuple(x.to(net.first.weight.dtype) for x in batch())
    other = trace(net, given)
    assert len(traces) == 2
    assert change == "versions" or described(other.graph) != described(first.graph)


def test_other_sizes_are_traced(traces):
    trace(Net(), batch())
    trace(Net(), batch(6))
    assert len(traces) == 2


class Formulas(L.LightningModule):
    """A step whose backward pass runs formulas of torch, and what `added` adds to it."""

    def __init__(self, added: Callable[[Tensor], Tensor] = lambda h: h) -> None:
        super().__init__()
        self.first, self.second, self.added = nn.Linear(3, 4), nn.Linear(4, 2), added

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.second(self.added(self.first(batch[0]).relu())).square().mean()


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an entry for each backward pass of a tracing run."""
    found: list[int] = []
    own = tracing_run._OperationLog.goes_back

    def counted(self: Any, results: Any) -> Tensor:
        found.append(1)
        return own(self, results)

    monkeypatch.setattr(tracing_run._OperationLog, "goes_back", counted)
    return found


def hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * 2.0)
    return h


def silently_hooked(h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: None)
    return h


def hooked_node(h: Tensor) -> Tensor:
    h.grad_fn.register_hook(lambda gradients, outer: tuple(x * 2.0 for x in gradients))
    return h


def flipped_behind(h: Tensor) -> Tensor:
    torch.autograd.graph.get_gradient_edge(h).node.register_prehook(lambda outer: (outer[0].flip(0),))
    return h


CODE_IN_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "a hook": hooked,
    "a hook of a node": hooked_node,
    "a hook without operations": silently_hooked,
    "an autograd.Function": Scaled.apply,
}


def test_the_forward_pass_shows_that_the_graph_is_known(traces, backwards):
    first = trace(Formulas(), batch())
    assert len(backwards) == 1
    again = trace(Formulas(), batch())
    assert len(backwards) == 1
    cached_graphs.forget()  # as in a process that begins
    from_file = trace(Formulas(), batch())
    assert len(backwards) == 1
    assert described(first.graph) == described(again.graph) == described(from_file.graph)


@pytest.mark.parametrize("added", CODE_IN_BACKWARD)
def test_code_in_the_backward_pass_runs_although_the_graph_is_known(added, traces, backwards):
    for _ in range(2):
        trace(Formulas(CODE_IN_BACKWARD[added]), batch())
    assert len(backwards) == 2


def test_a_setting_that_formulas_read_is_part_of_the_digest(traces, backwards, request):
    trace(Formulas(), batch())
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    trace(Formulas(), batch())
    assert len(backwards) == 2


@pytest.mark.parametrize("added", [hooked, hooked_node, flipped_behind])
def test_a_hook_changes_the_graph_of_a_known_forward_pass(added, traces, backwards):
    plain, hooks = trace(Formulas(), batch()), trace(Formulas(added), batch())
    assert described(plain.graph) != described(hooks.graph)


def test_a_known_graph_whose_file_is_lost_is_made_again(traces, backwards, monkeypatch):
    first = trace(Formulas(), batch())
    cached_graphs.forget()
    monkeypatch.setattr(cached_graphs, "_is_known", lambda digest: True)
    monkeypatch.setattr(cached_graphs.cache, "read", lambda path: None)
    assert described(trace(Formulas(), batch()).graph) == described(first.graph)


def test_what_is_logged_is_of_the_day(traces):
    """The graph is the same, the name in Python is another."""
    trace(Net(), batch())
    net = Net()
    net.log_as = "other"
    assert [log.name for log in trace(net, batch()).logs] == ["other"]
    assert len(traces) == 1


def test_guards_are_recorded_beside_a_known_graph(traces):
    capture(Net(), batch()).at(4)
    count, net = len(traces), Net()
    step = capture(net, batch())
    step.at(4)
    assert len(traces) == count
    assert step.reads.hold()
    net.scale = 2.0
    assert not step.reads.hold()


class Counting(Net):
    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)

        def count(gradient: Tensor) -> None:
            self.count = 1

        loss.register_hook(count)
        return loss


def test_what_a_backward_pass_changes_is_refused_again(traces):
    trace(Net(), batch())  # the same graph
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"changes self\.count"):
            trace(Counting(), batch())


def test_code_is_compiled_after_a_tracing_run(traces):
    """Dynamo would meet it there first, and remember what it was not to compile."""
    net = Net()
    net.act = torch.compile(lambda x: torch.cos(x), backend="eager", fullgraph=True)
    trace(net, batch())
    x = torch.ones(3)
    assert torch.equal(net.act(x), torch.cos(x))  # or it raises that it could not be compiled


class Reading(Net):
    """A module that reads state that no guard sees."""

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(socket.getdefaulttimeout() or 0)


@pytest.mark.parametrize("when", ["between", "before"])
def test_a_graph_of_another_time_is_not_kept(when, traces, monkeypatch, request):
    """What it reads changes between the tracing run and the trace; or before both."""
    request.addfinalizer(lambda: socket.setdefaulttimeout(None))
    socket.setdefaulttimeout(1.0 if when == "between" else 2.0)
    own = _torch.functional_graph

    def later(*args: Any) -> torch.fx.Graph:
        socket.setdefaulttimeout(2.0)
        return own(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_torch, "functional_graph", later)
        second = trace(Reading(), batch())
    again = trace(Reading(), batch())
    assert len(traces) == (2 if when == "between" else 1)
    socket.setdefaulttimeout(1.0)
    assert described(trace(Reading(), batch()).graph) != described(second.graph) == described(again.graph)


def damage_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damage_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_of_another_name(path: Path) -> None:
    other = path.with_name("other")
    cache.write(other, b"something else")
    other.replace(path)


def damage_other_content(path: Path) -> None:
    cache.write(path, b"something else")


def damage_writable(path: Path) -> None:
    path.chmod(0o666)


DAMAGES = [damage_truncated, damage_flipped, damage_of_another_name, damage_other_content, damage_writable]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_and_replaced(damage, traces, monkeypatch):
    first = trace(Net(), batch())
    (path,) = (x for x in cache.folder("graphs").iterdir() if x.name != "lock")
    damage(path)
    for count in (2, 2):  # then it is whole again
        cached_graphs.forget()  # as in a process that begins
        assert described(trace(Net(), batch()).graph) == described(first.graph)
        assert len(traces) == count


def test_a_folder_of_others_is_ignored(traces, monkeypatch):
    trace(Net(), batch())
    cache.folder("graphs").chmod(0o777)
    cached_graphs.forget()  # as in a process that begins
    trace(Net(), batch())
    assert len(traces) == 2
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)  # files are somebody else's
    cache.folder("graphs").chmod(0o700)
    cached_graphs.forget()  # as in a process that begins
    trace(Net(), batch())
    assert len(traces) == 3


def test_no_folder_is_no_error(traces, monkeypatch):
    monkeypatch.setenv(cache.CACHE, os.devnull)
    for count in (1, 2):
        cached_graphs.forget()  # as in a process that begins
        trace(Net(), batch())
        assert len(traces) == count


@pytest.mark.parametrize(
    "target",
    ["posix.system", "aten.from_file.default", "lightning_piper.rest.default", "aten.no_such.default"],
)
def test_only_operations_are_found(target):
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.relu.default, (graph.placeholder("x"),)))
    content = zlib.compress(
        zlib.decompress(serialize(graph, CPU)).replace(b"aten.relu.default", target.encode())
    )
    with pytest.raises(NotSerializable):
        deserialize(content, CPU)


WRITE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cache
path = Path(sys.argv[2])
for _ in range(200):
    cache.write(path, sys.argv[3].encode() * 20000)
    assert len(cache.read(path) or b"") == 20000
"""


def test_writers_at_once_leave_a_whole_file(tmp_path):
    path = tmp_path / "own" / "file"
    where = str(Path(cache.__file__).parent)  # without torch
    running = [subprocess.Popen([sys.executable, "-c", WRITE, where, str(path), letter]) for letter in "ab"]
    assert [process.wait(400) for process in running] == [0, 0]
    assert (cache.read(path) or b"")[:1] in (b"a", b"b")
    assert [x.name for x in path.parent.iterdir()] == ["file"]


WAIT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import cache
path = Path(sys.argv[2])
with cache.exclusive(path):
    assert not path.exists()
    print("in", flush=True)
    sys.stdin.read(1)
    cache.write(path, b"made")
"""


def test_others_wait_for_who_makes_a_file(tmp_path, monkeypatch):
    path = tmp_path / "own" / "file"
    command = [sys.executable, "-c", WAIT, str(Path(cache.__file__).parent), str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.read(2) == b"in"
        with cache.exclusive(tmp_path / "own" / "another"):  # of which nobody waits for anybody
            pass
        with monkeypatch.context() as patch:
            patch.setattr(cache, "PATIENCE", 0.05)
            with cache.exclusive(path):  # in vain
                assert cache.read(path) is None
        other.stdin.write(b"x")
        other.stdin.flush()
        with cache.exclusive(path):
            assert cache.read(path) == b"made"


@pytest.mark.parametrize("beside", ["nothing", "a folder", "files of a day to come"])
def test_folder_does_not_grow_without_end(beside, tmp_path, monkeypatch):
    """Nor does what else is in it hinder that, or push out what is new."""
    monkeypatch.setattr(cache, "MANY", 3)
    own, later = tmp_path / "own", time.time() + 10 * cache.DAY
    if beside == "a folder":
        (own / "older").mkdir(0o700, parents=True)
        os.utime(own / "older", (0, 0))
    for i in range(5):
        at = later if beside == "files of a day to come" and i < 3 else i
        cache.write(own / str(i), b"x")
        os.utime(own / str(i), (at, at))
    cache.write(own / "5", b"x")
    left = {
        "nothing": ["3", "4", "5"],
        "a folder": ["3", "4", "5", "older"],
        "files of a day to come": ["3", "4", "5"],
    }
    assert sorted(x.name for x in own.iterdir()) == left[beside]


def test_large_files_are_not_kept(tmp_path, monkeypatch):
    path = tmp_path / "own" / "file"
    cache.write(path, b"x" * 1000)
    assert cache.read(path) == b"x" * 1000  # the control
    monkeypatch.setattr(cache, "LARGE", 500)
    assert cache.read(path) is None
    cache.write(path, b"y" * 499)  # with its checksum it is larger
    monkeypatch.undo()
    assert cache.read(path) == b"x" * 1000


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_what_is_no_lock_is_not_waited_for(kind, tmp_path):
    (own := tmp_path / "own").mkdir(0o700)
    match kind:
        case "pipe":
            os.mkfifo(own / "lock")
        case "link":
            (own / "lock").symlink_to(own / "nowhere")
        case "folder":
            (own / "lock").mkdir()
    with cache.exclusive(own / "file"):
        cache.write(own / "file", b"made")
    assert cache.read(own / "file") == b"made"
    assert not (own / "nowhere").exists()


def test_versions_are_those_that_were_imported(traces, monkeypatch):
    """The package is replaced while it runs: what the old one traces is not the new one's."""
    monkeypatch.setattr(Path, "read_bytes", lambda path: b"another version")
    assert cached_graphs._versions() != cached_graphs.VERSIONS  # the control
    trace(Net(), batch())
    monkeypatch.setattr(cached_graphs, "VERSIONS", cached_graphs._versions())
    cached_graphs.forget()
    trace(Net(), batch())
    assert len(traces) == 2
