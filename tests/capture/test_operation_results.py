"""Results of operations that are known from the specs of their arguments are the results of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_piper import cache
from lightning_piper.capture.graph_cache import cached_graphs, operation_results
from lightning_piper.capture.graph_cache.operation_results import OperationResults
from lightning_piper.capture.torch_private import _torch, _torch_calls
from tests.capture.test_cached_graphs import Net, batch, described, trace

aten = torch.ops.aten


class Counted:
    """An operation that counts how often it runs."""

    def __init__(self, operation: Any) -> None:
        self.operation, self.runs = operation, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.operation(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.operation, name)

    def __str__(self) -> str:
        return str(self.operation)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OperationResults]:
    """Yield an object without results, while operations run on tensors without data. The cache is empty."""
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    follows = _torch_calls.follows_from_specs
    monkeypatch.setattr(
        _torch_calls, "follows_from_specs", lambda x: follows(x.operation if isinstance(x, Counted) else x)
    )
    found = OperationResults("1")
    found.read()
    with _torch.FakeTensorMode():
        yield found


def tensors() -> list[Tensor]:
    return [torch.empty(4, 6), torch.empty(4, 6)]


# operation, and a function from two tensors of 4 x 6 to its arguments
CASES: dict[str, tuple[Any, Callable[[Tensor, Tensor], tuple[Any, ...]]]] = {
    "new tensor": (aten.add.Tensor, lambda x, y: (x, y)),
    "number": (aten.mul.Scalar, lambda x, y: (x, 2.5)),
    "matrices": (aten.mm.default, lambda x, y: (x, y.t())),
    "several results": (aten.native_layer_norm.default, lambda x, y: (x, [6], None, None, 1e-5)),
    "list of tensors": (aten.cat.default, lambda x, y: ([x, y], 1)),
    "random": (aten.native_dropout.default, lambda x, y: (x, 0.1, True)),
    "view": (aten.view.default, lambda x, y: (x, [-1, 12])),
    "view of a part": (aten.slice.Tensor, lambda x, y: (x, 1, 2, 5)),
    "view of a view": (aten.select.int, lambda x, y: (x[1:], 0, 1)),
    "several views": (aten.split.Tensor, lambda x, y: (x, 3, 1)),
    "expanded": (aten.expand.default, lambda x, y: (x[:, :1], [len(x), 8])),
    "another dtype": (aten.gt.Scalar, lambda x, y: (x, 0)),
}


def about(made: Any, args: Any) -> Any:
    """Return all that is known of a result: its specs, and the arguments and results that share memory."""
    given = [x for x in _torch.tree_leaves(args) if isinstance(x, Tensor)]
    return type(made), [type(x) for x in _torch.tree_leaves(made)], _torch_calls.specs_of(
        [*given, *_torch.tree_leaves(made)]
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_known_result_is_the_result_of_torch(case: str, results: OperationResults) -> None:
    function, arguments = CASES[case]
    operation = Counted(function)
    for runs in (1, 1):
        args = arguments(*tensors())
        assert about(results.run(operation, args, {}), args) == about(function(*args), args)
        assert operation.runs == runs
    larger = arguments(torch.empty(8, 6), torch.empty(8, 6))
    assert about(results.run(operation, larger, {}), larger) == about(function(*larger), larger)
    assert operation.runs == 2


def test_a_later_process_reads_the_results(results: OperationResults) -> None:
    operation = Counted(aten.mm.default)
    results.run(operation, (torch.empty(2, 3), torch.empty(3, 4)), {})
    results.write()
    for versions, runs in (("1", 1), ("2", 2)):  # other versions of the code do not read them
        later = OperationResults(versions)
        later.read()
        assert later.run(operation, (torch.empty(2, 3), torch.empty(3, 4)), {}).shape == (2, 4)
        assert operation.runs == runs


def test_a_damaged_file_counts_as_absent(results: OperationResults) -> None:
    operation = Counted(aten.mm.default)
    results.run(operation, (torch.empty(2, 3), torch.empty(3, 4)), {})
    results.write()
    (file,) = (x for x in cache.folder("results").iterdir() if x.name != "lock")
    file.write_bytes(file.read_bytes().replace(b"[2,4]", b"[2,5]"))
    later = OperationResults("1")
    later.read()
    assert later.run(operation, (torch.empty(2, 3), torch.empty(3, 4)), {}).shape == (2, 4)
    assert operation.runs == 2


def run_twice(results: OperationResults, function: Any, first: Any, second: Any) -> int:
    """Return how often the operation runs for these two lists of arguments."""
    operation = Counted(function)
    results.run(operation, first(), {})
    results.run(operation, second(), {})
    return operation.runs


def test_each_difference_of_the_arguments_counts(
    results: OperationResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pair() -> Any:
        return torch.empty(4, 4), torch.empty(4, 4)

    def one() -> Any:
        x = torch.empty(4, 4)
        return x, x

    assert run_twice(results, aten.add.Tensor, pair, pair) == 1
    for other in (
        one,
        lambda: (torch.empty(4, 4), torch.empty(4, 4).t()),
        lambda: (torch.empty(4, 4), torch.empty(4, 4, dtype=torch.float64)),
        lambda: (torch.empty(4, 4), torch.empty(8, 4)[4:]),
        lambda: (torch.empty(4, 4), torch.empty(4, 4, requires_grad=True)),
        lambda: (torch.empty(4, 4), torch.empty(4, 1)),
        lambda: (torch.empty(4, 4), 1),
        lambda: (torch.empty(4, 4), 1.0),
        lambda: (torch.empty(4, 4), True),
    ):
        assert run_twice(results, aten.add.Tensor, pair, other) == 1  # `pair` is known


def test_the_default_dtype_counts(results: OperationResults) -> None:
    counts = torch.empty(4, dtype=torch.int64)
    assert results.run(aten.div.Tensor, (counts, counts), {}).dtype is torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert results.run(aten.div.Tensor, (counts, counts), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (aten.add_.Tensor, lambda: (torch.empty(4), torch.empty(4))),
        (aten.unsqueeze_.default, lambda: (torch.empty(4), 0)),
        (aten.mul.Tensor, lambda: (torch.tensor(2.0), torch.tensor(3.0))),  # tensors whose values are known
        (aten.reshape.default, lambda: (torch.empty(4), [2, 2])),  # made of other operations
        (aten.ones.default, lambda: ([4],)),  # without a tensor
        (
            aten.convolution.default,
            lambda: (torch.empty(1, 2, 4), torch.empty(2, 2, 1), None, [1], [0], [1], False, [0], 1),
        ),
    ],
    ids=["changes", "changes the layout", "values", "composite", "no tensor", "convolution"],
)
def test_other_operations_run_each_time(function: Any, args: Any, results: OperationResults) -> None:
    assert run_twice(results, function, args, args) == 2


def test_known_values_stay_known(results: OperationResults) -> None:
    args = torch.tensor(2.0), torch.tensor(3.0)
    assert [results.run(aten.mul.Tensor, args, {}).item() for _ in range(2)] == [6.0, 6.0]
    results.run(aten.mul.Tensor, (torch.empty(()), torch.empty(())), {})
    assert results.run(aten.mul.Tensor, args, {}).item() == 6.0


def test_a_new_kernel_forgets_the_results(results: OperationResults, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Counted(aten.mm.default)
    for kernels, runs in (("a", 1), ("a", 1), ("b", 2)):
        monkeypatch.setattr(_torch_calls, "registered_kernels", kernels.__str__)
        results.read()
        results.run(operation, (torch.empty(2, 3), torch.empty(3, 4)), {})
        assert operation.runs == runs


def test_a_process_keeps_a_limited_number(results: OperationResults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation_results, "MANY", 3)
    operation = Counted(aten.mm.default)
    for size in (1, 2, 3, 3, 4, 1):
        results.run(operation, (torch.empty(size, 3), torch.empty(3, 4)), {})
    assert operation.runs == 5
    assert len(results._known) <= 3


class Seen(TorchDispatchMode):
    """A mode of the user that notes each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_has_the_same_graph_with_known_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    described_by_torch = Counted(operation_results._described)
    monkeypatch.setattr(operation_results, "_described", described_by_torch)
    found = []
    for _ in range(2):
        cached_graphs.forget()
        monkeypatch.setattr(cached_graphs, "_results", OperationResults("1"))  # as in a process that begins
        found.append(described(trace(Net(), batch()).graph))
        found.append(str(described_by_torch.runs))
    assert found[:2] == found[2:]
    trace(Net(), batch(6))
    assert described_by_torch.runs > int(found[1])


def test_a_mode_of_the_user_sees_each_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    seen = []
    for _ in range(2):
        with Seen() as mode:
            trace(Net(), batch())
        seen.append([name for name in mode.names if "addmm" in name])
    assert seen[0] and seen[0] == seen[1]
