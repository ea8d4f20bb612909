"""The errors that users can see. Every message says what is wrong, where, and what to do."""

from __future__ import annotations

import torch


class PiperError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        rank: Rank of the process that failed, if other processes raise its error, too.
    """

    rank: int | None = None


class CaptureError(PiperError):
    """The training step cannot be captured as one graph. Names the user's source line.

    Attributes:
        late: Earlier steps may have run otherwise than the user's code, or other processes may go on.
        communicates: The code communicates with other processes, which would not answer a process that runs
            only a part of the step.
        raised: The exception of the step's own code, if that is the cause.
    """

    late = communicates = False
    raised: Exception | None = None


class BatchError(PiperError):
    """The batches of the replicas do not fit one captured step. Names the difference.

    Attributes:
        late: Other processes may go on.
    """

    late = False


class DirectiveError(PiperError):
    """A directive is malformed or cannot be applied. Names the directive's index and field."""


class VerificationError(PiperError):
    """A training DAG or plan does not compute what one device computes."""


class ExecutionError(PiperError, RuntimeError):
    """An instruction of a plan failed. Names the device, the node and its directive.

    It is a RuntimeError like torch's own errors, because some code looks for these by their text.
    """


class OutOfMemoryError(ExecutionError, torch.OutOfMemoryError):
    """An `ExecutionError` because memory ran out. Also an instance of torch's class for this."""


class SimulationError(PiperError):
    """Durations or a network that a simulation cannot use. Names the entry and the accepted values."""


class SearchError(PiperError):
    """A search cannot begin, or finds nothing. Names the argument, or the least memory that suffices."""


class NoProgram(SearchError):
    """A search finds no program on these devices, or none that passes the checks.

    Replicas may still run the step uncaptured.
    """


class CheckpointNotFoundError(PiperError, FileNotFoundError):
    """There is no checkpoint at the path to load from."""


class CountsError(PiperError, ValueError):
    """Counts of tokens do not fit the tokens."""


class NodeNotFoundError(PiperError, KeyError):
    """A training DAG does not have this node."""

    def __str__(self) -> str:
        return str(self.args[0])  # str of a KeyError is its `repr`
