"""The simulated accelerator reports work on memory before earlier work on it is done. It does not report work
that waits, or that only reads.
"""

from __future__ import annotations

import pytest
import torch

from lightning_piper.accelerators.simulated_device import Simulated
from lightning_piper.errors import ExecutionError

CPU = torch.device("cpu")
ORDERS = range(6)


def found(first: str, second: str, waits: bool) -> set[str]:
    """Return the reports, in some order of the work, on two operations on one tensor that one stream issues
    after the other.
    """
    said = set()
    base = torch.arange(8.0)
    work = {
        "reads": lambda x: x.sum(),
        "writes": lambda x: x.add_(1),
        "writes the rest": lambda x: base[4:].add_(1),
    }
    for order in ORDERS:
        x = base[:4]
        try:
            with Simulated(order) as device:
                device.set_stream(device.stream(CPU, (0, "one")))
                kept = [work[first](x)]
                event = device.current_stream().record_event()
                device.set_stream(device.stream(CPU, (0, "other")))
                if waits:
                    device.current_stream().wait_event(event)
                kept.append(work[second](x))
        except ExecutionError as error:
            said.add(str(error))
    return said


@pytest.mark.parametrize(
    ("first", "second"), [("writes", "reads"), ("reads", "writes"), ("writes", "writes")]
)
def test_what_is_not_awaited_is_named(first: str, second: str) -> None:
    assert found(first, second, waits=True) == set()
    (said,) = found(first, second, waits=False)
    name = {"reads": "aten.sum.default", "writes": "aten.add_.Tensor"}
    assert (
        f"{name[second]} on stream 1 (0, other) does not wait for {name[first]} on stream 0 (0, one)" in said
    )


@pytest.mark.parametrize(
    ("first", "second"), [("reads", "reads"), ("writes", "writes the rest"), ("writes the rest", "reads")]
)
def test_what_has_nothing_to_wait_for_is_not(first: str, second: str) -> None:
    assert found(first, second, waits=False) == set()


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_reads_too_early_is_named(waits: bool) -> None:
    said = set()
    for order in ORDERS:
        x = torch.zeros(3)
        try:
            with Simulated(order) as device:
                device.set_stream(device.stream(CPU, (0, "one")))
                x.add_(1)
                event = device.current_stream().record_event()
                device.set_stream(device.stream(CPU, (0, "other")))
                if waits:
                    device.current_stream().wait_event(event)
                x[0].item()
        except ExecutionError as error:
            said.add(str(error))
    assert (
        said == set()
        if waits
        else any("the host, which reads" in text and "aten.add_.Tensor" in text for text in said)
    )
