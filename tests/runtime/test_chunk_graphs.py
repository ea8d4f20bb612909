"""Passes as graphs, on the simulated accelerator: the bits are the same as without graphs, and faults of graphs show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch

import lightning_piper as piper
from benchmarks.accelerator import PROGRAMS
from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.capture import capture
from lightning_piper.compiler import compile_step
from lightning_piper.errors import ExecutionError, PiperError
from lightning_piper.ops.communication import gather
from lightning_piper.plan.graphs import kept_out
from lightning_piper.runtime import Executor, LocalTransport, chunk_graphs
from lightning_piper.runtime.chunk_graphs import ChunkGraphs, copy_of
from lightning_piper.runtime.chunks import ChunkBinder
from lightning_piper.testing.simulated import Batch, Over, Values, first_difference
from tests.strategy.fitting import Batches, same, trainer, values
from tests.strategy.models import make

CPU = torch.device("cpu")
ORDERS = range(3)
ON_HOST, AGAIN, PER_USE = (
    "have values in host memory",
    "recompute values, or read recomputed values",
    "read parameters that are gathered for each use",
)
# Name of a program -> reasons for passes that run without graphs.
REASONS: dict[str, set[str]] = {
    "1F1B, 2 stages": set(),
    "zero bubble": set(),
    "ZeRO-1": set(),
    "ZeRO-3": {PER_USE},
    "second passes": {AGAIN},
    "stored on the host": {ON_HOST},
    "dropout": {"draw random numbers"},
    "batch norm": set(),
    "accumulated over sizes": set(),
    "metric objects": set(),
}


def steps_of(name: str) -> tuple[list[Batch], Values]:
    """Return a program's batches, twice: the first steps of an executor run without graphs."""
    batches, held = PROGRAMS[name](CPU)
    return [*batches, *batches], held


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ChunkGraphs]:
    """The graphs of all executors that the test makes."""
    found: list[ChunkGraphs] = []

    class Noted(ChunkGraphs):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found.append(self)

    monkeypatch.setattr("lightning_piper.runtime.executor.ChunkGraphs", Noted)
    return found


@pytest.mark.parametrize("over", ["devices", "one device"])
@pytest.mark.parametrize("name", REASONS)
def test_graphs_give_the_same_bits(name: str, over: Over, made: list[ChunkGraphs]) -> None:
    batches, held = steps_of(name)
    assert first_difference(batches, held, ORDERS, over, cuda_graphs=True) is None
    assert (sum(graphs.captured for graphs in made) > 0) == (name != "stored on the host")
    assert {reason for graphs in made for reason in graphs.refused} == REASONS[name]
    assert all(graph.is_captured for graphs in made for graph in graphs._graphs)


def on_one_device() -> tuple[list[Batch], Values]:
    batches, held = steps_of("1F1B, 2 stages")
    alone = compile_step(batches[0].dag.step, ())
    return [Batch(alone.dag, alone.plans, batch.leaves) for batch in batches], held


def test_one_device_without_directives_captures_everything(made: list[ChunkGraphs]) -> None:
    assert first_difference(*on_one_device(), ORDERS, cuda_graphs=True) is None
    assert all(graphs.captured and not graphs.refused for graphs in made)


def test_gradients_that_stay_in_the_memory_of_graphs_are_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the comparison: without the copies, the results of one step change in the next step."""
    given = ChunkBinder.given
    monkeypatch.setattr(
        ChunkBinder, "given", lambda self: given(self) - (self._graphs.memory if self._graphs else set())
    )
    found = first_difference(*on_one_device(), ORDERS, cuda_graphs=True)
    assert found is not None and "of step" in found


def test_inputs_that_are_not_copied_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, held = steps_of("1F1B, 2 stages")
    monkeypatch.setattr(
        chunk_graphs, "_core", copy_of
    )  # copies go into a tensor that the graph does not read
    assert first_difference(batches, held, range(1), cuda_graphs=True) is not None


def test_a_bucket_that_is_replaced_instead_of_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, held = steps_of("ZeRO-1")
    join = gather._AllGather.join
    monkeypatch.setattr(gather._AllGather, "join", lambda *args: tuple(x.clone() for x in join(*args)))
    assert first_difference(batches, held, range(1)) is None
    found = first_difference(batches, held, range(1), cuda_graphs=True)
    assert found is not None and "the tensors were replaced instead of written" in found


def test_the_plan_says_which_passes_are_no_graphs() -> None:
    def reasons(name: str) -> Counter[str]:
        batches, _ = PROGRAMS[name](CPU)
        return Counter(reason for plan in batches[0].plans.values() for reason in kept_out(plan).values())

    assert not reasons("ZeRO-1") and not reasons("1F1B, 4 stages")
    assert set(reasons("second passes")) == {AGAIN}
    assert set(reasons("stored on the host")) == {ON_HOST}
    assert set(reasons("ZeRO-3")) == {PER_USE}
    assert set(reasons("experts")) == {"work on a number of rows that is known only in the step"}


class Indexes(L.LightningModule):
    """Numbers as indices are captured. A mask as an index makes the host wait."""

    def __init__(self, mask: bool) -> None:
        super().__init__()
        self.mask, self.weight = mask, torch.nn.Parameter(torch.ones(4))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with piper.annotate("PP"):
            some = batch.masked_fill(batch < 0, 1.0) if self.mask else batch[:, torch.tensor([1, 0])]
        with piper.annotate("PP"):
            made = torch.zeros_like(batch).index_put((batch > 0,), some.sum()) if self.mask else some
            return (made.sum(1, keepdim=True) * self.weight).mean()


@pytest.mark.parametrize("mask", [False, True])
def test_only_masks_among_indices_make_the_host_wait(mask: bool, made: list[ChunkGraphs]) -> None:
    module, batch = Indexes(mask), torch.arange(-3.0, 5.0).view(4, 2)
    compiled = compile_step(capture(module, batch), ())
    held = {name: x.detach() for name, x in module.named_parameters()}
    batches = [Batch(compiled.dag, compiled.plans, [batch + i]) for i in range(3)]
    assert first_difference(batches, held, range(1), cuda_graphs=True) is None
    reasons = {"read values of the device on the host"} if mask else set()
    assert {reason for graphs in made for reason in graphs.refused} == reasons


# The capture itself


def test_a_replay_uses_the_memory_of_the_capture() -> None:
    with Simulated(0) as device:
        x = torch.ones(4)
        graph, y = device.capture(lambda: (x * 2 + 1).sum(0, keepdim=True), CPU, device.new_graph_pool())
        assert y.isnan().all(), "a capture runs nothing"
        for factor in (1.0, 3.0):
            x.fill_(factor)
            graph.replay()
            assert y.item() == 4 * (2 * factor + 1)
        device.synchronize()


@pytest.mark.parametrize(
    "work, message",
    [
        (lambda x: x.sum().item(), "the host waits for the device while it records a CUDA graph"),
        (lambda x: x.tolist(), "the host waits for the device while it records a CUDA graph"),
        (lambda x: x[x > 0], "the host waits for the device while it records a CUDA graph"),
        (lambda x: torch.rand(3), "draws random numbers during a capture"),
    ],
)
def test_a_capture_refuses_what_a_graph_cannot_repeat(work: Callable[[Any], Any], message: str) -> None:
    with Simulated(0) as device:
        x = torch.ones(4)
        with pytest.raises(ExecutionError, match=message):
            device.capture(lambda: work(x), CPU, None)
        assert float(work(x).sum()) >= 0 if isinstance(work(x), torch.Tensor) else True


def test_a_replay_waits_like_other_work() -> None:
    """And a reader on another stream that does not wait for the replay is a fault."""
    for waits in (True, False):
        faults = []
        for order in range(34):
            try:
                with Simulated(order) as device:
                    x = torch.ones(4)
                    graph, y = device.capture(lambda x=x: x * 2, CPU, None)  # type: ignore[misc]
                    other = device.stream(CPU, "other")
                    other.wait_stream(device.current_stream())
                    graph.replay()
                    if waits:
                        other.wait_stream(device.current_stream())
                    device.set_stream(other)
                    z = y + 1
                    device.synchronize()
                    faults.append(z.tolist() != [3.0] * 4)
            except ExecutionError as error:
                assert "an event is missing" in str(error)
                faults.append(True)
        assert any(faults) is not waits


# The strategy


def fitted(
    cuda_graphs: bool, samples: int = 44, program: Sequence[Any] = (), **options: Any
) -> dict[str, Any]:
    """Return the values after a fit on the simulated accelerator, in batches of 8 and a smaller last one."""
    module, loader = make("mlp", samples=samples)
    strategy = piper.PiperStrategy(list(program), transport="simulated", cuda_graphs=cuda_graphs)
    run, record = trainer(strategy, **{"max_steps": -1, "max_epochs": 2, **options})
    run.fit(module, Batches(list(loader)))
    return {**values(module), "losses": torch.stack(record.losses)}


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_fit_with_graphs_gives_the_same_bits(accumulated: int, made: list[ChunkGraphs]) -> None:
    program = [piper.Place([0, 1]), piper.Split(2), piper.Replicate(zero=1)]
    options = {"program": program, "accumulate_grad_batches": accumulated}
    plain = fitted(False, **options)
    assert not made
    assert same(plain, fitted(True, **options))
    assert sum(graphs.captured for graphs in made) > 0
    assert all(graph.is_captured for graphs in made for graph in graphs._graphs)


def test_graphs_need_a_device_that_captures() -> None:
    module, loader = make("mlp", samples=8)
    run, _ = trainer(piper.PiperStrategy([], transport="local", cuda_graphs=True))
    with pytest.raises(
        PiperError, match=r"cuda_graphs=True: torch does not capture graphs on cpu. Use a CUDA device"
    ):
        run.fit(module, Batches(list(loader)))
    with pytest.raises(PiperError, match=r"PiperStrategy\(cuda_graphs=1\) is not usable. Give True or False"):
        piper.PiperStrategy(cuda_graphs=1)  # type: ignore[arg-type]
    batches, held = PROGRAMS["1F1B, 2 stages"](CPU)
    with pytest.raises(ExecutionError, match="torch does not capture graphs on cpu"):
        transport = LocalTransport(batches[0].plans)
        Executor(batches[0].plans[0], batches[0].dag.step, held, held, transport, CPU, cuda_graphs=True)
