"""What an exchange of tokens makes, row by row: the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_piper.errors import VerificationError
from lightning_piper.experts import COUNTS, DISPATCH
from lightning_piper.ir.nodes import AllToAll


def exchange(node: AllToAll, even: bool, held: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """What each replica has after an exchange.

    Args:
        node: the exchange.
        even: each expert has the same number of places.
        held: by replica, what it has of each input of the node.
    """
    made: dict[int, torch.Tensor] = {}
    for group in node.owners:
        here = [held[r] for r in group]
        if node.way == COUNTS:
            arrived = [torch.stack([x[0].chunk(len(group))[i] for x in here]) for i in range(len(group))]
        elif even:
            arrived = _even(node.way == DISPATCH, [x[0] for x in here])
        else:
            arrived = _uneven(node.way == DISPATCH, [x[0] for x in here], [x[1].tolist() for x in here])
        made |= dict(zip(group, arrived, strict=True))
    return [made[r] for r in range(len(held))]


def _even(out: bool, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    split, join = (0, 1) if out else (1, 0)
    return [torch.cat([x.chunk(len(rows), split)[i] for x in rows], join) for i in range(len(rows))]


def _uneven(out: bool, rows: list[torch.Tensor], counts: list[list[int]]) -> list[torch.Tensor]:
    """`counts[i][e]`: rows that member i has for expert e."""
    members, experts = len(rows), len(counts[0])
    owned = [range(i * experts // members, (i + 1) * experts // members) for i in range(members)]
    # Where each run of rows, of one member for one expert, is: at home by expert; at the expert's owner by expert, then member.
    home = [[(e, i) for e in range(experts)] for i in range(members)]
    away = [[(e, i) for e in owned[k] for i in range(members)] for k in range(members)]
    before, after = (home, away) if out else (away, home)
    runs: dict[tuple[int, int], torch.Tensor] = {}
    for x, places in zip(rows, before, strict=True):
        sizes = [counts[i][e] for e, i in places]
        if sum(sizes) != x.shape[0]:
            raise VerificationError(f"dispatch: counts {sizes} add up to {sum(sizes)}, and there are {x.shape[0]} rows")
        runs |= dict(zip(places, x.split(sizes), strict=True))
    return [torch.cat([runs[place] for place in places]) for places in after]
