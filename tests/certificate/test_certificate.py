"""Certificates of all families of programs: the checker accepts them, names faults, and needs no torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_piper_cli import certificate as checker_package
from lightning_piper_cli.certificate.checker import Checker, verify
from lightning_piper_cli.certificate.memory import Fault
from tests.certificate.families import FAMILIES, certificate, text

CHECKER = Path(checker_package.__file__).parent


FAST = ("one device", "ZeRO-1", "ZeRO-3", "owners", "1F1B", "zero bubble", "weights of the batch")


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in FAST else pytest.mark.long) for name in FAMILIES],
)
def test_the_checker_accepts_every_family(family: str) -> None:
    Checker(certificate(family)).check()


def test_a_fault_names_device_instruction_and_reason() -> None:
    wrong = certificate("1F1B")
    run = next(x for x in wrong["devices"]["1"]["instructions"] if x["op"] == "run")
    run["slice"] = [0, 1]
    with pytest.raises(Fault, match=r"^device 1, instruction \d+ \(run %\d+\): it runs the code 1.F@2"):
        Checker(wrong).check()


def test_it_imports_only_the_standard_library() -> None:
    """The checker shares no code with the package, and runs without torch."""
    for file in CHECKER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                own = name.startswith("lightning_piper_cli.certificate")
                assert own or name.split(".")[0] in sys.stdlib_module_names


def test_the_command_verifies_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "certificate.json"
    file.write_text(text("ZeRO-1"))
    code = "import sys; import lightning_piper_cli as c; s = c.main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(s)"
    done = subprocess.run(
        [sys.executable, "-c", code, "certificate", str(file)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{file}: verified")
    wrong = certificate("ZeRO-1")
    del wrong["devices"]["0"]["instructions"][-1]
    file.write_text(json.dumps(wrong))
    assert verify(file) == 1 and "device 0, at the end: " in capsys.readouterr().err
    file.write_text("{}")
    assert (
        verify(file) == 1
        and "does not have the format 'lightning-piper certificate 1'" in capsys.readouterr().err
    )
    assert verify(tmp_path / "absent.json") == 1 and "No such file" in capsys.readouterr().err


def test_the_page_counts_the_lines_that_are_trusted() -> None:
    page = (CHECKER.parents[1] / "docs" / "verification.md").read_text(encoding="utf-8")
    counted = dict(re.findall(r"\| `(\w+\.py)`: [^|]+ \| (\d+) \|", page))
    found = {file.name: str(len(file.read_text().splitlines())) for file in CHECKER.glob("*.py")}
    assert counted == {name: count for name, count in found.items() if name != "__init__.py"}


def test_an_update_from_a_part_of_its_gradient_is_a_fault() -> None:
    """The update reads the sum over replicas of the first microbatch's gradient."""
    wrong = certificate("owners")
    Checker(certificate("owners")).check()
    plan = wrong["devices"]["0"]["instructions"]
    early = next(x for x in plan if x["op"] == "early_update")
    slot = early["reads"][0][0]
    add = next(x for x in plan if x["op"] == "add" and slot in x["writes"])
    first = add["reads"][0][0]
    awaited = plan[plan.index(early) - 1]
    assert awaited["op"] == "await" and slot in awaited["shared"]
    plan.remove(awaited)
    plan.remove(early)
    awaited["shared"], early["reads"] = [first], [[first, False]]
    early["stream"] = "compute"
    plan.insert(plan.index(add), early)
    times = sorted(x["time"] for x in plan)
    for x, time in zip(plan, times, strict=True):
        x["time"] = time
    with pytest.raises(Fault, match=r"\(early_update %\d+\): the gradient of .* sums"):
        Checker(wrong).check()
