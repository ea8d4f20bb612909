"""Compile the code of passes for the machine that runs it.

Each pass is one graph of ATen operations, so Piper calls Inductor directly, without frame evaluation and
without guard checks in a step. Fused kernels round at different points than the captured operations, so results
are equal within the rounding of the dtype, but not bitwise. Compiled code also draws random numbers with
ATen's operations, so dropout masks are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.capture.torch_private import _torch_inductor
from lightning_piper.common.limits import shown
from lightning_piper.common.units import counted
from lightning_piper.errors import PiperError
from lightning_piper.ir.boxed_code import RUNS_KEY
from lightning_piper.ir.regions import Code

# Code of a pass: it takes the list of arguments, empties it, and returns the outputs, as `Code.run` does.
Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def checked_options(value: Any) -> Mapping[str, Any] | None:
    """Return Inductor's options from the argument of `PiperStrategy(compile=...)`.

    Returns:
        For a dict, a copy of it. For True, an empty dict: Inductor uses its default options. For False, None:
        Piper does not compile.

    Raises:
        PiperError: the argument is neither a bool nor a dict, or Inductor does not have one of the options.
    """
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise PiperError(
            f"PiperStrategy(compile={shown(value)}) is not usable. Give True, False, or a dict of Inductor's options"
            " [PIPER-S001]"
        )
    unknown = sorted(map(str, value.keys() - _torch_inductor.inductor_options()))
    if unknown:
        raise PiperError(
            f"PiperStrategy(compile=...): Inductor has no option {unknown[0]!r}. Give options of "
            "torch._inductor.config [PIPER-S001]"
        )
    return dict(value)


class ChunkCompiler:
    """A compiler of passes, which compiles each `Code` object once.

    Each process runtime has one if the user asks for compilation, and calls it with the code of a pass.

    Args:
        options: Inductor's options by name.
        device: the device on which the code will run.

    Attributes:
        compiled: the number of code objects that were compiled.
        refused: reason -> number of code objects that were not compiled for this reason. They run as
            captured. Code without operations does not count.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self._options, self._device = options, device
        # `id` of a code object -> (the object, its function). The entry keeps the object alive, so no other
        # object gets its id.
        self._made: dict[int, tuple[Code, Function]] = {}
        self.compiled = 0
        self.refused: Counter[str] = Counter()

    def __call__(self, code: Code) -> Function:
        """Return the compiled function of a code object, or `code.run` if the code is not compiled."""
        if id(code) not in self._made:
            self._made[id(code)] = code, self._function(code)
        return self._made[id(code)][1]

    def _function(self, code: Code) -> Function:
        """Compile a code object, and return its compiled function.

        Return `code.run` instead if the graph is empty. Also return it, and count the reason in `refused`, if the
        code runs the user's code uncaptured, or if Inductor raises an error.
        """
        if not len(code.graph.nodes):
            return code.run
        if any(RUNS_KEY in node.meta for node in code.graph.nodes):
            self.refused["uncaptured code of the step"] += 1
            return code.run
        inputs = [
            torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self._device) for x in code.inputs
        ]
        try:
            made = _torch_inductor.through_inductor(code.run, inputs, self._options)
        except Exception as error:  # the uncompiled code works whatever error the compiler raises
            text = (str(error) or type(error).__name__).splitlines()[0]
            self.refused[f"an error of Inductor ({type(error).__name__}: {text[:200]})"] += 1
            return code.run
        self.compiled += 1
        return made

    @property
    def report(self) -> str | None:
        """A message for the user about passes that were not compiled, with the most common reason and the number
        of passes that have it. None if there are no such passes."""
        if not self.refused:
            return None
        ((reason, number),) = self.refused.most_common(1)
        total = self.refused.total() + self.compiled
        others = self.refused.total() - number
        more = f", and {others} for other reasons" if others else ""
        return (
            f"compile: {number} of {counted(total, 'pass')} {'runs' if number == 1 else 'run'} uncompiled, because of "
            f"{reason}{more}. The results are the same. Remove this cause, or leave compile= out [PIPER-W018]"
        )
