"""Tensor specs, slices, values, and the seeds of chunks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lightning_piper.directives import Directive, Place, Split
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.seeds import chunk_seed, seed_of
from lightning_piper.ir.values import Partial, Replicated, Sharded, Slice, TensorSpec, Value
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from lightning_piper.schedules import gpipe, one_f_one_b
from tests.models import captured

X = torch.arange(24.0).reshape(2, 3, 4)


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (X, (0, 1, 2)),
        (X.transpose(0, 2), (2, 1, 0)),
        (X.permute(1, 2, 0), (2, 0, 1)),
        (torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (0, 2, 3, 1)),
        (torch.empty(()), ()),
        (torch.empty(1, 4).t(), (1, 0)),
    ],
)
def test_the_layout_of_a_dense_tensor_makes_it_contiguous(
    tensor: torch.Tensor, layout: tuple[int, ...]
) -> None:
    assert TensorSpec.of(tensor).dim_order == layout
    assert tensor.permute(layout).is_contiguous()
    if tensor.numel() > 1 and layout != tuple(range(len(layout))) and 1 not in tensor.shape:
        assert not tensor.is_contiguous(), "the control: without the layout it is not"


def test_specs_and_values_count_and_name_themselves() -> None:
    spec = TensorSpec.of(X.to(torch.bfloat16))
    assert (spec.numel, spec.nbytes, str(spec)) == (24, 48, "bfloat16[2,3,4]")
    value = Value("grad", ("a", "b", "c"), (spec, spec, spec))
    assert (value.nbytes, value.label) == (144, "grad:a,b,+1")
    assert Value("saved", (), ()).label == "saved" and Value("loss", ("loss",), ()).label == "loss:loss"
    assert (str(Replicated()), str(Sharded(1)), str(Partial())) == ("R", "S(1)", "P(sum)")


def test_slices() -> None:
    assert len(Slice(2, 5)) == 3 and str(Slice(2, 5)) == "2:5" and Slice(0, 2) < Slice(2, 3)


# Seeds


def seeds(name: str, program: list[Directive]) -> dict[tuple[int, str, int], int]:
    dag = apply_program(build_dag(captured(name).step), program)
    return {(*chunk.key, chunk.slice.start): chunk_seed(5, chunk) for chunk in dag.of_type(Chunk)}


def test_seeds_do_not_depend_on_place_order_or_stream() -> None:
    split = Split(filter={}, dim_name="MB", num_microbatches=2)
    alone = seeds("mlp", [split])
    assert len(alone) == 8
    assert seeds("mlp", gpipe(2, 2)) == seeds("mlp", one_f_one_b(2, 2, devices=[1, 0])) == alone
    assert seeds("mlp", [split, Place(filter={}, devices=[3], stream="other")]) == alone


def test_seeds_depend_on_everything_else() -> None:
    split = Split(filter={}, dim_name="MB", num_microbatches=2)
    found = seeds("mlp", [split])
    assert len(set(found.values())) == len(found)
    assert all(0 <= seed < 1 << 63 for seed in found.values())
    assert seed_of(5, 0, "F", 0) != seed_of(6, 0, "F", 0)
    assert found[0, "F", 0] == seed_of(5, 0, "F", 0)


def test_seeds_of_all_regions_steps_and_samples_are_distinct() -> None:
    found = [
        seed_of(step, region, kind, start)
        for step in range(9)
        for region in range(9)
        for kind in "FB"
        for start in range(9)
    ]
    assert len(set(found)) == len(found) == 9 * 9 * 2 * 9


def test_values_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorSpec.of(X).shape = (1,)  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (2, 1, 3), (2, 0, 3), (0, 4, 5)], ids=str)
def test_a_contiguous_spec_has_the_strides_of_a_new_tensor(shape):
    new = torch.empty(shape, dtype=torch.bfloat16)
    assert TensorSpec.contiguous(shape, torch.bfloat16) == TensorSpec.of(new)
    assert TensorSpec.contiguous((2, 3), torch.float32) != TensorSpec.of(torch.empty(3, 2).t())
