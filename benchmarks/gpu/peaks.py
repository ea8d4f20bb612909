"""The peak of allocated memory: of torch's allocator on an accelerator, of torch's profiler on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from _memory import MB, growth_of, peak_of


def peak_with(device: torch.device, build: Callable[[], Callable[[int], Any]]) -> float:
    """Return the peak bytes in the third step, counted from before `build`.

    Args:
        device: The device whose memory counts.
        build: Allocates tensors, and returns a function that runs a step with a seed.
    """
    gc.collect()  # otherwise tensors of earlier measurements may be freed in this one
    if device.type == "cpu":
        return peak_of(build) * MB
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated(device)
    step = build()
    for seed in range(2):
        step(seed)
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    step(2)
    torch.accelerator.synchronize(device)
    return float(torch.accelerator.max_memory_allocated(device) - before)


def growth_in(device: torch.device, step: Callable[[], Any]) -> int:
    """Return the peak bytes during a step, counted from before the step."""
    gc.collect()
    if device.type == "cpu":
        return growth_of(step)
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    result = step()
    torch.accelerator.synchronize(device)
    peak = torch.accelerator.max_memory_allocated(device)
    del result
    return peak - before
