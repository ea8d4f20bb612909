"""Merging a metric over slices, in float64."""

from __future__ import annotations

import torch

from lightning_piper.plan.instructions import Merge, Report
from lightning_piper.runtime.outbox import Outbox
from lightning_piper.runtime.transport import Bound, Slots


def bind_merge(instruction: Merge, slots: Slots, device: torch.device) -> Bound:
    """Scalars -> vector. Means and sums are left folds over the bundles in the order read; places without a scalar are 0."""
    reads, into, size = instruction.reads, instruction.into, len(instruction.reductions)
    replica, replicas = instruction.replica, instruction.replicas
    rows: dict[int, list[int]] = {}  # metric -> indices of its scalars
    for i, metric in enumerate(instruction.metrics):
        rows.setdefault(metric, []).append(i)
    weights = [w if instruction.reductions[m] == "mean" else 1.0
               for w, m in zip(instruction.weights, instruction.metrics, strict=True)]  # fmt: skip
    weight = torch.tensor([*weights, 0.0], dtype=torch.float64, device=device)
    # Row k holds the k-th scalar of every metric that is folded; the others point to the zero behind the last scalar.
    folded = {m: row for m, row in rows.items() if instruction.reductions[m] in ("mean", "sum")}
    depth = max((len(row) for row in folded.values()), default=1)
    table = [[folded[m][k] if m in folded and k < len(folded[m]) else len(weights) for m in range(size)] for k in range(depth)]
    index = torch.tensor(table, device=device)
    extremes = [(m, torch.tensor(row, device=device), getattr(torch, f"a{instruction.reductions[m]}"))
                for m, row in rows.items() if m not in folded]  # fmt: skip
    zero = torch.zeros(1, dtype=torch.float64, device=device)

    def merge() -> None:
        scalars = [slots[read.slot][0] for read in reads]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        if len({x.dtype for x in scalars}) == 1:
            flat = torch.cat([torch.stack(scalars).double(), zero])
        else:
            flat = torch.stack([*(x.double() for x in scalars), zero[0]])
        first, *rest = (flat * weight)[index].unbind()
        for row in rest:
            first = first + row
        for metric, where, extreme in extremes:
            first[metric] = extreme(flat[where])
        if replicas > 1:
            padded = torch.zeros(replicas * size, dtype=torch.float64, device=device)
            padded[replica * size : (replica + 1) * size] = first
            first = padded
        slots[into] = (first,)

    return merge


def bind_report(instruction: Report, slots: Slots, outbox: Outbox, device: torch.device) -> Bound:
    reads, replicas = instruction.reads, instruction.replicas
    extremes = [(m, getattr(torch, f"a{how}")) for m, how in enumerate(instruction.reductions) if how in ("max", "min")]

    def report() -> None:
        if not reads:  # nothing is logged
            outbox.metrics = torch.zeros(0, dtype=torch.float64, device=device)
            return
        total = slots[reads[0].slot][0]
        for read in reads[1:]:
            total = total + slots[read.slot][0]
        for read in reads:
            if read.last:
                slots[read.slot] = None
        if replicas > 1:
            rows = total.view(replicas, -1)
            total = rows[0]
            for row in rows[1:]:  # means have their weights applied
                total = total + row
            for metric, extreme in extremes:
                total[metric] = extreme(rows[:, metric])
        outbox.metrics = total

    return report
