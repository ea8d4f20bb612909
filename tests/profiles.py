"""Hypothesis profiles: `ci` (default: the same examples each time, in `make test`) and `deep` (`make
property-tests`). Both conftest.py files load them, so that a test draws equally many examples in any run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# If STEPS is set, a run draws the examples of its `--hypothesis-seed`. With `derandomize`, hypothesis would
# ignore this seed and draw the same examples each time.
slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
settings.register_profile(
    "ci", max_examples=25, derandomize="STEPS" not in os.environ, deadline=None, suppress_health_check=slow
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=slow)


def load() -> None:
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
