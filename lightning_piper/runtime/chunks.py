"""Binds the code of a chunk to parameters, buffers and slots once, so that a step does no lookups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from lightning_piper.accelerators import generators_of, seeded
from lightning_piper.errors import ExecutionError
from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import Code, Step, StepCode
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.terms import Denominator
from lightning_piper.ir.values import Kind, Slice, TensorSpec
from lightning_piper.ops.arguments import Way, shares
from lightning_piper.plan.instructions import Run
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.chunk_graphs import ChunkGraphs, Function, Part
from lightning_piper.runtime.inplace_grads import GradDestination, InplaceCode, destinations_of, inplace_code
from lightning_piper.runtime.step_outputs import memory_of
from lightning_piper.runtime.transport import Bound, Slots

Compiler = Callable[[Code], Function]  # Returns the function that runs in place of `Code.run`.

_GRADIENTS = (Kind.GRAD, Kind.COTANGENT)


class ChunkBinder:
    """A binder of the chunks of one plan.

    Chunks also read tensors that are not values of the plan. The binder appends a slot for each of these to
    the plan's slots. It fills the slots of parameters and buffers once, and the slots of batch slices and
    loss gradients in each step.

    Attributes:
        seed: The seed of the current step.
        scale: The factor on the gradient of the current step's loss.
        loss_dtype: The dtype of the loss.
        makes_loss: Whether the step has a loss.
        inplace: Node of a pack or sum -> indices, in its bucket or bundle, of the tensors that chunks write
            there directly. The instruction of the node skips these tensors.
    """

    def __init__(
        self,
        plan: Plan,
        step: Step,
        params: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        slots: Slots,
        device: torch.device,
        flat_of: Callable[[Bucket], torch.Tensor],
        compiler: Compiler | None = None,
        watch: Compiler | None = None,
        graphs: ChunkGraphs | None = None,
    ) -> None:
        self._plan, self._step, self._slots, self._device = plan, step, slots, device
        self._compiler, self._watch, self._flat_of = compiler, watch, flat_of
        self._params, self._buffers = params, buffers
        self._whole = step.at(plan.size)
        self._graphs = graphs
        # A graph writes its outputs into its own memory.
        self._destinations = {} if graphs else destinations_of(plan, sums=compiler is not None)
        # slot of a destination -> the code that writes there; None if no code can
        self._inplace_codes: dict[int, InplaceCode | None] = {}
        self.inplace: dict[int, frozenset[int]] = {}
        # (leaf, samples, or None for all samples) -> slot
        self._leaves: dict[tuple[int, Slice | None], int] = {}
        self._gradients: dict[float, int] = {}  # weight -> slot of the loss gradient
        self._batch: list[torch.Tensor] = []  # the tensors of the current step's batch
        self._scale: float | None = None
        self.loss_dtype, self.makes_loss = self._whole.loss_dtype, self._whole.makes_loss
        self.scale = 1.0
        self.seed = 0

    def bind(self, run: Run) -> Bound:
        """Return a function that runs a chunk's code: it reads the arguments from their slots, empties slots
        at their last read, and writes the outputs."""
        code = self._code_of(run)
        parts = self._arguments(run)
        function: Function | None = None
        writes, start = [], 0
        for slot, specs in zip(run.writes, code.outputs, strict=True):
            if slot is not None:
                writes.append((slot, start, start + len(specs)))
                if function is None and slot in self._destinations:
                    function = self._bind_inplace(run, self._destinations[slot], code, start, specs)
            start += len(specs)
        if function is None:
            function = self._compiled(code, run)
        dropped = [read.slot for read in run.reads if read.last]
        random, call = bool(self._whole.interface_of(run.key).random), None
        if self._graphs is not None:
            call = self._graphs.bind(run, code, random, function, self._slots, parts, writes)
        call = call or _bind_code(function, self._slots, parts, dropped, writes)
        call = self._seeded(call, run) if random else call
        return self._nan_checked(call, run) if run.key[1].startswith("B") else call

    def _code_of(self, run: Run) -> Code:
        step = self._step.member if run.member else self._step
        return step.at(run.samples, run.degrees).code_of(run.key)

    def _compiled(self, code: Code, run: Run) -> Function:
        if self._watch is not None:
            return self._watch(code)
        # Compiled code is for one number of rows. In a region whose experts are
        # divided over devices (`degrees`), the number of rows varies, so the code runs uncompiled.
        return code.run if self._compiler is None or run.degrees else self._compiler(code)

    def _bind_inplace(
        self, run: Run, destination: GradDestination, code: Code, first: int, own: Sequence[TensorSpec]
    ) -> Function | None:
        """Return a function like the chunk's code that writes gradients directly to their final memory. None
        if it cannot write any gradient there, or if the chunks of the sum have different code.

        Args:
            run: The chunk.
            destination: The final memory.
            code: The chunk's code.
            first: The index of the bundle's first tensor among the outputs of the code.
            own: The specs of the bundle.
        """
        if destination.into not in self._inplace_codes:
            alike = all(self._code_of(each) is code for each in destination.runs)
            self._inplace_codes[destination.into] = (
                inplace_code(code, destination, first, own, self._compiler is not None) if alike else None
            )
        found = self._inplace_codes[destination.into]
        if found is None:
            return None
        self.inplace[destination.node] = frozenset(found.indices)
        slots = self._slots
        device = self._device
        into = destination.into
        bucket = destination.bucket
        begins = destination.runs[0] is run
        function, new, views, flat_of = self._compiled(found.code, run), found.new, found.views, self._flat_of

        def run_into(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            if begins:
                slots[into] = new(bucket, device, flat_of)
            args += views(slots[into])
            return function(args)

        return run_into

    def _arguments(self, run: Run) -> list[Part]:
        """Return where each argument of the code lies, in the order of `Interface`."""
        interface = self._whole.interface_of(run.key)
        parts: list[Part] = [(read.slot, None) for read in run.reads[: run.inputs]]
        own = (None,) * len(interface.buffers)
        params = zip(interface.params, run.params or (None,) * len(interface.params), strict=True)
        buffers = zip(interface.buffers + interface.state, own + run.state, strict=True)
        constant: list[torch.Tensor] = []  # consecutive tensors that no step replaces; they share a slot
        for kind, tensors, sources in (
            ("parameter", self._params, params),
            ("buffer", self._buffers, buffers),
        ):
            for name, source in sources:
                if source is None:
                    constant.append(self._find(run, kind, name, tensors))
                    continue
                parts += self._bound(constant)
                constant = []
                parts.append((run.reads[source[0]].slot, source[1]))
        parts += self._bound(constant)
        for leaf in interface.batch:
            samples = self._whole.samples(leaf, run.slice)
            if (leaf, samples) not in self._leaves:
                self._leaves[leaf, samples] = self._new_slot()
            parts.append((self._leaves[leaf, samples], None))
        for seed in run.seeds:
            if isinstance(seed, tuple):
                parts.append((run.reads[seed[0]].slot, None))
            else:
                if seed not in self._gradients:
                    self._gradients[seed] = self._new_slot()
                parts.append((self._gradients[seed], None))
        return parts

    def denominators(self, terms: Sequence[int]) -> list[Denominator]:
        """Return the denominator of each loss term in `terms` that is a ratio."""
        return _denominators(self._whole, terms)

    def bind_counts(self, terms: Sequence[int], slices: Sequence[Slice]) -> Callable[[], list[torch.Tensor]]:
        """Return a function that returns, for each slice of the current batch, the counts of the denominators
        of `terms`."""
        codes = [(part, _denominators(self._step.at(len(part)), terms)) for part in slices]
        buffers = {
            name: self._buffers[name].detach() for _, found in codes for d in found for name in d.buffers
        }

        def count() -> list[torch.Tensor]:
            return [
                torch.cat([d.counted(self._batch, buffers, part) for d in found]) for part, found in codes
            ]

        return count

    def shares(self, way: Way, slices: Sequence[Slice]) -> list[torch.Tensor]:
        """Return the weight of each slice of the current local batch in a value that joins the slices. `way`
        says how the value joins them (`ops.arguments.shares`)."""
        return shares(self._step, way, slices, self._batch, self._buffers)

    def _find(self, run: Run, kind: str, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name not in tensors:
            raise ExecutionError(
                f"device {self._plan.device}: {run.where} reads {kind} {name!r}, which this device does not "
                "have. If you wrote a directive or an operation, check its devices. Otherwise, report this "
                "[PIPER-X001]"
            )
        return tensors[name].detach()

    def _bound(self, tensors: list[torch.Tensor]) -> list[Part]:
        if not tensors:
            return []
        return [(self._new_slot(tuple(tensors)), None)]

    def _new_slot(self, content: tuple[torch.Tensor, ...] | None = None) -> int:
        self._slots.append(content)
        return len(self._slots) - 1

    def _seeded(self, call: Bound, run: Run) -> Bound:
        """Return a call that runs with the chunk's own seed and then restores the state of the random
        generators.
        """
        chunk = Chunk(region=run.key[0], kind=run.key[1], slice=run.slice)
        # Position in the global batch from which the chunk's slice counts. A joined chunk has all samples.
        first = self._plan.replica * self._plan.local_batch_size if run.whole is None else 0
        device = self._device
        generators_of(device)  # raises here, not in a step, if the generator cannot be seeded

        def drawing() -> None:
            with seeded(chunk_seed(self.seed, chunk, first), device):
                call()

        return drawing

    def _nan_checked(self, call: Bound, run: Run) -> Bound:
        """Return a call that checks the gradients of a backward pass for NaN in torch's anomaly mode
        (`Trainer(detect_anomaly=True)`).

        torch checks each autograd node in this mode. This call checks each backward pass.
        """
        slots, source = self._slots, self._whole.regions[run.key[0]].source
        outputs = self._whole.interface_of(run.key).outputs
        made = [
            (out, at)
            for out, at in zip(outputs, run.writes, strict=True)
            if at is not None and out.kind in _GRADIENTS
        ]

        def checked() -> None:
            call()
            if not (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()):
                return
            for out, slot in made:
                found = [i for i, x in enumerate(slots[slot]) if torch.isnan(x).any()]
                if found:
                    of = out.names[found[0]] if out.kind == Kind.GRAD else "a value from an earlier region"
                    raise ExecutionError(
                        f"the gradient of {of} has a NaN, which Trainer(detect_anomaly=True) refuses. The "
                        f"region begins at {source}. To see the operation, train this batch on one device with "
                        "Trainer(detect_anomaly=True) and without PiperStrategy [PIPER-X003]"
                    )

        return checked

    def begin(self, leaves: list[torch.Tensor], seed: int, scale: float) -> None:
        """Set the seed, the scale and the batch of a step."""
        self.seed, self.scale, self._batch = seed, scale, leaves
        slots = self._slots
        for (leaf, samples), slot in self._leaves.items():
            x = leaves[leaf]
            if samples is not None and len(samples) < x.shape[0]:
                x = x.narrow(0, samples.start, len(samples))
            slots[slot] = (x.contiguous(),)  # the code was captured with contiguous inputs
        if scale != self._scale:
            # Make new tensors, because a chunk may have output the old ones unchanged.
            self._scale = scale
            for share, slot in self._gradients.items():
                slots[slot] = (torch.full((), share * scale, dtype=self.loss_dtype, device=self._device),)

    def given(self) -> set[int]:
        """Return the addresses of the storages that outlive the step or that the caller has: parameters, buffers,
        slices of the batch, loss gradients, and the memory of graphs. Call this only during a step."""
        bundles = self._slots[self._plan.slots :]
        found = {memory_of(x) for bundle in bundles for x in bundle}
        return found | self._graphs.memory if self._graphs is not None else found

    def end(self) -> None:
        """Drop the references to the batch of the step."""
        for slot in self._leaves.values():
            self._slots[slot] = None
        self._batch = []


def _denominators(code: StepCode, terms: Sequence[int]) -> list[Denominator]:
    return [found for term in terms if (found := code.terms[term].denominator) is not None]


def _bind_code(  # type: ignore[no-untyped-def]
    run, slots: Slots, parts: list[Part], dropped: list[int], writes: list[tuple[int, int, int]]
) -> Bound:
    """Return a call of `run` on tensors in slots.

    Args:
        run: The function of a chunk.
        slots: The values of the plan.
        parts: Where each argument is.
        dropped: The slots to empty before the run.
        writes: For each slot to write, the range of the results that it receives.
    """
    if all(tensor is None for _, tensor in parts):
        order = [slot for slot, _ in parts]

        def call() -> None:
            args: list[torch.Tensor] = []
            for slot in order:
                args += slots[slot]
            # From this line on, only `args` keeps the inputs alive, and the code frees them as it runs.
            for slot in dropped:
                slots[slot] = None
            made = run(args)
            for slot, start, stop in writes:
                slots[slot] = made[start:stop]

        return call

    def call_with_state() -> None:
        args: list[torch.Tensor] = []
        for slot, tensor in parts:
            if tensor is None:
                args += slots[slot]
            else:
                args.append(slots[slot][tensor])
        for slot in dropped:
            slots[slot] = None
        made = run(args)
        for slot, start, stop in writes:
            slots[slot] = made[start:stop]

    return call_with_state
