"""Chooses the trainings whose verdicts the tests compare with the page: each kind in replicas, at one ZeRO
level and in stages, and each verdict of each level. `make zoo` trains all kinds at all levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

ZERO = ("zero1", "zero2", "zero3")


def covering(verdicts: Mapping[tuple[str, str], str]) -> list[tuple[str, str]]:
    """Choose kinds and levels by the verdicts of the page.

    The ZeRO levels take turns among the kinds that have the same verdict at them. A kind is trained on one
    device only if its verdict there differs from the one in stages, because both are compared with the same
    plain training.
    """
    kinds = list(dict.fromkeys(name for name, _ in verdicts))
    turns, chosen = Counter[str](), dict[tuple[str, str], None]()
    for name in kinds:
        verdict = verdicts[name, ZERO[0]]
        alone = ["one"] if verdicts[name, "stages"] != verdicts[name, "one"] else []
        levels = [*alone, "replicate", ZERO[turns[verdict] % len(ZERO)], "stages"]
        turns[verdict] += 1
        chosen |= dict.fromkeys((name, level) for level in levels)
    met = {(level, verdicts[name, level]) for name, level in chosen}
    for (name, level), verdict in verdicts.items():
        if (level, verdict) not in met:
            met.add((level, verdict))
            chosen[name, level] = None
    return sorted(chosen, key=list(verdicts).index)
