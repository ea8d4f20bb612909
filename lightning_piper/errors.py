"""The errors a user can meet. Every message says what was wrong, where, and what would be right."""


class PiperError(Exception):
    """Base of every error this package raises on purpose.

    Attributes:
        rank: of the process that failed, where the others raise its error as well.
    """

    rank: int | None = None


class CaptureError(PiperError):
    """The training step cannot be captured as one graph; names the user's source line."""


class DirectiveError(PiperError):
    """A directive is malformed or cannot be applied; names the directive's index and field."""


class VerificationError(PiperError):
    """A training DAG or plan does not compute what one device computes."""


class ExecutionError(PiperError, RuntimeError):
    """An instruction of a plan failed while it ran; names the device, the node and its directive.

    A RuntimeError, so that who looks for one that says "out of memory" (BatchSizeFinder) finds it.
    """


class SimulationError(PiperError):
    """Durations or a network that a simulation cannot use; names the entry and what would be accepted."""
