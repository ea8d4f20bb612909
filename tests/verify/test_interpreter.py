"""The reference interpreter: it runs any DAG, leaves its arguments unchanged, and refuses nodes that it does
not know.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from lightning_piper.errors import VerificationError
from lightning_piper.ir.nodes import Node
from lightning_piper.ir.regions import LOSS
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import complete
from lightning_piper.schedules import gpipe, one_f_one_b
from lightning_piper.verify.interpreter import interpret
from tests.dags import build, chunk, order, place, run, split
from tests.models import CASES, captured
from tests.reference import differences, plain


@pytest.mark.parametrize("name", ["mlp", "tied", "conv", "logs", "constants", "autocast"])
def test_it_changes_neither_parameters_nor_batch(name: str) -> None:
    c = captured(name)
    before = {n: x.clone() for n, x in c.tensors.items()}, [x.clone() for x in c.leaves]
    dag = build(name, split(2))
    text = str(dag)
    first, second = run(name, dag), run(name, dag)
    assert differences(first, second) == [] and str(dag) == text
    assert all(torch.equal(x, before[0][n]) for n, x in c.tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(c.leaves, before[1], strict=True))
    assert not any(x.requires_grad for x in first.grads.values())


def test_it_reads_the_parameters_it_is_given() -> None:
    """A captured graph holds no weights: with others, the result is that of the other weights."""
    c = captured("mlp")
    other = {n: x + 0.1 for n, x in c.tensors.items()}
    found = interpret(build_dag(c.step), other, c.leaves)
    assert differences(found, plain(c, [4])) != []
    module = CASES["mlp"].make()
    module.load_state_dict(other)
    module.log = lambda *args, **kwargs: None  # there is no Trainer to log to
    loss = module.training_step(c.batch, 0)
    loss.backward()
    assert torch.equal(found.metrics[LOSS], loss.detach().double())
    assert all(torch.equal(found.grads[n], x.grad) for n, x in module.named_parameters())


def test_place_and_order_do_not_touch_a_bit() -> None:
    for name, stages in (("gpt", 3), ("experts", 3), ("conv", 2), ("losses", 2)):
        alone = run(name, build(name, split(2)))
        for program in ([split(2), *place(*range(stages))], gpipe(stages, 2), one_f_one_b(stages, 2)):
            assert differences(run(name, build(name, *program)), alone) == []
        if name != "conv":  # its statistics pass from the first microbatch to the second
            assert differences(run(name, build(name, split(2), order({"MB": 1}, {"MB": 0}))), alone) == []
        assert differences(run(name, build(name)), alone) != [], "the control"


@pytest.mark.parametrize("name", ["dropout", "one_dropout"])
def test_masks_do_not_depend_on_placement_or_order(name: str) -> None:
    alone = run(name, build(name, split(2)), seed=3)
    programs = [
        gpipe(2, 2),
        one_f_one_b(2, 2, devices=[1, 0]),
        [split(2), *place(0, 0)],
        [split(2), order({"MB": 1}, {"MB": 0})],
    ]
    for program in programs:
        dag = build(name, *program)
        complete(dag)
        assert differences(run(name, dag, seed=3), alone) == []
    assert LOSS in differences(run(name, build(name, split(2)), seed=4), alone)
    assert LOSS in differences(run(name, build(name), seed=3), alone), (
        "another division of the batch draws other masks"
    )


def test_it_leaves_the_random_numbers_of_others_alone() -> None:
    before = torch.get_rng_state()
    run("dropout", build("dropout"))
    assert torch.equal(before, torch.get_rng_state())


def test_a_circle_is_refused() -> None:
    dag = build("mlp")
    dag.order(chunk(dag, "B[PP=0]"), chunk(dag, "F[PP=0]"), 0)
    with pytest.raises(VerificationError, match="the training DAG has a cycle"):
        run("mlp", dag)


def test_an_unknown_node_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mystery(Node):
        pass

    dag = build("mlp")
    dag.add(Mystery())
    with pytest.raises(
        VerificationError, match=r"mystery is a .*Mystery, a kind of node that has no operation"
    ):
        run("mlp", dag)


def test_a_batch_in_another_order_of_samples_is_another_batch() -> None:
    """The control of all comparisons that cut the batch: which samples a chunk gets does matter."""
    c = captured("conv")
    turned = [x.roll(1, 0) for x in c.leaves]  # other samples together, as their statistics show
    dag = build("conv", split(2))
    assert LOSS in differences(interpret(dag, c.tensors, turned), run("conv", dag))
