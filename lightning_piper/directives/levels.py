"""Other levels of a program: the same replicas with less divided over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_piper.directives.base import Directive
from lightning_piper.directives.replicate import Replicate

_WHOLE: Mapping[str, Any] = {"shard_optimizer": False, "shard_grads": False, "shard_params": False}


def shards_of(directive: Directive) -> list[str]:
    """The fields of a directive by which it shards what replicas have."""
    return [field for field in _WHOLE if isinstance(directive, Replicate) and getattr(directive, field)]


def whole(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """A program whose replicas have everything whole."""
    return tuple(
        dataclasses.replace(each, **_WHOLE, shard_by="elements") if isinstance(each, Replicate) else each for each in program
    )


def divides_optimizer(program: Sequence[Directive]) -> tuple[Directive, ...]:
    """A program that shards the optimizer's state, where it shards something."""
    return tuple(
        dataclasses.replace(each, **{**_WHOLE, "shard_optimizer": True})
        if isinstance(each, Replicate) and shards_of(each) else each
        for each in program
    )  # fmt: skip
