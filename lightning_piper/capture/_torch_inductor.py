"""What `_torch` is for captures, for Inductor, which is imported when it is used. Tried on torch 2.13; relied on is:

- `torch._inductor`: `compile_fx_inner` compiles a graph of ATen operations for fake inputs, and gives a boxed function; outputs
  named in `user_visible_output_idxs` keep their strides; `select_decomp_table` says what to decompose; `lowerings` are the
  operations that it has code for, and `make_fallback` has it call one as it is.
- `torch._guards.tracing`, `TracingContext`: tell it which fake tensors are used.
- `FakeTensorMode`: tensors without data. `OpOverload._schema`: which operations write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def inductor_options() -> set[str]:
    """Names of Inductor's options."""
    from torch._inductor import config

    return set(config.get_config_copy())


def _called_as_they_are(graph: torch.fx.Graph) -> None:
    """Has Inductor call operations that write in place, of which it has no code of its own. It would find them by itself, but takes
    that for a mistake where the environment variable CI is set."""
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback

    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable and node.target not in lowerings:
            make_fallback(node.target, layout_constraint=constrain_to_fx_strides, warn=False)


def through_inductor(
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], options: Mapping[str, Any]
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A boxed function of tensors, compiled for inputs like these. Random numbers are drawn as ATen's operations draw them, and
    outputs have the strides that they have now.

    Args:
        run: the function, of ATen operations.
        inputs: without data.
        options: of Inductor, by name.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    # In this process: each rank compiles, and a pool of workers for each of them is more than the cores can do.
    with config.patch({"fallback_random": True, "compile_threads": 1, **options}), torch.no_grad():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(x) for x in inputs]
        traced = make_fx(lambda *args: tuple(run(list(args))), decomposition_table=select_decomp_table())(*fakes)
        (made_of,) = traced.graph.output_node().args
        assert isinstance(made_of, Sequence)
        traced.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(made_of)))
        _called_as_they_are(traced.graph)
        with tracing(TracingContext(mode)):
            made: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = compile_fx_inner(traced, fakes)
    return made
