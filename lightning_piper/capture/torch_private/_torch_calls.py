"""torch's private names for building a graph from operations. Tested with torch 2.13.

Each entry states the behavior that the package relies on.

- `torch.autograd._get_sequence_nr`: the number that the next operation with a gradient will have. A trace
  gives an operation the number of the last such operation. It gives an operation of a backward pass the
  number of its forward operation (`node.meta["seq_nr"]`).
- `setup_stacktrace_preservation_hooks`: makes a backward pass record in `current_meta` that it runs
  (`in_grad_fn`), the number of its forward operation (`grad_fn_seq_nr`), and `GRADIENT_ACC_SPECIAL_STACK`
  while it adds gradients of one value.
- `FunctionalTensor.metadata_fns`: operations that only query a tensor, as `prim.device` does.
- `torch._C._dispatch_has_kernel_for_dispatch_key`, `autograd_would_have_decomposed`: whether an operation is
  composed of other operations (`CompositeImplicitAutograd`), and whether it runs decomposed.
- `_disable_saved_tensors_hooks_during_tracing`: a forward pass saves its values without hooks, as in a trace.
- `torch._C._autograd._top_saved_tensors_default_hooks(True)`: the functions of the `saved_tensors_hooks` that were
  entered last, or None.
- `enable_python_dispatcher`: composite operations are decomposed as in a trace.
- `FakeTensor(mode, tensor, device)`: a fake tensor with the spec of a tensor of the meta device, without dispatch.
  Its `device` is the result of `prim.device`, which C++ code calls about twice for each operation.
- `torch._C._DisableTorchDispatch`: within it, modes for operations are not active.
- `torch.library._impls`: the kernels that Python code has registered, such as "aten/add.Tensor/Meta".
- `torch._C._dispatch_key_set`: the keys that decide which kernels run for a tensor.
- `_get_current_dispatch_mode_stack`, `_get_current_function_mode_stack`: the active modes.
- A fake tensor has the attributes of each new fake tensor. A fake parameter also has `_is_param`.
- `torch._C.DisableTorchFunction`: within it, modes for functions of torch are not active.
- `global_state` lists the settings, besides the arguments, on which the operations of a function of torch depend.
- `BackwardCFunction`: the class of an `autograd.Function` in the graph of autograd.
- `Tensor._backward_hooks`: the hooks of `register_hook`, also of a tensor that an operation has made.
- `FakeTensor` inherits `grad_fn`, which torch's Python code also reads, such as `Module.register_backward_hook`.
  torch does not list the hooks of a node of autograd.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.fx.traceback as fx_traceback
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.utils import _disable_saved_tensors_hooks_during_tracing
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    autograd_would_have_decomposed,
)
from torch.utils._pytree import tree_leaves

__all__ = [
    "FakeSpec",
    "advance_sequence",
    "are_alike",
    "as_traced",
    "backward_alone",
    "backward_nodes",
    "backward_text",
    "device_asked",
    "fake_like",
    "fake_of",
    "follows_from_specs",
    "global_state",
    "has_attributes_of_user",
    "has_modes_of_user",
    "has_spec_only",
    "is_of_torch",
    "is_taken_apart",
    "last_sequence",
    "merges_gradients",
    "mode_of",
    "number_backward",
    "only_asks",
    "registered_kernels",
    "runs_python_backward",
    "sequence_now",
    "specs_of",
    "watching_nodes",
]

_without_modes: Any = torch._C._DisableTorchDispatch
_DEVICE = torch.ops.prim.device.default
_ASKING = frozenset({*FunctionalTensor.metadata_fns, _DEVICE})


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Within this context, operations run as they do in a trace."""
    with enable_python_dispatcher(), _disable_saved_tensors_hooks_during_tracing():
        yield


def hooks_of_saved_tensors() -> tuple[Any, Any] | None:
    """Return the functions of the `saved_tensors_hooks` that were entered last; None outside of such a context."""
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def only_asks(function: Any) -> bool:
    """Return whether an operation only reads properties of a tensor."""
    return function in _ASKING


def device_asked(function: Any, args: Sequence[Any]) -> torch.device | None:
    """Return the result of an operation that only asks for the device of a fake tensor; None for other operations."""
    return args[0].device if function is _DEVICE and isinstance(args[0], FakeTensor) else None


def sequence_now() -> int:
    """Return the sequence number that a trace would give to an operation that runs now."""
    about = fx_traceback.current_meta
    found: int = (
        about["grad_fn_seq_nr"][-1] if about.get("in_grad_fn", 0) else torch.autograd._get_sequence_nr() - 1
    )
    return found


def number_backward(loss: torch.Tensor) -> None:
    """Make the backward pass of a loss record the sequence numbers of its operations."""
    setup_stacktrace_preservation_hooks([] if loss.grad_fn is None else [loss.grad_fn])


def merges_gradients() -> bool:
    """Return whether the current backward operation adds gradients of one value.

    torch 2.11 leaves the mark of an addition in `stack_trace` when the next operation begins, but the addition
    itself runs outside of any `in_grad_fn`.
    """
    about = fx_traceback.current_meta
    marked = fx_traceback.GRADIENT_ACC_SPECIAL_STACK in about.get("stack_trace", "")
    return marked and not about.get("in_grad_fn", 0)


@cache
def _is_made_of_others(function: Any) -> bool:
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")
    return found


def is_taken_apart(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a trace would decompose this operation."""
    return _is_made_of_others(function) and bool(
        autograd_would_have_decomposed(function, tree_leaves((args, kwargs)))
    )


def last_sequence() -> int:
    """Return the sequence number of the last operation with a gradient, also within a backward pass."""
    return int(torch.autograd._get_sequence_nr()) - 1


def advance_sequence(count: int) -> None:
    """Give away this many sequence numbers, as operations with a gradient do."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        x = torch.zeros((), requires_grad=True)
        for _ in range(count):
            x.view_as(x)


@contextlib.contextmanager
def backward_alone() -> Iterator[None]:
    """Within this context, a backward pass that runs during a forward pass has no annotations and no modes for
    functions of torch, and leaves the metadata of later operations as it was."""
    before = dict(fx_traceback.current_meta)
    fx_traceback.current_meta.pop("custom", None)
    try:
        with torch._C.DisableTorchFunction():
            yield
    finally:
        fx_traceback.current_meta.clear()
        fx_traceback.current_meta.update(before)


@contextlib.contextmanager
def watching_nodes(read: Callable[[], None]) -> Iterator[None]:
    """Within this context, call `read` when code reads the node of autograd of a fake tensor (`grad_fn`). Such code may
    register hooks on nodes."""

    kind, own = cast(Any, FakeTensor), cast(Any, torch.Tensor.grad_fn)

    def grad_fn(x: torch.Tensor) -> Any:
        read()
        return own.__get__(x)

    kind.grad_fn = property(grad_fn)
    try:
        yield
    finally:
        del kind.grad_fn


def backward_nodes(x: torch.Tensor) -> dict[Any, int]:
    """Return the nodes of the backward pass of a tensor, numbered in an order that only the graph of autograd decides."""
    stack, found = [x.grad_fn], dict[Any, int]()
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = len(found)
            stack += [other for other, _ in node.next_functions]
    return found


def runs_python_backward(x: torch.Tensor) -> bool:
    """Return whether the backward pass of a tensor runs an `autograd.Function`."""
    return any(isinstance(node, BackwardCFunction) for node in backward_nodes(x))


def backward_text(x: torch.Tensor, numbers: Mapping[int, int], tensors: Iterable[torch.Tensor]) -> str | None:
    """Return the graph of autograd of a tensor as text. Return None if its backward pass runs an `autograd.Function`
    or a hook of one of `tensors`.

    Args:
        numbers: `id` of a parameter -> its number.
        tensors: all tensors of the forward pass.
    """
    nodes = backward_nodes(x)
    if any(isinstance(node, BackwardCFunction) for node in nodes) or any(x._backward_hooks for x in tensors):
        return None
    return "\n".join(
        f"{node.name()} {[(nodes.get(other), place) for other, place in node.next_functions]} "
        f"{numbers.get(id(getattr(node, 'variable', None)))}"
        for node in nodes
    )


def is_of_torch(function: Any) -> bool:
    """Return whether a function that torch passes to a mode is torch's own, or a function of Piper that replaces it
    while a step is traced."""
    owner = function.__self__ if getattr(function, "__name__", "") == "__get__" else function
    owner = getattr(owner, "__objclass__", owner)
    return str(getattr(owner, "__module__", "")).partition(".")[0] in ("torch", "lightning_piper")


def has_modes_of_user() -> bool:
    """Return whether a mode for functions or operations is active that is neither Piper's nor a fake mode."""
    modes = (*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack())
    return any(
        not isinstance(mode, FakeTensorMode) and not type(mode).__module__.startswith("lightning_piper.")
        for mode in modes
    )


def has_attributes_of_user(x: torch.Tensor) -> bool:
    """Return whether a fake tensor has Python attributes that torch did not give to it."""
    return not vars(x).keys() <= _attributes_of_torch()


@cache
def _attributes_of_torch() -> frozenset[str]:
    with _disable_current_modes():
        made = FakeTensor(FakeTensorMode(), torch.empty(0, device="meta"), torch.device("cpu"))
    return frozenset({*vars(made), "_is_param"})


_SETTINGS = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    torch.is_autocast_cache_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_sdp_priority_order,
    torch._C._get_mkldnn_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.maybe_current_level,
)


# The kinds of devices of this machine, which have a setting of autocast each.
_KINDS = ("cpu", *([found.type] if (found := torch.accelerator.current_accelerator()) is not None else []))


def global_state() -> tuple[Any, ...]:
    """Return the state that decides, besides the arguments, which operations a function of torch calls."""
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _KINDS]
    return (*(setting() for setting in _SETTINGS), *casts)


def specs_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return what decides how operations run on these tensors: their specs, and which of them share memory."""
    memory: dict[int, int] = {}
    return [
        (
            memory.setdefault(x.untyped_storage()._cdata, len(memory)),
            tuple(x.shape),
            x.stride(),
            x.storage_offset(),
            x.dtype,
            x.device,
            x.requires_grad,
            isinstance(x, torch.nn.Parameter),
            x.is_conj() or x.is_neg(),
        )
        for x in tensors
    ]


@dataclass(frozen=True)
class FakeSpec:
    """The spec of a fake tensor.

    Attributes:
        empty: A tensor of the meta device with this spec.
        mode, device: The mode and the device of the fake tensor.
    """

    empty: torch.Tensor
    mode: FakeTensorMode
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> FakeSpec:
        assert isinstance(x, FakeTensor)
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            return cls(empty.requires_grad_(x.requires_grad), x.fake_mode, x.device)

    def fake(self) -> torch.Tensor:
        """Return a new fake tensor of this spec, without an operation."""
        return FakeTensor(self.mode, self.empty, self.device)


def mode_of(args: Sequence[Any]) -> FakeTensorMode | None:
    """Return the mode of the first argument if it is a fake tensor, or else of the first tensor in it. Return None
    without such a tensor, or if new tensors would be inference tensors."""
    first = next(iter(args), None)
    first = first[0] if type(first) in (list, tuple) and first else first
    return first.fake_mode if type(first) is FakeTensor and not torch.is_inference_mode_enabled() else None


def has_spec_only(x: torch.Tensor, mode: FakeTensorMode) -> bool:
    """Return whether a tensor is a strided fake tensor of this mode whose values are not known."""
    return (
        type(x) is FakeTensor
        and x.fake_mode is mode
        and mode.shape_env is None
        and x.constant is None
        and x.layout is torch.strided
        and not x.is_conj()
        and not x.is_neg()
        and not x.is_quantized
        and not x.is_inference()
    )


@cache
def follows_from_specs(function: Any) -> bool:
    """Return whether an operation is one of torch's that changes nothing, and whose result has a spec that follows from
    the specs of its arguments. The spec of a convolution also depends on the machine."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    return (
        isinstance(function, torch._ops.OpOverload)
        and function.namespace == "aten"
        and not function._schema.is_mutable
        and not any(tag in function.tags for tag in tags)
        and not _is_made_of_others(function)
        and not function.name().startswith("aten::lift")
        and "conv" not in function.name()
    )


def registered_kernels() -> str:
    """Return the names of the kernels of torch's operations that Python code has registered."""
    return " ".join(sorted(x for x in torch.library._impls if x.startswith("aten/")))


def fake_of(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    dtype: torch.dtype,
    device: torch.device,
    whole: torch.Tensor | None,
) -> torch.Tensor:
    """Return a new fake tensor of this spec, without an operation: a view of the memory of `whole`, or a new tensor."""
    with _without_modes():
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if whole is not None:
            empty.set_(whole.untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, empty, device)


def are_alike(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have equal specs, memory of the same size, and the same keys for dispatch."""
    keys: Any = torch._C._dispatch_key_set
    return (
        specs_of([x])[0][1:] == specs_of([other])[0][1:]
        and x.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        and keys(x) == keys(other)
    )


def fake_like(
    x: torch.Tensor, shape: Sequence[int], mode: FakeTensorMode, device: torch.device
) -> torch.Tensor:
    """Return a new fake tensor with this shape, and otherwise like `x`, without an operation: a parameter if `x` is
    one. Call it while no mode is active."""
    is_param = isinstance(x, torch.nn.Parameter)
    empty = torch.empty_strided(shape, x.stride(), dtype=x.dtype, device="meta")
    made = FakeTensor(mode, empty.requires_grad_(is_param and x.requires_grad), device)
    if is_param:
        cast(Any, made)._is_param = True
    return made
