"""The base class of directives. A directive is a frozen dataclass with one rewrite of the training DAG and a
JSON form.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, NoReturn, Self, TypeVar, get_args, get_type_hints

from lightning_piper.common.argument_names import did_you_mean, problem_of
from lightning_piper.common.limits import DEVICES, NAME, integer, is_name, shown
from lightning_piper.common.user_lines import user_frame
from lightning_piper.errors import DirectiveError
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.filters import Filter, Index, describe, matches, names_split_backward, problem_with
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import SPLIT_BACKWARD, Step

Contract = Literal["bitwise", "reassociated", "bounded", "rounded"]
ENTRY_POINTS = "lightning_piper.directives"
# The attributes that hold `built_at` and `written_for`. They are not fields, so equality and JSON ignore
# them.
LINE, DEGREES = "_built_at", "_written_for"
AFTER_SPLITS = ("offload",)  # the ops of directives that move the values that BI saves for BW
FIELD = re.compile(r"^\(\w+\): field '[^']*': ")  # the beginning of a message of `Directive.refuse`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Directive:
    """One rewrite of the training DAG.

    To write a directive, subclass this class, set `op` and `contract`, implement `apply`, and `register` the
    class.

    Attributes:
        op: The name in JSON.
        contract: The promise of the rewrite. `bitwise`: the rewritten DAG computes the same bits.
            `reassociated`: sums may be taken in another order, or the batch may be cut differently.
            `bounded`: gradients may differ by at most the bound that the reference semantics of its
            operations state (`ops.Reference.loosen`). `rounded`: as `reassociated`, but compared with one
            device whose parameters are rounded in the same way.
    """

    op: ClassVar[str]
    contract: ClassVar[Contract]

    def __new__(cls, *args: Any, **fields: Any) -> Self:
        known = fields.keys() <= cls.__dataclass_fields__.keys()  # then `problem_of` is not needed
        if not known and (problem := problem_of(cls, fields)) is not None:
            raise DirectiveError(f"{problem} [PIPER-D002]")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Record the line of the user's code (`built_at`). Convert integers and containers in fields to
        Python's own types, because fields are written as JSON and checked by `type`.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if (plain := _with_plain_parts(value)) is not value:
                object.__setattr__(self, field.name, plain)
        set_line(self, user_frame() or None)

    @property
    def built_at(self) -> str | None:
        """`file:line` of the user's code that built this directive. None for a directive from JSON, or if no
        line of the user's code was running."""
        return vars(self).get(LINE)

    @property
    def written_for(self) -> str | None:
        """The degrees for which Piper wrote this directive, such as "pp=2, dp=2". None for a directive that the
        user built."""
        return vars(self).get(DEGREES)

    def kind_in(self, program: Sequence[Directive]) -> str:
        """Return the name of the directive in the table by which Piper sorts `program`
        (`directives.sequence`)."""
        return self.op

    @abstractmethod
    def apply(self, dag: TrainingDAG) -> Contract | None:
        """Rewrite `dag` in place.

        Returns:
            The contract that the rewrite keeps on this DAG; None if it is the contract of the class.

        Raises:
            DirectiveError: The directive does not fit this DAG. Raise it with `self.refuse`.
        """

    def prepare(self, step: Step, program: Sequence[Directive]) -> Step:
        """Return the captured step in the form that this directive needs (default: `step` itself).

        Piper calls this method before it applies any directive of the program.
        """
        return step

    def apply_forward(self, dag: TrainingDAG, training: TrainingDAG | None) -> Contract | None:
        """Rewrite the DAG of a forward-only step, such as `validation_step`. By default this calls `apply`.

        Args:
            dag: The DAG of the forward-only step.
            training: The finished training DAG, or None if there was no training step.
        """
        return self.apply(dag)

    def check_fields(self) -> None:
        """Check the values of fields. Raise an error for values that no DAG could accept."""

    def completed(self, program: Sequence[Directive]) -> Directive:
        """Return this directive with its omitted fields, if they follow from the program's other directives.
        By default, return the directive unchanged."""
        return self

    def replica_groups(self) -> Sequence[Sequence[int]]:
        """Return the groups of devices over which this directive divides a batch; empty if it does not divide
        the batch.

        The position in a group is the index of the replica. Samplers need this index before there is a batch.
        """
        return ()

    def member_lines(self, program: Sequence[Directive]) -> Sequence[Sequence[int]]:
        """Return the groups of devices that work on the same samples because of this directive.

        Each group belongs to one replica. The result is empty if the directive does not make such groups.
        """
        return ()

    def refuse(self, field: str, found: str, accepted: str) -> NoReturn:
        """Raise the error of this directive. The caller that applies the program adds the directive's
        index.

        Args:
            field: The name of the field.
            found: The problem, as a sentence without its period.
            accepted: The fix, as a sentence that begins with a verb. The message shows its first letter as
                a capital.
        """
        fix = accepted[:1].upper() + accepted[1:]
        raise DirectiveError(f"({self.op}): field {field!r}: {found}. {fix}")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form. It leaves out each field that has its default value, unless the default comes
        from a factory.
        """
        out: dict[str, Any] = {"op": self.op}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or value != field.default:
                out[field.name] = _plain(value)
        return out

    # Functions for subclasses.

    def check_filter(self, field: str, condition: Any, copies: bool = False) -> None:
        """Raise an error unless the value of a field is a filter. With `copies`, PASS may name copies to and
        from the host."""
        if problem := problem_with(condition, copies):
            found, accepted = problem
            self.refuse(field, found, f"{accepted} [PIPER-D003]")

    def check_device_list(self, field: str, devices: Any, example: str = "[0]") -> None:
        """Raise an error unless the value of a field is a non-empty list of distinct devices from 0 to
        `DEVICES` - 1. The error shows `example`."""
        good = (
            isinstance(devices, list | tuple) and devices and all(type(d) is int and d >= 0 for d in devices)
        )
        if not good or len(set(devices)) != len(devices):
            self.refuse(
                field,
                f"{shown(devices)} is not a list of distinct devices",
                f"give distinct device indices >= 0, such as {example} [PIPER-D003]",
            )
        if max(devices) >= DEVICES:
            self.refuse(
                field, f"{shown(max(devices))} is not a device", f"give indices below {DEVICES} [PIPER-D003]"
            )

    def check_groups(self, field: str, devices: Any) -> None:
        """Call `check_device_list` for a field's group of devices, or for each group in a field's list of
        groups."""
        nested = isinstance(devices, list | tuple) and devices and isinstance(devices[0], list | tuple)
        for group in devices if nested else [devices]:
            self.check_device_list(field, group, "[0, 1]")

    def check_stream(self, field: str, default: str) -> None:
        """Raise an error unless the value of a field names a stream. The error shows `default` as an
        example."""
        stream = getattr(self, field)
        if not is_name(stream):
            self.refuse(
                field,
                f"{shown(stream)} is not a stream",
                f"give a name of 1 to {NAME} printable characters, such as {default!r} [PIPER-D003]",
            )

    def select(
        self, dag: TrainingDAG, field: str, condition: Filter, index: Index | None = None
    ) -> list[Chunk]:
        """Return the chunks that the filter `condition` matches. Messages name `field`, the directive's field
        that holds the filter. `index` is an index of the DAG's present chunks (default: a new index).

        A filter that matches nothing is an error, with three exceptions that give an empty list. A smaller
        batch may not have the microbatch. A part of the step may not have the pass: a frozen first stage does
        not have a backward pass, and a first stage does not have a `BI`. A forward-only step may not have any
        part of the training step. `BI` or `BW` of a backward pass that is not split is an error, and so is
        `B` of a split one.
        """
        index = index or Index(dag)
        chunks = index.select(condition)
        if chunks or dag.forward_only or names_absent(dag, condition):
            return chunks
        anyhow = {tag: wanted for tag, wanted in condition.items() if tag != "PASS"}
        there = index.select(anyhow) if "PASS" in condition else []
        nothing = f"{describe(condition)} matches nothing"
        if not there:
            if anyhow and all(index.select({tag: wanted}) for tag, wanted in anyhow.items()):
                self.refuse(
                    field,
                    f"{nothing}, because no chunk has all of these tags",
                    f"choose tags that one chunk has together: {_combinations_in(dag)} [PIPER-D004]",
                )
            known = {tag for chunk in dag.of_type(Chunk) for tag in chunk.tags}
            missing = sorted(tag for tag, wanted in anyhow.items() if tag not in known and wanted != "-")
            source = (
                did_you_mean(missing[0], known)
                or f". Tag {missing[0]!r} needs piper.annotate in the module, or a split before this directive"
                if missing
                else ""
            )
            self.refuse(field, nothing, f"choose from the step's tags: {_tags_in(dag)}{source} [PIPER-D004]")
        named = names_split_backward(condition)
        for chunk in there:
            if named and chunk.kind == "B":
                advice = "put an order that names BI or BW before this directive"
                if self.op not in AFTER_SPLITS:
                    advice = "leave PASS out of the filter"
                    if self.op == "place":
                        advice = f"name B instead, or {advice}"
                self.refuse(field, f"{nothing}: {chunk.label} is not split", f"{advice} [PIPER-D008]")
            if chunk.kind in SPLIT_BACKWARD and not named and matches(condition, {**chunk.tags, "PASS": "B"}):
                by = f"{nothing}: directive {chunk.origin} has split B into BI and BW, such as {chunk.label}"
                self.refuse(field, by, "name BI and BW instead [PIPER-D008]")
        return chunks


def names_absent(dag: TrainingDAG, condition: Filter) -> bool:
    """Return whether a filter names microbatches that are absent, because the batch is smaller than the batch
    for which the program was written."""
    for tag, absent in dag.program.absent.items():
        wanted = condition.get(tag)
        if any(w in absent for w in (wanted if isinstance(wanted, list | tuple) else [wanted])):
            return True
    return False


def _combinations_in(dag: TrainingDAG) -> str:
    """Return the combinations of tags of a DAG's chunks, without PASS, as text for messages."""
    found = dict.fromkeys(
        describe({tag: index for tag, index in chunk.tags.items() if tag != "PASS"})
        for chunk in dag.of_type(Chunk)
    )
    return ", ".join(list(found)[:8]) + (", ..." if len(found) > 8 else "")


def _tags_in(dag: TrainingDAG) -> str:
    """Return the tags of a DAG's chunks with their values, as text for messages."""
    found: dict[str, set[Any]] = {}
    for chunk in dag.of_type(Chunk):
        for tag, value in chunk.tags.items():
            found.setdefault(tag, set()).add(value)
    shown = []
    for tag, values in sorted(found.items()):
        ordered = sorted(values, key=str) if tag == "PASS" else sorted(values)
        names = ", ".join(map(str, ordered[:8])) + (f", ... {ordered[-1]}" if len(ordered) > 8 else "")
        shown.append(f"{tag} in {{{names}}}")
    return "; ".join(shown)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _with_plain_parts(value: Any, depth: int = 0) -> Any:
    """Return a value whose integers and containers are Python's, converted from numpy or from a configuration
    (Hydra).

    All other values are returned unchanged.
    """
    if value is None or isinstance(value, str | bool | float) or type(value) is int:
        return value
    if (number := integer(value)) is not None:
        return number
    if depth == 4:  # fields are not nested deeper
        return value
    if isinstance(value, Mapping):
        found = {key: _with_plain_parts(item, depth + 1) for key, item in value.items()}
        return (
            value
            if isinstance(value, dict) and all(found[key] is item for key, item in value.items())
            else found
        )
    if type(value) in (list, tuple):
        items = [_with_plain_parts(item, depth + 1) for item in value]
        return value if all(a is b for a, b in zip(items, value, strict=True)) else type(value)(items)
    if isinstance(value, Sequence) and not isinstance(value, list | tuple | bytes | bytearray):
        return [_with_plain_parts(item, depth + 1) for item in value]
    return value


def set_line(directive: Directive, line: str | None) -> None:
    """Set the property `built_at` of a directive."""
    object.__setattr__(directive, LINE, line)


def set_degrees(directive: Directive, degrees: str | None) -> None:
    """Set the property `written_for` of a directive."""
    object.__setattr__(directive, DEGREES, degrees)


def error_at(index: int, directive: Directive | None, error: DirectiveError | str) -> DirectiveError:
    """Return `error` with the index of its directive, and with a note that names the line that built the
    directive, if this line is known.

    If Piper wrote the directive for degrees that the user gave, the message names the degrees instead.
    """
    if directive is not None and directive.written_for is not None:
        return error_of(directive.written_for, FIELD.sub("", str(error)))
    found = DirectiveError(f"directive {index} {error}")
    if directive is not None and directive.built_at is not None:
        found.add_note(f"directive {index} ({directive.op}) was built at {directive.built_at}")
    return found


def one_microbatch(degrees: str) -> str:
    """Return how to make the program of `degrees` leave the batch whole, as text for messages."""
    # The schedule dualpipev needs several microbatches. zbv has as many stages.
    return f"give microbatches=1{', schedule=' + repr('zbv') if 'dualpipev' in degrees else ''}"


def error_of(degrees: str, message: str) -> DirectiveError:
    """Return an error of a program that Piper wrote for `degrees`. The message names the degrees."""
    return DirectiveError(f"PiperStrategy({degrees}): {message}")


D = TypeVar("D", bound=type[Directive])
_registry: dict[str, type[Directive]] = {}


def register(cls: D) -> D:
    """Register a directive class under its `op`, so that JSON can name it. This is a class decorator.

    Raises:
        DirectiveError: `op` or `contract` is missing or not valid, or a class with another name has the same
            op. A class with the same name replaces the earlier one, as when a notebook cell runs again.
    """
    check_class(cls)
    taken = _registry.get(cls.op)
    if taken is not None and taken.__qualname__ != cls.__qualname__:
        raise DirectiveError(
            f"op {cls.op!r} is taken by {taken.__module__}.{taken.__qualname__}. Choose another name"
            " [PIPER-D019]"
        )
    _registry[cls.op] = cls
    # The types of inherited fields are texts with names of the base class's module. Readers of `__init__`, such as
    # `jsonargparse`, would look for these names in this class's module.
    with contextlib.suppress(NameError):  # a name that is imported for type checkers only
        types, texts = get_type_hints(cls), cls.__init__.__annotations__
        texts.update({name: types[name] for name in texts.keys() & types.keys()})
    return cls


def check_class(cls: type[Directive]) -> None:
    """Raise an error for a directive class without a valid `op` and `contract`."""
    op = getattr(cls, "op", None)
    if not isinstance(op, str) or not op:
        found = f"has the op {shown(op)}" if op else "has no op"
        raise DirectiveError(f"{cls.__name__} {found}. Give it a class attribute op = 'name' [PIPER-D019]")
    contract = getattr(cls, "contract", None)
    if contract not in get_args(Contract):
        found = f"has the contract {shown(contract)}" if contract else "has no contract"
        raise DirectiveError(
            f"{cls.__name__} {found}. Give it contract = 'bitwise', 'reassociated', 'bounded' or 'rounded' [PIPER-D019]"
        )


def find(op: str) -> type[Directive] | None:
    """Return the directive class of an op; None if the op is unknown.

    Looks in installed packages only if no registered class has the op, because this search takes
    milliseconds.
    """
    return _registry.get(op) or known().get(op)


def known() -> dict[str, type[Directive]]:
    """Register the directives of installed packages (entry points of group `lightning_piper.directives`), and
    return all registered classes by op. The result is the registry itself: do not change it.
    """
    for point in entry_points(group=ENTRY_POINTS):
        if point.name not in _registry:
            register(point.load())
    return _registry
