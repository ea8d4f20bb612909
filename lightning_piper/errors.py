"""The errors that users can see."""

from __future__ import annotations

import math
import re

import torch


class PiperError(Exception):
    """The base class of all errors that this package raises on purpose.

    Attributes:
        rank: Rank of the process that failed, if other processes also raise its error.
    """

    rank: int | None = None

    @property
    def code(self) -> str | None:
        """The code of this kind of mistake, such as "PIPER-D004". docs/codes.md explains each code.

        The message contains the code. None if the message has no code, as in a directive that you wrote.
        """
        shown = re.findall(r"\[(PIPER-[A-Z]\d{3})\]", str(self))
        return shown[-1] if shown else None


class CaptureError(PiperError):
    """An error raised if a step cannot be captured, or if a function for the step does not accept its arguments.

    Attributes:
        late: Whether it is too late to run the step uncaptured: earlier steps may differ from the user's
            code, or other processes may continue.
        communicates: Whether the code communicates with other processes, which would not answer a process
            that runs only a part of the step.
        raised: The exception of the step's own code, if this exception is the cause.
    """

    late = communicates = False
    raised: Exception | None = None


class LongStepError(CaptureError):
    """An error raised if a capture would take minutes, and the step may run uncaptured instead."""


class BatchError(PiperError):
    """An error raised if the replicas' batches do not fit one captured step.

    Attributes:
        late: Whether other processes may continue.
    """

    late = False


class DirectiveError(PiperError):
    """An error raised if a directive or a degree is malformed or does not fit."""


class VerificationError(PiperError):
    """An error raised if a training DAG or a plan is wrong, or if its result cannot be compared with one device."""


class ExecutionError(PiperError, RuntimeError):
    """An error raised if a step fails while it runs, for example because a gradient is NaN.

    It is a RuntimeError like torch's own errors, because some code catches RuntimeErrors and reads their
    texts.
    """


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """An `ExecutionError` raised if memory runs out. It is also an instance of torch's class for this."""


class SimulationError(PiperError):
    """An error raised if a simulation cannot use its durations, its network or a hardware file."""


class SearchError(PiperError):
    """An error raised if a search cannot begin or finds nothing.

    Attributes:
        memory: The bytes of each device that are enough for a program, if the error names them; otherwise infinite.
    """

    memory: float = math.inf


class NoProgram(SearchError):
    """An error raised if a search finds no program on these devices, or no program that passes the checks.

    Replicas may still run the step uncaptured.
    """


class CheckpointNotFoundError(PiperError, FileNotFoundError):
    """An error raised if there is no checkpoint at the path to load."""


class CountsError(PiperError, ValueError):
    """An error raised if counts of tokens do not fit the tokens."""


class NodeNotFoundError(PiperError, KeyError):
    """An error raised if a training DAG does not have a node."""

    def __str__(self) -> str:
        return str(self.args[0])  # str of a KeyError is its `repr`


def with_notes(error: Exception) -> str:
    """Return an error's message and its notes as one text, such as for the message of a second error."""
    return "; ".join((str(error), *getattr(error, "__notes__", ())))
