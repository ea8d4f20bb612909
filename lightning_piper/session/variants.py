"""The captures of one step, by the kind of batch and by the Python state that it has read.

A capture is valid while its guards hold. If no capture is valid, the step is captured once more, and the
failed guards say why. All processes run the same Python code on the same state, so they choose the same
capture. `processes.agreement` compares the choices of the processes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Hashable

from lightning_piper.capture import BatchSpec, History
from lightning_piper.capture.python_state.rollback import rollback_on_failure
from lightning_piper.compiler import Compiled
from lightning_piper.errors import CaptureError
from lightning_piper.processes.world import World

MANY = 16  # the number of captures for one kind of batch at which the user is warned


class Variants:
    """The captures of one step, and the choice among them.

    Attributes:
        history: Facts learned from earlier captures.
        number: Number of the capture that the last `find` or `add` returned, counted over all kinds of
            batches; -1 if `find` returned none.
        retraced: Whether `ran` has just traced the step again.

    Args:
        step: Name of the method.
        capture: Captures the step.
    """

    def __init__(self, step: str, capture: Callable[[BatchSpec, History], Compiled], world: World) -> None:
        self.history = History()
        self.number, self.retraced = -1, False
        self._step, self._capture, self._world = step, capture, world
        # kind of batch -> (number, capture) of its captures, the last used first
        self._known: dict[Hashable, list[tuple[int, Compiled]]] = {}
        self._runs: Counter[int] = Counter()  # number of a capture -> how often it has run
        self._count = 0  # number of captures of all kinds

    @property
    def programs(self) -> list[Compiled]:
        return [compiled for found in self._known.values() for _, compiled in found]

    def find(self, kind: Hashable) -> Compiled | None:
        """Return the capture for this kind of batch whose guards hold; None if there is no such capture. The
        capture that was used last is checked first."""
        known = self._known.get(kind, [])
        for index, (number, compiled) in enumerate(known):
            if compiled.step.reads.hold():
                self.number = number
                if index:
                    known.insert(0, known.pop(index))
                return compiled
        self.number = -1
        return None

    def state(self, compiled: Compiled | None) -> int:
        """Return a checksum of the capture's number and of the Python numbers that the step reads. If
        processes read different numbers, their checksums differ."""
        numbers = (
            () if compiled is None else tuple(get() for get, _ in compiled.step.reads.inputs.numbers.values())
        )
        return zlib.crc32(repr((self.number, numbers)).encode())

    def add(self, kind: Hashable, batch_spec: BatchSpec) -> Compiled:
        """Capture the step for this kind of batch, because no capture is valid. Return the new capture, and
        set `number`. At `MANY` captures for one kind of batch, warn the user."""
        known = self._known.setdefault(kind, [])
        if known:
            self.history.learn(known[0][1].step.reads)
        compiled = self._capture(batch_spec, self.history)
        self.history = compiled.step.reads.history
        self.number, self._count = self._count, self._count + 1
        known.insert(0, (self.number, compiled))
        if len(known) == MANY:
            self._world.warn(
                f"{self._step} was captured {MANY} times for one kind of batch, because Python values that "
                f"it reads changed: {self._causes()}. Each capture takes as long as the first step. Keep such a value in "
                "a buffer (register_buffer), write to the buffer in a hook, and let the step compute with this tensor. "
                "New values then need no capture [PIPER-W017]"
            )
        return compiled

    def ran(self, compiled: Compiled, first_of_epoch: bool) -> CaptureError | None:
        """Count a step that is about to run. In the first step of each epoch, and after 1, 2, 4, 8, ... runs
        of this capture, trace the step again to check that it has not changed. Do not trace it again before
        the first run of a capture.

        Returns:
            The error if the step has changed; None otherwise.
        """
        runs, self._runs[self.number] = self._runs[self.number], self._runs[self.number] + 1
        self.retraced = bool(runs) and (first_of_epoch or runs & (runs - 1) == 0)
        if self.retraced:
            try:
                with rollback_on_failure(compiled.step.module, self._step):
                    compiled.step.retrace()
            except CaptureError as error:
                return error
        return None

    def told(self) -> str | None:
        """Return a text for the user: how often the step was captured, and why. None if no Python value made
        a new capture necessary."""
        if not self.history.causes:
            return None
        again = sum(len(found) - 1 for found in self._known.values())
        return (
            f"{self._step} was captured {again + 1} times, because Python values that it reads changed: "
            f"{self._causes()}"
        )

    def _causes(self) -> str:
        return ", ".join(f"{where} ({count} times)" for where, count in self.history.causes.most_common(5))
