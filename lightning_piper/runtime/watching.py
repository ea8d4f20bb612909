"""Runs the code of a plan's passes operation by operation, and shows every value (`Watch`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Interpreter, Node

from lightning_piper.capture.joint.sizes import fill_sizes
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.regions import Code
from lightning_piper.ops.base import Bound
from lightning_piper.ops.instruction import Instruction
from lightning_piper.plan.plan import Plan

# Called after each operation with the instruction that runs, the operation, its inputs, and its result.
See = Callable[[Instruction, Node, Sequence[torch.Tensor], Any], None]


class Watch:
    """A watch over the operations of one device's plan. The watched code gives the bits of the code itself.

    Pass `function` as the `watch` of an `Executor`, and set its `observer` to `observe(plan)`.

    Args:
        see: Called after each operation.
    """

    def __init__(self, see: See) -> None:
        self._see = see
        self._at: Instruction | None = None  # the instruction that runs

    def observe(self, plan: Plan) -> Callable[[Sequence[Bound], Sequence[int]], list[Bound]]:
        """Return an `Executor.observer` that notes which instruction runs."""

        def noted(call: Bound, index: int) -> Bound:
            def run() -> object:
                self._at = plan.instructions[index]
                return call()

            return run

        return lambda bound, source: [noted(call, i) for call, i in zip(bound, source, strict=True)]

    def function(self, code: Code) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        """Return a function that runs in place of `code.run`. Code without a graph, which runs the user's
        code uncaptured, is not watched."""
        run = code.run.func if isinstance(code.run, partial) else code.run
        module = getattr(run, "__self__", None)
        if not isinstance(module, torch.fx.GraphModule):
            return code.run

        def watched(args: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            given = list(args)
            args.clear()
            found: Sequence[torch.Tensor] = _Watched(module, code, self._seen).run(
                *given, enable_io_processing=False
            )
            return found

        return watched

    def _seen(self, node: Node, inputs: Sequence[torch.Tensor], value: Any) -> None:
        assert self._at is not None
        self._see(self._at, node, inputs, value)


class _Watched(Interpreter):
    """An interpreter that shows the result of every operation."""

    def __init__(
        self,
        module: torch.fx.GraphModule,
        code: Code,
        seen: Callable[[Node, Sequence[torch.Tensor], Any], None],
    ) -> None:
        super().__init__(module, graph=code.graph)
        self._sizes, self._seen = code.sizes, seen

    def run_node(self, n: Node) -> Any:
        args, kwargs = fill_sizes(self.fetch_args_kwargs_from_env(n), self._sizes)
        if (runs := n.meta.get(RUNS_KEY)) is not None:
            value = runs(*args, **kwargs)
        else:
            value = getattr(self, n.op)(n.target, args, kwargs)
        if n.op == "call_function":
            read = {name: x for name, x in kwargs.items() if name != "out"}  # `out` has no values yet
            self._seen(n, tensors_in((args, read)), value)
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value of an operation, such as a tuple of results."""
    return [x for x in _torch.tree_leaves(value) if isinstance(x, torch.Tensor)]
