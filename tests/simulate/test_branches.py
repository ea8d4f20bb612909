"""A step with branches: streams that wait while others compute, and messages that share a link."""

from __future__ import annotations

from lightning_piper.simulate import Link, Network, simulate
from tests.simulate.programs import ROW, branches

MAIN, SIDE = "compute", "side"


def test_waiting_behind_computing_is_not_exposed() -> None:
    """Stage 4 waits on a stream of its own for two messages, while stage 3 computes on the other stream of
    the device. The messages are sent at 2 and 3 and share a channel: the second one begins when the first is
    there.
    """
    program = branches((0, MAIN), (0, MAIN), (0, MAIN), (1, MAIN), (1, SIDE))
    slow = Network(channels={(0, 1): Link(latency=3), (1, 0): Link(latency=3)})
    times = {"F": 1, "B": 2, "F[PP=3]": 10, "B[PP=3]": 20}
    result = simulate(program.dag, program.plans, times, slow)
    assert [(s.start, s.end) for s in result.timeline if (s.device, s.kind) == (1, "recv")] == [
        (2, 5),
        (5, 8),
    ]
    assert (result.devices[1].exposed, result.devices[1].bubble, result.devices[1].busy) == (0, 0, 33)
    # With a short stage 3, from 1 to 2 nothing is there to be sent; from 2 to 8 the device waits for messages
    # only in part:
    # both had been computed at 3.
    short = simulate(program.dag, program.plans, {**times, "F[PP=3]": 1, "B[PP=3]": 20}, slow)
    assert (short.devices[1].exposed, short.devices[1].bubble) == (5, 2)


def test_a_late_value_hides_the_way_of_an_early_one() -> None:
    """Stage 4 needs a value that is computed at 21 and one unit on its way, and one that is on its way from 2
    to 7.
    """
    program = branches((0, MAIN), (0, MAIN), (1, MAIN), (2, MAIN), (2, MAIN))
    network = Network(channels={(0, 2): Link(latency=1), (1, 2): Link(latency=5)})
    result = simulate(program.dag, program.plans, {"F": 1, "B": 2, "F[PP=1]": 20}, network)
    starts = {s.label: s.start for s in result.timeline}
    assert starts["F[PP=4]"] == 22 and result.devices[2].exposed == 1


def test_a_value_stays_until_all_its_readers_are_done() -> None:
    """Stage 0's activation is read by stage 1 from 1 to 11, and by stage 2, last in the plan, on another
    stream from 1 to 2.
    """
    program = branches((0, MAIN), (0, MAIN), (0, SIDE), (0, MAIN), (0, MAIN))

    for first in (10, 1):
        curve = simulate(program.dag, program.plans, {"F": 1, "B": 2, "F[PP=1]": first}).devices[0].memory
        # While a pass runs, its sum and the tanh of it; the tanh stays, which is handed on and saved at once.
        assert curve[:5] == ((0, 0), (0, 2 * ROW), (1, ROW), (1, 3 * ROW), (1, 5 * ROW))
        assert [n for t, n in curve if t <= 2][-1] == (4 * ROW if first == 10 else 5 * ROW)
