"""torch's private names, except those in the other files of this package. Tested with torch 2.13.

Each entry states the behavior that the package relies on.

- `aot_export_joint_with_descriptors`: traces a module's forward and backward (under `torch.no_grad`, its
  forward alone) into one functional graph whose placeholders and outputs carry descriptors
  (`node.meta["desc"]`). The `*AOTInput` and `*AOTOutput` classes are these descriptors.
- `FakeTensor`: its attributes are those that it annotates, and names with an underscore.
- `FakeTensorMode`, `DataDependentOutputException`, `DynamicOutputShapeException`: tensors without data, and
  the errors that they raise when Python asks for a value or for a shape that depends on a value.
- `ShapeEnv`, `DimDynamic`, `StatelessSymbolicContext`: sizes of such tensors as symbols. Equal sizes get the
  same symbol (duck shaping). `guards` holds the conditions under which a trace took its branches, and
  `var_to_range` the ranges that it assumed. `SymInt.node.expr` is a sympy expression, which `PythonPrinter`
  writes as Python code for evaluation in `SYMPY_INTERP`.
- `torch.compiler._is_compiling_flag`, `_is_exporting_flag`: make `torch.compiler.is_compiling()` and
  `is_exporting()` true, as torch.export does. Some code (Hugging Face's masks) then avoids asking for tensor
  values.
- `torch.nn.modules.transformer._detect_is_causal_mask`: reads the values of a mask passed to `nn.Transformer`
  or its parts and returns whether the mask is causal, so that a faster kernel can be chosen. False is a
  correct answer for any mask.
- The names of the loggers that report failed operations.
- The text of the error with which `FakeTensorMode` rejects a tensor that has data. The text of the error that
  ends a trace whose graph reads a tensor left over from an earlier run.
- `torch.backends.mkldnn.enabled`: whether torch may choose oneDNN's RNN. Its backward needs values that its
  forward makes only while gradients are recorded, and a plan records none.
- `torch.distributions.Distribution._validate_args`: whether distributions check the values of their arguments
  by default.
- `torch.nn.utils.prune.BasePruningMethod._tensor_name`: the attribute that such a hook sets before each
  forward.
- `OpOverload._schema`: names, order and defaults of an operation's arguments, and which results are views of
  which arguments.
- `torch._C._dynamo.guards.dict_version`: a number that differs after each write to a dict. From Python 3.13
  on, it does not differ after a write to an attribute of the object whose `__dict__` the dict is.
- `torch.nn.modules.module._global_forward_hooks` and its siblings: the hooks that apply to all modules.
- `torch.utils._python_dispatch._disable_current_modes`: code inside sees real tensors, even while a step is
  traced.
- `TorchDispatchMode`: sees each operation. Unless its `ignore_compile_internals()` is true, Dynamo
  permanently skips the code that it meets under that mode.
- `UntypedStorage._cdata`: the address of the storage.
- `torch.utils._pytree`: flattens and unflattens nested arguments of an operation.
- `torch.nn.utils.clip_grad._get_total_norm`: the function with which `clip_grad_norm_`, wherever it was
  imported, measures gradients.
- `Tensor._backward_hooks`, `Tensor._post_accumulate_grad_hooks`: the hooks from `register_hook` and
  `register_post_accumulate_grad_hook`.
- `torch._functorch.partitioners`: `classify_nodes` and `choose_saved_values_set`, which reads
  `node.dist_from_bw`, choose the values of a forward pass to keep for the backward pass.
- `Optimizer._optimizer_step_post_hooks`: the hooks in the order of their calls.
- `torch.serialization._check_save_filelike`: the function that `torch.save`, wherever it was imported, calls
  with its file before it opens it.
- `_engine_run_backward`: the name of the function in which torch runs each backward pass.
- `HigherOrderOperator.__call__`: calls an operation that gets functions as arguments (`torch.cond`,
  FlexAttention). `_name` is its name.
- `TracerBase.create_node`: the method through which a trace makes each node.
- `node.meta["partitioner_tag"]`: `is_backward` on nodes traced by autograd.
- `node.meta["seq_nr"]`: the same number on a forward operation and on the nodes of its backward.
"""

from __future__ import annotations

import contextlib
import logging
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.nn.modules.transformer as transformer
import torch.nn.utils.clip_grad as clip_grad
from torch import nn
from torch._C._dynamo.guards import dict_version
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import TracerBase
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._sympy.printers import PythonPrinter
from torch.utils.hooks import RemovableHandle

__all__ = [
    "CHECKS_FILE",
    "FAKE_ATTRIBUTES",
    "NEWEST_TRIED",
    "RUNS_BACKWARD",
    "TRACED",
    "WITHOUT_VALUES",
    "BufferAOTInput",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeSymbols",
    "TangentAOTInput",
    "TorchDispatchMode",
    "call_is_random",
    "called_with_functions",
    "clipping_replaced",
    "dict_version",
    "dict_version_follows_attributes",
    "evaluator",
    "exporting",
    "expression",
    "functional_graph",
    "global_hooks",
    "has_gradient_hooks",
    "is_backward",
    "is_foreign_tensor",
    "is_kept_tensor",
    "is_random",
    "is_traced",
    "is_view",
    "operands",
    "quietly",
    "recomputed",
    "register_first_post_hook",
    "saved_values",
    "sequence_number",
    "storage_id",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "warn_if_newer_torch",
    "with_data",
]

# The attributes that torch gives tensors without data.
FAKE_ATTRIBUTES = frozenset({*FakeTensor.__annotations__, "elem"})

NEWEST_TRIED = (2, 15)  # major and minor version of torch
CHECKS_FILE = "_check_save_filelike"  # the function that torch.save calls with its file
RUNS_BACKWARD = "_engine_run_backward"  # the function in which torch runs each backward pass
# The product of two sizes up to `LARGEST` is still a valid size. A range whose end is at least `NO_BOUND` has
# no upper bound.
LARGEST, NO_BOUND = 2**30, 2**62
# errors of operations that need values of tensors without data
WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def global_hooks() -> dict[str, dict[int, Any]]:
    """Return the global module hooks: name of the function that registers them -> torch's dict of hooks."""
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    stores = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    return {
        f"register_module_{kind}": getattr(nn.modules.module, store)
        for kind, store in zip(kinds, stores, strict=True)
    }


@cache
def dict_version_follows_attributes() -> bool:
    """Return whether a write to an attribute changes the version of the object's `__dict__`. From Python 3.13 on,
    it does not."""
    for each in (types.SimpleNamespace(), _Attributes()):
        _write(each)
        before = dict_version(vars(each))
        for _ in range(20):  # Python has a faster way to write after a few times
            _write(each)
            if dict_version(vars(each)) == before:
                return False
            before = dict_version(vars(each))
    return True


class _Attributes:
    value = 0


def _write(owner: Any) -> None:
    owner.value = object()


def warn_if_newer_torch() -> None:
    """Warn if torch is newer than the newest version with which Piper was tried."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version > NEWEST_TRIED:
        warnings.warn(
            f"torch {torch.__version__} is newer than {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}, the newest that "
            "lightning_piper was tried with. Capturing a training step relies on parts of torch that may "
            f"have changed. If it fails, install torch {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]} [PIPER-W024]",
            stacklevel=3,
        )


def with_data() -> contextlib.AbstractContextManager[Any]:
    """Return a context that disables all modes, so that tensors behave as they do outside of a trace."""
    return _disable_current_modes()


def functional_graph(
    mode: FakeTensorMode,
    module: nn.Module,
    args: tuple[torch.Tensor, ...],
    mark: Callable[[torch.fx.Node], None],
) -> torch.fx.Graph:
    """Return the functional graph of `module(*args)`, traced with fake tensors of `mode`.

    The graph includes the backward pass, unless gradients are disabled (`torch.no_grad`).

    Args:
        mark: called with each new node while the code that makes the node is on the stack.
    """
    # This import loads Inductor, and few steps need a trace.
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        stack.enter_context(exporting())
        stack.enter_context(_marking(mark))
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(mode)
        graph = aot_export_joint_with_descriptors(stack, module, args).graph_module.graph
    behind = False
    for node in graph.nodes:
        behind = behind or (is_backward(node) and node.op == "call_function")
        if behind and not is_backward(node):
            # If a result is a view of a tensor that was changed in place (`loss += penalty`), torch makes a
            # new view at the end of the graph. It gives this view the metadata of the previous operation,
            # which belongs to the backward pass.
            node.meta.pop("custom", None)
    return graph


@contextlib.contextmanager
def _marking(mark: Callable[[torch.fx.Node], None]) -> Iterator[None]:
    """Within this context, call `mark` with each new node of a trace."""
    create = TracerBase.create_node

    def creating(*args: Any, **kwargs: Any) -> torch.fx.Node:
        node = create(*args, **kwargs)
        mark(node)
        return node

    TracerBase.create_node = creating  # type: ignore[method-assign]
    try:
        yield
    finally:
        TracerBase.create_node = create  # type: ignore[method-assign]


class ShapeSymbols:
    """A factory of symbolic shapes for fake tensors.

    Attributes:
        mode: the mode of the fake tensors.
    """

    def __init__(self) -> None:
        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self._env)
        self._symbols: list[Any] = []

    def sizes(self, shape: tuple[int, ...], free: Collection[int]) -> list[Any]:
        """Return a size for each dimension.

        A dimension in `free` becomes a symbol, for which torch knows its size as a hint. Equal sizes share a
        symbol.

        Raises:
            NotImplementedError: a size is larger than `LARGEST`.
        """
        kinds = [DimDynamic.DUCK if dim in free else DimDynamic.STATIC for dim in range(len(shape))]
        meta = torch.empty(shape, device="meta")
        sizes = list(
            self.mode.from_tensor(meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)).shape
        )
        if not all(size <= LARGEST for size in sizes):
            # The comparison is recorded as a guard, from which torch knows that `x[:]` is x.
            raise NotImplementedError("a size is too large")
        return sizes

    def is_fixed(self, symbols: Iterable[str]) -> bool:
        """Return whether the trace has replaced one of the symbols by a number."""
        fixed = {str(symbol) for symbol, x in self._env.replacements.items() if x.is_number}
        return any(symbol in fixed for symbol in symbols)

    def conditions(self, symbols: Iterable[str]) -> list[str]:
        """Return the conditions on the sizes under which the trace holds, as Python expressions.

        Raises:
            NotImplementedError: the trace holds only if assertions on values hold at run time.
        """
        if self._env.deferred_runtime_asserts:
            raise NotImplementedError("assertions at run time")
        found = [PythonPrinter().doprint(guard.expr) for guard in self._env.guards]
        ranges = {str(symbol): bounds for symbol, bounds in self._env.var_to_range.items()}
        for symbol in symbols:
            found += [f"{symbol} >= {int(ranges[symbol].lower)}"]
            found += [f"{symbol} <= {int(ranges[symbol].upper)}"] if ranges[symbol].upper < NO_BOUND else []
        return found


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress the traceback that torch logs for an operation that it cannot trace.

    The same error is also raised.
    """
    loggers = [
        logging.getLogger(name)
        for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    ]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def expression(size: Any) -> str:
    """Return a size as a Python expression of its symbols."""
    return PythonPrinter().doprint(size.node.expr) if isinstance(size, torch.SymInt) else repr(int(size))


def evaluator(symbols: Sequence[str], expressions: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that takes the values of `symbols` and returns the values of `expressions`."""
    found: Callable[..., tuple[Any, ...]] = eval(
        f"lambda {', '.join(symbols)}: ({''.join(f'{e}, ' for e in expressions)})", dict(SYMPY_INTERP)
    )
    return found


# Operations that get functions as arguments. In a graph, they would be calls of other graphs.
_OF_FUNCTIONS = frozenset({"cond", "flex_attention", "map_impl", "associative_scan", "scan", "while_loop"})


class FunctionArgumentError(Exception):
    """An error raised if a step calls an operation in `_OF_FUNCTIONS`. Its text is the operation's name."""


def _operation_call(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `HigherOrderOperator`. Raise `FunctionArgumentError` if it is in `_OF_FUNCTIONS`."""
    if operator._name in _OF_FUNCTIONS:
        raise FunctionArgumentError(operator._name)
    return _call_operation(operator, *args, **kwargs)


_call_operation: Any = HigherOrderOperator.__call__


def called_with_functions(error: Exception) -> str:
    """Return the name of the operation in `_OF_FUNCTIONS` that raised an error in a capture; "" if none did.

    The function `create_block_mask` belongs to FlexAttention. It fails before the operation is called.
    """
    if isinstance(error, FunctionArgumentError):
        return str(error)
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_globals.get("__name__") == "torch.nn.attention.flex_attention":
            return "flex_attention"
        frame = frame.tb_next
    return ""


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Within this context, torch and libraries avoid code that needs tensor values or hides operations, as
    during `torch.export`. Functions that the user has compiled run uncompiled. Operations that get functions
    as arguments raise `FunctionArgumentError`."""
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    detect, onednn = transformer._detect_is_causal_mask, torch.backends.mkldnn.enabled
    validates = torch.distributions.Distribution._validate_args
    call = HigherOrderOperator.__call__
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.distributions.Distribution._validate_args = False
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    transformer._detect_is_causal_mask = _only_if_told
    HigherOrderOperator.__call__ = _operation_call  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):  # trace through functions that the user has compiled
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags
        HigherOrderOperator.__call__ = call  # type: ignore[method-assign]
        transformer._detect_is_causal_mask, torch.backends.mkldnn.enabled = detect, onednn
        torch.distributions.Distribution._validate_args = validates


def _only_if_told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def is_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: torch.fx.Node) -> Any:
    return node.meta.get("seq_nr")


def is_kept_tensor(error: BaseException) -> bool:
    """Return whether the error means that the graph reads a tensor that another run has kept."""
    return isinstance(error, AssertionError) and "Unexpected fake buffer" in str(error)


TRACED = (FakeTensor, FunctionalTensor)  # classes of the tensors of a trace


def is_traced(tensor: torch.Tensor) -> bool:
    """Return whether the tensor comes from a trace."""
    return torch._is_functional_tensor(tensor) or isinstance(tensor, TRACED)


def is_foreign_tensor(error: Exception) -> bool:
    """Return whether the error means that an operation received a tensor with data together with fake
    tensors."""
    return isinstance(error, AssertionError) and "Please convert all Tensors to FakeTensors first" in str(
        error
    )


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether a hook that sees or changes the tensor's gradient is registered on the tensor."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def storage_id(tensor: torch.Tensor) -> int:
    """Return an identifier of the tensor's memory. It is unique while the memory exists, and also works on
    the meta device."""
    return int(tensor.untyped_storage()._cdata)


def register_first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook like `register_step_post_hook`, but let it run before the hooks that are already
    registered. Return its handle."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle


@contextlib.contextmanager
def clipping_replaced(
    total_norm: Callable[..., torch.Tensor], held: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Iterator[Callable[..., torch.Tensor]]:
    """Within this context, replace the gradient norm and the tensors to scale in torch's gradient clipping.

    Affects `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_`.

    Args:
        total_norm: the replacement for torch's norm.
        held: maps the parameters passed to the clipping to the tensors whose gradients are scaled.

    Yields:
        torch's own norm function.
    """
    norm, scale = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    scale_public = torch.nn.utils.clip_grads_with_norm_

    def scaled(parameters: Any, *args: Any, **kwargs: Any) -> None:
        scale_public(
            held([parameters] if isinstance(parameters, torch.Tensor) else list(parameters)), *args, **kwargs
        )

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = total_norm
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = scaled
    try:
        yield norm
    finally:
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = norm
        clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grads_with_norm_ = scale, scale_public


def recomputed(module: nn.Module) -> set[str]:
    """Return the attributes that torch's hooks (`spectral_norm`, `weight_norm`, `prune`) set before each
    forward pass of the module."""
    hooks = module._forward_pre_hooks.values()
    names = {hook.name for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm)}
    return names | {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}


@cache
def arguments_of(operation: torch._ops.OpOverload) -> tuple[Any, ...]:
    """Return the arguments in the schema of an operation. torch makes new objects for each request."""
    return tuple(operation._schema.arguments)


def operands(node: torch.fx.Node) -> list[Any]:
    """Return the Python numbers with which an operation calculates, such as the 2 of `x * 2`. Sizes, dimensions
    and indices do not count. If the node is not an operation of torch, the list is empty."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for position, argument in enumerate(arguments_of(node.target)):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(given, int | float) and str(argument.type) in ("number", "Tensor"):
            found.append(given)
    return found


def is_random(node: torch.fx.Node) -> bool:
    """Return whether the operation draws random numbers."""
    return call_is_random(node.target, node.args, node.kwargs)


def call_is_random(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers when it is called with these arguments.

    torch marks all attention as random, but attention without dropout does not draw random numbers.
    """
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    for position, argument in enumerate(arguments_of(target)):
        if argument.name == "dropout_p":
            given = (
                args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            )
            return bool(given != 0)
    return True


def is_view(target: Any) -> bool:
    """Return whether all results of an operation are views of its arguments."""
    returns = target._schema.returns
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def saved_values(
    graph: torch.fx.Graph, constants: nn.Module | None, results: int, budget: float
) -> list[torch.fx.Node]:
    """Return the nodes whose values a forward pass saves for its backward pass, according to torch's min-cut
    partitioner.

    Args:
        graph: forward and backward together. Placeholders that only the backward pass reads have "tangents"
            in their names.
        constants: the module with the graph's constant tensors.
        results: the number of the forward pass's outputs.
        budget: see `Recompute.keep`.
    """
    from torch._functorch.partitioners import choose_saved_values_set, classify_nodes  # loads Inductor

    far = 10**9  # the partitioner uses the same number
    info = classify_nodes(torch.fx.GraphModule(constants or nn.Module(), graph), [], results)
    if not info.inputs:  # without inputs, only the required nodes can be saved
        return list(info.required_fw_nodes)
    for node in reversed(graph.nodes):
        distance = 0 if node.op != "output" and not info.is_required_fw(node) else far
        if distance and node.op != "output":
            distance = min([far, *(user.dist_from_bw + 1 for user in node.users)])
        node.dist_from_bw = distance
    return choose_saved_values_set(graph, info, budget)
