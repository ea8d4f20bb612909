"""Lightning's own tests that use a Trainer with the default strategy pass with this package's strategy in its
place, and give the same numbers.

They run if the variable LIGHTNING_TESTS names a folder with Lightning's repository (at the tag of the
installed release), and if pytest-mock, pytest-rerunfailures, cloudpickle, psutil, scikit-learn and pandas are
installed, which those tests need. They take half an hour.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = os.environ.get("LIGHTNING_TESTS")
LEFT_OUT = "not spike and not ddp and not spawn and not fsdp and not multi_gpu"
# The tests that fail, by a pattern of their names, and why they fail.
KNOWN = {
    r"test_pytorch_profiler_trainer_fit": "looks for the name of Lightning's own strategy in what is "
    "profiled",
    r"test_skip_training_step_not_allowed": "sets strategy.world_size, which no strategy of several "
    "processes lets anyone set",
    r"test_cpu_slurm_save_load|test_hpc_restore_attempt|test_lightning_cli_args_cluster": "SLURM is there without its variables",
    r"test_trainer_save_checkpoint_storage_options": "a CheckpointIO that writes nothing is refused",
    r"test_workers_are_shutdown": "passes alone: it depends on when Python collects garbage",
    r"test_timer_stops_training": "is timed, and the first step takes longer, for it is captured",
    r"test_models\[": "needs the network",
}
# The tests whose numbers differ, and why they differ.
APART = {
    r"test_timer_(stops|resume)_training": "trains until a time is over",
    r"test_fit_ckpt_path_epoch_restored": "resumes from the files of a set, in any order",
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(FOLDER is None, reason="LIGHTNING_TESTS names no folder with Lightning's repository"),
]


def outcomes(strategy: str, file: Path, tests: Path) -> dict[str, dict[str, Any]]:
    """For each test, what `plugin.py` has written about it."""
    environ = os.environ | {
        "OWN_STRATEGY": strategy,
        "OWN_OUTCOMES": str(file),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests), os.environ.get("PYTHONPATH", "")]),
    }
    options = [
        "-q",
        "-p",
        "tests.lightning_own.plugin",
        "-p",
        "no:cacheprovider",
        "--timeout=300",
        "-k",
        LEFT_OUT,
        "--tb=native",
    ]
    options += ["--continue-on-collection-errors"]  # some files import packages that are not installed
    config = [
        "-c",
        str(tests.parent / "pyproject.toml"),
        f"--rootdir={tests.parent}",
        f"--basetemp={file.parent / strategy}",
    ]
    subprocess.run(
        [sys.executable, "-m", "pytest", *options, *config, "tests_pytorch"],
        cwd=tests,
        env=environ,
        check=False,
    )
    return {found["id"]: found for found in map(json.loads, file.read_text().splitlines())}


def test_they_pass_and_leave_the_same_numbers(tmp_path):
    assert FOLDER is not None
    tests = Path(FOLDER) / "tests"
    plain, own = (
        outcomes(strategy, tmp_path / f"{strategy}.jsonl", tests) for strategy in ("plain", "piper")
    )
    used = [name for name, found in plain.items() if found["setups"] and found["outcome"] == "passed"]
    failing = [name for name in used if own[name]["outcome"] == "failed"]
    print(f"{len(used) - len(failing)} of {len(used)} pass")
    assert len(used) > 1000
    unknown = {
        name: own[name]["said"] for name in failing if not any(re.search(pattern, name) for pattern in KNOWN)
    }
    assert not unknown
    assert len(failing) <= 0.02 * len(used)
    # As texts, where a nan is equal to itself.
    apart = [
        name for name in used if name not in failing and repr(own[name]["runs"]) != repr(plain[name]["runs"])
    ]
    assert not [name for name in apart if not any(re.search(pattern, name) for pattern in APART)]
