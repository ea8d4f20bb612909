"""Exchanges that share links: equal to a plain fluid model, and to cases computed by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_piper.errors import SimulationError
from lightning_piper.ops.communication.all_to_all import AllToAllInstruction
from lightning_piper.plan.instructions import (
    AllReduceInstruction,
    Collective,
    Instruction,
    Irecv,
    Record,
    SendInstruction,
    WaitEvent,
    WaitWork,
)
from lightning_piper.simulate import Link, Network, Number, SharedLink, contention, simulate
from tests.simulate.exchanges import Delay, bytes_of, traced
from tests.simulate.programs import ROW, pipeline


@dataclass(frozen=True)
class Message:
    """The message k goes from `sender` to device k + 1. The sender first receives its own message."""

    sender: int
    delay: Number
    nbytes: int
    link: Link


def ends(messages: Sequence[Message], shared: Sequence[SharedLink]) -> list[Number]:
    """Return the ends of messages in the simulator."""
    plans: dict[int, list[Instruction]] = {device: [] for device in range(len(messages) + 1)}
    for k, message in enumerate(messages):
        receive: dict[str, Any] = {"node": 3 * k + 2, "label": "", "stream": "recv"}
        plans[k + 1] += [
            Irecv(
                **receive,
                channel=(message.sender, k + 1),
                message=3 * k + 1,
                tensors=bytes_of(message.nbytes),
            ),
            WaitWork(**receive),
            Record(**receive, event=0),
        ]
    for k, message in enumerate(messages):
        about: dict[str, Any] = {"label": "", "stream": f"send{k}"}
        if message.sender:
            plans[message.sender].append(WaitEvent(node=3 * k, **about, event=0, shared=()))
        plans[message.sender] += [
            Delay(node=3 * k, **about),
            SendInstruction(
                node=3 * k + 1, **about, channel=(message.sender, k + 1), tensors=bytes_of(message.nbytes)
            ),
        ]
    network = Network(channels={(m.sender, k + 1): m.link for k, m in enumerate(messages)}, shared=shared)
    trace = traced(plans, {3 * k: m.delay for k, m in enumerate(messages)}, network)
    found = {span.node: span.end for span in trace.spans if span.kind == "recv"}
    return [found[3 * k + 2] for k in range(len(messages))]


def fluid(messages: Sequence[Message], shared: Sequence[SharedLink]) -> list[Number]:
    """Return the ends of messages in a plain fluid model.

    Every message passes through pipes: its own link, and each shared link in its direction. At any time, the
    rates are max-min fair.
    """
    pipes: dict[Any, Number] = {}
    through: dict[Any, set[int]] = defaultdict(set)
    for k, message in enumerate(messages):
        if message.link.bandwidth is not None:
            pipes[k] = Fraction(message.link.bandwidth)
            through[k].add(k)
        for number, link in enumerate(shared):
            far = set(range(len(messages) + 1)) - set(link.devices) if link.peers is None else set(link.peers)
            for side, (near, other) in enumerate([(message.sender, k + 1), (k + 1, message.sender)]):
                if near in link.devices and other in far:
                    pipes[number, side] = Fraction(link.bandwidth)
                    through[number, side].add(k)
    left = {k: Fraction(message.nbytes) for k, message in enumerate(messages)}
    found: dict[int, Number] = {}
    now: Number = 0
    while len(found) < len(messages):
        begins = {
            k: (found[m.sender - 1] if m.sender else 0) + m.delay + m.link.latency
            for k, m in enumerate(messages)
            if k not in found and (not m.sender or m.sender - 1 in found)
        }
        moving = {k for k, begin in begins.items() if begin <= now}
        over = {k for k in moving if not left[k] or not any(k in users for users in through.values())}
        if over:
            found |= dict.fromkeys(over, now)
            continue
        rates = fair({pipe: (pipes[pipe], users & moving) for pipe, users in through.items()}, moving)
        later = [begin - now for begin in begins.values() if begin > now]
        step = min([*later, *(left[k] / rate for k, rate in rates.items())])
        for k, rate in rates.items():
            left[k] -= rate * step
        now += step
    return [found[k] for k in range(len(messages))]


def fair(pipes: Mapping[Any, tuple[Number, set[int]]], moving: set[int]) -> dict[int, Fraction]:
    """Return max-min fair rates, and check them.

    The smallest fair share of a pipe is the rate of its messages. Then the same holds for the other messages
    and for the bandwidth that is left.
    """
    rates: dict[int, Fraction] = {}
    while open_messages := moving - rates.keys():
        shares = {
            pipe: (Fraction(width) - sum(rates.get(k, 0) for k in users)) / len(users & open_messages)
            for pipe, (width, users) in pipes.items()
            if users & open_messages
        }
        least = min(shares, key=lambda pipe: shares[pipe])
        rates |= dict.fromkeys(pipes[least][1] & open_messages, shares[least])
    for k, rate in rates.items():  # each message has a full pipe on which no message is faster
        assert any(
            k in users and sum(rates[j] for j in users) == width and max(rates[j] for j in users) == rate
            for width, users in pipes.values()
        )
    return rates


NUMBERS = st.fractions(0, 5, max_denominator=4)
WIDTHS = st.fractions(Fraction(1, 2), 9, max_denominator=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Message], list[SharedLink]]:
    """Draw messages along a tree, and shared links."""
    count = draw(st.integers(1, 7))
    messages = [
        Message(
            draw(st.integers(0, k)),
            draw(NUMBERS),
            draw(st.integers(0, 40)),
            Link(draw(NUMBERS), draw(st.none() | WIDTHS)),
        )
        for k in range(count)
    ]
    devices = st.sets(st.integers(0, count), min_size=1)
    links = st.builds(SharedLink, devices=devices, bandwidth=WIDTHS, peers=st.none() | devices)
    return messages, draw(st.lists(links, max_size=4))


@settings(max_examples=200)
@given(case=cases())
def test_ends_are_those_of_a_fluid_model(case: tuple[list[Message], list[SharedLink]]) -> None:
    assert ends(*case) == fluid(*case)


TEN = Link(bandwidth=10)
CARD = [SharedLink([0], 10)]


def test_a_message_slows_one_that_is_under_way() -> None:
    """A message of 100 bytes has 50 left when one of 50 bytes starts. From then on, each has half of the
    bandwidth. Without the shared link, the model disagrees.
    """
    messages = [Message(0, 0, 100, TEN), Message(0, 5, 50, TEN)]
    assert ends(messages, CARD) == fluid(messages, CARD) == [15, 15]
    assert ends(messages, []) == [10, 10] != fluid(messages, CARD)


def test_a_message_becomes_faster_when_another_one_ends() -> None:
    """20 and 60 bytes at 5 each until 4, then 40 bytes at 10. Other messages use what a slow message leaves."""
    assert ends([Message(0, 0, 20, TEN), Message(0, 0, 60, TEN)], CARD) == [4, 8]
    slow = Message(0, 0, 20, Link(bandwidth=2))
    assert ends([slow, Message(0, 0, 40, TEN), Message(0, 0, 40, TEN)], CARD) == [10, 10, 10]


def test_directions_and_peers() -> None:
    """Bytes that come do not delay bytes that leave. A link to some peers carries only what goes there."""
    there_and_back = [Message(0, 0, 20, TEN), Message(1, 0, 20, TEN)]
    assert ends(there_and_back, [SharedLink([0], 10), SharedLink([1], 10)]) == [2, 4]
    both = [Message(0, 0, 20, TEN), Message(0, 0, 20, TEN)]
    assert ends(both, [SharedLink([0], 10, peers=[1])]) == [2, 2]
    assert ends(both, [SharedLink([0], 10, peers=[1, 2])]) == [4, 4]
    assert ends(both, [SharedLink([1, 2], 10)]) == [4, 4]
    assert ends(both, [SharedLink([0, 1, 2], 10)]) == [2, 2], "no byte leaves or comes"


def together(first: Collective, second: Collective, shared: Sequence[SharedLink]) -> list[Number]:
    """Return the ends of two collectives that start at the same time."""
    plans = {device: [first, second] for device in first.members}
    network = Network(groups={first.members: TEN}, shared=shared)
    return [next(s.end for s in traced(plans, {}, network).spans if s.node == node) for node in (0, 1)]


def collectives(count: int, summed: int, moved: int) -> tuple[AllReduceInstruction, AllToAllInstruction]:
    about: dict[str, Any] = {"label": "", "members": tuple(range(count))}
    (tensor,) = bytes_of(moved)
    return (
        AllReduceInstruction(**about, node=0, communicator="data", tensors=bytes_of(summed)),
        AllToAllInstruction(**about, node=1, communicator="experts", direction="dispatch", tensor=tensor),
    )


def test_a_sum_slows_an_all_to_all() -> None:
    """Among four devices, an all-reduce of 80 bytes sends 120 from each, and an all-to-all of 80 bytes 60.
    Both share each device's port until the all-to-all is over. Across two nodes of two devices, one channel
    of the ring leaves a node, and four of the twelve channels of the all-to-all, each with a third of the
    rate.
    """
    both = collectives(4, 80, 80)
    assert together(*both, []) == [12, 6]
    assert together(*both, [SharedLink([device], 10) for device in range(4)]) == [18, 12]
    # r + 4/3 r = 10 until the all-to-all has sent 60; then the ring has all of the 10.
    end = 60 / Fraction(30, 7)
    nodes = [SharedLink([0, 1], 10), SharedLink([2, 3], 10)]
    assert together(*both, nodes) == [end + 6, end]
    few = collectives(2, 80, 80)
    assert few[0].routes == few[1].routes == ((0, 1), (1, 0))


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_links_that_are_wide_enough_change_nothing(schedule: str) -> None:
    """Figures, timeline and memory are those without shared links."""
    program = pipeline(schedule, 4, 8)
    link = Link(Fraction(1, 3), Fraction(ROW))
    free = simulate(program.dag, program.plans, network=Network(link))
    wide = simulate(program.dag, program.plans, network=Network(link, shared=[SharedLink([0, 1], 10**6)]))
    assert wide == free
    narrow = simulate(program.dag, program.plans, network=Network(link, shared=[SharedLink([0, 1], ROW / 4)]))
    assert narrow.step_time > free.step_time


def test_the_work_for_shared_links_grows_with_the_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the microbatches, twice the rates to compute."""
    computed = []
    filling = contention.progressive_filling

    def counted(flows: Any, capacities: Any) -> Any:
        listed = list(flows)
        computed.append(len(listed))
        return filling(listed, capacities)

    monkeypatch.setattr(contention, "progressive_filling", counted)
    work = []
    for microbatches in (8, 16, 32):
        program = pipeline("one_f_one_b", 4, microbatches)
        network = Network(Link(bandwidth=ROW), shared=[SharedLink([0, 1], ROW), SharedLink([2, 3], ROW)])
        simulate(program.dag, program.plans, network=network)
        work.append(sum(computed))
        computed.clear()
    assert work[0] > 0 and work[2] - work[1] <= 2.5 * (work[1] - work[0])


def crossing(communicators: Mapping[str, str]) -> list[tuple[int, Number, Number]]:
    """Return receiver, start and end of messages that take 2: 0 to 1 and 1 to 0 from 0, 2 to 0 from 1 on."""
    plans: dict[int, list[Instruction]] = {0: [], 1: [], 2: [Delay(node=9, label="", stream="send")]}
    for node, channel in ((1, (0, 1)), (3, (1, 0)), (5, (2, 0))):
        about: dict[str, Any] = {"label": "", "channel": channel, "tensors": ()}
        plans[channel[0]].append(SendInstruction(node=node, **about, stream="send"))
        plans[channel[1]].append(Irecv(node=node + 1, **about, stream="recv", message=node))
    trace = traced(plans, {9: 1}, Network(Link(latency=2), communicators=communicators))
    return sorted((s.device, s.start, s.end) for s in trace.spans if s.kind == "recv")


def test_messages_that_share_a_communicator_take_turns() -> None:
    """A device with one communicator for messages sends or receives one message at a time."""
    assert crossing({}) == crossing({"other": "pair"}) == [(0, 0, 2), (0, 1, 3), (1, 0, 2)]
    assert crossing({"send": "out", "recv": "in"}) == [(0, 0, 2), (0, 2, 4), (1, 0, 2)]
    assert crossing({"send": "pair", "recv": "pair"}) == [(0, 2, 4), (0, 4, 6), (1, 0, 2)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SharedLink([0], 0), "bandwidth is 0. Give a number from 1e-15"),
        (lambda: SharedLink([], 1), r"SharedLink\(devices=\[\]\) is not usable. Give a list of devices"),
        (lambda: SharedLink(7, 1), r"SharedLink\(devices=7\)"),  # type: ignore[arg-type]
        (lambda: SharedLink([0], 1, ["a"]), r"SharedLink\(peers=\['a'\]\)"),  # type: ignore[list-item]
        (
            lambda: Network(shared=[Link()]),
            r"Network\(shared=\[Link.* is not usable. Give a list of SharedLinks",
        ),  # type: ignore[list-item]
        (lambda: Network(communicators={"send": 1}), "Give a mapping from streams to names"),  # type: ignore[dict-item]
    ],
)
def test_links_that_cannot_be_shared(build: Any, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        build()
