"""Filters select nodes by their tags.

`{"PP": 1}` selects one index, `{"PP": [0, 1]}` either of two, `{"PP": "*"}` any index, `{"PP": "-"}` nodes
without the tag, and `{}` every node. `PASS` is `F`, `B`, `BI`, `BW`, or `R` for a recomputed forward pass
(`recompute`). In an order it may also be `STORE` or `FETCH`, the copies to the host and back (`offload`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from lightning_piper.common.limits import INDEX, NAME, SHOWN, is_name, shown
from lightning_piper.ir.dag import TrainingDAG
from lightning_piper.ir.nodes import Chunk, Node
from lightning_piper.ir.regions import SPLIT_BACKWARD

Filter = Mapping[str, object]
AGAIN = "R"  # a recomputed forward pass
# The values of PASS for copies to the host and back. Only an `order` can name them, because they are not
# chunks.
STORE, FETCH = COPIES = ("STORE", "FETCH")
PASSES = ("F", "B", *SPLIT_BACKWARD, AGAIN)
FILTER = 'give an object such as {"PP": 0, "PASS": "F"}'


def names_copies(condition: Filter) -> bool:
    """Return whether a filter names copies to the host or back."""
    return condition.get("PASS") in COPIES


def names_again(condition: Filter) -> bool:
    """Return whether a filter names recomputed forward passes by `R`."""
    wanted = condition.get("PASS")
    return AGAIN in (wanted if isinstance(wanted, list | tuple) else (wanted,))


def problem_with(condition: object, copies: bool = False) -> tuple[str, str] | None:
    """Return why something is not a filter and what to give instead, two sentences without a period; None if
    it is a filter. `copies` allows stores and fetches."""
    if not isinstance(condition, Mapping):
        return f"{shown(condition)} is not a filter", FILTER
    for tag, wanted in condition.items():
        if not is_name(tag):
            return (
                f"{shown(tag)} is not a tag",
                f"give a string of 1 to {NAME} printable characters as a tag, such as 'PP'",
            )
        options = wanted if isinstance(wanted, list | tuple) else [wanted]
        if not options:
            return f"tag {tag!r} has an empty list", "name at least one index"
        for option in options:
            if tag == "PASS":
                if copies and wanted in COPIES:
                    continue
                if not isinstance(option, str) or option not in (*PASSES, "*"):
                    more = ", or STORE or FETCH alone" if copies else ""
                    accepted = f"give one of {', '.join(PASSES)} and '*'{more}"
                    return f"PASS {shown(option)} is unknown", accepted
            elif isinstance(wanted, str) and option in ("*", "-"):
                continue
            elif isinstance(option, bool) or not isinstance(option, int) or not 0 <= option < INDEX:
                large = type(option) is int and option >= INDEX
                accepted = (
                    f"give an index below {INDEX}"
                    if large
                    else "give an index >= 0, a list of them, '*' (any index) or '-' (absent)"
                )
                return f"tag {tag!r} has {shown(option)}", accepted
    return None


def matches(condition: Filter, tags: Mapping[str, int | str]) -> bool:
    """Return whether a filter selects a node with these tags."""
    for tag, wanted in condition.items():
        if wanted == "-":
            if tag in tags:
                return False
        elif tag not in tags:
            return False
        elif wanted != "*":
            options = wanted if isinstance(wanted, list | tuple) else (wanted,)
            if tags[tag] not in options and "*" not in options:
                return False
    return True


def names_split_backward(condition: Filter) -> bool:
    """Return whether a filter names BI or BW, but not B."""
    wanted = condition.get("PASS")
    options = wanted if isinstance(wanted, list | tuple) else (wanted,)
    return any(part in options for part in SPLIT_BACKWARD) and "B" not in options


class Index:
    """An index of a DAG's chunks by tag, so that a filter tests only the chunks of its rarest condition."""

    def __init__(self, dag: TrainingDAG) -> None:
        self.all = list(dag.of_type(Chunk))
        self._by: dict[tuple[str, int | str], list[Chunk]] = {}
        for chunk in self.all:
            for item in chunk.tags.items():
                self._by.setdefault(item, []).append(chunk)

    def select(self, condition: Filter) -> list[Chunk]:
        """Return the chunks that a filter selects, in order of creation."""
        pools: list[Sequence[Chunk]] = [self.all]
        for tag, wanted in condition.items():
            if isinstance(wanted, int) or (tag == "PASS" and wanted in PASSES):
                pools.append(self._by.get((tag, wanted), []))
        return [chunk for chunk in min(pools, key=len) if matches(condition, chunk.tags)]


def selecting(dag: TrainingDAG, regions: Collection[int]) -> str:
    """Return filters that select exactly these regions of a DAG, as JSON for a message.

    Regions with equal tags count as one region.
    """
    inside = [dag.regions[region].tags for region in sorted(regions)]
    outside = [region.tags for region in dag.regions if region.index not in regions]
    for tag in dict.fromkeys(tag for tags in inside for tag in tags):
        if all(tag in tags for tags in inside):
            wanted = sorted({tags[tag] for tags in inside})
            if all(tags.get(tag) not in wanted for tags in outside):
                return json.dumps({tag: wanted if len(wanted) > 1 else wanted[0]})
    conditions: list[Filter] = []
    for tags in sorted(inside, key=len):  # a filter with few tags may select regions with more tags
        if not any(matches(condition, tags) for condition in conditions):
            conditions.append(_without(tags, outside))
    return " and ".join(map(json.dumps, conditions))


def _without(tags: Mapping[str, int], outside: Sequence[Mapping[str, int]]) -> dict[str, object]:
    """Return a filter with these tags that selects none of the regions with the tags `outside`. It excludes as few tags
    as possible."""
    found: dict[str, object] = dict(tags)
    left = [each for each in outside if tags.items() <= each.items() and each != tags]
    while left:
        further = Counter(tag for each in left for tag in each if tag not in tags)
        tag = further.most_common(1)[0][0]
        found[tag] = "-"
        left = [each for each in left if tag not in each]
    return found


def copies(dag: TrainingDAG, condition: Filter) -> list[Node]:
    """Return the stores or fetches that a filter selects, in order of creation."""
    return [
        node
        for node in dag.nodes.values()
        if node.tags.get("PASS") in COPIES and matches(condition, node.tags)
    ]


def describe(condition: Filter) -> str:
    """Return a filter as text for a message, cut off at `SHOWN` characters."""
    text = "{" + ", ".join(f"{k}: {v}" for k, v in condition.items()) + "}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
