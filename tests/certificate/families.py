"""Programs of every family, whose certificates the checker must accept, and their certificates."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

import lightning_piper as piper
from lightning_piper import Offload, Place, Recompute, Replicate, ShardExperts, Split
from lightning_piper import schedules as S
from lightning_piper.capture import capture
from lightning_piper.certificate import certificate_of
from lightning_piper.directives import Directive, parse
from lightning_piper.ir.regions import Step
from lightning_piper.passes import run_pipeline
from lightning_piper.plan import compile_plans
from lightning_piper.testing import POOL, Spec, case
from tests import ring, tensors
from tests.simulate.programs import Chain

PAIRS = [[0, 2], [1, 3]]
LONG = Spec(("linear", "residual", "residual", "linear"), (0, 1, 2, 3))


def _split(parts: int) -> Split:
    return Split(filter={}, dim_name="MB", num_microbatches=parts)


def _groups(*groups: Sequence[int]) -> list[Directive]:
    if len(groups) == 1:
        return [Place(filter={}, devices=list(groups[0]))]
    return [Place(filter={"PP": stage}, devices=list(group)) for stage, group in enumerate(groups)]


def _replicate(*groups: list[int], **fields: Any) -> Replicate:
    return Replicate(filter={}, devices=list(groups), bucket_size=0.0003, **fields)


@functools.cache
def _chain(stages: int) -> Step:
    return capture(Chain(stages), torch.zeros(8, 4))


def _of(spec: Spec, size: int, program: Sequence[Directive]) -> Callable[[], tuple[Step, Any]]:
    return lambda: (case(spec, size).step, program)


def _pipeline(stages: int, program: Any) -> Callable[[], tuple[Step, Any]]:
    return lambda: (_chain(stages), program)


def _decoder(*program: Directive) -> Callable[[], tuple[Step, Any]]:
    return lambda: (tensors.captured(), program)


_EXPERTS = Spec(("experts", "experts"), (0, 1))
_TWO = [[0, 1], [2, 3]]
FAMILIES: dict[str, Callable[[], tuple[Step, Any]]] = {
    "one device": _of(POOL[3], 8, [_split(3)]),
    "replicas": _of(POOL[4], 8, [*_groups(*PAIRS), _split(2), _replicate(*PAIRS)]),
    "ZeRO-1": _of(POOL[4], 8, [*_groups(*PAIRS), _split(2), _replicate(*PAIRS, shard_optimizer=True)]),
    "ZeRO-2": _of(POOL[4], 8, [*_groups(*PAIRS), _replicate(*PAIRS, shard_grads=True), _split(4)]),
    "ZeRO-3": _of(LONG, 8, [*_groups([0, 1]), _split(2), _replicate([0, 1], shard_params=True)]),
    "gathers in float32": _of(
        LONG, 8, [*_groups([0, 1]), _split(2), _replicate([0, 1], shard_params=True, gather_dtype="float32")]
    ),
    "owners": _of(
        LONG,
        8,
        [
            *_groups([0, 1]),
            _split(2),
            _replicate([0, 1], shard_grads=True, shard_by="parameter", overlap_update=True),
        ],
    ),
    "HSDP": _of(
        LONG,
        8,
        parse(
            [
                {"op": "place", "filter": {}, "devices": [0, 1, 2, 3]},
                {"op": "replicate", "zero": 3, "shard_size": 2},
            ]
        ),
    ),
    "1F1B": _pipeline(4, S.one_f_one_b(4, 4)),
    "interleaved": _pipeline(4, S.interleaved_one_f_one_b(4, 4, devices=[0, 1])),
    "zero bubble": _pipeline(2, S.zero_bubble(2, 4)),
    "ZBV": _pipeline(4, S.zbv(4, 4)),
    "DualPipe": _pipeline(4, S.dualpipe(4, 8)),
    "tied weights": _of(POOL[7], 5, S.one_f_one_b(3, 3)),
    "PP x DP": _of(
        Spec(("residual", "frozen", "linear"), (0, 1, 2)),
        8,
        [
            *S.one_f_one_b(3, 4, devices=[[0, 3], [1, 4], [2, 5]]),
            _replicate([0, 3], [1, 4], [2, 5], shard_params=True),
        ],
    ),
    "weights of the batch": _of(
        Spec(("scored", "scored"), (0, 1)), 8, [*_groups(*PAIRS), _split(2), _replicate(*PAIRS)]
    ),
    "buffers": _of(POOL[5], 5, [*_groups([0], [1]), _split(3)]),
    "sums of the batch": _of(
        Spec(("synced", "linear", "synced"), (0, 1, 1)), 8, [_split(2), *_groups(*PAIRS), _replicate(*PAIRS)]
    ),
    "gathered samples": _of(
        Spec(("linear", "gathered", "residual"), (0, 1, 1)),
        8,
        [_split(2), *_groups(*PAIRS), _replicate(*PAIRS)],
    ),
    "experts": _of(
        _EXPERTS,
        8,
        [
            *S.one_f_one_b(2, 2, devices=PAIRS),
            _replicate(*PAIRS, shard_grads=True),
            ShardExperts(filter={"EP": "*"}, devices=PAIRS),
        ],
    ),
    "tensor parallel": _decoder(*_groups([0, 1]), tensors.divided([0, 1])),
    "vocabulary": lambda: (
        tensors.captured(),
        piper.tensor_parallel(tensors.decoder(), tensors.tensors(8), 2),
    ),
    "tensor parallel stages": _decoder(*tensors.stages(_TWO), tensors.divided(_TWO, sequence=True)),
    "ring attention": lambda: (ring.captured(), ring.around(2)),
    "sequences": lambda: (ring.captured(), ring.around(2, attention="heads")),
    "chunked losses": _decoder(
        piper.ChunkLoss(chunk=4), *_groups([0, 1]), Replicate(filter={}, devices=[0, 1])
    ),
    "recompute": _of(Spec(("residual", "norm"), (0, 1)), 5, [*S.one_f_one_b(2, 3), Recompute(filter={})]),
    "recompute by name": _of(
        Spec(("attention", "branch"), (0, 1)), 5, [*S.one_f_one_b(2, 3), Recompute(filter={}, keep=["*mm"])]
    ),
    "offload": _of(
        Spec(("linear", "residual", "norm"), (0, 1, 1)),
        6,
        [*S.zero_bubble(2, 3), Recompute(filter={}), Offload(filter={}, ahead=2)],
    ),
}


@functools.cache
def text(family: str) -> str:
    """Return the certificate of a family's program as JSON."""
    step, directives = FAMILIES[family]()
    program = tuple(parse(directives))
    dag = run_pipeline(step, program)
    return json.dumps(certificate_of(dag, compile_plans(dag), program))


def certificate(family: str) -> dict[str, Any]:
    """Return a new copy of the certificate of a family's program."""
    found: dict[str, Any] = json.loads(text(family))
    return found
