"""Split the backward pass of a region into `BI`, the input-gradient pass, and `BW`, the weight-gradient pass.

Other regions wait for the cotangents, so BI runs the operations that the cotangents need, and BW runs all
other operations. If both need a value, BI computes it and passes it to BW. Only views, and the nodes that
each pass computes itself, are computed twice. Apart from them, BI followed by BW runs the same operations as
the whole backward pass B.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from lightning_piper.capture.joint.region_assignment import VIEWS
from lightning_piper.capture.joint.region_passes import OutputRef, RegionPass, reads_of
from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.regions import Output, PassKey
from lightning_piper.ir.values import Kind

# Views that BW computes again. A value and its view share memory, so BI passes only the value to BW.
_FREE = VIEWS - {torch.ops.aten._to_copy.default}


def split_backward(
    whole: RegionPass, shared: Collection[Node], kept: Collection[Node]
) -> dict[str, RegionPass]:
    """Split a backward pass, and return its parts by name. `whole` does not change.

    Args:
        whole: the pass B with its outputs and reads.
        shared: the nodes that every pass computes itself.
        kept: the values that the region's forward pass saves for `whole`.

    Returns:
        `{"BI": ..., "BW": ...}`, without `inputs`. If no cotangent leaves the region, only BW. If cotangents
        leave the region but it computes no gradients of weights, only BI. The only part shares the lists of
        `whole`.
    """
    region = whole.key[0]
    cotangents = [bundle for bundle in whole.outputs if bundle[0].kind == Kind.COTANGENT]
    grads = [bundle for bundle in whole.outputs if bundle[0].kind == Kind.GRAD]
    if not cotangents or not grads:
        kind = "BI" if cotangents else "BW"
        return {kind: dataclasses.replace(whole, key=(region, kind))}
    first = _needed(whole, [node for _, nodes in cotangents for node in nodes])
    inputs = RegionPass((region, "BI"), [n for n in whole.nodes if n in first], cotangents)
    weights = RegionPass((region, "BW"), [n for n in whole.nodes if n not in first], grads)
    inputs.reads = reads_of(inputs.nodes, inputs.outputs, shared)
    weights.reads = reads_of(weights.nodes, weights.outputs, {*shared, *(n for n in first if _is_free(n))})
    # Values from other regions reach BW through BI, even if BI does not need them. So BW reads from the same
    # passes for every batch size, although a batch of one sample may run other operations.
    handed = [n for n in weights.reads if n.op != "placeholder" and n not in kept]
    inputs.outputs = [*cotangents, (Output(Kind.SAVED, ("BW",)), handed)]
    return {"BI": inputs, "BW": weights}


def _needed(whole: RegionPass, results: list[Node]) -> set[Node]:
    """Return the nodes of the pass that BI runs: the nodes on which `results` depend, and random operations
    with the nodes on which they depend.

    BI draws all random numbers, in the order of B, so that BI and BW draw the same numbers as B.
    """
    own = set(whole.nodes)
    needed: set[Node] = set()
    stack = results + [n for n in whole.nodes if _torch.is_random(n)]
    while stack:
        node = stack.pop()
        if node in own and node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    # An operation with several results runs in BI if BI needs one of its results. BI passes tensors to BW,
    # not the tuple of results, so BI also takes each result out of the tuple.
    needed |= {
        n for n in whole.nodes if n.target is operator.getitem and n.args[0] in needed and not _is_free(n)
    }
    return needed


def _is_free(node: Node) -> bool:
    """Return whether BW computes the node again instead of receiving it from BI: whether the node is a view,
    or takes one view out of a list of views (such as the result of `split`)."""
    source = node.args[0] if node.args else None
    return node.target in _FREE and (
        node.target is not operator.getitem or (isinstance(source, Node) and _is_free(source))
    )


def save_values(forward: RegionPass, parts: Mapping[str, RegionPass], kept: Collection[Node]) -> None:
    """Add the values that the backward pass reads to the forward pass's outputs, in one bundle for each set
    of readers: BI, BW, or both.

    With separate bundles, each value can be freed as soon as its readers are done. Every batch size has the
    same bundles, even if some bundles are empty.

    Args:
        forward: the forward pass of the region. The function adds to its outputs.
        parts: the parts of the backward pass, by name. If there is only one part, there is one bundle.
        kept: the values that the backward pass reads from its region's forward pass.
    """
    readers = [("BI",), ("BW",), ("BI", "BW")] if len(parts) == 2 else [tuple(parts)]
    for names in readers:
        nodes = [n for n in kept if tuple(kind for kind, part in parts.items() if n in part.reads) == names]
        forward.outputs.append((Output(Kind.SAVED, names), nodes))


def wire_inputs(
    whole: RegionPass,
    parts: Mapping[str, RegionPass],
    passes: Mapping[PassKey, RegionPass],
    taken: Collection[OutputRef],
) -> None:
    """Set the `inputs` of a backward pass and its parts.

    Args:
        whole: the backward pass.
        parts: the parts of `whole`, by name. The order is BI, BW.
        passes: all passes F and B, with their outputs.
        taken: the bundles that `whole` receives from other regions.
    """
    region = whole.key[0]
    saved = passes[region, "F"].bundles(Kind.SAVED)
    whole.take([*(ref for ref, _, _ in saved), *taken], passes)
    known = {**passes, **{part.key: part for part in parts.values()}}
    # The first part receives the bundles of other regions. The second part receives the first part's bundle.
    outside: Collection[OutputRef] = taken
    for kind, part in parts.items():
        part.take([*(ref for ref, out, _ in saved if kind in out.names), *outside], known)
        outside = [ref for ref, _, _ in part.bundles(Kind.SAVED)]
