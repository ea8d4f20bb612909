"""Bytes of stages against those of compiled programs."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

import lightning_piper as piper
from lightning_piper.errors import SimulationError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.values import Kind
from lightning_piper.search.analytic import analytic
from lightning_piper.search.blocks import TAG, blocks_of
from lightning_piper.search.memory import FRAGMENTATION, stage_memory
from lightning_piper.simulate import simulate
from lightning_piper.simulate.hardware import Hardware
from tests.search.nets import GPT, Module, tokens

SAMPLES, MICROBATCHES = 8, 4
CPU = Hardware.read("cpu")


@pytest.mark.parametrize("border", [2, 4])
def test_what_a_stage_saves_is_what_its_program_saves(border: int) -> None:
    """Of a pipeline that keeps all microbatches (GPipe), cut between blocks."""
    module, batch = Module(GPT(3)), tokens(SAMPLES)
    cut = blocks_of(module, batch, short=False)
    blocks = analytic(module, batch, CPU, samples=(2,), tensor=()).blocks
    stages = [range(border), range(border, len(blocks))]
    annotated = Module(GPT(3))
    piper.annotate_modules(annotated, TAG, cut.groups)
    program = json.dumps([directive.to_json() for directive in piper.schedules.gpipe(stages=2, microbatches=MICROBATCHES)])
    for i, stage in enumerate(stages):
        program = program.replace(f'"PP": {i}', f'"{TAG}": {list(stage)}')
    compiled = piper.compile(annotated, batch, json.loads(program))
    figures = simulate(compiled.dag, compiled.plans)
    for device, stage in enumerate(stages):
        chunks = [c for c in compiled.dag.of_type(Chunk) if c.devices == (device,) and c.kind == "F"]
        saved = sum(value.nbytes for chunk in chunks for value in chunk.outputs if value.kind == Kind.SAVED)
        own = [blocks[i] for i in stage]
        given = blocks[border - 1].work[2, 1].output if device else 0
        found = stage_memory(own, 2, MICROBATCHES, given=given)
        assert found.saved == saved and found.saved != stage_memory(own, 2, MICROBATCHES - 1, given=given).saved
        curve = figures.devices[device].memory_by_kind["activations"]
        # The curve also has what blocks of a stage hand to each other, one value at a time, and what travels.
        within = 2 * max(block.work[2, 1].output for block in own)
        assert found.saved <= max(nbytes for _, nbytes in curve) <= found.saved + MICROBATCHES * within + found.buffers


def test_parts_of_what_stays() -> None:
    blocks = analytic(Module(GPT(3, tied=True)), tokens(SAMPLES), CPU, samples=(2,), tensor=(2,)).blocks
    params = {name: nbytes for block in blocks for name, nbytes in block.params.items()}
    whole = sum(params.values())
    assert whole < sum(sum(block.params.values()) for block in blocks), "a tied weight counts once"
    by_level = [stage_memory(blocks, 2, 1, replicas=4, level=level) for level in range(4)]
    plain = by_level[0]
    assert (plain.params, plain.gradients, plain.states) == (whole, whole, 2 * whole)
    assert all(a.total > b.total for a, b in itertools.pairwise(by_level))
    assert (by_level[1].states, by_level[2].gradients) == (2 * whole // 4, whole // 4)
    assert plain.margin == -(-sum(plain[:-1]) * FRAGMENTATION // 1)
    two = stage_memory(blocks, 2, 1, tensor=2)
    divided = sum(n for name, n in params.items() if any(name in block.divided for block in blocks))
    assert two.params == whole - divided // 2 < whole
    more = [dataclasses.replace(block, experts=frozenset(block.params)) for block in blocks]
    assert stage_memory(more, 2, 1, experts=2).params == whole // 2
    assert stage_memory(blocks, 2, 1, waiting=1).saved - plain.saved == sum(b.work[2, 1].saved_for_weights for b in blocks)


def test_refusals() -> None:
    blocks = analytic(Module(GPT(2)), tokens(SAMPLES), CPU, samples=(2,), tensor=()).blocks
    with pytest.raises(SimulationError, match="level=4"):
        stage_memory(blocks, 2, 1, level=4)
    with pytest.raises(SimulationError, match=r"nothing is known of 'net\.embed' on 3 members"):
        stage_memory(blocks, 2, 1, tensor=3)
