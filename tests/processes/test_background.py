"""Work in the background of the training: pieces run one at a time and in order, and an error is raised where
somebody waits for the piece.
"""

from __future__ import annotations

import threading

import pytest

from lightning_piper.processes.background import AWAITED, BackgroundThread
from lightning_piper.processes.failure import place_of

PATIENCE = 300.0  # seconds, longer than anything here takes


def fails() -> None:
    raise OSError("disk full")


def test_one_piece_of_work_at_a_time_and_what_follows_it() -> None:
    behind, gate, done = BackgroundThread("b"), threading.Event(), []
    behind.start(lambda: (gate.wait(PATIENCE), done.append("first")))
    behind.then(lambda: done.append("after the first"))
    behind.wait(0.01)
    assert not done  # nobody has opened the gate
    threading.Timer(0.01, gate.set).start()
    behind.start(lambda: done.append("second"))
    behind.wait()
    assert done == ["first", "after the first", "second"]
    behind.then(lambda: done.append("now"))
    assert done[-1] == "now"


def test_what_fails_is_raised_once_and_nothing_follows_it() -> None:
    behind, gate, done = BackgroundThread("b"), threading.Event(), []
    behind.start(lambda: (gate.wait(PATIENCE), fails()))
    behind.then(lambda: done.append("queued"))
    gate.set()
    behind._thread.join()  # type: ignore[union-attr]
    behind.then(lambda: done.append("late"))
    with pytest.raises(OSError, match="disk full"):
        behind.start(lambda: done.append("next"))
    assert not done
    behind.start(lambda: done.append("next"))
    behind.wait()
    assert done == ["next"]
    behind.start(fails)
    with pytest.raises(OSError, match="disk full"):
        behind.wait()


def test_who_waits_is_where_the_work_is() -> None:
    behind, gate, places = BackgroundThread("b"), threading.Event(), []
    own = threading.get_ident()

    def work() -> None:
        while own not in AWAITED:
            pass
        threading.Thread(target=lambda: (places.append(place_of(own)), gate.set())).start()
        stand_here(gate)

    behind.start(work)
    behind.wait()
    assert "threading.py" in places[0]["at"] and not places[0]["waits"]
    assert own not in AWAITED and "in place_of" in place_of(own)["at"]


def stand_here(gate: threading.Event) -> None:
    gate.wait(PATIENCE)
