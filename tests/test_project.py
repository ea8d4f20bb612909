"""The project's own files: the files that they name exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.versions import COMBINATIONS
from tests.wheel import differences, example

ROOT = Path(__file__).parents[1]
MAPS = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "design.md"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def missing(text: str) -> list[str]:
    """Return the files and folders that a text names as code, below the package or the repository's root, and
    that do not exist.
    """
    paths = re.findall(r"`([\w./]+(?:\.py|/))`", text)
    assert paths
    return [
        path
        for path in paths
        if not any((root / path).exists() for root in (ROOT, ROOT / "lightning_piper", *rooms(text)))
    ]


def rooms(text: str) -> list[Path]:
    """Return the packages and files of design.md, which names a package and then its files."""
    named = [ROOT / "lightning_piper" / room for room in re.findall(r"`(\w+)/[\w.]*`", text)]
    return [room for room in named if room.is_dir()]


@pytest.mark.parametrize("path", MAPS, ids=lambda path: path.stem)
def test_maps_name_files_that_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not missing(text)
    assert missing(text + "`nowhere/file.py`") == ["nowhere/file.py"]


def test_the_tests_that_pages_name_exist() -> None:
    named = {
        found
        for page in ROOT.glob("docs/**/*.md")
        for found in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 25
    gone = {(f, name) for f, name in named if f"def {name}(" not in (ROOT / f).read_text(encoding="utf-8")}
    assert not gone


def test_the_four_files_have_what_to_look_for() -> None:
    rows = re.findall(
        r"^\| who [^|]*\| `([\w/]+\.py)` \|(.*)\|$", MAPS[0].read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 4
    for path, names in rows:
        source = (ROOT / "lightning_piper" / path).read_text(encoding="utf-8")
        assert not [name for name in re.findall(r"`(\w+)`", names) if f"def {name}(" not in source], path


def test_one_version() -> None:
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == version
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_continuous_integration_runs_what_the_readme_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    jobs = workflow["jobs"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    versions = ["python -m tests.versions ${{ matrix.torch }}"]
    assert commands == {"ci": ["bash .ci/run"], "versions": versions, "coverage": ["make coverage"]}
    tried = {(each["python"], each["torch"]) for each in jobs["versions"]["strategy"]["matrix"]["include"]}
    assert tried <= {(each.python, each.torch) for each in COMBINATIONS}
    promised = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert promised and promised <= {*jobs["ci"]["strategy"]["matrix"]["python"]}, (
        "a release that is promised is tried"
    )
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("make test", "make test-long", "make docs"):
        assert f"    {command}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
        assert re.search(rf"^(exec )?{command}( |$)", script, re.MULTILINE), command


def test_the_wheel_check_notices_what_is_missing() -> None:
    """`make wheel` builds the wheel. Here, its check compares names."""
    tab = "lightning_piper_tensorboard/static/index.js"
    full = ["lightning_piper/simulate/hardware/cpu.json", "lightning_piper_cli/py.typed", tab]
    names = ["README.md", "tests/wheel.py", *full[:2], f"lightning_piper/profile/plugin/{tab}"]
    assert not differences(names, [*full, "lightning_piper-0.1.0.dist-info/RECORD"])
    for name in full:
        [problem] = differences(names, [other for other in full if other != name])
        assert problem.startswith(f"the wheel does not have {name}. ")
    assert differences(names, [*full, "tests/wheel.py"]) == [
        "the wheel has tests/wheel.py, which is not part of a package"
    ]
    assert "piper.PiperStrategy(" in example()


def test_the_notebook_has_been_run_and_is_small() -> None:
    path = ROOT / "examples" / "notebook.ipynb"
    cells = [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len(outputs) >= 5 and not [output for output in outputs if output["output_type"] == "error"]
    assert path.stat().st_size < 100_000
