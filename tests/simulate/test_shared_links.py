"""Messages and collectives on shared links: the times of the simulator are those of a plain fluid model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_piper.simulate import Link, Network, SharedLink
from lightning_piper.simulate.network import HierarchicalRing
from tests.simulate.exchanges import KINDS, Exchange, fluid, simulated

TIMES = st.fractions(0, 4, max_denominator=3)
WIDTHS = st.fractions(Fraction(1, 2), 9, max_denominator=3)
LINKS = st.builds(Link, TIMES, st.none() | WIDTHS)


@st.composite
def shared_links(draw: st.DrawFn, nodes: list[list[int]]) -> list[SharedLink]:
    """Draw nested domains: a port of each device inside of its node, a port of each device to other nodes, a
    card of each node, and any other links.
    """
    found, devices = list[SharedLink](), [device for node in nodes for device in node]
    for kind in draw(st.sets(st.sampled_from(("inside", "outside", "all", "card", "other")), min_size=1)):
        width = draw(WIDTHS)
        for node in nodes:
            for device in node:
                near = [other for other in node if other != device]
                if kind == "inside" and near:
                    found.append(SharedLink([device], width, near))
                if kind == "outside" and len(nodes) > 1:
                    found.append(SharedLink([device], width, [d for d in devices if d not in node]))
                if kind == "all":
                    found.append(SharedLink([device], width))
            if kind == "card":
                found.append(SharedLink(node, width))
        if kind == "other":
            some = st.sets(st.sampled_from(devices), min_size=1)
            found.append(SharedLink(draw(some), width, draw(st.none() | some)))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Exchange], Network]:
    """Draw exchanges on a few channels and groups, so that several often share one."""
    count, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nodes = [[each * k + i for i in range(each)] for k in range(count + (each == 1))]
    devices = [device for node in nodes for device in node]
    subsets = st.lists(st.sampled_from(devices), min_size=2, max_size=6, unique=True).map(tuple)
    groups = draw(st.lists(subsets, min_size=1, max_size=2)) + [tuple(devices)]
    channels = [group[:2] for group in draw(st.lists(subsets, min_size=1, max_size=3))]
    exchanges = list[Exchange]()
    for k in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(("send", *KINDS)))
        members = draw(st.sampled_from(channels if kind == "send" else groups))
        exchanges.append(
            Exchange(
                kind,
                members,
                draw(st.integers(0, 40)),
                tuple(draw(TIMES) for _ in members),
                draw(st.none() | st.integers(0, k - 1)) if k else None,
                draw(st.sampled_from("ab")),
                draw(st.integers(1, len(members) - 1)),
            )
        )
    hierarchical = HierarchicalRing(tuple(map(tuple, nodes)), draw(LINKS), draw(LINKS))
    return exchanges, Network(
        draw(LINKS),
        {channel: draw(LINKS) for channel in channels},
        {
            group: hierarchical
            if len(nodes) > 1 and group == tuple(devices) and draw(st.booleans())
            else draw(LINKS)
            for group in groups
        },
        shared=draw(shared_links(nodes)),
    )


@settings(max_examples=200)
@given(case=cases())
def test_times_are_those_of_a_fluid_model(case: tuple[list[Exchange], Network]) -> None:
    assert simulated(*case) == fluid(*case)


@settings(max_examples=200)
@given(case=cases(), data=st.data())
def test_communicators_take_one_exchange_at_a_time(
    case: tuple[list[Exchange], Network], data: st.DataObject
) -> None:
    """In the order in which their parties are ready. Delays are such that no two are ready at the same time."""
    exchanges, network = case
    rows = [*"ab", *(f"s{k}" for k, exchange in enumerate(exchanges) if exchange.kind == "send")]
    names = {row: name for row in rows if (name := data.draw(st.sampled_from(("x", "y", None)))) is not None}
    primes = itertools.count(1)
    exchanges = [
        replace(e, delays=tuple(delay + Fraction(1, 1009 + next(primes)) for delay in e.delays))
        for e in exchanges
    ]
    network = replace(network, communicators=names)
    assert simulated(exchanges, network) == fluid(exchanges, network)


def test_an_exchange_that_is_ready_later_does_not_overtake() -> None:
    """The first message is ready last. And a message that waits for one of its two communicators keeps its
    place on the other one."""
    network = Network(Link(latency=4), communicators={"s0": "x", "s1": "x", "s2": "x"})
    late = [Exchange("send", (0, 1), 0, (2, 0)), Exchange("send", (0, 2), 0, (1, 0))]
    assert simulated([*late, Exchange("send", (0, 3), 0, (0, 0))], network) == [(8, 12), (4, 8), (0, 4)]
    row = [Exchange("send", channel, 0, (k, 0)) for k, channel in enumerate([(0, 1), (1, 2), (2, 3)])]
    assert simulated(row, network) == [(0, 4), (4, 8), (8, 12)]
    assert simulated(row, replace(network, communicators={})) == [(0, 4), (1, 5), (2, 6)]


TEN = Link(bandwidth=10)
NODES = ((0, 1), (2, 3))


def test_two_messages_of_one_channel_and_nested_domains() -> None:
    """Two messages from 0 to 2 take turns. They share the card of their node with a message from 1 to 3, and
    the port of device 0 with a message to 1. The rates are 5, 5 and 7 until 3, then 5 and 5 until 12, and
    then 10.
    """
    exchanges = [
        Exchange("send", (0, 2), 40, (0, 0)),
        Exchange("send", (0, 2), 20, (0, 0)),
        Exchange("send", (1, 3), 80, (0, 0)),
        Exchange("send", (0, 1), 21, (0, 0)),
    ]
    port, card = SharedLink([0], 12), SharedLink([0, 1], 10)
    nested, flat = (Network(TEN, shared=shared) for shared in ([port, card], [port]))
    assert simulated(exchanges, nested) == fluid(exchanges, nested) == [(0, 8), (8, 12), (0, 14), (0, 3)]
    assert simulated(exchanges, flat) != simulated(exchanges, nested)


def test_a_shift_does_not_go_around_rings() -> None:
    """Each member sends 20 bytes to the next, so 2 for the bytes. The rings would take three phases' time."""
    network = Network(groups={(0, 1, 2, 3): HierarchicalRing(NODES, Link(7), Link(1, 10))})
    about = ((0, 1, 2, 3), 20, (0,) * 4)
    for shared in ([], [SharedLink([0], 1000)]):
        found = simulated([Exchange("shift", *about)], replace(network, shared=shared))
        assert found == [(0, 3)]
    assert simulated([Exchange("all_reduce", *about)], network) != [(0, 3)]


def test_a_gather_goes_across_nodes_first() -> None:
    """A message inside of a node, from 0 to 2 on, does not meet it."""
    network = Network(
        TEN, groups={(0, 1, 2, 3): HierarchicalRing(NODES, TEN, TEN)}, shared=[SharedLink([0], 10, [1])]
    )
    found = {
        kind: simulated(
            [Exchange(kind, (0, 1, 2, 3), 80, (0,) * 4), Exchange("send", (0, 1), 20, (0, 0))], network
        )
        for kind in ("all_gather", "gather_samples", "reduce_scatter")
    }
    assert found["all_gather"] == found["gather_samples"] == [(0, 6), (0, 2)]
    assert found["reduce_scatter"] == [(0, 8), (0, 4)]


def test_a_device_that_is_listed_twice_counts_once() -> None:
    both = [Exchange("send", (0, 1), 20, (0, 0)), Exchange("send", (0, 2), 20, (0, 0))]
    once, twice = (simulated(both, Network(TEN, shared=[SharedLink(d, 10)])) for d in ([0], [0, 0]))
    assert once == twice == [(0, 4), (0, 4)] != simulated(both, Network(TEN))
