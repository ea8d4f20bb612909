"""The functions of torch's Python interface that call operations.

`torch.add(x, y)` and `torch.ops.aten.add.Tensor(x, y)` call the same kernel. The function parses its arguments in
about half of the time, 1 to 2 microseconds less for each call, so generated code calls functions.

This file relies on one private name of torch: `torch._C.DisableTorchFunction` is a context in which functions of
torch do not call `__torch_function__` of modes and of subclasses of tensors. Calls of operations never do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

without_torch_function: Callable[[], Any] = torch._C.DisableTorchFunction

# Operations whose function takes the same arguments and calls this operation and no other one.
# `tests/ir/test_torch_functions.py` has a call of each.
_NAMES = """
    abs.default add.Tensor addmm.default amax.default amin.default baddbmm.default bitwise_and.Tensor bitwise_not.default
    bitwise_or.Tensor bmm.default cat.default clamp.default clone.default convolution.default cos.default cumsum.default
    detach.default div.Tensor embedding.default eq.Scalar eq.Tensor erf.default exp.default expand.default gather.default
    ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_select.default le.Scalar le.Tensor log.default logical_and.default
    logical_not.default logical_or.default lt.Scalar lt.Tensor masked_fill.Scalar masked_fill.Tensor maximum.default mean.default
    mean.dim minimum.default mm.default mul.Tensor native_dropout.default native_group_norm.default native_layer_norm.default
    ne.Scalar ne.Tensor neg.default permute.default pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default relu.default
    repeat.default reshape.default rsqrt.default scatter_add.default select.int sigmoid.default sin.default sqrt.default
    squeeze.dim sub.Tensor sum.default sum.dim_IntList t.default tanh.default transpose.int unsqueeze.default view.default
    where.self
"""


def _functions() -> dict[torch._ops.OpOverload[..., Any], Callable[..., Any]]:
    found = {}
    for name in _NAMES.split():
        packet, overload = name.split(".")
        # Some functions exist only as a method.
        function = getattr(torch, packet, None) or getattr(torch.Tensor, packet)
        found[getattr(getattr(torch.ops.aten, packet), overload)] = function
    return found


FUNCTIONS = _functions()
