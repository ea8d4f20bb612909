"""Figures of devices: those in the package, those of this machine, and those in hostile files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_piper.errors import SimulationError
from lightning_piper.simulate.hardware import Hardware, known
from lightning_piper.simulate.network import Link

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
    with pytest.raises(SimulationError, match="H100 SXM: flops has no 'complex64'"):
        found.flops_of(torch.complex64)


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
    "a key too many": ({"speed": 1}, "has 'speed'; accepted are name, source, memory"),
    "a negative number": ({"bandwidth": -1}, "bandwidth is -1; give a number > 0"),
    "zero": ({"memory": 0}, "memory is 0; give a number > 0"),
    "a truth value": ({"host_memory": True}, "host_memory is True"),
    "a number without end": ({"memory": 10**40}, "memory is 1000"),
    "a text": ({"bandwidth": "fast"}, "bandwidth is 'fast'"),
    "no data types": ({"flops": {}}, r"flops is \{\}; give an object"),
    "a data type that is none": ({"flops": {"Tensor": 1}}, "flops has 'Tensor', which is not a data type"),
    "a negative rate": ({"flops": {"float32": -1}}, "flops of 'float32' is -1"),
    "no links": ({"links": []}, "give a list of at least one link"),
    "links of no devices": (
        {"links": [LINK | {"devices": 0}]},
        r"links\[0\]: devices is 0; give an integer >= 1",
    ),
    "links that join fewer": (
        {"links": [LINK, LINK]},
        r"links join \[8, 8\] devices; give the links from the nearest to the farthest",
    ),
    "a latency that is none": ({"links": [LINK | {"latency": -1}]}, r"links\[0\]: latency is -1"),
    "a link without bandwidth": ({"host": {"latency": 0}}, "host lacks 'bandwidth'"),
    "a host that is none": ({"host": []}, "host is a list; give an object"),
    "too efficient": ({"efficiency": 1.5}, "efficiency is 1.5; give a share, at most 1"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_files(tmp_path: Path, what: str) -> None:
    changes, message = HOSTILE[what]
    Hardware.read(changed(tmp_path))
    with pytest.raises(SimulationError, match=message):
        Hardware.read(changed(tmp_path, **changes))


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(SimulationError, match="there is no hardware 'h1000'; give one of a100-40gb-sxm"):
        Hardware.read("h1000")
    with pytest.raises(SimulationError, match="does not exist"):
        Hardware.read(tmp_path / "none.json")
    path = tmp_path / "broken.json"
    path.write_text("[1, NaN]")
    with pytest.raises(SimulationError, match="cannot be read as JSON: NaN is not a number"):
        Hardware.read(path)
    path.write_text("[]")
    with pytest.raises(SimulationError, match="is a list; give an object with name, source"):
        Hardware.read(path)
    given: Any = 7
    with pytest.raises(SimulationError, match="there is no hardware 7"):
        Hardware.read(given)
