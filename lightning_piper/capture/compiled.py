"""The code of passes, compiled for the machine that it runs on.

Each pass is one graph of ATen operations, so Inductor is called with it directly: no frame is watched, and no guard is asked in a
step. Fused kernels round in places of their own: results are equal within the rounding of the dtype, not to the bit. Random numbers
are drawn by ATen's own operations, so masks are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_piper.capture import _torch_inductor
from lightning_piper.errors import PiperError
from lightning_piper.ir.boxed import RUNS_KEY
from lightning_piper.ir.regions import Code
from lightning_piper.limits import shown

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def checked_options(value: Any) -> Mapping[str, Any] | None:
    """What `PiperStrategy(compile=...)` was given -> Inductor's options, None where nothing is compiled.

    Raises:
        PiperError: it is neither a bool nor a dict of Inductor's options.
    """
    if isinstance(value, bool):
        return {} if value else None
    if not isinstance(value, Mapping):
        raise PiperError(f"PiperStrategy(compile={shown(value)}): give True, False, or a dict of Inductor's options")
    unknown = sorted(map(str, value.keys() - _torch_inductor.inductor_options()))
    if unknown:
        raise PiperError(f"PiperStrategy(compile=...): Inductor has no option {unknown[0]!r}; see torch._inductor.config")
    return dict(value)


class ChunkCompiler:
    """Compiles the code of passes, each once.

    Args:
        options: of Inductor, by name.
        device: on which the code will run.

    Attributes:
        compiled: how many passes were compiled.
        refused: why others run as they were captured -> how many.
    """

    def __init__(self, options: Mapping[str, Any], device: torch.device) -> None:
        self._options, self._device = options, device
        self._made: dict[int, tuple[Code, Function]] = {}  # by identity; the code is kept, so that no other one gets its number
        self.compiled = 0
        self.refused: Counter[str] = Counter()

    def __call__(self, code: Code) -> Function:
        """The compiled code, or the code as it is where it cannot be compiled."""
        if id(code) not in self._made:
            self._made[id(code)] = code, self._function(code)
        return self._made[id(code)][1]

    def _function(self, code: Code) -> Function:
        if not len(code.graph.nodes) or any(RUNS_KEY in node.meta for node in code.graph.nodes):
            self.refused["they run the user's code as it is"] += 1
            return code.run
        inputs = [torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=self._device) for x in code.inputs]
        try:
            made = _torch_inductor.through_inductor(code.run, inputs, self._options)
        except Exception as error:  # whatever a compiler meets, the code as it was captured runs
            text = (str(error) or type(error).__name__).splitlines()[0]
            self.refused[f"{type(error).__name__}: {text[:200]}"] += 1
            return code.run
        self.compiled += 1
        return made

    @property
    def report(self) -> str | None:
        """What was not compiled, for the user; None if all was."""
        if not self.refused:
            return None
        reason, _ = self.refused.most_common(1)[0]
        of = f"{self.refused.total()} of {self.refused.total() + self.compiled}"
        return f"compile: {of} passes run as they were captured, for they could not be compiled ({reason})"
