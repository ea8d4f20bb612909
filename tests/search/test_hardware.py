"""Figures of devices: those in the package, those of this machine, and those in hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from lightning_piper.errors import SimulationError
from lightning_piper.ir.values import TensorSpec
from lightning_piper.plan.instructions import AllReduceInstruction, Instruction, SendInstruction
from lightning_piper.simulate.contention import Traffic
from lightning_piper.simulate.hardware import Hardware, SharedBandwidth, known
from lightning_piper.simulate.network import HierarchicalRing, Link

FOLDER = Path(__file__).parents[2] / "lightning_piper" / "simulate" / "hardware"


def test_every_file_is_read_and_names_its_source() -> None:
    assert len(known()) >= 12 and {"h100-sxm", "cpu", "tpu-v5p"} <= set(known())
    for name in known():
        content = json.loads((FOLDER / f"{name}.json").read_text())
        found = Hardware.read(name)
        assert content["source"] and all(link["source"] for link in content["links"]), name
        assert (found.memory, found.bandwidth, found.efficiency) == (
            content["memory"],
            content["bandwidth"],
            1.0,
        )
        assert max(found.flops.values()) / found.bandwidth > 1, "products pay for what they read"


def test_figures_of_a_data_sheet() -> None:
    """H100 SXM: 989 TFLOP/s in bfloat16 without sparsity, 80 GB at 3.35 TB/s, NVLink with 900 GB/s in both
    directions together.
    """
    found = Hardware.read("h100-sxm")
    assert abs(found.flops_of(torch.bfloat16) - 989e12) < 1e12 and found.flops_of(torch.float32) == 67e12
    assert (found.memory, found.bandwidth) == (80e9, 3350e9)
    assert found.link(0, 7).bandwidth == found.link(8, 15).bandwidth == 450e9
    assert found.link(7, 8).bandwidth == 50e9
    with pytest.raises(SimulationError, match="H100 SXM' has no speed for complex64"):
        found.flops_of(torch.complex64)


def test_devices_share_the_network_of_a_node() -> None:
    """P4d: 100 Gb/s for two devices are 6.25 GB/s for each, or 12.5 GB/s for one."""
    found = Hardware.read("a100-p4d")
    assert found.link(0, 7).bandwidth == 300e9 and found.link(7, 8).bandwidth == 6.25e9
    assert found.shared == (SharedBandwidth(1, 300e9, 300e9), SharedBandwidth(2, 12.5e9, 12.5e9))
    assert Hardware.read("a100-80gb-sxm").link(7, 8).bandwidth == 25e9


class Ended(NamedTuple):
    """A plan with instructions alone."""

    instructions: list[Instruction]


def exchanged(members: tuple[int, ...], nbytes: int) -> Any:
    """The instructions of an all-reduce over members, and of a message from each to the device 8 after it."""
    tensors = (TensorSpec((nbytes,), torch.uint8, (1,)),)
    about: dict[str, Any] = {"node": 0, "label": "", "tensors": tensors}
    summed = AllReduceInstruction(**about, members=members, communicator="data")
    return {d: Ended([summed, SendInstruction(**about, channel=(d, d + 8))]) for d in members}


def test_the_network_of_plans() -> None:
    """Among 16 devices on two nodes, a sum is a hierarchical ring, and each two devices share a network
    card.
    """
    members = tuple(range(16))
    plans = exchanged(members, 64 * 10**9)
    network = Hardware.read("a100-p4d").network(plans)
    assert network.channels[0, 8] == Link(1e-5, 12.5e9) == network.channels[7, 15]
    ring = network.groups[members]
    assert ring == HierarchicalRing((members[:8], members[8:]), Link(5e-6, 300e9), Link(1e-5, 12.5e9))
    # Inside: 2 x 7 x 8 GB at 300 GB/s. Across: 2 x 1 x 4 GB at 12.5 GB/s, if nothing else leaves the node.
    alone = 2 * 7 * (5e-6 + 8 / 300) + 2 * (1e-5 + 4 / 12.5)
    assert network.collective(plans[0].instructions[0]) == pytest.approx(alone)
    ports = [link for link in network.shared if len(link.devices) == 1]
    cards = [link for link in network.shared if len(link.devices) == 2]
    assert [link.devices for link in ports] == [[device] for device in members]
    assert all(len(link.peers or ()) == 7 and link.bandwidth == 300e9 for link in ports)
    assert [(link.devices, sorted(link.peers or ())) for link in cards] == [
        ([first, first + 1], list(members[8:] if first < 8 else members[:8])) for first in members[::2]
    ]
    # Of groups with one member on a node, or with unequal numbers, the ring takes the links across nodes.
    for odd in ((0, 8), (0, 1, 8)):
        assert Hardware.read("a100-p4d").network(exchanged(odd, 8)).groups[odd] == Link(1e-5, 12.5e9)


def test_two_devices_that_send_have_half_of_a_card_each() -> None:
    """They have 6.25 GB/s each, and a hierarchical ring has that across nodes."""
    plans = exchanged(tuple(range(16)), 64 * 10**9)
    network = Hardware.read("a100-p4d").network(plans)

    def end(instructions: list[Any]) -> float:
        """Return the end of exchanges that start together."""
        traffic, last = Traffic(network), 0.0
        for instruction in instructions:
            transfer = traffic.transfer(instruction, network.phases(instruction), ())
            assert transfer is not None
            traffic.request(0, transfer)
        while (moment := traffic.advance()) is not None:
            last = float(moment[0])
        return last

    messages = [plans[device].instructions[1] for device in range(8)]
    assert end(messages[:1]) == pytest.approx(1e-5 + 64 / 12.5)
    assert end(messages) == pytest.approx(1e-5 + 64 / 6.25)
    assert end(plans[0].instructions[:1]) == pytest.approx(2 * 7 * (5e-6 + 8 / 300) + 2 * (1e-5 + 4 / 6.25))


def test_this_machine() -> None:
    found = Hardware.measure()
    assert found.flops_of(torch.float32) > 1e8 and found.bandwidth > 1e8 and found.memory > 1e8
    assert isinstance(found.link(0, 3), Link)


def changed(tmp_path: Path, **changes: Any) -> Path:
    content = json.loads((FOLDER / "h100-sxm.json").read_text()) | changes
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


LINK = {"devices": 8, "latency": 1e-6, "bandwidth": 1e9}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a key that is missing": ({"memory": None}, r"mine\.json'? lacks 'memory'"),
    "a key too many": ({"speed": 1}, "the key 'speed' is unknown. Give one of name, source, memory"),
    "a negative number": ({"bandwidth": -1}, "bandwidth is -1. Give a number > 0"),
    "zero": ({"memory": 0}, "memory is 0. Give a number > 0"),
    "a truth value": ({"host_memory": True}, "host_memory is True"),
    "a number without end": ({"memory": 10**40}, "memory is 1000"),
    "a text": ({"bandwidth": "fast"}, "bandwidth is 'fast'"),
    "no data types": ({"flops": {}}, r"flops is \{\}. Give an object"),
    "a data type that is none": ({"flops": {"Tensor": 1}}, "flops has 'Tensor', which is not a data type"),
    "a negative rate": ({"flops": {"float32": -1}}, "flops of 'float32' is -1"),
    "no links": ({"links": []}, "Give a list of at least one link"),
    "links of no devices": (
        {"links": [LINK | {"devices": 0}]},
        r"links\[0\]: devices is 0. Give an integer >= 1",
    ),
    "links that join fewer": (
        {"links": [LINK, LINK]},
        r"links join \[8, 8\] devices. Give the links from the nearest to the farthest",
    ),
    "a latency that is none": ({"links": [LINK | {"latency": -1}]}, r"links\[0\]: latency is -1"),
    "a link without bandwidth": ({"host": {"latency": 0}}, "host lacks 'bandwidth'"),
    "a host that is none": ({"host": []}, "host is a list. Give an object"),
    "shared by no devices": (
        {"links": [LINK | {"shared": {"devices": 9, "bandwidth": 1}}]},
        r"links\[0\]: shared: devices is 9. Give an integer from 1 to 8",
    ),
    "shared without bandwidth": (
        {"links": [LINK | {"shared": {"devices": 8}}]},
        r"links\[0\]: shared lacks 'bandwidth'",
    ),
    "too efficient": ({"efficiency": 1.5}, "efficiency is 1.5. Give a number > 0 and <= 1"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(tmp_path: Path, what: str) -> None:
    changes, message = HOSTILE[what]
    Hardware.read(changed(tmp_path))
    with pytest.raises(SimulationError, match=message):
        Hardware.read(changed(tmp_path, **changes))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match=r"there is no hardware 'h1000'. Give one of a100-40gb-sxm"):
        Hardware.read("h1000")
    with pytest.raises(SimulationError, match="does not exist"):
        Hardware.read(tmp_path / "none.json")
    path = tmp_path / "broken.json"
    path.write_text("[1, NaN]")
    with pytest.raises(SimulationError, match="cannot be read as JSON: NaN is not a number"):
        Hardware.read(path)
    path.write_text("[]")
    with pytest.raises(SimulationError, match=r"is a list. Give an object with name, source"):
        Hardware.read(path)
    given: Any = 7
    with pytest.raises(SimulationError, match="there is no hardware 7"):
        Hardware.read(given)
