"""`lightning-piper search` and `explain --run`, and program files that say how a module is tagged."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from textwrap import dedent
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lightning_piper as piper
from lightning_piper.cli import main
from lightning_piper.directives.program import annotate_as, annotations_of
from lightning_piper.errors import PiperError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.profile.files import plan_json
from lightning_piper.search.comparison import PredictionComparison, compare
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.recorded_costs import FIELDS
from lightning_piper.search.proposal import Proposal, search, sizes_of
from lightning_piper.simulate import simulate
from tests.search.nets import GPT, Module, tokens
from tests.strategy.fitting import QUIET

SOURCE = """
    from tests.search.nets import GPT, Module, tokens

    def net():
        return Module(GPT(4))

    def batch():
        return tokens(4)
"""
STAGES = [["net.embed", "net.layers.[01]"], ["net.layers.[23]", "net.norm", "net.head"]]
BATCH = ("net.py:net", "--batch", "net.py:batch")
LINK = {
    "latency": 1e-7,
    "bandwidth": 3e7,
    "devices": 64,
}  # sums over replicas are slow, and messages between stages are shorter
SLOW = {"name": "some", "source": "made up", "memory": 2**30, "flops": {"float32": 1e9}, "bandwidth": 1e10,
    "links": [LINK],
        "host": {"latency": 0, "bandwidth": 1e9}, "host_memory": 2**30}  # fmt: skip


def two_stages() -> dict[str, Any]:
    directives = [directive.to_json() for directive in piper.schedules.one_f_one_b(2, 2)]
    return {"version": 1, "annotate": {"PP": STAGES}, "directives": directives}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with a module without annotations, and with a program that annotates it, the current
    folder.
    """
    (tmp_path / "net.py").write_text(dedent(SOURCE))
    (tmp_path / "two.json").write_text(json.dumps(two_stages()))
    (tmp_path / "bare.json").write_text(json.dumps(two_stages()["directives"]))
    (tmp_path / "slow.json").write_text(json.dumps(SLOW))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield tmp_path
    sys.modules.pop(str((tmp_path / "net.py").resolve()), None)


def ran(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    found = capsys.readouterr()
    assert not (found.out if status else found.err)
    return found.err if status else found.out


# search


def test_a_search_prints_and_writes_what_it_proposes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ran(
        capsys,
        "search",
        *BATCH,
        "--devices",
        "2",
        "--hardware",
        "slow.json",
        "--memory",
        "1MiB",
        "-o",
        "found.json",
    )
    wanted = search(Module(GPT(4)), tokens(4), 2, "1MiB", hardware="slow.json")
    assert (
        text == f"{wanted}\n"
        and "why not" in text
        and "piper.annotate_modules(module, 'PP', [['net.embed'" in text
    )
    assert json.loads(Path("found.json").read_text()) == json.loads(json.dumps(wanted.written.to_json()))
    assert ran(capsys, "check", *BATCH, "--directives", "found.json", "--run").rstrip().endswith("verified")


@pytest.mark.parametrize(("check", "by"), [("static", "its plan"), ("off", "the estimate")])
def test_a_proposal_names_its_batch_and_its_memory_with_the_margin(check: Any, by: str) -> None:
    options: dict[str, Any] = {"ranks": 1, "levels": (0,), "check": check, "hardware": "cpu"}
    module, batch = Module(GPT(1)), tokens(4)
    two, bare = (search(module, batch, 2, all_devices=True, margin=m, **options) for m in (0.5, 0))
    one = search(module, batch, 1, **options)
    assert f"{two.memory} bytes" in str(
        two
    ) and f"on the fullest device by {by}, with a margin of 50.0%" in str(two)
    assert abs(two.memory - 1.5 * bare.memory) < 2
    assert (
        two.batch_size == 2
        and "2 samples for each of 2 replicas, such as from DataLoader(batch_size=2)" in str(two)
    )
    assert one.batch_size == 4 and "batch: 4 samples, such as from DataLoader(batch_size=4)" in str(one)


@pytest.mark.long
def test_the_objective_may_be_memory(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    least = ran(
        capsys,
        "search",
        *BATCH,
        "--devices",
        "2",
        "--hardware",
        "slow.json",
        "--objective",
        "memory",
        "--check",
        "off",
    )
    assert "not checked" in least and "more on the fullest device" in least


def test_progress_is_for_terminals(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("search", *BATCH, "--devices", "1", "--hardware", "cpu")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(argv) == 0
    lines = capsys.readouterr().err.split("\r\x1b[K")
    assert {"tracing the step", "searching"} <= {*lines} and lines[-1] == "" and "\n" not in "".join(lines)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert main(argv) == 0
    assert capsys.readouterr().err == "searching for a program, which can take minutes\n"


USAGE = {
    "no devices": ([], "the following arguments are required: --devices"),
    "a word for devices": (["--devices", "two"], "argument --devices: invalid int value: 'two'"),
    "another objective": (
        ["--devices", "2", "--objective", "money"],
        "argument --objective: invalid choice: 'money'",
    ),
    "another check": (["--devices", "2", "--check", "never"], "argument --check: invalid choice: 'never'"),
    "no folder": (
        ["--devices", "2", "-o", "nowhere/x.json"],
        "'nowhere/x.json' cannot be written: there is no folder 'nowhere'",
    ),
    "a folder": (["--devices", "2", "-o", "."], "'.' cannot be written: it is a folder"),
    "directives": (
        ["--devices", "2", "--directives", "two.json"],
        "unrecognized arguments: --directives two.json",
    ),
}
REFUSED = {
    "no device": (["--devices", "0"], "search: devices=0 is not usable. Give an integer from 1"),
    "a size that is none": (
        ["--devices", "2", "--memory", "much"],
        "search: memory='much' is not usable. Give bytes, at most 1e15, or text such as '24GiB'",
    ),
    "too little": (
        ["--devices", "2", "--memory", "1KiB"],
        "search: no program fits in 1 KiB. Give",
    ),
    "hardware": (["--devices", "2", "--hardware", "abacus"], "there is no hardware 'abacus'. Give one of"),
    "a file": (["--devices", "2", "--hardware", "none.json"], "hardware file 'none.json' does not exist"),
}


@pytest.mark.parametrize("name", USAGE)
def test_a_wrong_command_line(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, message = USAGE[name]
    with pytest.raises(SystemExit) as ended:
        main(["search", *BATCH, *more])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_what_was_found_is_told_where_it_cannot_be_kept(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Proposal, "save", full)
    with pytest.raises(SystemExit) as ended:
        main(["search", *BATCH, "--devices", "1", "--hardware", "cpu", "-o", "x.json"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and "'x.json' cannot be written: No space left on device" in said.err
    assert "directives = [" in said.out


@pytest.mark.parametrize("name", REFUSED)
def test_a_search_that_is_refused(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, message = REFUSED[name]
    assert ran(capsys, "search", *BATCH, "--hardware", "slow.json", *more, status=1).startswith(message)


# Programs that say how a module is tagged


@pytest.mark.parametrize("name", ["check", "plan", "simulate", "viz", "explain"])
def test_every_command_tags_the_module(name: str, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = ran(capsys, "plan", *BATCH, "--directives", "two.json")
    command = [name, *re.findall(r"%\d+", plans)[:1]] if name == "explain" else [name]
    assert ran(capsys, *command, *BATCH, "--directives", "two.json")
    assert "{PP: 0} matches nothing" in ran(capsys, *command, *BATCH, "--directives", "bare.json", status=1)


@pytest.mark.parametrize(
    "annotate", [[], {"PP": "net"}, {"PP": ["net.embed"]}, {"PP": [[1]]}, {"": [["net"]]}, None]
)
def test_annotations_that_are_none(annotate: Any) -> None:
    for read in (piper.directives.parse, annotations_of):
        with pytest.raises(
            piper.DirectiveError, match=r"the program: the key 'annotate' is .*. Give an object of lists"
        ):
            read({**two_stages(), "annotate": annotate})
    assert (
        annotations_of({**two_stages(), "annotate": {"PP": []}})
        == {}
        == annotations_of(two_stages()["directives"])
    )


def fit(
    program: Any, folder: Path, module: L.LightningModule | None = None, **options: Any
) -> L.LightningModule:
    torch.manual_seed(0)
    module = module or Module(GPT(4))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    strategy = piper.PiperStrategy(program, transport="local", **options)
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=5, strategy=strategy, default_root_dir=folder, **QUIET
    )
    trainer.fit(module, DataLoader(TensorDataset(*tokens(20)), batch_size=4))
    return module


def hooks(module: torch.nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("where", ["argument", "environment", "module"])
def test_the_strategy_tags_the_module_while_it_runs(
    where: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = None if where != "argument" else "two.json"
    tagged = Module(GPT(4))
    if where == "environment":
        monkeypatch.setenv("PIPER_DIRECTIVES", "two.json")
    if where == "module":
        tagged.piper_directives = "two.json"  # type: ignore[assignment]
    torch.manual_seed(0)
    tagged.load_state_dict(Module(GPT(4)).state_dict())
    trained = fit(program, project, tagged)
    monkeypatch.delenv("PIPER_DIRECTIVES", raising=False)
    one = fit(
        [piper.Place(filter={}, devices=[0]), piper.Split(filter={}, dim_name="MB", num_microbatches=2)],
        project,
    )
    assert hooks(trained) == 0
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), one.parameters(), strict=True))
    with pytest.raises(piper.DirectiveError, match="matches nothing"):
        fit("bare.json", project)


# explain --run


def test_a_recorded_run_beside_its_prediction(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two stages of two microbatches, recorded for real."""
    fit("two.json", project, profile=piper.Schedule(wait=1, warmup=1, active=3))
    steps = [json.loads(path.read_text()) for path in sorted((project / "piper").glob("step_*.json"))]
    plan = json.loads((project / "piper" / "plan.json").read_text())
    text = ran(capsys, "explain", "--run", ".", *BATCH, "--directives", "two.json", "--hardware", "cpu")
    rows = {line.split("  ")[0]: line.split() for line in text.partition("\n\n")[0].splitlines()[1:]}
    recorded = {what: float(row[-4]) / 1e3 for what, row in rows.items()}
    assert recorded.keys() == {
        "step",
        *(f"{k} of stage {s}" for k in "FB" for s in (0, 1)),
        *(f"device {d}, {w}" for d in (0, 1) for w in ("busy", "exposed", "bubble")),
    }
    shown = 1e-6  # a digit of what is printed
    assert recorded["step"] == pytest.approx(median(step["step"]["step_time"] for step in steps), abs=shown)
    busy = median(step["step"]["devices"]["1"]["busy"] for step in steps)
    assert recorded["device 1, busy"] == pytest.approx(busy, abs=shown)
    chunks = [n for n, x in plan["nodes"].items() if x["kind"] == "F" and x["tags"]["PP"] == 1]
    assert recorded["F of stage 1"] == pytest.approx(
        2 * median(s["durations"][f"%{n}"] for s in steps for n in chunks), abs=shown
    )
    differences = [abs(float(row[-2])) for what, row in rows.items() if "stage" in what]
    assert differences == sorted(differences, reverse=True)
    assert "with the recorded costs, this program is predicted to take" in text


def write_recording(folder: Path, program: dict[str, Any], slower: float) -> None:
    """Write a recording as predicted on slow.json, but with a slower stage 1."""
    module, batch = Module(GPT(4)), tokens(4)
    annotate_as(module, annotations_of(program))
    compiled = piper.compile(module, batch, program)
    cut = blocks_of(module, batch, short=False)
    regions = cut.step.at(4).regions
    hardware = piper.simulate.hardware.Hardware.read("slow.json")
    chunks = list(compiled.dag.of_type(Chunk))
    sizes = sorted({*sizes_of(4), *(c.slice.stop - c.slice.start for c in chunks)})
    costs = analytic(module, batch, hardware, sizes, cut=cut)
    durations = {}
    for chunk in chunks:
        own = [
            b
            for b, rs in zip(costs.blocks, cut.regions, strict=True)
            if regions[rs[0]].tags["PP"] == chunk.tags["PP"]
        ]
        works: list[Any] = [b.at(chunk.slice.stop - chunk.slice.start) for b in own]
        seconds = float(sum(getattr(work, field) for work in works for field in FIELDS[chunk.kind]))
        durations[f"%{chunk.id}"] = seconds * (slower if chunk.tags["PP"] == 1 else 1)
    figures = simulate(compiled.dag, compiled.plans, durations).to_json()
    (folder / "piper").mkdir(exist_ok=True)
    (folder / "piper" / "plan.json").write_text(json.dumps(plan_json(compiled, {}, None)))
    step = {
        "version": 1,
        "kind": "step",
        "plan": "plan.json",
        "number": 3,
        "durations": durations,
        "step": figures,
    }
    (folder / "piper" / "step_3.json").write_text(json.dumps(step))


def compared(folder: Path, program: Any) -> PredictionComparison:
    annotations = annotations_of(program)
    return compare(
        folder, Module(GPT(4)), tokens(4), piper.directives.parse(program), annotations, "slow.json"
    )


def test_a_run_as_it_was_predicted_and_one_that_was_not(project: Path) -> None:
    program = search(Module(GPT(4)), tokens(4), 2, hardware="slow.json").written.to_json()
    assert len(program["annotate"]["PP"]) > 1
    write_recording(project, program, 1)
    found = compared(project, program)
    assert max(abs(row.difference) for row in found.passes) < 1e-15 * found.step.predicted + 1e-15
    assert found.same and str(found).endswith("a search chooses\nthe same")
    write_recording(project, program, 3)
    other = compared(project, program)
    own = [row for row in other.passes if row.what.endswith(" of stage 1")]
    assert own == list(other.passes[: len(own)]) and len(own) > 1
    for row in other.passes:
        assert row.recorded == pytest.approx((3 if row in own else 1) * row.predicted, rel=1e-12)
    assert not other.same and other.proposal.time < other.time  # stage 1 gets fewer blocks
    assert str(other).endswith(str(other.proposal.written))


def test_recordings_that_cannot_be_compared(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("explain", "--run=.", *BATCH, "--hardware", "slow.json", "--directives")
    assert ran(capsys, *argv, "two.json", status=1).startswith(
        "there is no recording in '.'. Give the log directory of a run"
    )
    write_recording(project, two_stages(), 1)
    other = [{"op": "place", "filter": {}, "devices": [0]}]
    Path("other.json").write_text(json.dumps(other))
    message = (
        "was recorded with another program or batch size. Give the directives of that run, and a batch of 4 "
        "samples"
    )
    assert message in ran(capsys, *argv, "other.json", status=1)
    shard = [{"op": "place", "filter": {}, "devices": [0, 1]},
             {"op": "shard", "filter": {}, "devices": [0, 1], "params": {"net.head.weight": 0}}]  # fmt: skip
    with pytest.raises(PiperError, match="the program shards weights, sequences or experts"):
        compared(project, shard)
    path = project / "piper" / "step_3.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": {}}))
    assert "is not a valid recording (KeyError: 'step_time')" in ran(capsys, *argv, "two.json", status=1)
    with pytest.raises(SystemExit):
        main([*argv[:2], "12", *argv[2:], "two.json"])
    assert "unrecognized arguments: net.py:net" in capsys.readouterr().err
