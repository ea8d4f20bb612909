"""Every seeded bug is caught, most of them without running anything; and nothing is caught where there is no
bug.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_piper.runtime.step_outputs import StepOutputs
from property_tests.mutations import processes
from property_tests.mutations.harness import LAYERS, TABLE, Caught, control, first_layer, on_processes
from property_tests.mutations.layers import random_programs
from property_tests.mutations.scenarios import SCENARIOS
from property_tests.mutations.table import mutation
from tests.distributed.processes import launch


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What two processes have after a step under each mutation that only they show, and (a scenario's name)
    without any.
    """
    names = [*processes.controls(), *processes.IN_PROCESSES]
    by_rank = launch(2, processes.run, tmp_path_factory.mktemp("mutations"), names)
    for results in by_rank:
        assert isinstance(results, list), results
    return {name: [results[i] for results in by_rank] for i, name in enumerate(names)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_control(name: str) -> None:
    control(SCENARIOS[name])


def test_control_by_property() -> None:
    random_programs()


@pytest.mark.parametrize("name", processes.controls())
def test_control_in_processes(name: str, ran: dict[str, list[Any]]) -> None:
    processes.compare(SCENARIOS[name], ran[name])


def test_wrong_functions_accept_the_arguments_of_the_originals() -> None:
    """Otherwise a check would find an error of the call, and not the mistake."""
    for entry in TABLE.values():
        with entry.patch():
            pass
    mutation("short", "accepts too few arguments", "executor", (StepOutputs, "commit"))(
        lambda original, seeded: lambda self: None
    )
    short = TABLE.pop("short")
    with (
        pytest.raises(AssertionError, match=r"does not accept the arguments of StepOutputs\.commit"),
        short.patch(),
    ):
        pass


@pytest.mark.parametrize("name", [*TABLE][::7])
def test_some_mutations_are_caught(name: str, request: pytest.FixtureRequest) -> None:
    """In `make test`; of each file of them some."""
    who_catches(name, request)


@pytest.mark.long
@pytest.mark.parametrize("name", TABLE)
def test_mutation_is_caught(name: str, found: dict[str, Caught], request: pytest.FixtureRequest) -> None:
    found[name] = who_catches(name, request)


def who_catches(name: str, request: pytest.FixtureRequest) -> Caught:
    mutation = TABLE[name]
    caught = first_layer(mutation)
    if caught is None and mutation.processes:
        caught = on_processes(mutation, request.getfixturevalue("ran")[name])
    assert caught is not None, f"nothing notices {name!r}: {mutation.what}"
    return caught


@pytest.mark.long
def test_the_static_layer_catches_most(found: dict[str, Caught]) -> None:
    if found.keys() != TABLE.keys():
        pytest.skip("needs all mutations of this run")
    assert len(TABLE) >= 320
    assert sum(caught.layer == LAYERS[0] for caught in found.values()) >= 180
