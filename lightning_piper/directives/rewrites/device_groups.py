"""The devices that sum gradients and update parameters. They follow from the devices that run regions.

A region may run on several devices or groups of devices, each for different microbatches. Each group sums the
region's gradients of its own microbatches. The updates add the sums of the groups, as they add the sums of
the regions that share a parameter.

Every device that uses a parameter, or a buffer that the step changes, updates its own copy. All copies get
the same terms in the same order, so they have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Ref
from lightning_piper.ops.communication.p2p import Recv
from lightning_piper.ops.update import Accumulate, Update

Group = tuple[int, ...]


def settle(dag: TrainingDAG, chunks: Iterable[Chunk]) -> tuple[list[Update], bool]:
    """Adapt gradient sums and updates after `chunks` got their devices.

    Each device group of a region gets a sum of its gradients. Each device group that uses parameters, or
    makes their gradients, gets an update.

    Returns:
        The updates, which may now read values of other devices, and whether the order of gradient sums
        changed.
    """
    regions = {chunk.region for chunk in chunks}
    groups: dict[int, set[Group]] = {}
    for chunk in dag.of_type(Chunk):
        if chunk.devices:
            groups.setdefault(chunk.region, set()).add(chunk.devices)
    readers: dict[str, set[int]] = {}
    for (region, _), interface in dag.code.interfaces.items():
        for name in interface.params + interface.state:
            readers.setdefault(name, set()).add(region)
    families: dict[tuple[tuple[str, ...], Bucket | None], list[Update]] = {}
    for update in dag.of_type(Update):
        value = dag.value(update.inputs[0])
        if any(readers.get(name, set()) & regions for name in value.names):
            families.setdefault((value.names, value.bucket), []).append(update)
    touched: list[Update] = []
    regrouped = False
    for (names, _), family in families.items():
        regrouped |= _sum_on_each_group(dag, family)
        users = {
            group for name in names for region in readers.get(name, ()) for group in groups.get(region, ())
        }
        touched += _update_everywhere(dag, family, users)
    return touched, regrouped


def _sum_on_each_group(dag: TrainingDAG, family: list[Update]) -> bool:
    """Make each sum that the updates in `family` read add the gradients of one device group. Terms without
    devices stay in the first group's sum.

    Returns:
        Whether a region has several device groups.
    """
    before = [dag.source(ref) for ref in family[0].inputs]
    after: list[Ref] = []
    several = False
    regions: dict[int, list[Accumulate]] = {}
    for ref in before:
        total = dag.nodes[ref[0]]
        if isinstance(total, Accumulate):
            regions.setdefault(dag.producer(ref).region, []).append(total)
    for ref in before:
        total = dag.nodes[ref[0]]
        if not isinstance(total, Accumulate):  # a sum over replicas, or the last value of buffers
            after.append(ref)
        elif total is (totals := regions[dag.producer(ref).region])[0]:
            sums = _by_group(dag, totals)
            several |= len(sums) > 1
            after += [(found.id, 0) for found in sums]
    if after != before:
        for update in family:
            _read_instead(dag, update, tuple(after))
    return several


def _by_group(dag: TrainingDAG, totals: list[Accumulate]) -> list[Accumulate]:
    """Divide `totals`, the sums of one region, into one sum for each device group, and add the missing sums.
    Return the sums in the order of the groups' first samples."""
    terms = sorted((ref for total in totals for ref in total.inputs), key=lambda ref: dag.producer(ref).slice)
    groups = list(dict.fromkeys(group for ref in terms if (group := dag.nodes[ref[0]].devices)))
    if len(groups) <= len(totals) == 1:  # one sum, and at most one device group: nothing to divide
        return totals
    known = {total.devices: total for total in totals}
    found = []
    for group in groups:
        mine = tuple(ref for ref in terms if (dag.nodes[ref[0]].devices or groups[0]) == group)
        if group not in known:
            by = max((n for ref in mine if (n := dag.nodes[ref[0]].placed_by) is not None), default=None)
            known[group] = dag.add(
                dataclasses.replace(totals[0], id=-1, origin=None, inputs=mine, devices=group, placed_by=by)
            )
        else:
            dag.rewire(known[group], inputs=mine)
        found.append(known[group])
    return found


def _read_instead(dag: TrainingDAG, update: Update, inputs: tuple[Ref, ...]) -> None:
    """Make an update read `inputs`, and remove the transfers that only this update needed."""
    received = [dag.nodes[ref[0]] for ref in update.inputs if isinstance(dag.nodes[ref[0]], Recv)]
    dag.rewire(update, inputs=inputs)
    for recv in received:
        if recv.id in dag.nodes and not dag.users(recv):
            dag.remove([recv, dag.nodes[recv.inputs[0][0]]])


def _update_everywhere(dag: TrainingDAG, family: list[Update], users: set[Group]) -> list[Update]:
    """Add an update on each device group that uses the parameters (`users`) or makes their gradients.

    Returns:
        The list `family`, to which this function adds the new updates. If an input of the updates does not
        have devices yet, the function changes nothing and returns an empty list.
    """
    inputs = tuple(dag.source(ref) for ref in family[0].inputs)
    sources = [dag.nodes[ref[0]] for ref in inputs]
    if not all(source.devices for source in sources):
        return []
    by = max((source.placed_by for source in sources if source.placed_by is not None), default=None)
    spare = [update for update in family if not update.devices]
    for group in sorted(
        (users | {source.devices for source in sources}) - {update.devices for update in family}
    ):
        if spare:
            update = spare.pop()
        else:
            update = dag.add(dataclasses.replace(family[0], id=-1, origin=None, inputs=inputs))
            family.append(update)
        dag.change(update, devices=group, placed_by=by)
    return family
