"""Compare a step's code for two numbers of samples. A batch may be cut only if the code has the same
structure for both numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from lightning_piper.capture.torch_private import _torch
from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import Interface, Output, PassKey, StepCode
from lightning_piper.ir.values import Kind, Sharded

aten = torch.ops.aten


class AtenCall(NamedTuple):
    """A call of an operation in a graph.

    Attributes:
        name: Name of the operation.
        numbers: Scalar arguments, which the user's code may choose, such as the factor of `mul`.
        sizes: Numbers in lists, such as shapes, and scalar arguments that follow from the call's tensors.
    """

    name: str
    numbers: tuple[float, ...]
    sizes: tuple[float, ...]


Calls = list[AtenCall]
# The first three scalar arguments of these operations are sizes of the input: N, C and H x W.
GROUP_NORMS = (aten.native_group_norm.default, aten.native_group_norm_backward.default)


def calls_of(graph: torch.fx.Graph) -> Calls:
    """Return the calls of a graph, in order."""

    def call(node: torch.fx.Node) -> AtenCall:
        arguments = (*node.args, *node.kwargs.values())
        numbers = tuple(x for x in arguments if isinstance(x, int | float))
        lists = [x for x in arguments if isinstance(x, list | tuple)]
        sizes = tuple(x for x in _torch.tree_leaves(lists) if isinstance(x, int | float))
        determined = 3 if node.target in GROUP_NORMS else len(numbers) if _undoes_expand(node) else 0
        return AtenCall(str(node.target), numbers[determined:], (*numbers[:determined], *sizes))

    return [call(node) for node in graph.nodes if node.op == "call_function"]


def _undoes_expand(node: torch.fx.Node) -> bool:
    """Return whether the node is the gradient of a mean: an expanded tensor, divided by the number of its
    copies of each value."""
    if node.target is not aten.div.Scalar:
        return False
    tensor, divisor = node.args
    return (
        isinstance(tensor, torch.fx.Node)
        and tensor.target is aten.expand.default
        and tensor.meta["val"].numel() == divisor * tensor.args[0].meta["val"].numel()  # type: ignore[union-attr]
    )


def choices(calls: Mapping[int, Calls]) -> bool:
    """Return whether the scalar arguments that the user's code may choose differ between two graphs.

    Args:
        calls: number of samples -> calls of the graph, with exactly two entries.
    """
    one, other = ([call.numbers for call in found] for found in calls.values())
    return str(one) != str(other)  # as texts, NaN equals NaN


def same_calls(calls: Mapping[int, Calls]) -> bool:
    """Return whether all graphs have the same operations, with numbers that are equal, or proportional or
    inversely proportional to the number of samples.

    Args:
        calls: number of samples -> the step's calls, with two or three entries. The third graph may be a
            forward pass only. Then the operations up to its end are compared.
    """
    (one, other), sizes = [*calls.values()][:2], [*calls]
    if len(one) != len(other):
        return False
    for found in zip(*calls.values(), strict=False):
        if len({(call.name, len(call.numbers), len(call.sizes)) for call in found}) > 1:
            return False
        for numbers in zip(*((*call.numbers, *call.sizes) for call in found), strict=True):
            if all(map(math.isnan, numbers)):
                continue
            multiples = [x / size for x, size in zip(numbers, sizes, strict=True)]
            fractions = [x * size for x, size in zip(numbers, sizes, strict=True)]
            if not any(all(math.isclose(x, xs[0]) for x in xs) for xs in (numbers, multiples, fractions)):
                return False
    return True


def same_structure(a: StepCode, b: StepCode) -> None:
    """Check that the code of two numbers of samples differs only in sizes.

    Args:
        a: the code for the first number of samples that was captured.
        b: the code for another number. The error says that the structure of this code differs.

    Raises:
        CaptureError: regions, interfaces (see `public`), logged values, metric calls or weights differ.
    """

    def shape_of(code: StepCode) -> tuple[Any, ...]:
        tags = tuple(tuple(sorted(r.tags.items())) for r in code.regions)
        said = (
            *((log.name, log.computed and log.computed.text) for log in code.logs),
            *map(str, code.metrics.events),
        )
        return tags, said, {key: public(i) for key, i in code.interfaces.items()}

    _same_weights(a, b)
    if shape_of(a) == shape_of(b):
        return
    for one, other in zip(a.metrics.calls, b.metrics.calls, strict=False):
        if one.metric == other.metric and len(one.tensors) != len(other.tensors):
            raise CaptureError(
                f"the step has a different structure for {counted(b.size, 'sample')} than for {a.size}: {other.where} "
                f"passes {counted(len(other.tensors), 'tensor')} to self.{other.metric}.{other.method} for "
                f"{counted(b.size, 'sample')}, and {len(one.tensors)} for {a.size}. Pass tensors with the samples in their first "
                "dimension, or a list with a dict for each sample, all with the same keys, shapes and "
                "constants [PIPER-C012]"
            )
    differing = [
        f"{b.regions[r].label} {p}, {b.regions[r].source}"
        for r, p in sorted(set(a.interfaces) | set(b.interfaces))
        if r < len(b.regions) and _at(a, (r, p)) != _at(b, (r, p))
    ]
    exchanges = any(output.changes for interface in b.interfaces.values() for output in interface.outputs)
    raise CaptureError(
        f"the step has a different structure for {counted(b.size, 'sample')} than for {a.size} "
        f"({'; '.join(differing) or 'in other regions'}). Make it independent of the batch size, or choose microbatches of "
        f"{'more than one sample' if exchanges and 1 in (a.size, b.size) else 'another size'} [PIPER-C012]"
    )


def _at(code: StepCode, key: PassKey) -> Any:
    """Return the public parts of a pass's interface. Return None if the code does not have this pass."""
    return public(code.interfaces[key]) if key in code.interfaces else None


def public(interface: Interface) -> Any:
    """Return the parts of an interface that must be the same at all sizes, as nested tuples to compare.

    The result leaves out the names of activations and cotangents, which are names in the graph, and the
    number of blocks of a shard. It has changes of placement, because one node of the training DAG makes a
    change at all sizes.
    """

    def kind(output: Output) -> tuple[Any, ...]:
        names = () if output.kind in (Kind.ACTIVATION, Kind.COTANGENT) else output.names
        held = tuple((axis, part.dim if isinstance(part, Sharded) else part) for axis, part in output.held)
        return output.kind, names, output.term, held, output.changes

    return (
        interface.inputs,
        tuple(map(kind, interface.outputs)),
        interface.params,
        interface.buffers,
        interface.state,
        interface.batch,
        interface.seeds,
    )


def _same_weights(a: StepCode, b: StepCode) -> None:
    """Raise a `CaptureError` if the terms of the loss or of logged values have different weights in `a` and
    `b`.

    The weights also differ if they are known in `a` and assumed in `b`: two sizes have shown a denominator that
    another size contradicts, such as `max(len(x), 6)` with 8, 16 and 4 samples.
    """
    one, other = ([(term.weighing, term.label) for term in code.terms] for code in (a, b))
    contradicted = b.assumed and not a.assumed
    if len(one) != len(other):
        raise CaptureError(
            f"the loss and the logged values have {counted(len(one), 'kind')} of denominator with "
            f"{counted(a.size, 'sample')}, and {len(other)} with {b.size}. Make their number independent of the batch size "
            "[PIPER-C012]"
        )
    if one != other or contradicted:
        pairs = zip(one, other, strict=True)
        differ = next(((x, y) for x, y in pairs if x != y), (_weights_of_loss(a), ("", "not known")))
        weights = " and ".join(
            f"{_IN_WORDS.get(label, label)} with {counted(code.size, 'sample')}"
            for code, (_, label) in zip((a, b), differ, strict=True)
        )
        single = (
            ". A denominator such as len(x) - 1 is 0 with 1 sample: use larger microbatches"
            if 1 in (a.size, b.size) and any("samples, -1" in label for _, label in differ)
            else ""
        )
        raise CaptureError(
            "the denominator of the loss, or of a logged value, depends on the batch size in a way that "
            f"Piper cannot follow: it is {weights}. Divide by len(x), or declare the denominator as a tensor that follows "
            f"from the batch: piper.mean(values, mask.sum()){single} [PIPER-C012]"
        )


# Labels of terms that are not expressions.
_IN_WORDS = {"samples": "proportional to the number of samples", "sum": "constant"}


def _weights_of_loss(code: StepCode) -> tuple[str, str]:
    """Return ("", the weights of the loss's terms in words)."""
    outputs = [out for interface in code.interfaces.values() for out in interface.outputs]
    labels = [code.terms[out.term].label for out in outputs if out.kind == Kind.LOSS and out.term is not None]
    return "", ", ".join(labels)
