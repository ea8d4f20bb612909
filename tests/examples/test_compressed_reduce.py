"""A third party's operation: it keeps the bound that it states, trains over processes, and appears under its
own name.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import strategies as st

import lightning_piper as piper
from examples import compressed_reduce
from examples.compressed_reduce import HALF_ULP, PROGRAM, Compress, CompressedReduce, Regression
from lightning_piper import ops
from lightning_piper.errors import VerificationError
from lightning_piper.profile.files import plan_json
from lightning_piper.simulate import simulate
from lightning_piper.testing import Case, Spec, directive_suite
from lightning_piper.verify.static_check import check
from tests.distributed.processes import launch_trainings
from tests.strategy.fitting import QUIET, Batches, values

STEPS = 6


def compresses(case: Case, dag: Any) -> st.SearchStrategy[Compress]:
    return st.just(Compress())


POOL = (
    Spec(("linear", "residual"), (0, 1), exact=True),
    Spec(("tied", "branch", "tied"), (0, 1, 2)),
    Spec(("attention", "norm"), (0, 1)),
)
TestCompress = directive_suite(Compress, compresses, pool=POOL)


def batch(i: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(8, 8, generator=generator)
    return [x, x.square().sum(1, keepdim=True) / 8]


def seeded() -> Regression:
    torch.manual_seed(0)
    return Regression()


def by_hand() -> dict[str, torch.Tensor]:
    """Run the same training in one process, without the package."""
    module = seeded()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    lost = [[torch.zeros_like(p) for p in module.parameters()] for _ in range(2)]
    for i in range(STEPS):
        totals = [torch.zeros_like(p) for p in module.parameters()]
        for replica in range(2):
            x, y = (part.chunk(2)[replica] for part in batch(i))
            grads = torch.autograd.grad(
                torch.nn.functional.mse_loss(module.net(x), y) * 0.5, list(module.parameters())
            )
            for k, grad in enumerate(grads):
                wanted = grad + lost[replica][k]
                sent = wanted.bfloat16().float()
                lost[replica][k] = wanted - sent
                totals[k] = totals[k] + sent
        for parameter, total in zip(module.parameters(), totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return values(module)


def train(rank: int, program: list[Any]) -> dict[str, Any]:
    module = seeded()
    options = {**QUIET, "accelerator": "cpu", "devices": 2, "max_steps": STEPS}
    batches = Batches([[part.chunk(2)[rank] for part in batch(i)] for i in range(STEPS)])
    L.Trainer(strategy=piper.PiperStrategy(program), **options).fit(module, batches)
    return values(module)


@pytest.mark.long
def test_trains_over_processes(tmp_path: Path) -> None:
    wanted, plain = by_hand(), train_plain()
    for found in launch_trainings(2, train, tmp_path, PROGRAM):
        for name, x in found.items():
            assert (x - wanted[name]).abs().max() <= 1e-6 * wanted[name].abs().max()
            assert not torch.equal(x, plain[name])  # it does round


def train_plain() -> dict[str, torch.Tensor]:
    module = seeded()
    L.Trainer(**QUIET, accelerator="cpu", devices=1, max_steps=STEPS).fit(
        module, Batches([batch(i) for i in range(STEPS)])
    )
    return values(module)


@pytest.fixture(scope="module")
def compiled() -> piper.Compiled:
    return piper.compile(Regression(), batch(0), PROGRAM)


def test_it_appears_with_its_own_name(compiled: piper.Compiled) -> None:
    assert "compressed_reduce %" in str(compiled.plans[0])
    assert "compressedreduce" in str(compiled.dag)
    step = simulate(compiled.dag, compiled.plans, {"F": 1, "B": 2})
    assert "compressed_reduce" in {span.kind for span in step.timeline}
    assert plan_json(compiled, {}, None)["colors"]["compressed_reduce"] == "#8fd3c8"


def test_verify_names_the_bound() -> None:
    report = piper.verify(seeded(), batch(0), PROGRAM)
    row = next(row for row in report.rows if row.name == "compress")
    assert (row.contract, row.before.verdict) == ("bounded", "equal within the bound")
    assert 0 < row.before.distance <= row.before.allowed
    assert report.verdict == "verified except" and "compressedreduce" in report.conclusion


def test_a_bound_that_is_not_held_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_reduce, "HALF_ULP", HALF_ULP / 1000)
    assert piper.verify(seeded(), batch(0), PROGRAM).verdict == "NOT EQUIVALENT"


def test_a_fit_that_verifies_warns_of_the_bound() -> None:
    strategy = piper.PiperStrategy(PROGRAM, transport="local", verify="first_batch")
    trainer = L.Trainer(**QUIET, accelerator="cpu", devices=1, max_steps=1, strategy=strategy)
    with pytest.warns(
        UserWarning,
        match=r"verified except compressedreduce: .*\(bound .*Training continues within that bound",
    ):
        trainer.fit(seeded(), Batches([batch(0)]))


def test_its_static_rule_is_asked(compiled: piper.Compiled) -> None:
    dag = compiled.dag.copy()
    node = next(dag.of_type(CompressedReduce))
    dag.change(node, outputs=(dataclasses.replace(node.outputs[0], kind="cotangent"),))
    with pytest.raises(
        VerificationError, match=r"compressedreduce .* describes its output differently from its input"
    ):
        check(dag, final=True)


def test_accumulation_waits_for_the_last_batch(compiled: piper.Compiled) -> None:
    assert {compiled.dag.nodes[i].label for i in compiled.plans[0].sync_only} == {
        "compressedreduce",
        "update",
    }


def test_under_a_pipeline() -> None:
    stages = [({"PP": 0}, [0, 1]), ({"PP": 1}, [2, 3])]
    program = [
        *(piper.Place(filter=f, devices=d) for f, d in stages),
        *(piper.Replicate(filter=f, devices=d) for f, d in stages),
        piper.Split(filter={}, dim_name="MB", num_microbatches=2),
        Compress(),
    ]
    dag = piper.compile(Tagged(), batch(0), program).dag
    assert len(list(dag.of_type(CompressedReduce))) == 2 and not any(
        n.sums for n in dag.of_type(ops.AllReduce)
    )


class Tagged(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        with piper.annotate("PP", 0):
            h = self.net[1](self.net[0](batch[0]))
        with piper.annotate("PP", 1):
            return torch.nn.functional.mse_loss(self.net[2](h), batch[1])
