"""Record the operations of a step without tracing it: the step runs once, forward and backward, on fake
tensors.

A trace makes a graph of the operations that the step's code calls, which takes about a hundred times as long
as calling them. This run records each operation with its arguments, marks and results. A digest of these
records identifies the graph: the same operations on the same tensors, under the same versions, give the same
graph. Python state decides which operations the code calls, so the run records guards, as a trace does. The
digest does not need to contain the user's code.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.fx import Graph

from lightning_piper.capture.graph_cache.block_replay import FEWEST, Blocks, BlocksDiffer, Template
from lightning_piper.capture.graph_cache.graph_builder import NotBuildable, NotedBlock, OperationNotes
from lightning_piper.capture.graph_cache.operation_results import OperationResults
from lightning_piper.capture.graph_cache.serialization import bytes_of, is_constant, name_of
from lightning_piper.capture.torch_private import _torch, _torch_calls
from lightning_piper.capture.user_code.source import line_in_backward
from lightning_piper.common.limits import OPERATIONS
from lightning_piper.errors import LongStepError
from lightning_piper.ir._torch_functions import without_torch_function

# Types whose values are equal if their `repr` is equal.
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)


# The argument `if_true` of the innermost `long_steps_refused`. None outside of such a context.
_may_leave: ContextVar[Callable[[], bool] | None] = ContextVar("may_leave", default=None)


@contextlib.contextmanager
def long_steps_refused(if_true: Callable[[], bool]) -> Iterator[None]:
    """Within this context, the tracing run raises a `LongStepError` for a step whose forward pass calls more
    than `limits.OPERATIONS` operations. The caller can then run the step uncaptured instead.

    Args:
        if_true: Called once when the run finds such a step. The error is raised only if it returns True.
    """
    token = _may_leave.set(if_true)
    try:
        yield
    finally:
        _may_leave.reset(token)


class NotLoggable(Exception):
    """Raised if the log of operations cannot record an argument of an operation. The step is then traced in
    full."""


def log_operations(
    step: nn.Module,
    inputs: Sequence[torch.Tensor],
    own: torch.device,
    blocks: Sequence[nn.Module] = (),
    is_known: Callable[[str], bool] = lambda digest: False,
    results: OperationResults | None = None,
) -> tuple[str, Callable[[], Graph | None] | None]:
    """Run a step once, forward and, if gradients are enabled, backward. Return a digest of its operations,
    and a function that makes its graph. The graph is None if the operations do not determine it
    (`graph_builder.py`). Call the function at most once.

    If the backward pass runs only formulas of torch, the forward pass determines it. The digest is then the forward
    pass's digest, and a step with a known digest does not run its backward pass.

    Args:
        step: a module that returns the step's results. If the step has a backward pass, the first result is
            the loss.
        inputs: the step's inputs other than its parameters and buffers.
        own: the device of the trace. The digest does not depend on the index of this device.
        blocks: repeated blocks of the step, whose operations are noted once (`block_replay.py`).
        is_known: whether the graph of a digest is known. In place of a function for a known graph, the result has None.
        results: the known results of operations. If None, each operation runs.

    Raises:
        NotLoggable: the log cannot record the step.
        BlocksDiffer: the step is not one that `block_replay.py` can note.
        LongStepError: the step is too long; see `long_steps_refused`.
        Exception: any error of the step itself.
    """
    joint = torch.is_grad_enabled()
    # A mode of the user must see each operation.
    known = None if _torch_calls.has_modes_of_user() else results
    notes = _OperationLog(own, step, inputs, joint, results=known)
    forward: str | None = None
    gradients: dict[int, torch.Tensor | None] = {}
    repeated: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if len(blocks) >= FEWEST:
        notes.read, repeated = {}, Blocks(blocks, notes).intercepting()
    with _torch_calls.as_traced(), notes, repeated:
        notes.enter_all(step, inputs)
        before = [x.grad for x in step.parameters()]
        with _torch.exporting(), fx_traceback.preserve_node_meta():
            with _torch_calls.watching_nodes(notes.reads_nodes):
                made = step(*inputs)
            if any(x.grad is not was for x, was in zip(step.parameters(), before, strict=True)):
                # The step itself has set gradients with a backward pass, which a graph cannot express.
                notes.leave_graph()
            notes.say("results", made)
            if joint:
                forward = notes.forward_digest(made[0])
                if forward is not None and is_known(forward):
                    return forward, None
                trained = [x for x in step.parameters() if x.requires_grad]
                tangent = notes.goes_back(made)
                found = torch.autograd.grad(made[0], trained, tangent, allow_unused=True)
                notes.say("gradients", found)
                gradients = {id(x): gradient for x, gradient in zip(trained, found, strict=True)}
    if notes.differs:
        raise BlocksDiffer("the step caught the error of a block that differs")
    digest = notes.digest() if forward is None or notes.runs_code_backward else forward
    return digest, notes.graph(made, gradients)


class _OperationLog(_torch.TorchDispatchMode):
    """A mode that hashes each operation of a step, and adds it to an `OperationNotes` as long as the graph
    can be built.

    Args:
        own, step, inputs: see `log_operations`.
        joint: whether the step has a backward pass.
        is_block: see `OperationNotes`.
        results: the known results of operations; None if each operation must run.
    """

    def __init__(
        self, own: torch.device, step: nn.Module, inputs: Sequence[torch.Tensor], joint: bool,
        is_block: bool = False, results: OperationResults | None = None,
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: OperationNotes | None = None  # None if the operations do not determine the graph
        with contextlib.suppress(NotBuildable):
            self._calls = OperationNotes(step, inputs, joint, is_block)
        self._results = results
        self._own, self._goes_back, self._count = own, False, 0
        self._hash = hashlib.sha256()
        self._numbers: dict[int, int] = {}  # id of a tensor -> its number
        self._storages: dict[int, int] = {}  # id of a storage -> its number
        self._kept: list[torch.Tensor] = []  # keeps tensors alive, so that ids stay unique
        self._muted = False
        self.runs_code_backward = (
            False  # whether code other than torch's formulas has called a backward operation
        )
        self._leaves_graph = False  # whether the step does more than its operations show
        self._reads_nodes = False  # whether the step may have hooks that torch does not list
        # With repeated blocks: id of each tensor that forward operations have read -> the only block that may
        # read it, or None. Without: None.
        self.read: dict[int, NotedBlock | None] | None = None
        self.differs = False  # whether a block differs, or other code reads tensors of a block
        self._of_blocks: set[int] = set()  # storages of the tensors that blocks have read or made

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # otherwise, Dynamo marks code that it meets here as code that must never be compiled

    def digest(self) -> str:
        return self._hash.hexdigest()

    def forward_digest(self, loss: torch.Tensor) -> str | None:
        """Return the digest after the forward pass, with the graph of autograd. Return None if the backward pass may run
        code other than torch's formulas.

        Args:
            loss: the step's first result.
        """
        if self.read is not None or self._leaves_graph or self._reads_nodes:
            return None
        backward = _torch_calls.backward_text(loss, self._numbers, self._kept)
        if backward is None:
            return None
        found = self._hash.copy()
        # The settings also decide which operations the formulas call.
        found.update(f"formulas of torch {_torch_calls.global_state()}\n{backward}".encode())
        return found.hexdigest()

    @property
    def notes(self) -> OperationNotes | None:
        """The operations; None if they do not determine the graph."""
        return self._calls

    def operations(self) -> int:
        """Return the number of forward operations that were noted up to now.

        Raises:
            BlocksDiffer: the operations do not determine the graph.
        """
        if self._calls is None:
            raise BlocksDiffer("operations that do not determine the graph")
        return len(self._calls.forward)

    def enter_all(self, step: nn.Module, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Enter the parameters, buffers and inputs of a module, and return them."""
        named = [*step.named_parameters(remove_duplicate=False), *step.named_buffers(remove_duplicate=False)]
        for name, tensor in (*named, *(("input", x) for x in inputs)):
            self.enter(name, tensor)
        return [*(x for _, x in named), *inputs]

    def enter(self, name: str, tensor: torch.Tensor) -> None:
        """Give a number to a tensor that no operation of the step makes (an input or a tangent), and add the
        tensor to the digest. A tensor with two names keeps its first number."""
        self._numbers.setdefault(id(tensor), len(self._kept))
        self._kept.append(tensor)
        self.say(name, tensor)

    def goes_back(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Start the backward pass. Return a fake tensor for the gradient of the loss, which is an input of
        the graph. If another result also needs a gradient, the graph is not built.

        Args:
            results: the results of the step. The first result is the loss.
        """
        loss, self._goes_back = results[0], True
        with _torch.with_data(), loss.fake_mode:  # type: ignore[attr-defined]
            tangent = torch.empty_strided(loss.shape, loss.stride(), dtype=loss.dtype, device=loss.device)
        self.enter("tangent", tangent)
        if self._calls is not None and not any(x.requires_grad for x in results[1:]):
            self._calls.goes_back(loss, tangent)
        else:
            self._calls = None
        return tangent

    def leave_graph(self) -> None:
        """Record that the step does more than its operations show. Then there is no graph."""
        self._calls, self._leaves_graph = None, True

    def reads_nodes(self) -> None:
        """Record that the step reads a node of autograd."""
        self._reads_nodes = True

    def graph(
        self, results: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor | None]
    ) -> Callable[[], Graph | None]:
        """Return a function that makes the graph from the recorded operations. It returns None if they do not
        determine the graph.

        Args:
            results, gradients: see `OperationNotes.build`.
        """
        build = None if self._calls is None else self._calls.build(results, gradients)

        def graph() -> Graph | None:
            try:
                return None if build is None else build()
            except NotBuildable:
                return None

        return graph

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Within this context, operations are not recorded."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def alone(self, block: nn.Module, inputs: Sequence[torch.Tensor]) -> _OperationLog:
        """Return a new log for the operations of a block alone, with these inputs."""
        return _OperationLog(self._own, block, inputs, True, is_block=True, results=self._results)

    def differentiate(
        self, made: torch.Tensor, tensors: Sequence[torch.Tensor]
    ) -> dict[int, torch.Tensor | None]:
        """Run the backward pass of a block's result. Return `id` of a tensor -> its gradient. Only tensors that
        need gradients have an entry.

        Raises:
            BlocksDiffer: the backward pass runs an `autograd.Function`.
        """
        if _torch_calls.runs_python_backward(made):
            raise BlocksDiffer("an autograd.Function")
        trained = [x for x in tensors if x.requires_grad]
        with _torch_calls.backward_alone():
            tangent = self.goes_back([made])
            found = torch.autograd.grad(made, trained, tangent, allow_unused=True)
        self.say("gradients", found)
        return {id(x): gradient for x, gradient in zip(trained, found, strict=True)}

    def note_block(
        self,
        template: Template,
        tensors: Sequence[torch.Tensor],
        customs: Sequence[dict[str, Any] | None],
        before: int,
    ) -> torch.Tensor:
        """Record the operations of a block that repeats `template`, and return its result.

        Args:
            tensors: the block's parameters, buffers and inputs.
            customs: the annotations of its forward operations.
            before: autograd's sequence number before the block.

        Raises:
            BlocksDiffer: other code has read a tensor whose gradient the block computes.
        """
        assert self.read is not None
        notes = template.notes
        block = NotedBlock(notes, list(tensors), customs, before, _torch_calls.sequence_now())
        for x in tensors:
            if x.requires_grad and self.read.setdefault(id(x), block) is not block:
                raise BlocksDiffer("a tensor that other code has read")
            self.read.setdefault(id(x), None)
        self.say(f"block {template.digest} {torch.is_grad_enabled()} {customs}", tensors)
        self._grow(len(notes.forward))
        with self.muted():
            if notes.made.requires_grad:
                block.made = _Repeated.apply((notes.made, partial(self._goes_back_in, block)), *tensors)  # type: ignore[no-untyped-call]
            else:
                block.made = _like(notes.made)
        self._of_blocks |= {_torch.storage_id(x) for x in (*tensors, block.made)}
        self._number(block.made)
        self.say("gives", block.made)
        _torch_calls.advance_sequence(notes.last - notes.first - (_torch_calls.sequence_now() - block.base))
        if self._calls is not None:
            self._calls.forward.append(block)
        return block.made

    def _goes_back_in(self, block: NotedBlock, gradient: torch.Tensor) -> list[torch.Tensor | None]:
        """Record the backward operations of a block, and return the gradients of its tensors.

        Raises:
            BlocksDiffer: the gradient of its result has another spec than in the template, or the step itself asks
                for gradients.
        """
        noted = block.notes.tangent
        assert noted is not None
        same = _torch_calls.specs_of([gradient]) == _torch_calls.specs_of([noted])
        if not self._goes_back or not same or fx_traceback.current_meta.get("custom") is not None:
            self.differs = True  # the user's code may catch the error
            raise BlocksDiffer("another gradient")
        block.tangent, block.end = gradient, _torch_calls.last_sequence()
        self.say("the block goes back", gradient)
        with self.muted():
            block.gradients = [None if x is None else _like(x) for x in block.notes.gradients]
        for x in block.gradients:
            if x is not None:
                self._number(x)
        self.say("gives", block.gradients)
        if self._calls is not None:
            self._calls.backward.append(block)
        return block.gradients

    def _grow(self, count: int) -> None:
        """Count forward operations.

        Raises:
            LongStepError: the forward pass is too long; see `long_steps_refused`.
        """
        before, self._count = self._count, self._count + count
        if before <= OPERATIONS < self._count:
            _refuse_long()

    def _number(self, x: torch.Tensor) -> None:
        if id(x) not in self._numbers:
            self._numbers[id(x)] = len(self._kept)
            self._kept.append(x)

    def say(self, what: str, about: Any) -> None:
        """Add a line to the digest: the word `what`, and the argument or result `about` as text."""
        self._hash.update(f"{what}({','.join(self._shown(about))})\n".encode())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation. Add the operation, its arguments and its results to the digest and to the graph.

        Raises:
            LongStepError: the forward pass is too long; see `long_steps_refused`.
        """
        if (device := _torch_calls.device_asked(function, args)) is not None:
            return device
        # The C++ code of an autograd.Function calls operations while the modes of `block_replay.py` are active. An error
        # of such a mode in here could end the process.
        with without_torch_function():
            return self._dispatched(function, args, kwargs or {})

    def _dispatched(self, function: Any, args: Any, kwargs: Any) -> Any:
        """See `__torch_dispatch__`."""
        if self._muted:
            return function(*args, **kwargs)
        # Such an operation needs no record, because the properties are recorded with the tensor.
        if _torch_calls.only_asks(function):
            return function(*args, **kwargs)
        called = line_in_backward() if self._goes_back else ""
        self.runs_code_backward |= bool(called)
        if self.read is not None and not self._goes_back:
            self._check_apart(function, args, kwargs)
        self._grow(not self._goes_back)
        self.say(
            f"{function} {torch.is_grad_enabled()} {fx_traceback.current_meta.get('custom')} {called}",
            (args, kwargs),
        )
        made = (
            function(*args, **kwargs) if self._results is None else self._results.run(function, args, kwargs)
        )
        for x in _torch.tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self._number(x)
        self.say("gives", made)
        if self._calls is not None:
            try:
                self._calls.note(function, args, kwargs, made, called)
            except NotBuildable:
                self._calls = None
        return made

    def _check_apart(self, function: Any, args: Any, kwargs: Any) -> None:
        """Note which tensors a forward operation outside of blocks reads.

        Raises:
            BlocksDiffer: it changes a tensor that a block has read or made, or reads a tensor whose gradient a block
                computes.
        """
        assert self.read is not None
        changes = function._schema.is_mutable and _torch.storage_id(args[0]) in self._of_blocks
        read = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if changes or any(self.read.setdefault(id(x), None) is not None for x in read):
            self.differs = True  # the user's code may catch the error
            raise BlocksDiffer("a tensor of a block")

    def _shown(self, value: Any) -> Iterator[str]:
        """Yield the words by which the log of operations identifies an argument or a result.

        Raises:
            NotLoggable: The log cannot record the type of the argument.
        """
        if isinstance(value, torch.Tensor):
            yield self._tensor(value)
        elif isinstance(value, list | tuple):
            yield f"{type(value).__name__}["
            for x in value:
                yield from self._shown(x)
            yield "]"
        elif isinstance(value, dict):
            for key, x in value.items():
                yield f"{key}="
                yield from self._shown(x)
        elif isinstance(value, torch.device):
            yield name_of(value, self._own)
        elif type(value) in _PLAIN:
            yield repr(value)
        else:
            raise NotLoggable(f"a {type(value).__name__}")

    def _tensor(self, x: torch.Tensor) -> str:
        """Return a tensor as text: its number, storage, layout, dtype and device. A tensor without a number is
        a constant, and its text has its content.

        Raises:
            NotLoggable: The tensor does not have a number, and cannot be a constant (`is_constant`).
        """
        number = self._numbers.get(id(x))
        if number is None:
            if not is_constant(x):
                raise NotLoggable("a tensor that was made elsewhere")
            return f"constant {x.dtype}{tuple(x.shape)}{bytes_of(x)}"
        if x.layout is not torch.strided:
            return f"%{number} {x.layout}"
        address = _torch.storage_id(x)
        storage = self._storages.setdefault(address, len(self._storages))
        device = name_of(x.device, self._own)
        return (
            f"%{number} of {storage} {tuple(x.shape)} {x.stride()} {x.storage_offset()} {x.dtype} {device} "
            f"{x.requires_grad}"
        )


class _Repeated(torch.autograd.Function):
    """A block in the graph of autograd.

    Its arguments are a pair, and the block's tensors. The pair has a tensor like the result, and a function from the
    gradient of the result to the gradients of the tensors.
    """

    @staticmethod
    def forward(ctx: Any, about: Any, *tensors: torch.Tensor) -> torch.Tensor:
        made, ctx.back = about
        return _like(made)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, *ctx.back(gradient)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _refuse_long() -> None:
    """Raise a `LongStepError` if `long_steps_refused` is active and its argument returns True."""
    if (may_leave := _may_leave.get()) is not None and may_leave():
        raise LongStepError(
            f"the step calls more than {OPERATIONS:,} operations before its backward pass, so its capture would take "
            "minutes. Give PiperStrategy(capture='always') to capture it anyway [PIPER-C025]"
        )
