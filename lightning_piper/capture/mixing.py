"""Do experts work on each row by itself? Where they are divided, a row meets other rows than on one device.

No list of operations can tell: a softmax may run over features or over rows. So the code is run on a few rows, and again with the
first or the last one not a number: no other row may lose its numbers for it.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from lightning_piper.capture.passes import Names, Pass
from lightning_piper.capture.regions import source_line
from lightning_piper.capture.rows import way_of
from lightning_piper.errors import CaptureError
from lightning_piper.experts import COMBINE, COUNTS, DISPATCH
from lightning_piper.ir.regions import Code, Experts, Interface

EACH = 2  # rows of each expert


def refuse_mixing(p: Pass, interface: Interface, code: Code, names: Names, experts: Experts) -> None:
    """Refuse a forward pass of divided experts in which rows meet; experts that are not divided are not looked at.

    Raises:
        CaptureError: what is made of one row depends on another one.
    """
    sent = [node for node in p.nodes if way_of(node) == DISPATCH]
    divided = any(_spec(node).shape != _spec(node.args[0]).shape for node in sent)
    if not divided or not experts.params or not all(interface.arrives) or interface.random or interface.batch or interface.state:
        return  # on one device; or a `shard` refuses them for that
    device = _spec(sent[0]).device
    if device.type == "cuda" and not torch.cuda.is_available():
        return
    even = experts.even
    given = {name: node for known in (names.params, names.buffers) for node, name in known.items()}
    here = _spec(given[experts.params[0]]).shape[0]
    arriving = zip(p.inputs.values(), interface.arrives, strict=True)
    inputs = [_arriving(nodes[0], way, sent, here, device) for nodes, way in arriving]
    inputs += [_constant(_spec(given[name]), device) for name in (*interface.params, *interface.buffers)]
    clean = _not_numbers(interface, code, inputs, even)
    for row in (0, -1):
        poisoned = [x.clone() if x.is_floating_point() and i < len(p.inputs) else x for i, x in enumerate(inputs)]
        for x in poisoned[: len(p.inputs)]:
            if x.is_floating_point():
                x.flatten(0, 1 if even else 0)[row] = torch.nan
        for before, after in zip(clean, _not_numbers(interface, code, poisoned, even), strict=True):
            spread = after & ~before
            spread[row] = False
            if spread.any():
                raise CaptureError(
                    f"{source_line(sent[0])}: what stands between dispatch and combine lets one token's row depend on another's; "
                    "where experts are divided, other rows meet. Work on each row by itself (a softmax, sum or norm over features, "
                    "not over rows), and do the rest outside"
                )


def _arriving(node: Node, way: str, sent: list[Node], here: int, device: torch.device) -> torch.Tensor:
    """A few rows for each of the experts here, or their counts."""
    if way == COUNTS:
        return torch.full((1, here), EACH, dtype=_spec(node).dtype, device=device)
    arrived = next(user for user in sent if user.args[0] is node)
    shape = list(_spec(arrived).shape)
    if arrived.args[1] is not None:
        shape[0] = EACH * here
    return torch.linspace(-1, 1, math.prod(shape), device=device).reshape(shape).to(_spec(node).dtype)


def _constant(spec: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Stands for a parameter, without taking its memory."""
    return torch.full((), 1, dtype=torch.float64, device=device).div(64).to(spec.dtype).expand(spec.shape)


@torch.no_grad()
def _not_numbers(interface: Interface, code: Code, inputs: list[torch.Tensor], even: bool) -> list[torch.Tensor]:
    """For each value that goes home, which of its rows have something that is not a number."""
    made, start, found = code.run(list(inputs)), 0, []
    for way, specs in zip(interface.leaves, code.outputs, strict=True):
        if way == COMBINE:
            rows = made[start].flatten(0, 1 if even else 0)
            found.append(rows.flatten(1).isnan().any(1) if rows.ndim > 1 else rows.isnan())
        start += len(specs)
    return found


def _spec(node: object) -> torch.Tensor:
    assert isinstance(node, Node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
