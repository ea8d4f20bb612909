"""Sums over the whole batch within a step: whatever divides the batch, the results are those of one device on
the whole batch.
"""

from __future__ import annotations

from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.ops.communication.total import Total
from lightning_piper.passes import run_pipeline
from lightning_piper.testing import Spec, case, run_interpreter
from lightning_piper.testing.suite import check_program
from lightning_piper.verify.equivalence import compare
from lightning_piper.verify.static_check import check
from tests.verify.test_mutations import changes

ONE = Spec(("linear", "synced", "residual"), (0, 0, 1))
SEVERAL = Spec(("synced", "synced", "dropout", "synced", "conv"), (0, 1, 1, 1, 0))
LOSSES = Spec(("synced", "auxiliary", "synced"), (0, 1, 1), loss="terms")
TIED = Spec(("tied", "synced", "tied", "batchnorm"), (0, 0, 1, 1))


def split(count: int, **condition: Any) -> piper.Split:
    return piper.Split(filter=condition, dim_name="MB", num_microbatches=count)


def place(*devices: int) -> list[Any]:
    return [piper.Place(filter={"PP": stage}, devices=[device]) for stage, device in enumerate(devices)]


def groups(*of: list[int], **fields: Any) -> list[Any]:
    found = [piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(of)]
    return [*found, piper.Replicate(filter={}, devices=list(of), bucket_size=0.0003, **fields)]


PROGRAMS: dict[str, list[Any]] = {
    "one device": [],
    "stages": place(0, 1),
    "microbatches": [split(3)],
    "microbatches in stages": [*place(0, 1), split(4)],
    "one stage split": [split(2, PP=1), *place(0, 1)],
    "microbatches on two groups of devices": [
        split(2),
        *(
            piper.Place(filter={"PP": stage, "MB": part}, devices=[(stage + part) % 2])
            for stage in (0, 1)
            for part in (0, 1)
        ),
    ],
    "replicas": groups([0, 1], [0, 1]),
    "replicas in stages": groups([0, 2], [1, 3]),
    "four replicas": groups([0, 1, 2, 3], [0, 1, 2, 3]),
    "microbatches, then replicas": [split(2), *groups([0, 2], [1, 3])],
    "replicas, then microbatches": [*groups([0, 2], [1, 3], shard_grads=True), split(2)],
    "shards": [split(2), *groups([0, 2], [1, 3], shard_params=True)],
    "halves": [
        *groups([0, 2], [1, 3]),
        piper.Order(filters=[{"PP": 0, "PASS": "BI"}, {"PP": 0, "PASS": "BW"}]),
    ],
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("spec", [ONE, SEVERAL, LOSSES], ids=["one", "several", "losses"])
def test_as_on_one_device(spec: Spec, name: str) -> None:
    dag = check_program(case(spec, 8), PROGRAMS[name])
    assert len(list(dag.of_type(Total))) == 2 * spec.blocks.count("synced")


def test_an_order_of_microbatches_is_refused() -> None:
    with pytest.raises(
        DirectiveError, match=r"directive 3 \(order\).*The statistics of a synchronized batch norm"
    ):
        piper.compile(case(ONE, 8).module, case(ONE, 8).batch, piper.schedules.one_f_one_b(2, 2))


def test_statistics_of_a_part_are_still_refused() -> None:
    """A control: what is no sum over the whole batch differs from replica to replica."""
    with pytest.raises(
        DirectiveError, match=r"directive 2 \(replicate\).*update blocks\.3.*sync_batchnorm=True"
    ):
        piper.compile(case(TIED, 8).module, case(TIED, 8).batch, PROGRAMS["replicas in stages"])


@pytest.mark.parametrize(
    "spec, name", [(Spec(("synced",), (0,)), "replicas on one stage"), (ONE, "microbatches, then replicas")]
)
def test_no_single_change_goes_unnoticed(spec: Spec, name: str) -> None:
    one = case(spec, 8)
    dag = run_pipeline(one.step, PROGRAMS.get(name, groups([0, 1])))
    clean, refused, unnoticed = run_interpreter(one, dag), 0, []
    for what, change in changes(dag):
        copy = dag.copy()
        change(copy)
        try:
            check(copy, final=True)
        except VerificationError:
            refused += 1
            continue
        if compare(clean, run_interpreter(one, copy), dict.fromkeys(clean.grads, 1e-12)).verdict == "differs":
            unnoticed.append(what)
    assert unnoticed == [] and refused > 100
