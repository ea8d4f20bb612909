"""Kinds of devices, without having one: their random number generators, their backends, and the kinds that
raise an error.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lightning_piper.accelerators import accelerator_of, generators_of, seeded, with_index
from lightning_piper.accelerators.kinds import backend_of, check_kind, name_of, options_of
from lightning_piper.errors import ExecutionError, PiperError

XPU = torch.device("xpu", 1)


def with_generators(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.Generator]:
    made = [torch.Generator() for _ in range(count)]
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: SimpleNamespace(default_generators=tuple(made))
    )
    return made


def test_both_generators_follow_the_seed_and_go_on_as_if_nothing_was_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, own = with_generators(monkeypatch, 2)
    states = own.get_state(), torch.default_generator.get_state()

    def drawn(seed: int) -> list[torch.Tensor]:
        with seeded(seed, XPU):
            return [torch.rand(4, generator=own), torch.rand(4)]

    first, again, other = drawn(1), drawn(1), drawn(2)
    for a, b, c in zip(first, again, other, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(own.get_state(), states[0]) and torch.equal(
        torch.default_generator.get_state(), states[1]
    )


def test_a_device_without_a_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_generators(monkeypatch, 1)
    with pytest.raises(ExecutionError, match=r"xpu:1: torch.xpu has no default_generators\[1\]"):
        generators_of(XPU)
    assert generators_of(torch.device("cpu")) == [torch.default_generator]


def test_a_backend_that_a_package_has_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    hpu = torch.device("hpu", 0)
    with pytest.raises(PiperError, match=r"cannot train on hpu: .*it has backends for cpu, cuda, xpu"):
        backend_of(hpu)
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "hpu", "hccl")
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    assert backend_of(hpu) == "hccl" and options_of("hccl") is None
    assert backend_of(torch.device("cpu")) == "gloo"


def test_what_no_plan_can_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kind(torch.device("cpu"))
    with pytest.raises(PiperError, match=r"cannot train on xla: .*torch\.accelerator, which finds"):
        check_kind(torch.device("xla", 0))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: without_float64())
    with pytest.raises(
        PiperError, match=r"cannot train on mps: .*float64, which mps does not support \(no doubles\)"
    ):
        check_kind(torch.device("mps", 0))


def without_float64() -> torch.Tensor:
    raise TypeError("no doubles")


def test_the_host_has_no_streams() -> None:
    cpu = torch.device("cpu")
    assert accelerator_of(cpu) is None and with_index(cpu) is cpu and name_of(cpu) == "cpu"
    assert accelerator_of(XPU) is not None and with_index(XPU) is XPU
