"""The captured step is the eager step, bit for bit: loss, logged values, gradients and buffers, whole and in
microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_piper.capture import capture, flatten
from lightning_piper.capture.eager.eager_reference import Outcome, merged, mixed, run_eagerly
from lightning_piper.directives import Split
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ir.regions import LOSS
from lightning_piper.ir.seeds import chunk_seed
from lightning_piper.ir.values import Slice
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from lightning_piper.verify.interpreter import interpret
from tests.groups import marked
from tests.models import CASES, DECOMPOSED, DETERMINISTIC, Captured, captured, fresh
from tests.reference import differences, distance, plain


def run(c: Captured, sizes: list[int]) -> Outcome:
    """Run the captured step in microbatches of these sizes, without any placement."""
    dag = build_dag(c.step)
    if len(sizes) > 1:
        apply_program(dag, [Split(filter={}, dim_name="MB", num_microbatches=len(sizes))])
    assert [len(chunk.slice) for chunk in dag.of_type(Chunk) if chunk.key == (0, "F")] == sizes
    return interpret(dag, c.tensors, c.leaves)


def uneven(size: int) -> list[int]:
    return {4: [2, 1, 1], 8: [3, 3, 2]}[size]


SUMMED = [name for name in CASES if CASES[name].reassociates and name != "terms"]
BITWISE = [name for name in DETERMINISTIC if not CASES[name].reassociates]
ROUNDING = 1e-6  # relative, of float32; 1e-7 measured


def assert_same_bits(name: str, found: Outcome, expected: Outcome, but: Sequence[str] = ()) -> None:
    """Assert that results are bitwise equal, except for the named results."""
    if name in DECOMPOSED:
        assert distance(found, expected) < ROUNDING
    else:
        assert differences(found, expected) == list(but)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_whole_batch_gives_the_bits_of_eager_autograd(name: str) -> None:
    c = captured(name)
    found, expected = run(c, [c.case.size]), plain(c, [c.case.size])
    # The terms of a loss with weights of their own are added up in float64.
    moved = [LOSS] if mixed(c.step) else []
    assert_same_bits(name, found, expected, moved)
    assert_same_bits(name, found, run_eagerly(c.step, c.tensors, c.leaves, [Slice(0, c.case.size)]), moved)
    assert set(found.grads) == set(expected.grads) and LOSS in found.metrics
    less = plain(c, [c.case.size - 1])  # the control: without one sample nearly nothing agrees
    assert LOSS in differences(found, less) and len(differences(found, less)) > len(found.grads) / 2


@pytest.mark.parametrize("name", marked(BITWISE, BITWISE[::2]))
def test_microbatches_give_the_bits_of_eager_accumulation(name: str) -> None:
    c = captured(name)
    sizes = uneven(c.case.size)
    found = run(c, sizes)
    assert_same_bits(name, found, plain(c, sizes))
    edges = [sum(sizes[:i]) for i in range(4)]
    assert_same_bits(
        name, found, run_eagerly(c.step, c.tensors, c.leaves, [Slice(*edge) for edge in pairwise(edges)])
    )


def test_the_weights_of_uneven_microbatches_matter() -> None:
    """The control of the test above: with a third for each slice, everything is far off."""
    c = captured("mlp")
    wrong = plain(c, [2, 1, 1], [1 / 3] * 3)
    assert differences(run(c, [2, 1, 1]), wrong) == sorted([LOSS, "train_loss"]) + sorted(c.tensors)
    assert distance(run(c, [2, 1, 1]), wrong) > 1e-2


@pytest.mark.parametrize("name", marked(SUMMED, SUMMED[1::2]))
def test_a_parameter_of_several_regions_is_summed_region_by_region(name: str) -> None:
    """One device sums slice by slice, so the last bit may differ; in float64 it is the same sum."""
    c = captured(name, double=True)
    sizes = uneven(c.case.size)
    found = run(c, sizes)
    assert distance(found, plain(c, sizes)) < 1e-14
    assert distance(found, plain(c, sizes, [1 / 3] * 3)) > 1e-3


def test_the_logged_values_are_merged_by_their_reduction() -> None:
    c = captured("logs")
    found = run(c, [2, 1, 1])
    assert set(found.metrics) == {LOSS, "h_max", "h_min", "count", "error", "twice"}
    whole = run(c, [4])
    for name in ("h_max", "h_min", "count"):
        assert torch.equal(found.metrics[name], whole.metrics[name])
    assert float(found.metrics["count"]) == 4.0 and found.metrics["h_max"] > found.metrics["h_min"]
    assert torch.equal(found.metrics["twice"], 2 * found.metrics["error"])


def test_many_microbatches_are_summed_from_the_first_to_the_last() -> None:
    """On one device as everywhere else: a sum in groups, as wide as the processor's vectors are, would keep
    some of the ones.
    """
    values = [torch.tensor(x, dtype=torch.float64) for x in (2.0**53, *[1.0] * 7)]
    assert float(merged("sum", values, torch.ones(8))) == 2.0**53
    assert float(merged("sum", values[::-1], torch.ones(8))) == 2.0**53 + 8  # 2^53 + 7, rounded once


def test_a_metric_may_be_called_loss() -> None:
    c = captured("conv")
    found = run(c, [8])
    assert torch.equal(found.metrics["loss"], found.metrics[LOSS])


def test_microbatches_pass_buffers_on() -> None:
    c = captured("conv")
    found = run(c, [3, 3, 2])
    assert sorted(found.buffers) == sorted(n for n, _ in c.module.named_buffers())
    assert int(found.buffers["one.1.num_batches_tracked"]) == 1  # no sample is in it: it moves once a step
    assert not torch.equal(found.buffers["one.1.running_mean"], run(c, [8]).buffers["one.1.running_mean"])


def test_a_module_without_data_is_captured_alike() -> None:
    c = captured("gpt")
    with torch.device("meta"):
        module = CASES["gpt"].make()
    step = capture(module, c.batch)
    assert str(build_dag(step)) == str(build_dag(c.step))
    assert differences(interpret(build_dag(step), c.tensors, c.leaves), plain(c, [4])) == []


def test_a_batch_without_data_is_enough_for_a_capture() -> None:
    c = captured("mlp")
    step = capture(c.module, tuple(x.to("meta") for x in c.batch))
    assert differences(interpret(build_dag(step), c.tensors, c.leaves), plain(c, [4])) == []


def test_a_batch_in_another_memory_order_gives_the_same_bits() -> None:
    module, batch = fresh("conv")
    strange = {**batch, "image": batch["image"].to(memory_format=torch.channels_last)}
    assert strange["image"].stride() != batch["image"].stride()
    step = capture(module, strange)
    leaves, _ = flatten(strange)
    found = interpret(build_dag(step), captured("conv").tensors, leaves)
    assert differences(found, plain(captured("conv"), [8])) == []


def test_eager_reference_leaves_batch_and_module_alone() -> None:
    """The step of this model writes into its batch."""
    c = captured("constants")
    before = [x.clone() for x in c.leaves]
    run_eagerly(c.step, c.tensors, c.leaves, [Slice(0, 2), Slice(2, 4)])
    assert all(torch.equal(a, b) for a, b in zip(before, c.leaves, strict=True))
    assert all(p.grad is None for p in c.module.parameters())


# Autocast


def test_autocast_is_part_of_the_capture() -> None:
    with_cast, without = captured("autocast"), captured("mlp")
    assert differences(run(with_cast, [4]), plain(without, [4])) != []
    graph = str(with_cast.step.at(4).code[0, "F"].graph)
    assert "_to_copy" in graph and "_to_copy" not in str(without.step.at(4).code[0, "F"].graph)
    assert {x.dtype for x in run(with_cast, [4]).grads.values()} == {torch.float32}


# Random numbers


def test_dropout_draws_what_eager_dropout_draws_under_the_chunks_seed() -> None:
    c = captured("one_dropout")
    dag = build_dag(c.step)
    random = [chunk for chunk in dag.of_type(Chunk) if dag.interface(chunk).random]
    assert [chunk.key for chunk in random] == [(0, "F")]
    found = interpret(dag, c.tensors, c.leaves, seed=7)
    torch.manual_seed(chunk_seed(7, random[0]))
    assert differences(found, plain(c, [4])) == []
    assert differences(interpret(dag, c.tensors, c.leaves, seed=8), found) != []


def test_every_microbatch_and_region_has_a_mask_of_its_own() -> None:
    c = captured("dropout")
    halves: list[Tensor] = []
    for leaf in c.leaves:
        halves.append(torch.cat([leaf[:2], leaf[:2]]))
    dag = apply_program(build_dag(c.step), [Split(filter={}, dim_name="MB", num_microbatches=2)])
    first, second = (chunk for chunk in dag.of_type(Chunk) if chunk.key == (0, "F"))
    assert chunk_seed(0, first) != chunk_seed(0, second)
    both = interpret(dag, c.tensors, halves).metrics[LOSS]
    one = interpret(build_dag(c.step, 2), c.tensors, [x[:2] for x in halves]).metrics[LOSS]
    assert not torch.equal(both, one), (
        "two equal microbatches would give the loss of one if they shared their masks"
    )


def test_a_capture_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    capture(*fresh("dropout")).at(4)
    assert torch.equal(before, torch.get_rng_state())


class OfTwoBatches(L.LightningModule):
    """A loss of two tensors that do not have the same number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layer(batch["labeled"]).mean() + self.layer(batch["unlabeled"]).square().mean()


def two_batches(labeled: int, unlabeled: int) -> dict[str, Tensor]:
    return {"labeled": torch.ones(labeled, 3), "unlabeled": torch.ones(unlabeled, 3)}


def test_a_batch_that_cannot_be_cut_has_code_of_its_own_shapes() -> None:
    step = capture(OfTwoBatches(), two_batches(4, 2))
    step.at(4)
    assert step.shaped(flatten(two_batches(4, 2))[1]) is step
    for sizes in ((4, 6), (4, 5), (3, 2)):
        spec = flatten(two_batches(*sizes))[1]
        other = step.shaped(spec)
        assert step.shaped(spec) is other
        assert [x.shape[0] for x in other.at(spec.size).batch_specs] == list(sizes)


def test_a_batch_that_can_be_cut_keeps_its_step_at_another_size() -> None:
    step = capture(OfTwoBatches(), two_batches(4, 4))
    assert step.shaped(flatten(two_batches(6, 6))[1]) is step
    assert step.shaped(flatten(two_batches(6, 4))[1]) is not step
