"""Snapshots: nothing changes them, their tensors share memory if the saved tensors did, and a snapshot reuses
the memory of the previous one.
"""

from __future__ import annotations

import io
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

from lightning_piper.checkpoint.late_copies import HostRoom, LateCopies
from lightning_piper.checkpoint.snapshot import snapshot


@dataclass
class Own:
    x: torch.Tensor


def example() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "state_dict": OrderedDict(
            a=weight, tied=weight, view=weight[1:], turned=weight.t(), empty=torch.empty(0, 3)
        ),
        "optimizer_states": [
            {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(5, dtype=torch.bfloat16)}}}
        ],
        "callbacks": {"best": {"a.ckpt": 1.5}, "own": Own(torch.zeros(2))},
        "loops": (1, [2]),
        "complex": torch.tensor([1 + 2j]).conj(),
    }


def saved(content: Any) -> tuple[str, int]:
    """Return the text of a file of the content, and the number of tensors whose data are in it."""
    file = io.BytesIO()
    torch.save(content, file)
    names = zipfile.ZipFile(file).namelist()
    file.seek(0)
    return repr(torch.load(file, weights_only=False)), sum("/data/" in name for name in names)


def whole(content: Any, room: HostRoom) -> Any:
    return snapshot(content, LateCopies(room))()


def change(content: dict[str, Any]) -> None:
    content["state_dict"]["a"].zero_()
    content["optimizer_states"][0]["state"][0]["exp_avg"].zero_()
    content["callbacks"]["best"]["b.ckpt"] = 2.5
    content["callbacks"]["own"].x.fill_(7)
    content["loops"][1].append(3)


def test_a_snapshot_is_what_was_there() -> None:
    content, expected = example(), saved(example())
    copy = whole(content, HostRoom())
    assert saved(copy) == expected
    change(content)
    assert saved(copy) == expected != saved(content)
    assert copy["state_dict"]["a"] is copy["state_dict"]["tied"]
    assert copy["state_dict"]["view"].untyped_storage().data_ptr() == copy["state_dict"]["a"].data_ptr()


def test_memory_is_used_again() -> None:
    room = HostRoom()
    first = whole(example(), room)["state_dict"]["a"]
    again = whole(example(), room)["state_dict"]["a"]
    assert first.data_ptr() == again.data_ptr()
    other = whole({"a": torch.zeros(13)}, room)["a"]
    assert other.data_ptr() != first.data_ptr()
    assert len(room._taken) == 1  # what the others were is let go with the next snapshot
