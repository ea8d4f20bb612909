"""Checksums by which processes compare their programs."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from lightning_piper.compiler import Compiled
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind, Value
from lightning_piper.ops.communication.total import OverBatch


def sum_of_plans(compiled: Compiled) -> int:
    """Return a checksum of the plans. It covers the plans' operations, order and devices, and the owners of whole
    parameters, but not shapes.

    The checksum covers the number of samples only if replicas exchange values for each sample.
    """
    dag, texts = compiled.dag, dict[int, str]()
    inner = (Kind.ACTIVATION, Kind.COTANGENT)  # their names come from the trace and differ between shapes

    def text(part: tuple[Any, ...], parts: Iterable[object]) -> str:
        """Return `parts` as text. The text is cached by the identity of `part`, because many nodes share
        `part`, and its text may be long."""
        if id(part) not in texts:
            texts[id(part)] = str(list(parts))
        return texts[id(part)]

    def described(value: Value) -> tuple[object, ...]:
        owners = None if value.bucket is None else value.bucket.owners
        return value.kind, len(value.names) if value.kind in inner else value.names, owners

    joined = any(dag.of_type(OverBatch)) and dag.code.undivided is None
    return checksum(
        str(dag.size if joined else 0),
        *(
            f"{node.id} {type(node).__name__} {node.key if isinstance(node, Chunk) else ''} "
            f"{text(node.devices, node.devices)} {node.stream} {node.reads} "
            f"{text(node.outputs, map(described, node.outputs))}"
            for node in compiled.plans.order
        ),
    )


def checksum(*texts: str) -> int:
    """Return a checksum of texts."""
    return zlib.crc32("\n".join(texts).encode())
