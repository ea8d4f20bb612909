"""Fits the speeds that the simulator uses to a device: matrix products, copies and collectives. Then compares
the passes of a GPT with the times that this `Hardware` predicts.

Each collective has one process, so its link is the cost of a call and of a copy, not of a network.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from _gpt import Config, Module, batch

from lightning_piper.accelerators import synchronize
from lightning_piper.accelerators.kinds import backend_of, name_of
from lightning_piper.search.costs.analytic_costs import costs_of
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.measurement import seconds_of_passes
from lightning_piper.search.costs.operation_costs import seconds
from lightning_piper.simulate import Hardware, Link

# By kind of device: rows of a matrix product, bytes of a copy, and the model whose passes are predicted.
PRODUCT = {"cpu": 256, "cuda": 8192}
NBYTES = {"cpu": 1 << 22, "cuda": 1 << 28}
CONFIGS = {
    "cpu": Config(cut=(1, 1), d=64, heads=2, seq=32, vocab=128),
    "cuda": Config(cut=(4, 4), d=1024, heads=16, seq=512, vocab=32768),
}
SMALL, ROUNDS, SEQUENCES = 1 << 10, 7, 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def taken(run: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of a call, after one call to warm up."""
    found = []
    for _ in range(ROUNDS + 1):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[1:])


def link(make: Callable[[int], Callable[[], object]], device: torch.device) -> Link:
    """Fit latency and bandwidth to a small and a large transfer. `make` takes a number of bytes, and returns
    a function that transfers them."""
    large = NBYTES[device.type]
    latency, whole = taken(make(SMALL), device), taken(make(large), device)
    return Link(latency, large / max(whole - latency, whole / 2))


def flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the floating point operations per second of a matrix product."""
    n = PRODUCT[device.type] // (4 if dtype == torch.float64 else 1)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / taken(lambda: a @ b, device)


def copied(device: torch.device) -> Callable[[int], Callable[[], object]]:
    """Return the copies within the memory of a device."""

    def make(nbytes: int) -> Callable[[], object]:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return make


def to_host(device: torch.device) -> Callable[[int], Callable[[], object]]:
    """Return the copies from a device to pinned memory of its host."""

    def make(nbytes: int) -> Callable[[], object]:
        source = torch.ones(nbytes, dtype=torch.uint8, device=device)
        target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
        return lambda: target.copy_(source, non_blocking=True)

    return make


def collectives(device: torch.device) -> dict[str, Link]:
    """Return the links of collectives of one process."""
    dist.init_process_group(
        backend_of(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )

    def of(run: Callable[[torch.Tensor, torch.Tensor], object]) -> Link:
        def make(nbytes: int) -> Callable[[], object]:
            x = torch.ones(nbytes // 4, device=device)
            into = torch.empty_like(x)
            return lambda: run(into, x)

        return link(make, device)

    try:
        found = {
            "all-reduce of one process": of(lambda into, x: dist.all_reduce(x)),
            "all-gather of one process": of(lambda into, x: dist.all_gather_into_tensor(into, x)),
        }
        if device.type != "cpu":  # older releases of gloo lack it
            found["reduce-scatter of one process"] = of(lambda into, x: dist.reduce_scatter_tensor(into, x))
        return found
    finally:
        dist.destroy_process_group()


def fitted(device: torch.device, speeds: dict[str, float], copy: Link, host: Link) -> Hardware:
    """Return the measured device. Its memory moves twice the bytes of a copy."""
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        memory = torch.cuda.mem_get_info(device)[1]
    assert copy.bandwidth is not None
    return Hardware(
        name_of(device), memory, speeds, 2 * float(copy.bandwidth), ((65536, copy),), host, memory
    )


def predicted(device: torch.device, hardware: Hardware) -> Iterator[dict[str, object]]:
    """Yield a row for each kind of pass: the measured and the predicted seconds of all passes of the kind."""
    config = CONFIGS[device.type]
    module, leaves = Module(config).to(device), batch(config, 0, SEQUENCES)
    here = tuple(x.to(device) for x in leaves)
    cut = blocks_of(module, here)
    times, _ = seconds_of_passes(cut, list(here), SEQUENCES, ROUNDS, time.perf_counter)
    costs = costs_of(cut.step, SEQUENCES)
    for kind in ("F", "B"):
        measured = sum(passes.get(kind, 0.0) for passes in times.values())
        expected = sum(seconds(found, hardware) for key, found in costs.items() if key[1] == kind)
        yield {
            "name": f"all passes {kind} of a GPT",
            "measured ms": measured * 1e3,
            "predicted ms": expected * 1e3,
            "efficiency": expected / measured,
        }


def measured(device: torch.device) -> Iterator[dict[str, object]]:
    """Yield a row for each speed and link of the device, and for the fit."""
    speeds = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        speeds[name] = flops(dtype, device)
        yield {"name": f"matrix product, {name}", "TFLOP/s": speeds[name] / 1e12}
    links = {
        "copy in device memory": link(copied(device), device),
        "copy to the host": link(to_host(device), device),
    }
    copy, host = links.values()
    try:
        links |= collectives(device)
    except Exception as error:  # the fit does not need them
        said = (str(error) or type(error).__name__).splitlines()[0]
        yield {"name": "collectives of one process", "outcome": "failed", "said": said}
    for name, found in links.items():
        assert found.bandwidth is not None
        yield {"name": name, "latency us": float(found.latency) * 1e6, "GB/s": float(found.bandwidth) / 1e9}
    yield from predicted(device, fitted(device, speeds, copy, host))
