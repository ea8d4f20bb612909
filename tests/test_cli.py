"""The command line: what it prints, where it looks for things, and how it ends."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import shlex
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

import lightning_piper as piper
from lightning_piper import cli
from lightning_piper.cli import main
from lightning_piper.directives.program import to_json
from lightning_piper.search.accounting import bytes_needed
from lightning_piper.search.report import size
from lightning_piper.session.local_sgd import LocalSGD
from lightning_piper.simulate import Link, Network, read_durations, simulate, write_chakra
from lightning_piper.verify.report import Comparison, Report, ReportRow
from tests.simulate.programs import Chain

ROOT = Path(__file__).parent.parent

SOURCE = """
    import dataclasses
    import torch
    import lightning_piper as piper
    from lightning_piper.ops import Accumulate
    from tests.simulate.programs import Chain

    def module():
        return Chain(2)

    def batch():
        return torch.linspace(-1, 1, 16).view(4, 4)

    def program():
        return piper.schedules.gpipe(2, 2)

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lossy(piper.Directive):
        op, contract = "lossy", "bitwise"

        def apply(self, dag):
            total = next(node for node in dag.of_type(Accumulate) if len(node.inputs) > 1)
            dag.rewire(total, inputs=total.inputs[1:])

    def lossy():
        return [piper.Split(filter={}, dim_name="MB", num_microbatches=2), Lossy()]

    class Needy(Chain):
        pass

    class Coupled(Chain):
        def __init__(self):
            super().__init__(2)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).sqrt()

    ready = torch.zeros(4, 4)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with `stages.py`, `package/inner.py` and JSON files the current folder."""
    (tmp_path / "package").mkdir()
    for file in ("stages.py", "package/inner.py"):
        (tmp_path / file).write_text(dedent(SOURCE))
    (tmp_path / "program.json").write_text(json.dumps(to_json(piper.schedules.one_f_one_b(2, 4))))
    (tmp_path / "broken.json").write_text(json.dumps([{"op": "place", "filter": {"PP": 7}, "devices": [0]}]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)) or name == "package":
            del sys.modules[name]


def arguments(
    command: str, *more: str, module: str = "stages:module", directives: str = "program.json"
) -> list[str]:
    return [command, module, "--batch", "stages:batch", "--directives", directives, *more]


def output(capsys: pytest.CaptureFixture[str], *args: Any, **named: Any) -> str:
    assert main(arguments(*args, **named)) == 0
    found = capsys.readouterr()
    assert not found.err
    return found.out


def compiled() -> piper.Compiled:
    return piper.compile(Chain(2), torch.zeros(4, 4), piper.schedules.one_f_one_b(2, 4))


def test_check_prints_the_directives(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "check").splitlines()
    assert lines[0] == '0 {"op": "place", "filter": {"PP": 0}, "devices": [0]}'
    assert lines[2] == '2 {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4}'
    assert len(lines) == 10 and lines[-1] == "ok"


def test_check_says_what_it_checked(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped = output(capsys, "check", "--dump", "graphs").splitlines()
    for lines in (output(capsys, "check").splitlines(), dumped):
        head, params, checked, memory = lines[5:9]
        assert head == "training_step on 2 devices: 2 stages, 4 microbatches"
        assert params.startswith("  parameters: ") and " (by stage: " in params
        assert re.fullmatch(
            r"  checked in [\d.]+ (ms|s|min): the graph after each directive, and all plans, without running them",
            checked,
        )
        needed = max(bytes_needed(compiled(), 2).values())  # without an optimizer, as with Adam
        assert memory.startswith(f"  memory: {size(needed)} on device ") and memory.endswith("states of Adam")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"lightning-piper {project['version']}\n"


@pytest.mark.parametrize(
    "module, verdict", [("stages:module", "verified"), ("stages:Coupled", "verified except aten.")]
)
def test_check_may_run_the_step(
    project: Path, capsys: pytest.CaptureFixture[str], module: str, verdict: str
) -> None:
    lines = output(capsys, "check", "--run", module=module).splitlines()
    assert re.split("  +", lines[5]) == [
        "directive",
        "contract",
        "vs the graph before",
        "vs one device, same microbatches",
    ]
    assert lines[-1].startswith(verdict) and (lines[-1] == "verified") == (module == "stages:module")


def test_check_fails_where_a_step_that_is_run_is_another(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = Comparison("differs", 0.5, "layers.0.weight", 1e-6)
    monkeypatch.setattr(
        cli, "verify_step", lambda *args: Report((ReportRow(0, "place", "bitwise", wrong, wrong),))
    )
    assert failure(capsys, "check", "--run").endswith(
        "NOT EQUIVALENT\nIf you wrote a directive or an operation, correct it. Otherwise, report this [PIPER-V001]\n"
    )


def untimed(text: str) -> str:
    return re.sub(r"[\d.]+ (ms|s|min)\b", "x ms", text)


def table(lines: Sequence[str]) -> list[list[str]]:
    """Return the lines of a table from its head on, without the times."""
    head = next(i for i, line in enumerate(lines) if line.startswith("pass "))
    return [re.split("  +", line)[:-1] for line in lines[head:] if "  " in line]


def test_check_tells_of_each_pass(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "check", "--passes").splitlines()
    head, *rows = table(lines)
    assert head == ["pass", "contract", "static check", "added", "changed", "removed"] and lines[-1] == "ok"
    names = [
        "capture",
        "0 place",
        "1 place",
        "2 split",
        "3 order",
        "4 order",
        "complete",
        "eliminate communication",
    ]
    assert [row[0] for row in rows] == names and {row[2] for row in rows} == {"ok"}
    assert [row[1] for row in rows] == ["reassociated" if row[0] == "2 split" else "bitwise" for row in rows]
    assert sum(int(row[3]) - int(row[5]) for row in rows) == len(compiled().dag.nodes)


def test_check_tells_what_the_execution_says_of_each_pass(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(capsys, "check", "--passes", "--run").splitlines()
    head, *rows = table(lines)
    assert (
        head[3:5] == ["vs the graph before", "vs one device, same microbatches"] and lines[-1] == "verified"
    )
    assert [row[4] for row in rows] == ["bitwise equal"] * 6 + ["-", "bitwise equal"]


def test_check_tells_how_far_the_passes_came(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The pass whose graph is wrong is the last one in the table, and its graph is the last one that is
    written.
    """
    assert main(arguments("check", "--passes", "--dump", "graphs", directives="stages:lossy")) == 1
    found = capsys.readouterr()
    assert [row[0::2] for row in table(found.out.splitlines())[1:]] == [
        ["capture", "ok", "0"], ["0 split", "ok", "3"], ["1 lossy", "failed", "1"]
    ]  # fmt: skip
    assert found.err.startswith(
        "after directive 1 (lossy), the training DAG does not compute what one device computes"
    )
    assert sorted(path.name for path in (project / "graphs").iterdir()) == [
        "00-capture.txt",
        "01-split.txt",
        "02-lossy.txt",
    ]
    before, after = (
        (project / "graphs" / name).read_text().splitlines() for name in ("01-split.txt", "02-lossy.txt")
    )
    assert [a.split()[1] for a, b in zip(before, after, strict=True) if a != b] == ["accumulate"]


def test_a_dump_replaces_the_one_before(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = project / "graphs"
    assert output(capsys, "check", "--dump", "graphs").endswith("ok\n")
    assert len(list(folder.iterdir())) == 8
    assert sorted((folder / "07-eliminate-communication.txt").read_text().splitlines()) == sorted(
        str(compiled().dag).splitlines()
    )
    failure(capsys, "check", "--dump", "graphs", directives="stages:lossy")
    assert len(list(folder.iterdir())) == 3
    (folder / "00-notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as ended:
        main(arguments("check", "--dump", "graphs"))
    assert (
        ended.value.code == 2
        and "'graphs' contains 00-notes.txt, which is not a dump of passes" in capsys.readouterr().err
    )
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    "module", ["stages:module", "package.inner:module", "stages.py:module", "package/inner.py:module"]
)
def test_modules_are_found_by_name_and_by_file(
    project: Path, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    assert output(capsys, "check", module=module).endswith("ok\n")


def test_directives_may_come_from_a_function(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert '"num_microbatches": 2' in output(capsys, "check", directives="stages.py:program")


def test_plans(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = compiled().plans
    assert output(capsys, "plan") == f"{plans[0]}\n\n{plans[1]}\n"
    assert output(capsys, "plan", "--device", "1") == f"{plans[1]}\n"


def test_a_chart_in_the_terminal(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "42")
    assert output(capsys, "viz") == (
        "device  one column is 0.5, the step takes 15\n"
        "0       F0F1....B0--F2B1--F3B2--..B3--\n"
        "1       ..F0B0--F1B1--F2B2--F3B3--....\n"
    )


def test_a_chart_as_a_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "durations.json").write_text('{"F": 3, "B": 4}')
    assert output(capsys, "viz", "-o", "step.svg", "--durations", "durations.json") == ""
    root = ET.parse(project / "step.svg").getroot()
    assert any("F[PP=0,MB=1] on device 0, stream compute: 3 to 6 (3)" in (t.text or "") for t in root.iter())


def test_the_dag_of_a_device(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "viz", "--dag", "1")
    assert text.startswith('digraph "device 1" {\n') and "F[PP=1,MB=3]" in text
    assert output(capsys, "viz", "--dag", "1", "--output", "one.dot") == ""
    assert (project / "one.dot").read_text() == text


def test_figures(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "durations.json").write_text('{"F": 1, "B": 2, "F[PP=1]": 1.5}')
    wanted = simulate(
        compiled().dag, compiled().plans, read_durations("durations.json"), Network(Link(0.25, 64))
    )
    more = ("--durations", "durations.json", "--latency", "0.25", "--bandwidth", "64")
    assert output(capsys, "simulate", *more) == f"{wanted}\n"
    assert json.loads(output(capsys, "simulate", "--json", *more)) == json.loads(json.dumps(wanted.to_json()))
    assert output(capsys, "simulate") == f"{simulate(compiled().dag, compiled().plans)}\n"


def test_a_round_of_local_sgd(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It costs what `LocalSGD.cost` says, over the given link or that of the messages."""
    step = simulate(compiled().dag, compiled().plans, network=Network(Link(0, 64)))
    settings = LocalSGD(replicas=2, every=4, parts=2)
    given = ("simulate", "--bandwidth", "64", "--local-sgd", '{"replicas": 2, "every": 4, "parts": 2}')
    near, far = (settings.cost(compiled(), step.step_time, link) for link in (Link(0, 64), Link(2, 8)))
    assert near.step_time < far.step_time
    assert output(capsys, *given) == f"{step}\n{near}\n"
    assert output(capsys, *given, "--across", "2", "8") == f"{step}\n{far}\n"
    found = json.loads(output(capsys, *given, "--json"))
    assert found == json.loads(json.dumps({**step.to_json(), "local_sgd": near.to_json()}))
    fields = "Give fields of LocalSGD as JSON, such as"
    for wrong, told in {
        '{"replicas": 1, "every": 4}': "LocalSGD(replicas=1) is not usable. Give an integer >= 2 [PIPER-S001]\n",
        '{"replica": 2}': "LocalSGD(replica=...): the argument is unknown. Give one of replicas, every",
        '{"replicas": 2}': fields,
        "[]": f"[] is a list. {fields}",
        "{": fields,
    }.items():
        with pytest.raises(SystemExit):
            main(arguments("simulate", "--local-sgd", wrong))
        assert told in capsys.readouterr().err


def test_chakra_traces(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "simulate", "--chakra", "traces") == output(capsys, "simulate")
    write_chakra("same", compiled().dag, compiled().plans)
    for path in Path("same").iterdir():
        assert path.read_bytes() == (Path("traces") / path.name).read_bytes()
    assert sorted(path.name for path in Path("traces").iterdir()) == [
        "comm_groups.json",
        "trace.0.et",
        "trace.1.et",
    ]
    (project / "file").write_text("")
    with pytest.raises(SystemExit):
        main(arguments("simulate", "--chakra", "file"))
    assert "'file' cannot be written: File exists. Give another path to --chakra" in capsys.readouterr().err


def failure(capsys: pytest.CaptureFixture[str], *args: Any, **named: Any) -> str:
    assert main(arguments(*args, **named)) == 1
    found = capsys.readouterr()
    assert not found.out
    return found.err


@pytest.mark.parametrize("command", ["check", "plan", "viz", "simulate"])
def test_a_broken_program_fails_with_the_text_of_the_api(
    project: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(piper.DirectiveError) as error:
        piper.compile(Chain(2), torch.zeros(4, 4), "broken.json")
    assert failure(capsys, command, directives="broken.json") == f"{error.value}\n"
    assert str(error.value).startswith("directive 0 (place): field 'filter': {PP: 7} matches nothing")


def test_files_that_are_not_there_fail(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = failure(capsys, "check", directives="none.json")
    assert found == "directives file 'none.json' does not exist. Give the path of a JSON file [PIPER-D001]\n"
    assert (
        failure(capsys, "simulate", "--durations", "none.json")
        == "durations file 'none.json' does not exist. Give the path of a JSON file [PIPER-T001]\n"
    )


USAGE = {
    "no command": ([], "the following arguments are required: command"),
    "no target": (
        arguments("check", module="stages"),
        "'stages' does not name anything to import. Give package.module:name or",
    ),
    "no program": (
        arguments("check", directives="programs"),
        "'programs' is not a program. Give the path of a JSON file (*.json), or",
    ),
    "no module": (
        arguments("check", module="nowhere:module"),
        "there is no module 'nowhere' in the current directory",
    ),
    "no file": (arguments("check", module="nowhere.py:module"), "there is no file 'nowhere.py'"),
    "no name": (arguments("check", module="stages:nothing"), "stages has no 'nothing'"),
    "no inner name": (
        arguments("check", module="stages:piper.nothing"),
        "stages has no 'piper.nothing'. Give one of its names: piper.",
    ),
    "no LightningModule": (
        arguments("check", module="stages:batch"),
        "stages:batch gives an object of type Tensor, not a module. Name a LightningModule class or",
    ),
    "arguments": (
        arguments("check", module="stages:Needy"),
        "stages:Needy cannot be called without arguments: missing a required",
    ),
    "no device": (arguments("plan", "--device", "5"), "the program does not use device 5. Give one of 0, 1"),
    "no device to draw": (
        arguments("viz", "--dag", "5"),
        "the program does not use device 5. Give one of 0, 1",
    ),
    "no latency": (
        arguments("simulate", "--latency", "-1"),
        "error: --latency is -1.0. Give 0, or a number from 1e-15 to 1e15 [PIPER-T001]",
    ),
    "no link": (
        arguments("simulate", "--local-sgd", '{"replicas": 2, "every": 1}', "--across", "1", "0"),
        "error: --across: bandwidth is 0. Give a number from 1e-15 to 1e15 [PIPER-T001]",
    ),
    "no module inside": (
        arguments("check", module="stages.inner:module"),
        "module 'stages' has no module 'inner' in it. Correct the name 'stages.inner'",
    ),
    "a builtin function": (
        arguments("check", module="torch:rand"),
        "torch:rand: Python does not know which arguments",
    ),
    "no number": (
        arguments("simulate", "--latency", "soon"),
        "argument --latency: invalid number value: 'soon'",
    ),
    "no node": (
        ["explain", "abc", *arguments("")[1:]],
        "argument NODE: 'abc' is not a node. Give the number of a node as plans print it",
    ),
    "a file for a folder": (
        arguments("check", "--dump", "stages.py"),
        "'stages.py' is a file. Give a folder",
    ),
    "no folder": (
        arguments("viz", "-o", "nowhere/step.svg"),
        "'nowhere/step.svg' cannot be written: No such file",
    ),
}


@pytest.mark.parametrize("name", USAGE)
def test_a_wrong_command_line(project: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    argv, message = USAGE[name]
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_an_error_in_the_users_own_module_is_not_hidden(project: Path) -> None:
    (project / "failing.py").write_text("import surely_not_installed\n")
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        main(arguments("check", module="failing:module"))


def test_a_batch_may_be_a_value(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "stages:module", "--batch", "stages:ready", "--directives", "program.json"]) == 0
    assert capsys.readouterr().out.endswith("ok\n")


def test_the_documentation_shows_real_output(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `$ lightning-piper ...` prints what stands below it. Of several commands in one block, the last does."""
    for name, content in re.findall(
        r"`(\w+\.\w+)`:\n\n```\w+\n(.*?)```", (ROOT / "docs/cli.md").read_text(), re.DOTALL
    ):
        (project / name).write_text(content)
    monkeypatch.setenv("COLUMNS", "132")
    shown = re.findall(
        r"^```\n\$ lightning-piper ((?:[^\n]*\n\$ lightning-piper )*[^\n]*)\n(.*?)^```",
        (ROOT / "docs/cli.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert len(shown) == 7
    for commands, wanted in shown:
        *earlier, command = commands.split("\n$ lightning-piper ")
        assert not any(main(shlex.split(each)) for each in earlier)
        capsys.readouterr()
        status = main(shlex.split(command))
        found = capsys.readouterr()
        assert untimed(found.err if status else found.out) == untimed(wanted)


def test_python_ends_with_the_status(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m lightning_piper.cli`."""
    monkeypatch.setattr(sys, "argv", ["lightning_piper.cli", *arguments("check", directives="broken.json")])
    monkeypatch.delitem(sys.modules, "lightning_piper.cli")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_piper.cli", run_name="__main__", alter_sys=True)
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert not out and err.splitlines()[-1].startswith("directive 0 (place): field 'filter'")


def test_the_installed_command_is_this_one() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, name = scripts["lightning-piper"].split(":")
    assert getattr(importlib.import_module(module), name) is main


def test_a_node_is_explained(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = compiled().explain(7)
    for spelling in ("7", "%7"):
        assert main(["explain", spelling, *arguments("")[1:]]) == 0
        assert capsys.readouterr().out == f"{wanted}\n"
    with pytest.raises(SystemExit):
        main(["explain", "999", *arguments("")[1:]])
    assert "has no node 999. Run `lightning-piper plan` to list its nodes" in capsys.readouterr().err
    assert main(["explain", "7", *arguments("", "--log-dir", str(project))[1:]]) == 1
    assert f"there is no recording in '{project}'" in capsys.readouterr().err


def test_check_writes_a_certificate_that_the_checker_accepts(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output(capsys, "check", "--certificate", "proved.json").endswith("ok\n")
    assert main(["certificate", "proved.json"]) == 0
    assert capsys.readouterr().out.startswith("proved.json: verified\n  assumes (")
    with pytest.raises(SystemExit) as ended:
        main(arguments("check", "--certificate", "absent/proved.json"))
    assert ended.value.code == 2 and "cannot be written" in capsys.readouterr().err
