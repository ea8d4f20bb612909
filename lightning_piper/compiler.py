"""`compile` and `verify`: apply a program to a step of a module, and check the result."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lightning_piper.capture import (
    BatchSpec,
    CapturedStep,
    History,
    PartlyCaptured,
    as_before,
    capture,
    check_step,
    flatten,
)
from lightning_piper.common.garbage_collection import uncollected
from lightning_piper.common.limits import INDEX, integer, kind_of, shown
from lightning_piper.common.units import duration
from lightning_piper.directives import Directive, Place, Replicate, parse
from lightning_piper.directives.replicate import shards_of
from lightning_piper.directives.split import refuse_nonlinear
from lightning_piper.errors import CaptureError, NodeNotFoundError, PiperError, with_notes
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import describe, matches
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.text import line_of
from lightning_piper.ops.weights import Counts, counted_buffers
from lightning_piper.passes import prepared, run_pipeline
from lightning_piper.plan import Plans, check_plans, compile_plans
from lightning_piper.summary import degrees_of, parameters_of, unproved
from lightning_piper.verify import Report, verify_step
from lightning_piper.verify.hook import StaticCheck
from lightning_piper.verify.uncaptured_check import verify_executed


@dataclass(frozen=True, repr=False)
class Compiled:
    """A program applied to a captured step, with one batch size.

    Attributes:
        step: The captured step.
        program: The directives.
        dag: The finished training DAG. `print(dag)` shows it.
        plans: The instructions of each logical device, made on demand.
        training: The first finished DAG of the training step, if it determined where this step's parameters
            are; otherwise None.
        device: The logical device that this process is; None if all devices are in one process. If plans
            of different group ranks differ only in device names, Piper checks only the plans of this device's
            group rank.
        checked: Seconds that the static checks took; None if there were none.
    """

    step: CapturedStep
    program: tuple[Directive, ...]
    dag: TrainingDAG
    plans: Plans
    training: TrainingDAG | None = None
    device: int | None = None
    checked: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"<Compiled {self._head}>"

    def summary(self) -> str:
        """Return up to four lines: how the devices share the work, the parameters, and the checks.

        `PiperStrategy` logs them at the first batch of a fit.
        """
        lines = [self._head, parameters_of(self.dag, self.program), "not checked (verification is off)"]
        if self.checked is not None:
            how = "the graph after each directive, and all plans, without running them"
            lines[-1] = f"checked in {duration(self.checked)}: {how}"
            left = "; ".join(unproved(self.dag, self.step.executed, self.step.draws))
            lines += [f"not proved: {left}"] if left else []
        return "\n  ".join(lines)

    @property
    def _head(self) -> str:
        return f"{self.step.name} on {degrees_of(self.dag, self.program, len(self.plans))}"

    def at(self, size: int, verify: bool = True) -> Compiled:
        """Return the same program for a batch of `size` samples, such as a smaller last batch. Return this
        object if it has this size.

        Args:
            size: Number of samples of the global batch.
            verify: Whether to run the static check.

        Raises:
            CaptureError: The size is not a positive number of samples, or the step does not run with it.
            DirectiveError: A directive does not fit this size.
        """
        number = integer(size)
        if number is None or not 0 < number < INDEX:
            raise CaptureError(
                f"Compiled.at(size={shown(size)}) is not usable. Give a number of samples from 1 to {INDEX - 1} [PIPER-A001]"
            )
        return self if number == self.dag.size else self._sized(self.step, number, verify)

    def shaped(
        self, batch_spec: BatchSpec, verify: bool = True, training: TrainingDAG | None = None
    ) -> Compiled:
        """Return the same program for batches with this spec. Return this object if it has this spec.

        Not only the number of samples may differ, but also other dimensions of the tensors.

        Args:
            batch_spec: The spec of the global batch.
            verify: Whether to run the static check.
            training: The first finished DAG of the training step, if it determines where parameters are
                (default: `self.training`).
        """
        step = self.step.shaped(batch_spec)
        if step is self.step and batch_spec.size == self.dag.size:
            return self
        return self._sized(step, batch_spec.size, verify, training)

    def _sized(
        self, step: CapturedStep, size: int, verify: bool, training: TrainingDAG | None = None
    ) -> Compiled:
        return compile_step(step, self.program, size, verify, training or self.training, self.device)

    def params_on(self, device: int) -> frozenset[str]:
        """Return the canonical names of the parameters that a device uses and therefore holds. A parameter
        counts as used even if the device holds only a shard of it."""
        return self._used[0].get(device, frozenset())

    def buffers_on(self, device: int) -> frozenset[str]:
        """Return the canonical names of the buffers that a device uses and therefore holds."""
        return self._used[1].get(device, frozenset())

    def written_on(self, device: int) -> frozenset[str]:
        """Return the canonical names of the buffers that a device changes."""
        return self._used[2].get(device, frozenset())

    @cached_property
    def _used(self) -> tuple[dict[int, frozenset[str]], ...]:
        """(parameters, buffers, changed buffers): three dicts from a device to canonical names. All devices
        of a group share one set of names."""
        dag = self.dag
        passes = {(chunk.devices, chunk.key): dag.interface(chunk) for chunk in dag.of_type(Chunk)}
        params = [(devices, interface.params) for (devices, _), interface in passes.items()]
        written = [(devices, interface.state) for (devices, _), interface in passes.items()]
        written += [(node.devices, tuple(counted_buffers(dag, node))) for node in dag.of_type(Counts)]
        read = [(devices, interface.buffers) for (devices, _), interface in passes.items()]
        return _by_device(params), _by_device([*read, *written]), _by_device(written)

    def explain(self, node: int) -> str:
        """Return why a node exists, as text: its line, the directives that made and placed it, and the nodes
        around it.

        Raises:
            NodeNotFoundError: The training DAG does not have this node.
        """
        if not isinstance(node, int) or node not in self.dag.nodes:
            raise NodeNotFoundError(
                f"the training DAG has no node {shown(node)}. Run print(compiled.dag) to list its nodes [PIPER-A002]"
            )
        found: Node = self.dag.nodes[node]
        lines = [line_of(self.dag, found)]
        for what, index in (("made", found.origin), ("placed", found.placed_by)):
            source = "the capture" if index is None else f"directive {index}: {self.program[index].to_json()}"
            lines.append(f"  {what} by {source}")
            if index is not None:
                lines += self._matched(found, index)
        if isinstance(found, Chunk):
            lines.append(f"  region {found.region} begins at {self.dag.regions[found.region].source}")
        lines += self._served(found)
        for title, others in (
            ("waits for", self.dag.graph.predecessors(node)),
            ("before", self.dag.graph.successors(node)),
        ):
            lines += [f"  {title} {line_of(self.dag, self.dag.nodes[other])}" for other in sorted(others)]
        return "\n".join(lines)

    def _matched(self, node: Node, index: int) -> list[str]:
        """Return a line with the filter of directive `index`, and the tags that the filter matched.

        The tags belong to the node, or to a node at an end of its edge. Return an empty list if the directive
        has no filter, or if the filter matches none of these nodes.
        """
        condition = getattr(self.program[index], "filter", None)
        if not condition:  # {} matches everything
            return []
        source, readers = self._ends(node)
        matched = next((other for other in [node, *readers, source] if matches(condition, other.tags)), None)
        if matched is None:
            return []
        tags = describe({tag: value for tag, value in matched.tags.items() if tag in condition})
        what = "" if matched is node else f" of %{matched.id} {matched.label}"
        return [f"    its filter {describe(condition)} matches {tags}{what}"]

    def _served(self, node: Node) -> list[str]:
        """Return a line about the edge that a message or collective serves: value, source and readers. Return
        an empty list for any other node."""
        if not node.communicates or not node.inputs:
            return []
        source, readers = self._ends(node)
        value = self.dag.value(node.inputs[0])
        to = ", ".join(dict.fromkeys(f"%{user.id} {user.label}" for user in readers))
        return [f"  carries {value.label} ({value.nbytes} bytes) from %{source.id} {source.label} to {to}"]

    def _ends(self, node: Node) -> tuple[Node, list[Node]]:
        """Return the node that made the value of a transfer, and the nodes that read the value after all
        transfers. For a node that is not a transfer, the first is the node itself."""
        source, readers = node, self.dag.users(node)
        while source.communicates and source.inputs:
            source = self.dag.nodes[source.inputs[0][0]]
        while any(reader.communicates for reader in readers):
            readers = [
                u for reader in readers for u in (self.dag.users(reader) if reader.communicates else [reader])
            ]
        return source, readers


def _by_device(named: Iterable[tuple[tuple[int, ...], tuple[str, ...]]]) -> dict[int, frozenset[str]]:
    """Return device -> names. `named` has pairs of a device group and the names that all its devices get."""
    groups: dict[tuple[int, ...], set[str]] = {}
    for devices, names in named:
        groups.setdefault(devices, set()).update(names)
    found: dict[int, frozenset[str]] = {}
    for devices, together in groups.items():
        own = frozenset(together)
        found |= {device: found[device] | own if device in found else own for device in devices}
    return found


def compile(
    module: nn.Module,
    batch: Any,
    directives: Any,
    *,
    verify: bool = True,
    device: torch.device | str = "cpu",
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    step: str = "training_step",
    history: History | None = None,
) -> Compiled:
    """Capture a step of the module and apply a program to it.

    If a `training_step` cannot be captured as a whole, and the program divides it (stages, microbatches,
    sharded parameters), Piper captures the calls of annotated modules. The remaining code of the step runs
    uncaptured, and a warning names the line. If the program only replicates such a step, `compile` raises the
    error, because `PiperStrategy` runs the step uncaptured and needs no graph.

    Args:
        module: A LightningModule. Piper traces its step without data, and does not change it.
        batch: The global batch of one step, as the DataLoader would give it to one device.
        directives: A list of directives or JSON objects, or the path of a JSON file.
        verify: Run the static check after the capture, after each directive and on the plans.
        device: The device type for which the step is captured.
        context: Entered around the step while it is captured, for example autocast.
        step: The method that is captured. Every method except `training_step` is forward-only: see
            `passes.forward`.
        history: Facts from earlier captures of the step.

    Raises:
        CaptureError: The step cannot be captured.
        DirectiveError: A directive is malformed or does not fit.
        VerificationError: A rewrite changed what the step computes.
    """
    program = tuple(parse(directives))
    kind = _device(device)
    if not isinstance(verify, bool):
        raise CaptureError(f"compile(verify={shown(verify)}) is not usable. Give True or False [PIPER-A001]")
    if not isinstance(step, str):
        raise CaptureError(
            f"compile(step={shown(step)}) is not usable. Give the name of a step, such as 'validation_step' [PIPER-A001]"
        )
    if not callable(context):
        raise CaptureError(
            f"compile(context={shown(context)}) is not usable. Give a function that makes a context manager [PIPER-A001]"
        )
    captured = capture(module, batch, kind, context, step, history=history)
    try:
        return compile_step(captured, program, verify=verify)
    except CaptureError as problem:
        if step != "training_step" or problem.late or problem.raised is not None:
            raise
        return _compile_in_part(problem, module, batch, program, verify, kind, context, history)


def _device(given: Any) -> torch.device:
    """Return the device of `compile(device=...)`. Torch ends the process if it differentiates on a kind of device for
    which it was not built.

    Raises:
        CaptureError: This is not a device, or torch was built without this kind of device.
    """
    found = torch.accelerator.current_accelerator()  # the kind for which torch was built
    kinds = ["cpu", *([] if found is None else [found.type])]
    with contextlib.suppress(RuntimeError, TypeError, ValueError, OverflowError):
        kind = torch.device(given)
        if kind.type in (*kinds, "meta"):
            return kind
    raise CaptureError(
        f"compile(device={shown(given)}) is not usable. Give a device type for which this torch was built: "
        f"{' or '.join(map(repr, kinds))} [PIPER-A001]"
    )


def _compile_in_part(
    problem: CaptureError,
    module: nn.Module,
    batch: Any,
    program: tuple[Directive, ...],
    verify: bool,
    device: torch.device,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    history: History | None,
) -> Compiled:
    """Compile a training step that cannot be captured as a whole.

    Raises:
        CaptureError: `problem`, if the calls of annotated modules cannot be captured alone or do not fit the
            program, or if the program does not divide the step.
    """
    if all(
        isinstance(each, Place | Replicate) and not each.filter and not shards_of(each) for each in program
    ):
        problem.add_note(
            "The program does not divide the step, so it needs no graph: PiperStrategy runs the step "
            "uncaptured, like DDP"
        )
        raise problem
    try:
        with as_before(module):
            step = PartlyCaptured(module, flatten(batch)[1], device, context, history)
            compiled = compile_step(step, program, verify=verify)
    except PiperError as other:
        problem.add_note(f"Capturing only the calls of annotated modules also failed: {with_notes(other)}")
        raise problem from None
    warnings.warn(
        f"training_step is captured in part. Reason: {problem}. Consequence: {step.executed} [PIPER-W002]",
        stacklevel=3,
    )
    return compiled


def compile_step(
    step: CapturedStep,
    program: tuple[Directive, ...],
    size: int | None = None,
    verify: bool = True,
    training: TrainingDAG | None = None,
    device: int | None = None,
) -> Compiled:
    """Apply a program to a step that is captured already, like `compile`.

    Args:
        step: The captured step.
        program: The directives.
        size: Number of samples (default: as captured).
        verify: Whether to run the static check.
        training: The first finished DAG of the training step, if it determines where parameters are.
        device: The logical device that this process is; None if all devices are in one process.

    Raises:
        DirectiveError: A directive does not fit the step.
        VerificationError: A rewrite changed what the step computes.
    """
    check = StaticCheck() if verify else None
    with uncollected():
        step = prepared(step, program)
        dag = run_pipeline(step, program, size, training, check)
        refuse_nonlinear(program, dag)
        plans = compile_plans(dag, device)
        if check is not None:
            with check.watch:
                check_plans(plans.representatives, plans.image)
    checked = None if check is None else check.watch.seconds
    return Compiled(step, program, dag, plans, training, device, checked)


def verify(module: nn.Module, batch: Any, directives: Any, *, seed: int = 0) -> Report:
    """Check a program by running it in this process, directive by directive.

    After each directive, `verify` compares loss, logged values, all gradients and changed buffers with two
    results: the graph before the directive, and eager execution of `training_step` on one device that
    accumulates over the same microbatches. The last graph, from which the plans are made, is also compared
    with one device on the whole batch.

    A step that draws random numbers draws them per region. Eager execution cannot repeat this, so the step is
    compared with the captured step on one device. If the results of microbatches and of the whole batch differ,
    the report names the operations that mix samples.

    If a step cannot be captured, and the program only replicates, `verify` runs it uncaptured. The report
    then says `executed`, and why. If the program divides such a step, `verify` captures only the calls of
    annotated modules.

    Args:
        module: A LightningModule with real parameters. It is not changed.
        batch: The global batch of one step, with data.
        directives: A list of directives or JSON objects, or the path of a JSON file.
        seed: Seed of random numbers (dropout).

    Returns:
        The report, whose last line is the verdict. A difference is not an error: call `require()` of the
            report to raise one.

    Raises:
        CaptureError, DirectiveError: `compile` would raise this error.
        VerificationError: The static check fails. Or the loss or another result of one device is NaN.
    """
    program = parse(directives)
    if not isinstance(module, nn.Module):
        raise CaptureError(f"verify: the module is {kind_of(module)}. Give a LightningModule [PIPER-A001]")
    check_step(module, "training_step")
    if integer(seed) is None:
        raise CaptureError(f"verify(seed={shown(seed)}) is not usable. Give an integer [PIPER-A001]")
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        return verify_step(capture(module, batch, device=device), module, batch, program, seed=seed)
    except CaptureError as error:
        problem = error
    try:
        return verify_executed(module, batch, program, problem, seed)
    except CaptureError:
        if problem.late or problem.raised is not None:
            raise problem from None
    try:
        with as_before(module):
            return verify_step(
                PartlyCaptured(module, flatten(batch)[1], device), module, batch, program, seed=seed
            )
    except CaptureError as other:
        problem.add_note(f"Capturing only the calls of annotated modules also failed: {with_notes(other)}")
        raise problem from None
