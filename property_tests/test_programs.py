"""Random programs compute what one device computes; broken ones are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from lightning_piper.directives import parse, to_json
from lightning_piper.errors import DirectiveError
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program, complete
from lightning_piper.testing import POOL, Case, broken_programs, case, cases, check_program, programs, specs

FIXTURE = HealthCheck.function_scoped_fixture


@given(data=st.data(), case=cases(pool=POOL))
def test_programs_are_equivalent(tally: Counter[str], data: Any, case: Case) -> None:
    """Static check, contracts, one device, plans: for programs of place, split and order on known models."""
    program = data.draw(programs(case))
    note(f"program: {to_json(program)}")
    check_program(case, program)
    tally["valid programs, each equal to one device"] += 1


@settings(max_examples=max(1, settings().max_examples // 12))
@given(data=st.data(), spec=specs())
def test_models_are_equivalent(tally: Counter[str], data: Any, spec: Any) -> None:
    """The same on models that are drawn too; fewer, since each is captured anew."""
    one = case(spec, data.draw(st.sampled_from([2, 4, 8])))
    program = data.draw(programs(one))
    note(f"program: {to_json(program)}")
    check_program(one, program)
    tally["drawn models, each equal to one device"] += 1


@settings(max_examples=settings().max_examples * 4)
@given(data=st.data(), case=cases(pool=POOL[:4]))
def test_broken_programs_are_refused(tally: Counter[str], data: Any, case: Case) -> None:
    """Nothing but a DirectiveError, whatever is wrong."""
    broken = data.draw(broken_programs(case))
    note(f"{broken.fault}: {broken.program}")
    with pytest.raises(DirectiveError):
        complete(apply_program(build_dag(case.step), parse(broken.program)))
    tally["broken programs, each refused"] += 1


@given(data=st.data(), case=cases(pool=POOL))
def test_programs_survive_json(data: Any, case: Case) -> None:
    program = data.draw(programs(case))
    assert parse(to_json(program)) == parse(program)
