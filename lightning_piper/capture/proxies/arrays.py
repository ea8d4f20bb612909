"""Numeric numpy arrays in a batch. They are inputs of the graph. The step can read their shape and dtype, and
convert them to tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from lightning_piper.capture.proxies.opaque_content import content_of, is_stand_in
from lightning_piper.capture.proxies.proxy_classes import Proxy
from lightning_piper.capture.user_code.replaced_attribute import replaced_attribute
from lightning_piper.common.user_lines import user_line
from lightning_piper.errors import CaptureError

_CONVERSIONS = (torch.as_tensor, torch.asarray, torch.tensor)


def is_numeric(item: Any) -> bool:
    """Return whether the value is an array whose dtype torch supports."""
    return (
        type(item) is np.ndarray
        and item.dtype.kind in "biufc"
        and item.dtype.isnative
        and _dtype_of(item.dtype) is not None
    )


def _dtype_of(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None


def to_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Convert an array of the batch to a tensor. The tensor shares the array's memory, unless the array is
    read-only or not contiguous."""
    return torch.from_numpy(array if array.flags.c_contiguous and array.flags.writeable else array.copy())


def to_array(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()


class ArrayProxy(Proxy):
    """A placeholder for an array while the step is traced.

    The step can read its shape and dtype, and convert it to a tensor. Reading or changing its elements, and
    computing with it, raises an error.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__dict__["_tensor"] = tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return np.ndarray

    shape = property(lambda self: tuple(self._tensor.shape))
    ndim = property(lambda self: self._tensor.ndim)
    size = property(lambda self: self._tensor.numel())
    dtype = property(lambda self: np.dtype(str(self._tensor.dtype).removeprefix("torch.")))

    def __len__(self) -> int:
        return len(self._tensor)

    def __repr__(self) -> str:
        return f"<array {self.dtype}{list(self.shape)} of the batch>"

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"{user_line()}: the step uses a numpy array of the batch, but a captured step computes "
            "with tensors only. Convert the array first with torch.as_tensor, or in the collate function"
            " [PIPER-C009]"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and not name.startswith("__array"):
            raise AttributeError(name)
        self._refuse()

    __setattr__ = __getitem__ = __setitem__ = __iter__ = __contains__ = __bool__ = __float__ = __int__ = (
        __index__
    ) = _refuse
    __array__ = __str__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = (
        __rpow__
    ) = _refuse
    __neg__ = __abs__ = __matmul__ = __rmatmul__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = (
        _refuse
    )
    __hash__ = None  # type: ignore[assignment]


def is_array(value: Any) -> bool:
    return type(value) is ArrayProxy


def tensor_of(stand_in: Any) -> torch.Tensor:
    found: torch.Tensor = vars(stand_in)["_tensor"]
    return found


def converted(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """Return the result of a call of `torch.as_tensor`, `asarray` or `tensor` on a placeholder of an array of the
    batch. Return None for any other call."""
    if function not in _CONVERSIONS or not args:
        return None
    # An array in `BatchSpec.carried` is not an input of the graph. `content_of` guards its content, so the
    # array becomes a constant.
    if is_stand_in(args[0]) and is_numeric(array := content_of(args[0])):
        return torch.tensor(
            array.tolist(), dtype=kwargs.pop("dtype", None) or _dtype_of(array.dtype), **kwargs
        )
    if not is_array(args[0]):
        return None
    tensor, (dtype, device) = tensor_of(args[0]), [*args[1:], None, None][:2]
    tensor = tensor.to(kwargs.get("device", device), kwargs.get("dtype", dtype) or tensor.dtype)
    tensor = tensor.clone() if function is torch.tensor or kwargs.get("copy") else tensor
    return tensor.requires_grad_() if kwargs.get("requires_grad") else tensor


@contextlib.contextmanager
def from_numpy() -> Iterator[None]:
    """Within this context, `torch.from_numpy` accepts placeholders of arrays. Torch function modes do not see
    calls of `from_numpy`, so this replaces the function."""
    own = torch.from_numpy
    with replaced_attribute(
        torch, "from_numpy", lambda array: tensor_of(array) if is_array(array) else own(array)
    ):
        yield
