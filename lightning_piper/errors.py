"""The errors a user can meet. Every message says what was wrong, where, and what would be right."""

from __future__ import annotations

import torch


class PiperError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        rank: of the process that failed, where the others raise its error as well.
    """

    rank: int | None = None


class CaptureError(PiperError):
    """The training step cannot be captured as one graph; names the user's source line.

    Attributes:
        late: steps may have run already as something else than the user's code, or other processes may go on.
        communicates: with other processes, which would not answer one that runs a part of the step.
        raised: what the step's own code has raised, if that is why.
    """

    late = communicates = False
    raised: Exception | None = None


class BatchError(PiperError):
    """The batches of the replicas do not fit one captured step; names where they differ.

    Attributes:
        late: other processes may go on.
    """

    late = False


class DirectiveError(PiperError):
    """A directive is malformed or cannot be applied; names the directive's index and field."""


class VerificationError(PiperError):
    """A training DAG or plan does not compute what one device computes."""


class ExecutionError(PiperError, RuntimeError):
    """An instruction of a plan failed while it ran; names the device, the node and its directive. A RuntimeError, as torch's own
    errors are, for those who look for one by its text."""


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """An `ExecutionError` for want of memory, of the class that torch gives it where it has one."""


class SimulationError(PiperError):
    """Durations or a network that a simulation cannot use; names the entry and what would be accepted."""


class SearchError(PiperError):
    """A search that cannot begin, or that finds nothing; names the argument, or the least memory that would do."""


class NoProgram(SearchError):
    """A search finds no program on so many devices, or none that passes; replicas may still run the step as it is."""


class CheckpointNotFoundError(PiperError, FileNotFoundError):
    """There is no checkpoint where one is to be loaded from."""


class CountsError(PiperError, ValueError):
    """Counts of tokens do not fit the tokens."""


class NodeNotFoundError(PiperError, KeyError):
    """A training DAG has no such node."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError shows its `repr`
