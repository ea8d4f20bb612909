"""What is known of a program while its directives are applied to a graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass
class Application:
    """The application of a program, as far as it has come.

    Attributes:
        partial: the batch is smaller than the one the program was written for; a split may then give fewer pieces.
        ops: names of its directives, by index, for messages.
        index: of the directive that is being applied; None between directives.
        absent: tag -> indices that a partial batch does not have; filters may name them in vain.
    """

    partial: bool = False
    ops: tuple[str, ...] = ()
    index: int | None = None
    absent: dict[str, set[int]] = field(default_factory=dict)

    def copy(self) -> Application:
        return replace(self, absent={tag: set(indices) for tag, indices in self.absent.items()})
