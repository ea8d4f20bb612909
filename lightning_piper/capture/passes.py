"""A pass of a region while it is put together: which nodes of the joint graph it runs, takes and hands out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from lightning_piper.capture import _torch
from lightning_piper.ir.regions import Output, PassKey

OutputRef = tuple[int, str, int]  # (region, pass, output index)


@dataclass
class Pass:
    """One pass of one region while the joint graph is cut.

    Attributes:
        nodes: what it runs, in the order of the joint graph.
        outputs: its bundles, with the nodes they hold.
        reads: placeholders and values from elsewhere, in the order of use.
        inputs: the bundles it takes, with the nodes they bring.
    """

    key: PassKey
    nodes: list[Node] = field(default_factory=list)
    outputs: list[tuple[Output, list[Node]]] = field(default_factory=list)
    reads: dict[Node, None] = field(default_factory=dict)
    inputs: dict[OutputRef, list[Node]] = field(default_factory=dict)

    def take(self, bundles: Iterable[OutputRef], passes: Mapping[PassKey, Pass]) -> None:
        """Set the inputs. A bundle comes whole, also when only a part of it is read."""
        # In a fixed order, not in that of use: a batch of one sample may take other operations, which read in another order.
        self.inputs = {ref: passes[ref[0], ref[1]].outputs[ref[2]][1] for ref in sorted(set(bundles))}

    def bundles(self, kind: str) -> list[tuple[OutputRef, Output, list[Node]]]:
        """The outputs of a kind."""
        return [((*self.key, i), out, nodes) for i, (out, nodes) in enumerate(self.outputs) if out.kind == kind]


def reads_of(nodes: list[Node], outputs: list[tuple[Output, list[Node]]], shared: Collection[Node]) -> dict[Node, None]:
    """What these nodes need from elsewhere. Whoever uses a `shared` node computes it again, from what that one needs."""
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
class Names:
    """What the placeholders of the joint graph are.

    Attributes:
        tangent: the gradient of the loss, as it was traced.
        tangents: gradients of the loss's terms, where these have weights.
    """

    params: Mapping[Node, str]
    buffers: Mapping[Node, str]
    batch: Mapping[Node, int]
    tangent: Node | None
    tangents: Mapping[Node, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: torch.fx.Graph, canonical: Mapping[str, str], tangents: Mapping[Node, int] | None = None) -> Names:
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
