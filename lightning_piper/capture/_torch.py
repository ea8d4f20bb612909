"""The one file that uses torch's private names. Tried on torch 2.13; each entry says what is relied on.

- `aot_export_joint_with_descriptors`: traces a module's forward and backward (under `torch.no_grad`, its forward alone) into one
  functional graph whose placeholders and outputs carry descriptors (`node.meta["desc"]`); the `*AOTInput` / `*AOTOutput` classes
  are those descriptors.
- `FakeTensorMode`, `DataDependentOutputException`, `DynamicOutputShapeException`: tensors without data, and what they
  raise when Python asks for a value or a shape that depends on one.
- `ShapeEnv`, `DimDynamic`, `StatelessSymbolicContext`: sizes of such tensors as symbols, those of one name where they are equal
  (duck shaping); `guards` are the conditions under which a trace took the way it took, and `var_to_range` the ranges that it took
  for granted. `SymInt.node.expr` is a sympy expression, `PythonPrinter` writes it as Python, to be evaluated in `SYMPY_INTERP`.
- `torch.compiler._is_compiling_flag`, `_is_exporting_flag`: make `torch.compiler.is_compiling()` and `isexporting()` true, as
  torch.export does, for code (Hugging Face's masks) that then avoids asking for tensor values.
- `torch.nn.modules.transformer._detect_is_causal_mask`: asks whether a mask that `nn.Transformer` and its parts are given is the
  causal one, by its values, to choose a faster kernel. "Not that I know" is a right answer to any mask.
- the names of its loggers, which tell of operations that fail.
- the text of the error with which `FakeTensorMode` refuses a tensor that has data, and of that with which a trace ends in whose
  graph a tensor of an earlier run was left.
- `torch.backends.mkldnn.enabled`: whether torch may choose oneDNN's RNN, whose backward needs what its forward makes only while
  gradients are recorded. A plan records none.
- `torch.distributions.Distribution._validate_args`: whether distributions look at the values of their arguments where the user
  does not say.
- `torch.nn.utils.prune.BasePruningMethod._tensor_name`: the attribute that such a hook sets before each forward.
- `OpOverload._schema`: names, order and defaults of an operation's arguments; which results are views of which arguments.
- `torch._C._dynamo.guards.dict_version`: a number that differs after each write to a dict.
- `torch.nn.modules.module._global_forward_hooks` and its kin: the hooks of all modules.
- `torch.utils._python_dispatch._disable_current_modes`: code inside sees real tensors, also while a step is traced.
  `TorchDispatchMode`: sees each operation; where it does not `ignore_compile_internals`, Dynamo skips code it meets, for good.
- `UntypedStorage._cdata`: its address.
- `torch.utils._pytree`: takes nested arguments of an operation apart, and puts them together.
- `torch.nn.utils.clip_grad._get_total_norm`: what `clip_grad_norm_`, wherever it was imported, measures gradients with.
- `Tensor._backward_hooks`, `Tensor._post_accumulate_grad_hooks`: what `register_hook` and its kin have registered.
- `torch._functorch.partitioners`: `classify_nodes` and `choose_saved_values_set`, which read `node.dist_from_bw`: what of a forward
  pass to keep for the backward pass.
- `Optimizer._optimizer_step_post_hooks`: in the order of calls.
- `_engine_run_backward`: the name of the function in which torch runs each backward pass.
- `TracerBase.create_node`: through it, a trace makes each node.
- `node.meta["partitioner_tag"]`: `is_backward` on nodes traced by autograd; `node.meta["seq_nr"]`: the same number on a
  forward operation and on the nodes of its backward.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._functorch.partitioners import choose_saved_values_set, classify_nodes
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

__all__ = [
    "NEWEST_TRIED",
    "RUNS_BACKWARD",
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
    "clipping_replaced",
    "dict_version",
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

NEWEST_TRIED = (2, 13)
RUNS_BACKWARD = "_engine_run_backward"
LARGEST, NO_BOUND = 2**30, 2**62  # of two sizes, the product is still a size
WITHOUT_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def global_hooks() -> dict[str, dict[int, Any]]:
    """The hooks of all modules, by how they are registered."""
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    stores = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
    return {f"register_module_{kind}": getattr(nn.modules.module, store) for kind, store in zip(kinds, stores, strict=True)}


def warn_if_newer_torch() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version > NEWEST_TRIED:
        warnings.warn(
            f"torch {torch.__version__} is newer than {NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}, the newest that lightning_piper "
            "was tried with; capturing a training step relies on parts of torch that may have changed",
            stacklevel=3,
        )


def with_data() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors are what they are outside of a trace."""
    return _disable_current_modes()


def functional_graph(
    mode: FakeTensorMode, module: nn.Module, args: tuple[torch.Tensor, ...], mark: Callable[[torch.fx.Node], None]
) -> torch.fx.Graph:
    """The functional graph of `module(*args)`, with fake tensors of `mode` throughout; and of its backward, unless gradients are
    off (`torch.no_grad`). `mark`: is called with each node while what makes it is on the stack."""
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
            # A result that is a view of what was changed in place (`loss += penalty`): torch makes it anew at the end, and marks it
            # like the operation before, the last one of the backward pass.
            node.meta.pop("custom", None)
    return graph


@contextlib.contextmanager
def _marking(mark: Callable[[torch.fx.Node], None]) -> Iterator[None]:
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
    """Fake tensors of which some sizes are symbols.

    Attributes:
        mode: of the tensors.
    """

    def __init__(self) -> None:
        self._env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = FakeTensorMode(shape_env=self._env)
        self._symbols: list[Any] = []

    def sizes(self, shape: tuple[int, ...], free: Collection[int]) -> list[Any]:
        """A size for each dimension: of those in `free` a symbol with the size given, the same for the same size."""
        kinds = [DimDynamic.DUCK if dim in free else DimDynamic.STATIC for dim in range(len(shape))]
        meta = torch.empty(shape, device="meta")
        sizes = list(self.mode.from_tensor(meta, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)).shape)
        if not all(size <= LARGEST for size in sizes):  # a condition of the trace, by which `x[:]` is known to be x
            raise NotImplementedError("a size is too large")
        return sizes

    def is_fixed(self, symbols: Iterable[str]) -> bool:
        """Has one of the symbols become a number?"""
        fixed = {str(symbol) for symbol, x in self._env.replacements.items() if x.is_number}
        return any(symbol in fixed for symbol in symbols)

    def conditions(self, symbols: Iterable[str]) -> list[str]:
        """What must hold of the sizes, as Python.

        Raises:
            NotImplementedError: more than sizes decide.
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
    """Inside, torch logs no traceback of an operation that it could not trace: it raises the same error, too."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")]
    before = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def expression(size: Any) -> str:
    """A size as Python, in its symbols."""
    return PythonPrinter().doprint(size.node.expr) if isinstance(size, torch.SymInt) else repr(int(size))


def evaluator(symbols: Sequence[str], expressions: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Expressions as a function of their symbols."""
    found: Callable[..., tuple[Any, ...]] = eval(f"lambda {', '.join(symbols)}: ({''.join(f'{e}, ' for e in expressions)})",
                                                 dict(SYMPY_INTERP))  # fmt: skip
    return found


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    flags = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    detect, onednn = transformer._detect_is_causal_mask, torch.backends.mkldnn.enabled
    validates = torch.distributions.Distribution._validate_args
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.distributions.Distribution._validate_args = False
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    transformer._detect_is_causal_mask = _only_if_told
    try:
        with torch.compiler.set_stance("force_eager"):  # what the user has compiled is code like any other
            yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = flags
        transformer._detect_is_causal_mask, torch.backends.mkldnn.enabled = detect, onednn
        torch.distributions.Distribution._validate_args = validates


def _only_if_told(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def is_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def sequence_number(node: torch.fx.Node) -> Any:
    return node.meta.get("seq_nr")


def is_kept_tensor(error: BaseException) -> bool:
    """Does the error say that the graph reads a tensor of another run?"""
    return isinstance(error, AssertionError) and "Unexpected fake buffer" in str(error)


def is_traced(tensor: torch.Tensor) -> bool:
    """Was the tensor made while a trace ran?"""
    return torch._is_functional_tensor(tensor) or isinstance(tensor, FakeTensor | FunctionalTensor)


def is_foreign_tensor(error: Exception) -> bool:
    """Does the error say that a tensor with data met fake ones?"""
    return isinstance(error, AssertionError) and "Please convert all Tensors to FakeTensors first" in str(error)


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Is a function registered that sees, or changes, the tensor's gradient?"""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def storage_id(tensor: torch.Tensor) -> int:
    """Another number for other memory, also on the meta device, while the memory is there."""
    return int(tensor.untyped_storage()._cdata)


def register_first_post_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> None:
    """As `register_step_post_hook`, but it is called before those that are there."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


@contextlib.contextmanager
def clipping_replaced(
    total_norm: Callable[..., torch.Tensor], held: Callable[[list[torch.Tensor]], list[torch.Tensor]]
) -> Iterator[Callable[..., torch.Tensor]]:  # fmt: skip
    """Let `torch.nn.utils.clip_grad_norm_`, `get_total_norm` and `clip_grads_with_norm_` use another norm, and scale the gradients
    of what `held` gives for the parameters they are given; gives torch's own norm."""
    norm, scale = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_
    scale_public = torch.nn.utils.clip_grads_with_norm_

    def scaled(parameters: Any, *args: Any, **kwargs: Any) -> None:
        scale_public(held([parameters] if isinstance(parameters, torch.Tensor) else list(parameters)), *args, **kwargs)

    clip_grad._get_total_norm = torch.nn.utils.get_total_norm = total_norm
    clip_grad._clip_grads_with_norm_ = torch.nn.utils.clip_grads_with_norm_ = scaled
    try:
        yield norm
    finally:
        clip_grad._get_total_norm = torch.nn.utils.get_total_norm = norm
        clip_grad._clip_grads_with_norm_, torch.nn.utils.clip_grads_with_norm_ = scale, scale_public


def recomputed(module: nn.Module) -> set[str]:
    """Attributes that torch's own hooks set before each forward: weights of `nn.utils.spectral_norm`, `weight_norm`, `prune`."""
    hooks = module._forward_pre_hooks.values()
    names = {hook.name for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm)}
    return names | {hook._tensor_name for hook in hooks if isinstance(hook, BasePruningMethod)}


def operands(node: torch.fx.Node) -> list[Any]:
    """The numbers with which an operation calculates; not those that are sizes, dimensions or indices."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    found = []
    for place, argument in enumerate(node.target._schema.arguments):
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(given, int | float) and str(argument.type) in ("number", "Tensor"):
            found.append(given)
    return found


def is_random(node: torch.fx.Node) -> bool:
    """Does the operation draw random numbers? Attention is marked as if it did, but draws none without dropout."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for place, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0)
    return True


def is_view(target: Any) -> bool:
    """Are all results of an operation views of its arguments?"""
    returns = target._schema.returns
    return bool(returns) and all(x.alias_info is not None and not x.alias_info.is_write for x in returns)


def saved_values(graph: torch.fx.Graph, constants: nn.Module | None, results: int, budget: float) -> list[torch.fx.Node]:
    """What a forward pass keeps for the backward pass behind it, by the min-cut partitioner.

    Args:
        graph: of both; placeholders that the backward pass alone takes have "tangents" in their names.
        constants: holds the tensors that it has as attributes.
        results: how many of its outputs are those of the forward pass.
        budget: see `Recompute.keep`.
    """
    far = 10**9  # as the partitioner has it
    info = classify_nodes(torch.fx.GraphModule(constants or nn.Module(), graph), [], results)
    if not info.inputs:  # there is nothing else that could be kept
        return list(info.required_fw_nodes)
    for node in reversed(graph.nodes):
        distance = 0 if node.op != "output" and not info.is_required_fw(node) else far
        if distance and node.op != "output":
            distance = min([far, *(user.dist_from_bw + 1 for user in node.users)])
        node.dist_from_bw = distance
    return choose_saved_values_set(graph, info, budget)
