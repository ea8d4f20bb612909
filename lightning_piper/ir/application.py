"""The state of a program while its directives are applied to a graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class Application:
    """A program's application to a graph, up to the current directive.

    Attributes:
        partial: Whether the batch is smaller than the batch for which the program was written. A split may
            then make fewer microbatches.
        ops: Names of the program's directives, by index. Messages show them.
        replicas: Number of replicas among which the program divides the batch.
        degrees: The degrees for which Piper wrote the program; None if the user wrote it.
        index: Index of the directive that is being applied; None between directives.
        absent: Tag -> indices that a partial batch does not have. A filter that names them may match nothing.
    """

    partial: bool = False
    ops: tuple[str, ...] = ()
    replicas: int = 1
    degrees: str | None = None
    index: int | None = None
    absent: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> Application:
        return replace(self, absent={tag: set(indices) for tag, indices in self.absent.items()})
