"""Conversion between whole parameters or gradients and their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_piper.ir.buckets import Bucket, packed_params
from lightning_piper.ir.values import TensorSpec, flattened, view_as
from lightning_piper.plan.plan import Plan
from lightning_piper.runtime.executor import StepResult


def shards_of(
    plan: Plan, params: Mapping[str, torch.Tensor], device: torch.device
) -> dict[Bucket, torch.Tensor]:
    """Return new flat tensors with the values of whole parameters, as `Executor` takes them as `shards`: for each
    bucket of the plan, the whole bucket or this device's shard of it.
    """
    flats = {bucket: packed_params(bucket, params, plan.group_rank, device) for bucket in plan.shards}
    return {
        b: flat if plan.shards[b] else flat.chunk(b.members)[b.member(plan.group_rank)].clone()
        for b, flat in flats.items()
    }


def local_shards_of(plan: Plan, shards: Mapping[Bucket, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the local shard of each sharded parameter that this device's optimizer updates.

    The local shards are one-dimensional views of the flat tensors, so the optimizer changes these in place.
    """
    found: dict[str, torch.Tensor] = {}
    for bucket, flat in shards.items():
        shard = flat.chunk(bucket.members)[bucket.member(plan.group_rank)] if plan.shards[bucket] else flat
        found |= {
            name: shard[at : at + stop - start]
            for name, start, stop, at in bucket.local_shards(plan.group_rank)
        }
    return found


def joined(plans: Sequence[Plan], results: Sequence[StepResult]) -> dict[str, torch.Tensor]:
    """Return the whole gradients of a step: parameter name -> gradient. If several devices have a gradient
    whole, the first device's tensor is returned.

    Args:
        plans: The plans of all devices.
        results: The results of all devices, in the order of `plans`.
    """
    grads: dict[str, torch.Tensor] = {}
    in_shards: dict[str, tuple[torch.Tensor, TensorSpec]] = {}
    for plan, result in zip(plans, results, strict=True):
        found = dict(result.grads)
        for bucket in plan.shards:
            specs = dict(zip(bucket.names, bucket.wholes, strict=True))
            for name, start, stop, _ in bucket.local_shards(plan.group_rank):
                if name in found:
                    shard = found.pop(name)
                    shard = flattened(shard, specs[name]) if bucket.whole_tensors else shard
                    flat, _ = in_shards.setdefault(name, (shard.new_empty(specs[name].numel), specs[name]))
                    flat[start:stop] = shard
        for name, grad in found.items():
            grads.setdefault(name, grad)
    return {**grads, **{name: view_as(flat, spec) for name, (flat, spec) in in_shards.items()}}
