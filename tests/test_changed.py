"""A change reaches the tests that import it, and no others."""

from __future__ import annotations

import pytest

from tests.changed import ROOT, changed, file_of, is_test, reached

TESTS = sorted(path for folder in ("tests", "property_tests") for path in (ROOT / folder).rglob("test_*.py"))


def reaches(file: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in reached([ROOT / file]) if is_test(path)}


def test_a_change_of_the_step_reaches_nearly_all_tests():
    assert len(reaches("lightning_piper/ir/dag.py")) > 0.6 * len(TESTS)


def test_a_change_of_drawings_reaches_few_tests():
    found = reaches("lightning_piper/viz/svg.py")
    assert "tests/viz/test_svg.py" in found and len(found) < 0.2 * len(TESTS)
    assert "tests/plan/test_clocks.py" not in found


def test_a_helper_reaches_the_tests_of_its_folder():
    """They may start it as a script."""
    assert "tests/strategy/test_failures.py" in reaches("tests/strategy/metric_jobs.py")


@pytest.mark.parametrize(
    "name, file",
    [
        ("lightning_piper.Place", "directives/place.py"),
        ("lightning_piper.errors.PiperError", "errors.py"),
        ("lightning_piper.strategy", "strategy/__init__.py"),
        ("torch.nn", None),
    ],
)
def test_a_name_counts_for_the_file_that_defines_it(name, file):
    assert file_of(name) == (None if file is None else ROOT / "lightning_piper" / file)


def test_a_commit_that_changed_nothing_since():
    assert all(path.suffix == ".py" for path in changed("HEAD"))
