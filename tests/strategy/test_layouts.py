"""Parameters and buffers that the first step does not use, and later steps do, are those of one device: in
the module of every process after the fit, in checkpoints, and in trainings that resume from one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.processes import launch_trainings
from tests.strategy.layouts import CASES, Joining, fit, train

ROUNDING = 1e-12


def far(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("stages")
    return launch_trainings(2, train, folder, folder)


@pytest.mark.parametrize("name", CASES)
def test_what_joins_later_is_trained_and_saved_everywhere(
    name: str, ranks: list[dict[Any, Any]], tmp_path: Path
) -> None:
    alone = fit(CASES[name], tmp_path, "auto", devices=1)
    for rank in ranks:
        for found in rank[name]:
            for what, values in alone.items():
                assert far(found[what], values) < ROUNDING, what
    before = Joining(CASES[name]["stage"], 0).state_dict()
    assert all(
        far({n: alone["module"][n]}, {n: before[n]}) > 1e-3 for n in ("extra.weight", "extra.bias", "seen")
    )
    assert torch.equal(alone["module"]["never.weight"], before["never.weight"])
