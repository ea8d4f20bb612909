"""Check that experts work on each row separately.

If experts are sharded over devices, a row is among other rows, and in another position, than on one device.
The names of the operations do not show whether the code mixes rows: a softmax may run over features or over
rows. So the check runs the code on a few rows, and again on arrangements that mix some of these rows with new
rows. The result for a row must stay the same, up to rounding. To measure the effect of rounding, the check
also runs the code with all rows moved by one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from lightning_piper.capture.cutting.row_counts import direction_of
from lightning_piper.capture.joint.region_assignment import own_line
from lightning_piper.capture.joint.region_passes import PlaceholderNames, RegionPass
from lightning_piper.common.units import counted
from lightning_piper.errors import CaptureError
from lightning_piper.ir.regions import Code, Interface, Routed
from lightning_piper.routing import COMBINE, DISPATCH

EACH = 4  # rows of each expert in the trial, if the step does not fix their number (`Routed.even`)
ALLOWANCE = 16  # a row's result may differ by this multiple of the effect of rounding
NEW = -1  # stands for a new row in an arrangement
# (for each row: its index among the original rows, or `NEW`; the magnitude of the new rows)
Arrangement = tuple[Sequence[int], float]


def refuse_row_dependence(
    p: RegionPass, interface: Interface, code: Code, names: PlaceholderNames, experts: Routed, known: set[Any]
) -> None:
    """Check that in a forward pass of sharded experts no row depends on another row.

    The function does not check a pass if one of these holds:

    - The experts are not sharded, or the region has no parameters of experts.
    - The pass draws random numbers.
    - The pass reads anything except dispatched rows, counts, parameters and unchanged buffers.
    - The pass is traced for an accelerator, and the machine has none.
    - A pass with the same graph was checked before (`known`).

    Args:
        p, interface, code: the pass, its interface and its code.
        experts: the experts of the pass's region.
        known: keys of the passes that were checked before (`_RowTrial.kind`), because layers are often
            copies. The function adds the key of this pass.

    Raises:
        CaptureError: the result for a row depends on other rows, on their number, or on its position among
            them. Or the code fails on the rows of the trial.
    """
    sent = [node for node in p.nodes if direction_of(node) == DISPATCH]
    divided = any(_spec(node).shape != _spec(node.args[0]).shape for node in sent)
    if (
        not divided
        or not experts.params
        or not all(interface.arrives)
        or interface.random
        or interface.batch
        or interface.state
    ):
        return  # the experts are on one device, or `shard_experts` raises an error for this pass
    # Without its accelerator, the machine cannot run the code.
    if _spec(sent[0]).device.type != "cpu" and not torch.accelerator.is_available():
        return
    given = {name: node for held in (names.params, names.buffers) for node, name in held.items()}
    fixed = [_spec(given[name]) for name in (*interface.params, *interface.buffers)]
    where = own_line(sent[0])
    trial = _RowTrial(
        interface,
        code,
        fixed,
        [_arrived(node, sent) for nodes in p.inputs.values() for node in nodes[:1]],
        _spec(given[experts.params[0]]).shape[0],
        experts.even,
        where,
    )
    if (kind := trial.kind()) not in known and trial.depends_across_rows():
        raise CaptureError(
            f"{where}: between dispatch and combine, the result for one token's row depends on other rows, "
            "on their number or on its position among them. With sharded experts, each device has different "
            "rows. Work on each row by itself (a softmax, sum or norm over features, not over rows), and do "
            "everything else outside of dispatch and combine [PIPER-C015]"
        )
    known.add(kind)


def _arrangements(n: int, even: bool) -> list[Arrangement]:
    """Return the arrangements of an expert's n rows on which the code runs.

    In some arrangements, new rows (of magnitude 1 or 100, or NaN) replace every second row. In another
    arrangement, all rows are in reverse order. In another, the rows of the first half occur twice. Unless
    `even` (every expert has the same number of rows), there are also arrangements with more and with fewer
    rows.
    """
    halves = [[i if i % 2 == parity else NEW for i in range(n)] for parity in (0, 1)]
    found: list[Arrangement] = [(half, size) for size in (1.0, 100.0, torch.nan) for half in halves]
    found += [(range(n)[::-1], 1.0), ([i // 2 for i in range(n)], 1.0)]
    return found if even else [*found, ([NEW, *range(n), NEW], 0.01), ([1], 1.0)]


class _RowTrial:
    """A trial run of a pass on generated rows.

    Args:
        fixed: fake tensors with the shapes and dtypes of the pass's parameters and buffers.
        arriving: for each input, a fake tensor with the shape and dtype of the rows that arrive. None for an
            input with counts.
        here: number of experts whose parameters the pass has, which is the number on one device.
        even: whether every expert has the same number of rows. If not, the number of rows is open.
        where: the user's line, which errors name.
    """

    def __init__(
        self,
        interface: Interface,
        code: Code,
        fixed: Sequence[torch.Tensor],
        arriving: Sequence[torch.Tensor | None],
        here: int,
        even: bool,
        where: str,
    ) -> None:
        self._interface, self._code, self._specs, self._arriving = interface, code, fixed, arriving
        self._here, self._even, self._where = here, even, where
        self._each = next(x.shape[1] for x in arriving if x is not None) if even else EACH
        self._generator = torch.Generator().manual_seed(0)

    def kind(self) -> Any:
        """Return a key that is equal for passes with the same operations on inputs of the same shapes and
        dtypes. Two equal layers have such passes."""
        index_of = {node: str(i) for i, node in enumerate(self._code.graph.nodes)}
        nodes = [
            (
                "" if node.op == "placeholder" else str(node.target),
                str(map_arg((node.args, node.kwargs), index_of.__getitem__)),
            )
            for node in index_of
        ]
        specs = [None if x is None else (x.shape, x.dtype) for x in (*self._arriving, *self._specs)]
        return str((nodes, specs, self._interface.arrives, self._interface.leaves, self._here))

    def depends_across_rows(self) -> bool:
        """Return whether the result for a row depends on other rows, on their number, or on its position
        among them.

        Raises:
            CaptureError: see `_run`.
        """
        fixed = _made_up(self._specs, self._here)
        rows = [None if spec is None else self._new(spec, self._here * self._each) for spec in self._arriving]
        every = [list(range(e * self._each, (e + 1) * self._each)) for e in range(self._here)]
        before = self._run(rows, every, fixed)
        moved = self._run([x if x is None else _one_ulp(x, self._generator) for x in rows], every, fixed)
        rounding = [_distance(a, b) for a, b in zip(before, moved, strict=True)]
        # In each run, the experts have different arrangements. Over all runs, each expert has every
        # arrangement.
        choices = _arrangements(self._each, self._even)
        for k in range(len(choices)):
            chosen = [choices[(k + e) % len(choices)] for e in range(self._here)]
            indices = [
                [i if i == NEW else e * self._each + i for i in taken] for e, (taken, _) in enumerate(chosen)
            ]
            sizes = torch.tensor([size for taken, size in chosen for _ in taken])
            source = torch.tensor([i for taken in indices for i in taken])
            arranged = [None if x is None else self._arranged(x, source, sizes) for x in rows]
            kept = (source != NEW).nonzero().squeeze(1)
            for a, b, explained in zip(before, self._run(arranged, indices, fixed), rounding, strict=True):
                a, b = a[source[kept].to(a.device)], b[kept.to(b.device)]
                eps = torch.finfo(a.dtype).eps * _largest(a, b) if a.is_floating_point() else 0.0
                if not _distance(a, b) <= ALLOWANCE * max(explained, eps):
                    return True
        return False

    def _new(self, spec: torch.Tensor, count: int, sizes: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Return `count` new rows: normally distributed values times `sizes`. Integers may be indices, so
        they are 0 or 1, and `sizes` has no effect.

        Args:
            spec: a tensor with the dtype, the device and the shape of the rows: `[rows, ...]`, or
                `[experts, rows, ...]` if every expert has the same number of rows.
            sizes: one factor for each row, or one for all rows.
        """
        shape = (count, *spec.shape[2 if self._even else 1 :])
        if not spec.is_floating_point():
            return torch.randint(2, shape, generator=self._generator).to(spec.dtype).to(spec.device)
        made = torch.randn(shape, generator=self._generator)
        made[::3] = made[::3].abs()  # some operations are defined for positive numbers only
        scale = sizes.view(-1, *[1] * (len(shape) - 1)) if isinstance(sizes, torch.Tensor) else sizes
        return (made * scale).to(spec.dtype).to(spec.device)

    def _arranged(self, rows: torch.Tensor, source: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        """Return the rows with the indices `source`, in a new tensor. For `NEW`, draw a new row of the
        magnitude in `sizes`."""
        spec = rows.unsqueeze(0) if self._even else rows
        made, new = self._new(spec, len(source), sizes), source == NEW
        made[~new] = rows[source[~new].to(rows.device)]
        return made

    def _run(
        self, rows: Sequence[torch.Tensor | None], indices: Sequence[Sequence[int]], fixed: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run the pass without gradients. Return each output that goes to `combine`, with one row for each
        given row. Other outputs are dropped.

        Args:
            rows: for each input, its rows of all experts, sorted by expert. None for an input with counts.
            indices: for each expert, the indices of its rows. Only the number of indices is used.
            fixed: values of the pass's parameters and buffers.

        Raises:
            CaptureError: the code fails on these rows, or returns another number of rows.
        """
        lengths = [len(taken) for taken in indices]
        inputs = [
            _counts(lengths, fixed) if x is None else x.unflatten(0, (self._here, -1)) if self._even else x
            for x in rows
        ]
        try:
            with torch.no_grad():
                made = self._code.run([*inputs, *fixed])
        except (RuntimeError, IndexError, ValueError) as error:
            raise CaptureError(
                f"{self._where}: the code between dispatch and combine fails on test rows that Piper "
                f"generated: {error}. Make it accept any number of rows, with any values [PIPER-C015]"
            ) from error
        start, found = 0, []
        for direction, specs in zip(self._interface.leaves, self._code.outputs, strict=True):
            if direction == COMBINE:
                found.append(made[start].flatten(0, 1 if self._even else 0))
                if len(found[-1]) != sum(lengths):
                    raise CaptureError(
                        f"{self._where}: combine gets {counted(len(found[-1]), 'row')} for "
                        f"{counted(sum(lengths), 'dispatched row')}. Pass one row for each dispatched row [PIPER-C015]"
                    )
            start += len(specs)
        return found


def _arrived(node: Node, sent: list[Node]) -> torch.Tensor | None:
    """Return a fake tensor with the shape and dtype of the rows that arrive in the input `node` of the pass.
    Return None if no dispatch in `sent` reads this input as rows, because it has counts."""
    return next((_spec(user) for user in sent if user.args[0] is node), None)


def _counts(lengths: list[int], fixed: list[torch.Tensor]) -> torch.Tensor:
    """Return an input with counts, as from one sending device: shape `[1, experts]`, int64."""
    return torch.tensor([lengths], device=fixed[0].device)


def _made_up(specs: Sequence[torch.Tensor], here: int) -> list[torch.Tensor]:
    """Return parameters and buffers for the trial, with positive values that differ between experts.

    To save memory, all tensors of one dtype and device are overlapping views of one tensor. So the caller
    must not change the tensors.

    Args:
        specs: Tensors with the shapes, dtypes and devices of the parameters and buffers.
        here: The number of experts. A tensor whose first dimension has this size has a part for each expert.
    """
    width = max(max(spec.shape[-2:], default=1) for spec in specs)
    extents = [_strided(spec, here) for spec in specs]
    pools: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for spec in specs:
        key = (spec.dtype, spec.device)
        if key not in pools:
            needed = len(specs) + max(total for total, _ in extents)
            few = torch.rand(4099, generator=torch.Generator().manual_seed(1)).add(0.5).div(width**0.5)
            pools[key] = few.to(spec.device, spec.dtype).repeat(needed // 4099 + 1)
    tensors = enumerate(zip(specs, extents, strict=True))
    return [
        pools[spec.dtype, spec.device].as_strided(spec.shape, stride, i) for i, (spec, (_, stride)) in tensors
    ]


def _strided(spec: torch.Tensor, here: int) -> tuple[int, list[int]]:
    """Return (number of elements of memory that a made-up parameter spans, its strides).

    If its first dimension has the size `here`, the slice of each expert begins one element after the slice of
    the expert before it, and the slices overlap. So `[4, 2, 3]` with `here=4` has the strides `[1, 3, 1]`.
    """
    own = spec.shape[1:] if spec.ndim and spec.shape[0] == here else spec.shape
    strides = list(torch.empty(own, device="meta").stride())
    total = own.numel()
    return (total, strides) if len(own) == spec.ndim else (total + here, [1, *strides])


def _one_ulp(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a copy of `x` with each element moved up or down, at random, by about one unit in the last place.
    A tensor of integers is returned unchanged."""
    if not x.is_floating_point():
        return x
    signs = torch.randint(2, x.shape, generator=generator).mul(2).sub(1).to(x.device)
    return x * (1 + torch.finfo(x.dtype).eps * signs).to(x.dtype)


def _largest(*values: torch.Tensor) -> float:
    """Return the largest absolute value of all finite elements, or 0 if there are none."""
    finite = [float(x[x.isfinite()].abs().max()) for x in values if x.isfinite().any()]
    return max(finite, default=0.0)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference between two elements at the same index. Two NaN, or two equal
    infinities, have the difference 0. A NaN and a number have an infinite difference."""
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return 0.0
    difference = float((a[~same].double() - b[~same].double()).abs().max())
    return difference if difference == difference else float("inf")


def _spec(node: object) -> torch.Tensor:
    """Return the fake tensor of a node of the joint graph."""
    assert isinstance(node, Node)
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value
