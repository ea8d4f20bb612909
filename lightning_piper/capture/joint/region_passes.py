"""A pass of a region while the joint graph is cut: the nodes that it runs, its inputs and its outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from lightning_piper.capture.torch_private import _torch
from lightning_piper.ir.regions import Output, PassKey

OutputRef = tuple[int, str, int]  # (index of the region, pass, index of the bundle among the pass's outputs)


@dataclass
class RegionPass:
    """One pass of one region while the joint graph is cut.

    Attributes:
        key: The index of the region, and the pass.
        nodes: The nodes that the pass runs, in the order of the joint graph.
        outputs: The pass's output bundles, each with the nodes that the bundle holds.
        reads: The placeholders and nodes of other passes that this pass reads, in the order of use. It is a
            dict only to keep the order: its values are None.
        inputs: The pass's input bundles -> the nodes that each bundle holds.
    """

    key: PassKey
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[Output, list[Node]]] = field(default_factory=list)
    reads: dict[Node, None] = field(default_factory=dict)
    inputs: dict[OutputRef, list[Node]] = field(default_factory=dict)

    def take(self, bundles: Iterable[OutputRef], passes: Mapping[PassKey, RegionPass]) -> None:
        """Set `inputs` to these bundles. A pass receives all nodes of a bundle, even if it reads only some.

        Args:
            bundles: The bundles that the pass reads. Repetitions are ignored.
            passes: All passes, with the bundles in their `outputs`.
        """
        # The bundles are sorted because a batch of one sample may run different operations, which read the
        # bundles in another order.
        self.inputs = {ref: passes[ref[0], ref[1]].outputs[ref[2]][1] for ref in sorted(set(bundles))}

    def bundles(self, kind: str) -> list[tuple[OutputRef, Output, list[Node]]]:
        """Return each output bundle of a kind, in the order of `outputs`: its reference, its description, and
        its nodes."""
        return [
            ((*self.key, i), out, nodes) for i, (out, nodes) in enumerate(self.outputs) if out.kind == kind
        ]


def reads_of(
    nodes: list[Node], outputs: list[tuple[Output, list[Node]]], shared: Collection[Node]
) -> dict[Node, None]:
    """Return the nodes outside of a pass that its nodes and outputs read, in the order of use. The values of
    the dict are None.

    Args:
        nodes: the nodes of the pass.
        outputs: the output bundles of the pass, each with its nodes.
        shared: nodes that each reader computes again. The reader reads the inputs of these nodes.
    """
    own, seen = set(nodes), set()
    reads: dict[Node, None] = {}
    stack = [x for n in reversed(nodes) for x in reversed(n.all_input_nodes)]
    stack = [x for _, made in reversed(outputs) for x in reversed(made)] + stack
    while stack:
        node = stack.pop()
        if node in own or node in seen:
            continue
        seen.add(node)
        if node in shared:
            stack.extend(reversed(node.all_input_nodes))
        else:
            reads[node] = None
    return reads


@dataclass(frozen=True)
class PlaceholderNames:
    """The meaning of the joint graph's placeholders.

    Attributes:
        params, buffers: Placeholder -> canonical name.
        batch: Placeholder -> index among the step's arguments, which are tensors of the batch and numbers.
        tangent: The placeholder of the gradient of the loss. None if the graph has no such placeholder.
        tangents: Placeholders of the gradients of the loss's terms -> the indices of the terms. Empty if the
            terms were not weighted.
    """

    params: Mapping[Node, str]
    buffers: Mapping[Node, str]
    batch: Mapping[Node, int]
    tangent: Node | None
    tangents: Mapping[Node, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, graph: torch.fx.Graph, canonical: Mapping[str, str], tangents: Mapping[Node, int] | None = None
    ) -> PlaceholderNames:
        """Return what each placeholder of a joint graph means. `canonical` maps each name of a parameter or
        buffer to its canonical name."""
        params, buffers, batch, tangent = {}, {}, {}, None
        for node in graph.nodes:
            desc = node.meta.get("desc") if node.op == "placeholder" else None
            if isinstance(desc, _torch.ParamAOTInput):
                params[node] = canonical[desc.target.removeprefix("module.")]
            elif isinstance(desc, _torch.BufferAOTInput):
                buffers[node] = canonical[desc.target.removeprefix("module.")]
            elif isinstance(desc, _torch.PlainAOTInput):
                batch[node] = desc.idx
            elif isinstance(desc, _torch.TangentAOTInput):
                tangent = node
        return cls(params, buffers, batch, tangent, tangents or {})

    def renamed(self, copies: Mapping[Node, Node]) -> PlaceholderNames:
        """Return the meaning of the placeholders of a copied graph. `copies` maps each node to its copy."""
        params, buffers = ({copies[x]: name for x, name in of.items()} for of in (self.params, self.buffers))
        batch, tangents = ({copies[x]: i for x, i in of.items()} for of in (self.batch, self.tangents))
        tangent = None if self.tangent is None else copies[self.tangent]
        return PlaceholderNames(params, buffers, batch, tangent, tangents)
