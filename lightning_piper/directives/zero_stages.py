"""Variants of a program with the same replicas at a lower ZeRO stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_piper.directives.base import Directive
from lightning_piper.directives.replicate import Replicate

_WHOLE: Mapping[str, Any] = {"shard_optimizer": False, "shard_grads": False, "shard_params": False}


def shards_of(directive: Directive) -> list[str]:
    """Return the names of the sharding fields that are set in a directive."""
    return [field for field in _WHOLE if isinstance(directive, Replicate) and getattr(directive, field)]


def without_sharding(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """Return the program at ZeRO stage 0: replicas shard nothing."""
    return tuple(
        dataclasses.replace(each, **_WHOLE, shard_by="elements") if isinstance(each, Replicate) else each
        for each in program
    )


def divides_optimizer(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """Return the program with each ZeRO stage above 0 lowered to stage 1, a sharded optimizer state."""
    return tuple(
        dataclasses.replace(each, **{**_WHOLE, "shard_optimizer": True})
        if isinstance(each, Replicate) and shards_of(each)
        else each
        for each in program
    )
