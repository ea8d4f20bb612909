"""The durations of a recorded run, divided among the blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import lightning_piper as piper
from lightning_piper.errors import PiperError
from lightning_piper.ir.nodes import Chunk
from lightning_piper.profile.files import plan_json
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import blocks_of
from lightning_piper.search.costs.recorded_costs import from_recording
from lightning_piper.search.costs.workload import Workload
from lightning_piper.simulate.hardware import Hardware
from tests.search.nets import GPT, Module, tokens

STAGES = [[0, 1, 2], [3, 4, 5, 6]]
SECONDS = {"F": 1.0, "B": 4.0}


def recorded(folder: Path, dim_name: str = "MB") -> Workload:
    """Write a recording of two stages and two microbatches, in which stage 1 takes ten times as long as stage
    0. Microbatches have the tag `dim_name`. Returns the workload of the module.
    """
    module, batch = Module(GPT(4)), tokens(4)
    workload = analytic(module, batch, Hardware.read("cpu"), samples=(1, 2, 4), tensor=())
    piper.annotate_modules(module, "PP", blocks_of(module, batch).stages([3]))
    program: list[Any] = [piper.Place(filter={"PP": i}, devices=[i]) for i in range(2)]
    compiled = piper.compile(
        module, batch, [*program, piper.Split(filter={}, dim_name=dim_name, num_microbatches=2)]
    )
    (folder / "piper").mkdir()
    (folder / "piper" / "plan.json").write_text(json.dumps(plan_json(compiled, {}, None)))
    durations = {
        f"%{chunk.id}": SECONDS[chunk.kind] * 10 ** chunk.tags["PP"] for chunk in compiled.dag.of_type(Chunk)
    }
    step = {"version": 1, "kind": "step", "plan": "plan.json", "number": 3, "durations": durations}
    (folder / "piper" / "step_3.json").write_text(json.dumps(step))
    return workload


def sums(workload: Workload, samples: int) -> list[float]:
    """The durations of F and B for stage 0, then for stage 1."""
    found = []
    for stage in STAGES:
        works = [work for i in stage if (work := workload.blocks[i].at(samples)) is not None]
        found += [sum(w.forward for w in works), sum(w.backward_input + w.backward_weights for w in works)]
    return [float(x) for x in found]


def test_stages_take_what_was_recorded(tmp_path: Path) -> None:
    before = recorded(tmp_path)
    after = from_recording(tmp_path, before, STAGES)
    assert sums(after, 2) == pytest.approx([1.0, 4.0, 10.0, 40.0], rel=1e-12)
    assert sums(before, 2) != pytest.approx([1.0, 4.0, 10.0, 40.0], rel=0.1)
    for old, new in zip(before.blocks, after.blocks, strict=True):
        assert {key: work[3:] for key, work in new.work.items()} == {
            key: work[3:] for key, work in old.work.items()
        }
        a, b, c, d = (block.work[n, 1].forward for block in (old, new) for n in (1, 4))
        assert a * d == pytest.approx(float(b * c), rel=1e-12)  # as it grew with samples before


@pytest.mark.parametrize("dim_name", ["MB", "part"])
def test_microbatches_with_any_tag_are_apart(dim_name: str, tmp_path: Path) -> None:
    after = from_recording(tmp_path, recorded(tmp_path, dim_name), STAGES)
    assert sums(after, 2) == pytest.approx([1.0, 4.0, 10.0, 40.0], rel=1e-12)


def test_two_regions_of_one_microbatch_are_added(tmp_path: Path) -> None:
    """The negative control: passes with the samples of one microbatch are one pass of the stage."""
    workload = recorded(tmp_path)
    path = tmp_path / "piper" / "plan.json"
    path.write_text(path.read_text().replace(" 2:4 ", " 0:2 "))
    after = from_recording(tmp_path, workload, STAGES)
    assert sums(after, 2) == pytest.approx([2.0, 8.0, 20.0, 80.0], rel=1e-12)


def test_refusals(tmp_path: Path) -> None:
    workload = recorded(tmp_path)
    with pytest.raises(PiperError, match="name each of the 7 blocks once"):
        from_recording(tmp_path, workload, [[0, 1], [1]])
    with pytest.raises(
        PiperError,
        match=r"from_recording\(stages=\.\.\.\): 1 stage, but the recorded program has PP=\[0, 1\]",
    ):
        from_recording(tmp_path, workload, [list(range(7))])
    with pytest.raises(
        PiperError,
        match=r"no times of passes with the tag 'STAGE'\. Its passes have the tags MB, PP\. If one of them numbers the",
    ):
        from_recording(tmp_path, workload, STAGES, tag="STAGE")
    from_recording(tmp_path, workload, STAGES, tag="PP")
    with pytest.raises(PiperError, match="there is no recording in"):
        from_recording(tmp_path / "elsewhere", workload, STAGES)
    path = tmp_path / "piper" / "step_3.json"
    step = json.loads(path.read_text())
    path.write_text(json.dumps({**step, "plan": "../plan.json"}))
    with pytest.raises(PiperError, match="not a file in the same folder"):
        from_recording(tmp_path, workload, STAGES)
    path.write_text(json.dumps({**step, "durations": dict.fromkeys(step["durations"], -1)}))
    with pytest.raises(PiperError, match=r"%\d+ takes -1 seconds"):
        from_recording(tmp_path, workload, STAGES)
    path.write_text(json.dumps({key: value for key, value in step.items() if key != "durations"}))
    with pytest.raises(PiperError, match="not a valid recording"):
        from_recording(tmp_path, workload, STAGES)
    path.write_text(json.dumps(step))
    from_recording(tmp_path, workload, STAGES)
    (tmp_path / "piper" / "plan.json").unlink()
    with pytest.raises(PiperError, match=r"cannot be read as a recording: .* Record again"):
        from_recording(tmp_path, workload, STAGES)
