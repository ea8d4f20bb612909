"""Hooks that drop gradients, or that change after the first batch which parameters are trained: the module
trains as on one device, or is refused.
"""

from __future__ import annotations

import pytest

from tests.distributed.processes import launch_trainings
from tests.strategy.changed_later import DROPPED, REFUSED, ROWS, Net, fit, train

ROUNDING = 1e-12  # 3e-15 measured


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changed_later")
    return launch_trainings(2, train, folder / "run", folder / "cache")


@pytest.fixture(scope="module")
def ones():
    return {kind: fit(kind, "auto") for kind, _ in ROWS}


def far(a, b):
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(("kind", "level"), ROWS)
def test_it_trains_as_on_one_device(kind, level, ranks, ones):
    assert all(far(rank[kind, level], ones[kind]) < ROUNDING for rank in ranks)


def test_gradients_that_stay_would_show(ones, monkeypatch):
    whole = {}
    for kind in DROPPED:
        with monkeypatch.context() as patch:
            patch.setattr(Net, "global_step", -1, raising=False)
            whole[kind.__name__] = fit(kind.__name__, "auto")
    assert all(far(ones[kind], state) > 1e-3 for kind, state in whole.items())


@pytest.mark.parametrize(("kind", "level"), REFUSED)
def test_what_cannot_go_on_is_refused(kind, level, ranks):
    assert all(REFUSED[kind, level] in rank[kind, level] for rank in ranks)
