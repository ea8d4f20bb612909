"""Passes as graphs of an accelerator (CUDA graphs): captured once after the first step, then replayed.

A replay issues all kernels of a pass at once, so the host takes little time for it. It reads and writes the same
memory each time. Inputs that always lie in the same memory are read there: parameters, buffers, gathered buckets that
are kept, and outputs of other graphs. All other inputs are copied into the graph's own memory first. Outputs stay in
the graph's memory until the next replay, so gradients and results that leave the step are copied (`StepOutputs`).

The plan and the code of a pass decide whether it becomes a graph, when the executor is made. All other passes run as
without graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from lightning_piper.accelerators import Graph, capturing
from lightning_piper.common.units import counted
from lightning_piper.errors import ExecutionError
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.regions import Code
from lightning_piper.plan.graphs import at_fixed_addresses, kept_out
from lightning_piper.plan.instructions import Run
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.step_outputs import memory_of
from lightning_piper.runtime.transport import Bound, Bundle, Slots

Part = tuple[int, int | None]  # (slot, index of one tensor in its bundle, or None for the whole bundle)
Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
aten = torch.ops.aten
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Operations for which the host waits only if an index is a mask, because it must know how many elements the mask has.
_INDEXING = {
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten._unsafe_index_put.default,
}


class ChunkGraphs:
    """The graphs of one executor.

    Args:
        plan: The executor's plan.
        device: The torch device.
        hands_over: Whether other devices of this process may get a tensor itself instead of a copy.

    Attributes:
        memory: Addresses of the storages that belong to graphs.
        refused: reason -> number of passes that run without a graph for this reason.

    Raises:
        ExecutionError: The device cannot capture graphs.
    """

    def __init__(self, plan: Plan, device: torch.device, hands_over: bool) -> None:
        self.device, self._plan, self._api = device, plan, capturing(device)
        self._kept_out = kept_out(plan)
        # Slots whose bundle lies in the same memory in every step, and those among them that a graph writes.
        self._fixed, self.written = set(at_fixed_addresses(plan)), set[int]()
        # Another device of this process may keep a tensor that it gets longer than the step.
        others = [x for x in plan.instructions if not isinstance(x, Run)]
        self._copied = {read.slot for x in others for read in x.reads} if hands_over else set[int]()
        self._graphs: list[_ChunkGraph] = []
        self._pools: dict[str, object] = {}  # stream -> the pool of the memory of its graphs
        self.static: dict[int, Bundle] = {}  # fixed slot -> its bundle
        self.memory: set[int] = set()
        self.refused: Counter[str] = Counter()

    def bind(
        self,
        run: Run,
        code: Code,
        random: bool,
        function: Function,
        slots: Slots,
        parts: Sequence[Part],
        writes: Sequence[tuple[int, int, int]],
    ) -> Bound | None:
        """Return the function that runs a pass as a graph after the first step; None if it must run without one.

        Args:
            run: The pass.
            code: Its code.
            random: Whether the code draws random numbers.
            function: Runs the code.
            slots: The slots of the executor.
            parts: Where each argument is.
            writes: For each slot to write, the range of the results that it receives.
        """
        reason = self._kept_out.get(run.node) or self._why_not(code, random)
        if reason is not None:
            self.refused[reason] += bool(code.graph.nodes)
            return None
        # Slots after the plan's slots that have content belong to parameters and buffers.
        constant = {slot for slot, _ in parts if slot >= self._plan.slots and slots[slot] is not None}
        graph = _ChunkGraph(self, run, function, slots, parts, self._fixed | constant, writes, self._copied)
        self._graphs.append(graph)
        self.written |= {slot for slot, *_ in writes} - self._copied
        self._fixed |= self.written
        return graph.run

    def _why_not(self, code: Code, random: bool) -> str | None:
        """Return why code cannot be captured; None if it can."""
        if random:
            return "draw random numbers"
        if not len(code.graph.nodes) or any(RUNS_KEY in node.meta for node in code.graph.nodes):
            return "run uncaptured code of the step"
        for node in code.graph.nodes:
            if _waits(node):
                return "read values of the device on the host"
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device.type != self.device.type:
                return "compute with numbers in host memory"
        return None

    @property
    def captured(self) -> int:
        """Number of passes that run as graphs after the first step."""
        return len(self._graphs)

    def capture(self) -> None:
        """Capture the passes in the order of the plan, after the first step has run all of them. Later calls do
        nothing.

        Raises:
            ExecutionError: A pass cannot be captured.
        """
        waiting = [graph for graph in self._graphs if not graph.is_captured]
        for graph in waiting:
            graph.capture()

    def record(
        self, run: Run, work: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Graph, Sequence[torch.Tensor]]:
        """Capture the work of a pass. Graphs of one stream share memory for values that no other pass reads, because
        they never run at the same time."""
        if run.stream not in self._pools:
            self._pools[run.stream] = self._api.new_graph_pool()
        try:
            return self._api.capture(work, self.device, self._pools[run.stream])
        except Exception as error:
            raise ExecutionError(
                f"device {self._plan.device}: {run.where} cannot be captured as a graph: {error}. Use "
                "cuda_graphs=False [PIPER-X001]"
            ) from error

    @property
    def report(self) -> str | None:
        """Return a text about the passes that run without graphs; None if all run as graphs."""
        if not self.refused.total():
            return None
        ((reason, number),) = self.refused.most_common(1)
        others = self.refused.total() - number
        more = f", and {others} for other reasons" if others else ""
        total = self.refused.total() + self.captured
        return (
            f"cuda_graphs: {number} of {counted(total, 'pass')} run without graphs, because they {reason}{more}. The "
            "results are the same [PIPER-W032]"
        )


class _ChunkGraph:
    """One pass. It runs its code in the first step, and replays its graph in later steps.

    Attributes:
        is_captured: Whether the pass runs as a graph.
    """

    def __init__(
        self,
        graphs: ChunkGraphs,
        run: Run,
        function: Function,
        slots: Slots,
        parts: Sequence[Part],
        fixed: set[int],
        writes: Sequence[tuple[int, int, int]],
        copied: set[int],
    ) -> None:
        self._graphs, self._run, self._function, self._slots = graphs, run, function, slots
        self._parts, self._writes, self._copied = parts, writes, copied
        self._fixed = [slot in fixed for slot, _ in parts]
        self._dropped = [read.slot for read in run.reads if read.last]
        self._inputs: list[Bundle] = []  # for each part, the memory from which the graph reads it
        self._now: Callable[[], None] = self._first
        self.is_captured = False

    def run(self) -> None:
        self._now()

    def _bundle(self, slot: int, index: int | None) -> Bundle:
        found = self._slots[slot]
        return found if index is None else (found[index],)

    def _first(self) -> None:
        """Run the code, and note where its inputs lie. Inputs that lie elsewhere in each step get memory."""
        slots, self._inputs = self._slots, []
        args: list[torch.Tensor] = []
        for fixed, (slot, index) in zip(self._fixed, self._parts, strict=True):
            args += (bundle := self._bundle(slot, index))
            self._inputs.append(() if fixed else tuple(map(copy_of, bundle)))
            if fixed and slot not in self._graphs.written:
                self._graphs.static[slot] = slots[slot]
        for slot in self._dropped:
            slots[slot] = None
        made = self._function(args)
        for slot, start, stop in self._writes:
            slots[slot] = made[start:stop]

    def capture(self) -> None:
        """Capture the code. Later calls of `run` replay it."""
        static = self._graphs.static
        for i, (fixed, (slot, index)) in enumerate(zip(self._fixed, self._parts, strict=True)):
            if fixed:
                self._inputs[i] = static[slot] if index is None else (static[slot][index],)
        args = [x for bundle in self._inputs for x in bundle]
        graph, made = self._graphs.record(self._run, lambda: self._function(list(args)))
        static |= {slot: tuple(made[start:stop]) for slot, start, stop in self._writes}
        own = [
            x for fixed, bundle in zip(self._fixed, self._inputs, strict=True) if not fixed for x in bundle
        ]
        self._graphs.memory |= {memory_of(x) for x in (*own, *made)}
        self._now, self.is_captured = self._replaying(graph), True

    def _replaying(self, graph: Graph) -> Callable[[], None]:
        """Return the function that replays the graph."""
        slots, dropped, static = self._slots, self._dropped, self._graphs.static
        where = [
            (slot, index, bundle)
            for fixed, (slot, index), bundle in zip(self._fixed, self._parts, self._inputs, strict=True)
            if not fixed
        ]
        there = {
            slot: static[slot] for fixed, (slot, _) in zip(self._fixed, self._parts, strict=True) if fixed
        }
        made = [(slot, static[slot], slot in self._copied) for slot, *_ in self._writes]

        def replay() -> None:
            for slot, expected in there.items():
                if slots[slot] is not expected:
                    self._check_place(slot, expected)
            for slot, index, bundle in where:
                for x, y in zip(bundle, self._bundle(slot, index), strict=True):
                    _core(x).copy_(_core(y))
            for slot in dropped:
                slots[slot] = None
            graph.replay()
            for slot, bundle, copied in made:
                slots[slot] = tuple(map(copy_of, bundle)) if copied else bundle

        return replay

    def _check_place(self, slot: int, expected: Bundle) -> None:
        """Raise an error if an input of the graph lies elsewhere than in the first step."""
        if [x.data_ptr() for x in self._slots[slot]] != [x.data_ptr() for x in expected]:
            raise ExecutionError(
                f"{self._run.where} is a graph, which reads slot s{slot} from the same memory in each step, but the "
                "tensors were replaced instead of written. Write into the tensors, or use cuda_graphs=False "
                "[PIPER-X001]"
            )


def _waits(node: Node) -> bool:
    """Return whether the host waits for the device in an operation, or may wait."""
    if node.target in _INDEXING:
        indices = [index.meta.get("val") for index in node.args[1] if isinstance(index, Node)]  # type: ignore[union-attr]
        return any(not isinstance(x, torch.Tensor) or x.dtype in (torch.bool, torch.uint8) for x in indices)
    return bool(_WAITS & set(getattr(node.target, "tags", ())))


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor with the same strides, because strides choose kernels."""
    core = _core(x)
    made = torch.empty_strided(core.shape, core.stride(), dtype=x.dtype, device=x.device).copy_(core)
    return made if core.shape == x.shape else made.expand(x.shape)


def _core(x: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor in which expanded dimensions have one element."""
    if 0 not in x.stride():
        return x
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]
