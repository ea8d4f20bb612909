"""torch's private names for compiling with Inductor, which is imported at its first use.

Tested with torch 2.13.

Each entry states the behavior that the package relies on.

- `torch._inductor`: `compile_fx_inner` compiles a graph of ATen operations for fake inputs, and returns a
  boxed function. Outputs named in `user_visible_output_idxs` keep their strides. `select_decomp_table`
  returns the decompositions to apply. `lowerings` holds the operations that Inductor generates code for.
  `make_fallback` makes Inductor call an operation unchanged.
- `torch._guards.tracing`, `TracingContext`: tell Inductor which fake tensors are in use.
- `FakeTensorMode`: tensors without data.
- `OpOverload._schema`: which operations write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def inductor_options() -> set[str]:
    """Return the names of Inductor's options."""
    from torch._inductor import config

    return set(config.get_config_copy())


def _called_as_they_are(graph: torch.fx.Graph) -> None:
    """Let Inductor call operations that write in place unchanged, if it generates no code for them.

    Inductor would find these operations itself, but it raises an error for each of them if the environment
    variable CI is set.
    """
    from torch._inductor.lowering import constrain_to_fx_strides, lowerings, make_fallback

    for node in graph.nodes:
        if (
            isinstance(node.target, torch._ops.OpOverload)
            and node.target._schema.is_mutable
            and node.target not in lowerings
        ):
            make_fallback(node.target, layout_constraint=constrain_to_fx_strides, warn=False)


def through_inductor(
    run: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    options: Mapping[str, Any],
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile `run` for inputs like these. Return a function that takes a list of tensors and clears it (a
    boxed function).

    The compiled function draws the same random numbers as ATen's operations. Its outputs have the strides of
    `run`'s outputs.

    Args:
        run: the function, which calls ATen operations.
        inputs: tensors with the inputs' shapes, strides and dtypes; their values do not matter.
        options: Inductor's options by name.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    # No worker pool, because each rank compiles: a pool for each rank would overload the cores.
    with config.patch({"fallback_random": True, "compile_threads": 1, **options}), torch.no_grad():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = [mode.from_tensor(x) for x in inputs]
        traced = make_fx(lambda *args: tuple(run(list(args))), decomposition_table=select_decomp_table())(
            *fakes
        )
        (made_of,) = traced.graph.output_node().args
        assert isinstance(made_of, Sequence)
        traced.graph.output_node().meta["user_visible_output_idxs"] = list(range(len(made_of)))
        _called_as_they_are(traced.graph)
        with tracing(TracingContext(mode)):
            made: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = compile_fx_inner(traced, fakes)
    return made
