"""Region tags: the part of the model to which a piece of work belongs.

Tags use `torch.fx.traceback.annotate`, which writes them into the metadata of every graph node traced inside
the context, forward and backward. Outside of a capture the context does nothing.
"""

from __future__ import annotations

import fnmatch
import inspect
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_piper.common.limits import INDEX, NAME, integer, is_name, kind_of, shown
from lightning_piper.errors import CaptureError

# Keys of a graph node's metadata. `META_KEY`: tag -> index. `SOURCE_KEY`: the line or module that opened the
# innermost region. `LAYER_KEY`: (number, name) of the repeated block that made the node.
META_KEY = "piper"
LAYER = "LAYER"  # the tag of repeated blocks, in a step without annotations
SOURCE_KEY = "piper_source"
LAYER_KEY = "piper_layer"
RESERVED = ("PASS",)  # tags that only Piper gives

# `_counters`: tag -> next number in the current traced run; None outside of a traced run. `_entered`: the
# open regions that hooks of modules opened, the outermost first.
_counters: Counter[str] | None = None
_entered: list[tuple[_EnterRegion, AbstractContextManager[None]]] = []


@dataclass
class AnnotationRecord:
    """The annotations of a traced run up to now.

    Attributes:
        tags: How often the step has entered an annotation. Each entry counts, also of the same annotation.
        marks: Number of calls of repeated blocks (`marking`).
        last: The annotation opened last, as in the metadata of graph nodes. Before the first annotation, the
            mark of the repeated block that was called last; empty if there is neither.
    """

    tags: int = 0
    marks: int = 0
    last: Mapping[str, Any] = field(default_factory=dict)


_opened = AnnotationRecord()


def opened() -> AnnotationRecord:
    """Return the record of the annotations of the current traced run."""
    return _opened


@contextmanager
def numbering() -> Iterator[None]:
    """A context in which annotations take effect. Annotations without an index are numbered from zero.

    Each traced run of the step enters this context once.
    """
    global _counters, _entered, _opened
    before = _counters, _entered, _opened
    _counters, _entered, _opened = Counter(), [], AnnotationRecord()
    try:
        yield
    finally:
        # An exception may leave regions open: during tracing, modules call no hooks after an exception.
        _leave(0)
        _counters, _entered, _opened = before


def _leave(depth: int) -> None:
    """Close the innermost regions that hooks opened, until `depth` of these regions are open."""
    while len(_entered) > depth:
        _entered.pop()[1].__exit__(None, None, None)


def annotate(tag: str, index: int | None = None) -> AbstractContextManager[None]:
    """Tag the work done inside this context.

    Contexts nest: work inside carries the tags of all open contexts. If several have the same tag, the
    innermost index counts. Outside of a capture, the context does nothing.

    Args:
        tag: The name of the tag, for example ``"PP"`` for pipeline stages.
        index: The value of the tag. Without an index, the entries of each tag are numbered 0, 1, ... in the
            order in which the step enters them.

    Raises:
        CaptureError: The tag or the index is not usable.
    """
    _check_tag(tag, "annotate")
    number = integer(index)
    if index is not None and (number is None or not 0 <= number < INDEX):
        raise CaptureError(
            f"annotate({tag!r}): index {shown(index)} is not usable. Give an integer from 0 to {INDEX - 1}, or leave it out"
            " [PIPER-C013]"
        )
    if _counters is None:
        return nullcontext()
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    return _tagged(tag, number, f"{caller.f_code.co_filename}:{caller.f_lineno}" if caller else "")


@contextmanager
def _tagged(tag: str, index: int | None, source: str) -> Iterator[None]:
    """Annotate the operations inside of the context with a tag, and with `source`, the line or module for
    errors. If the index is None, it is the tag's next number."""
    assert _counters is not None
    if index is None:
        index = _counters[tag]
        _counters[tag] += 1
    outer: dict[str, int] = fx_traceback.current_meta.get("custom", {}).get(META_KEY, {})
    annotation = {META_KEY: {**outer, tag: index}, SOURCE_KEY: source}
    with fx_traceback.annotate(annotation):
        _opened.tags, _opened.last = _opened.tags + 1, annotation
        yield


class _EnterRegion:
    """A forward pre-hook that opens a region. `_ExitRegion` closes it."""

    def __init__(self, tag: str, index: int, name: str) -> None:
        self.tag, self.index, self.name = tag, index, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if _counters is not None:
            context = _tagged(self.tag, self.index, f"module {self.name}")
            context.__enter__()
            _entered.append((self, context))


class _ExitRegion:
    def __init__(self, enter: _EnterRegion) -> None:
        self.enter = enter

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        depths = [depth for depth, (enter, _) in enumerate(_entered) if enter is self.enter]
        if depths:
            _leave(depths[-1])


def _check_tag(tag: object, function: str) -> None:
    """Raise a `CaptureError` that names `function` if the tag is not usable."""
    if not is_name(tag) or tag in RESERVED:
        raise CaptureError(
            f"{function}: tag {shown(tag)} is not usable. Give a string of 1 to {NAME} printable characters, other than "
            f"{', '.join(RESERVED)} [PIPER-C013]"
        )


def _has_forward(module: nn.Module) -> bool:
    """Return whether hooks can run for a module. They do not run for containers such as `nn.ModuleList`."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def annotate_modules(model: nn.Module, tag: str, groups: Sequence[Sequence[str]]) -> list[RemovableHandle]:
    """Tag modules by name, if you cannot edit the model's code.

    Args:
        model: The model. Its submodules are found by their qualified names.
        tag: The name of the tag.
        groups: `groups[i]` is a list of glob patterns, as in `fnmatch`: `layers.[0-1]`, `layers.*`. Every
            module whose qualified name matches a pattern of `groups[i]` runs under `tag=i`.

    Returns:
        Handles of the hooks. `handle.remove()` of each handle removes the tags.

    Raises:
        CaptureError: A pattern matches no module, two groups match the same module, or an argument has the
            wrong type.
    """
    _check_tag(tag, "annotate_modules")
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"annotate_modules({tag!r}): the model is {kind_of(model)}. Give a torch.nn.Module [PIPER-C013]"
        )
    if not isinstance(groups, Sequence) or isinstance(groups, str):
        raise CaptureError(
            f"annotate_modules({tag!r}): groups is {shown(groups)}. Give a list of lists of patterns"
            " [PIPER-C013]"
        )
    names = dict(model.named_modules())
    chosen: dict[str, int] = {}
    for index, patterns in enumerate(groups):
        listed = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not listed or not all(isinstance(pattern, str) for pattern in patterns):
            what = f"the string {shown(patterns)}" if isinstance(patterns, str) else shown(patterns)
            raise CaptureError(
                f"annotate_modules({tag!r}): groups[{index}] is {what}. Give a list of strings, which are patterns of "
                "names of modules [PIPER-C013]"
            )
        for pattern in patterns:
            found = [name for name in names if name and fnmatch.fnmatchcase(name, pattern)]
            if not found:
                own = [name for name, module in names.items() if name and _has_forward(module)]
                some = f"{', '.join(own[:8])}{', ...' if len(own) > 8 else ''}"
                fix = (
                    f"Give a pattern of its modules: {some}"
                    if own
                    else "Write piper.annotate in its forward method"
                )
                raise CaptureError(
                    f"annotate_modules({tag!r}): groups[{index}] pattern {shown(pattern)} matches no module of "
                    f"{type(model).__name__}. {fix} [PIPER-C013]"
                )
            for name in found:
                if chosen.setdefault(name, index) != index:
                    raise CaptureError(
                        f"annotate_modules({tag!r}): module {name!r} is matched by groups {chosen[name]} and "
                        f"{index}. Name each module in one group [PIPER-C013]"
                    )
    handles: list[RemovableHandle] = []
    for name, index in chosen.items():
        enter = _EnterRegion(tag, index, name)
        # `enter` runs before the module's other hooks and `_ExitRegion` after the hooks that exist by now, so
        # the region covers these hooks.
        handles.append(names[name].register_forward_pre_hook(enter, prepend=True))
        handles.append(names[name].register_forward_hook(_ExitRegion(enter), always_call=True))
    return handles


# Steps without annotations


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model by name, such as `{"layers.0": ..., "layers.1": ...}`: the
    children of a list of equal modules. Empty if there is no such list.

    The list is an `nn.ModuleList` or `nn.Sequential` with several children. All children are of one class,
    and each child has parameters and submodules. In nested lists, the outer list counts.
    """
    found: dict[str, nn.Module] = {}
    within: set[int] = set()  # blocks found so far, and all their submodules
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or id(module) in within:
            continue
        children = list(module.named_children())
        kinds = {type(child) for _, child in children}
        if len(children) > 1 and len(kinds) == 1 and all(_is_block(child) for _, child in children):
            found |= {f"{name}.{key}" if name else key: child for key, child in children}
            within.update(id(inner) for _, child in children for inner in child.modules())
    return found


def _is_block(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and any(True for _ in module.parameters())


@contextmanager
def marking(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Mark the calls of these modules while a step is traced.

    Whether the marks become tags is known only after the trace: see `tag_layers`.
    """
    of = {id(block): (i, f"module {name}") for i, (name, block) in enumerate(blocks.items())}
    marked: list[tuple[nn.Module, AbstractContextManager[None]]] = []  # calls in progress

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in of:
            annotation = {LAYER_KEY: of[id(module)]}
            mark = fx_traceback.annotate(annotation)
            mark.__enter__()
            marked.append((module, mark))
            _opened.marks += 1
            if not _opened.tags:
                _opened.last = annotation

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if any(other is module for other, _ in marked):
            left = None
            while left is not module:  # an exception may have left marks of inner calls open
                left, mark = marked.pop()
                mark.__exit__(None, None, None)

    # Global hooks, because a step may inspect the modules' own hooks.
    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        with warnings.catch_warnings():
            # A module that the user has compiled warns about global hooks.
            warnings.filterwarnings(
                "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
            )
            yield
    finally:
        for handle in handles:
            handle.remove()
        for _, mark in reversed(marked):
            mark.__exit__(None, None, None)


def tag_layers(graph: torch.fx.Graph) -> None:
    """If no node of a graph has tags, turn the marks of repeated blocks into tags `LAYER=0, 1, ...`."""
    about = [(node, node.meta.get("custom", {})) for node in graph.nodes]
    if any(META_KEY in custom for _, custom in about):
        return
    for node, custom in about:
        if LAYER_KEY in custom:
            index, source = custom[LAYER_KEY]
            node.meta["custom"] = {**custom, META_KEY: {LAYER: index}, SOURCE_KEY: source}
