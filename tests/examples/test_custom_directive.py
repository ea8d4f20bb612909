"""The example's directive keeps its contract, and saves memory as it promises."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from examples.custom_directive import Checkpoint, Regressor
from lightning_piper import compile
from lightning_piper.ir import Chunk, TrainingDAG
from lightning_piper.testing import Case, directive_suite


def recomputes(case: Case, dag: TrainingDAG) -> st.SearchStrategy[Checkpoint]:
    stages = sorted({chunk.tags["PP"] for chunk in dag.of_type(Chunk) if "PP" in chunk.tags}, key=str)
    return st.one_of(st.just({}), *(st.just({"PP": stage}) for stage in stages)).map(
        lambda chosen: Checkpoint(filter=chosen)
    )


TestCheckpoint = directive_suite(Checkpoint, recomputes)


def test_the_first_forward_keeps_nothing() -> None:
    """Without the directive F hands its activations to B; with it only the second forward does."""
    batch = [torch.randn(4, 64), torch.randn(4, 64)]
    for program, readers in (([], {False}), ([Checkpoint(filter={})], {True})):
        dag = compile(Regressor(), batch, program).dag
        kept = [
            chunk
            for chunk in dag.of_type(Chunk)
            for user in dag.users(chunk)
            if user in _backward(dag, chunk)
        ]
        assert {"RECOMPUTED" in chunk.tags for chunk in kept} == readers


def _backward(dag: TrainingDAG, forward: Chunk) -> list[Chunk]:
    return [chunk for chunk in dag.of_type(Chunk) if chunk.kind == "B" and chunk.region == forward.region]
