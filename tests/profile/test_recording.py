"""A recording of a real fit: what is logged, what is written, and whether the figures agree."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

import lightning_piper as piper
from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.profile import clock
from lightning_piper.profile.node_times import when_it_ran
from lightning_piper.profile.recorder import now
from lightning_piper.strategy.phases import Ended
from tests.distributed.processes import launch
from tests.profile.recorded import plan, record_local, steps
from tests.simulate.programs import Chain


@pytest.fixture(scope="module")
def fit(tmp_path_factory: pytest.TempPathFactory) -> tuple[L.Trainer, Path]:
    return record_local(tmp_path_factory.mktemp("logs"), "run", kernels=True)


def logged(run: Path) -> EventAccumulator:
    found = EventAccumulator(str(run), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    found.Reload()
    return found


def test_scalars_are_in_the_trainers_log(fit: tuple[L.Trainer, Path]) -> None:
    events, recorded = logged(fit[1]), steps(fit[1])
    for name, key in (("step_time", "step_time"), ("bubble_fraction", "bubble_fraction")):
        found = events.Scalars(f"piper/{name}")
        assert [event.step for event in found] == [step["global_step"] for step in recorded] == [2, 3]
        assert [event.value for event in found] == pytest.approx([step["step"][key] for step in recorded])
    names = set(events.Tags()["scalars"])
    assert {
        "piper/exposed_communication_fraction",
        "piper/samples_per_second",
        "piper/bytes_moved/send",
    } <= names
    # Two sends forward and two back, of 2 samples of 4 floats each, in 2 microbatches.
    assert events.Scalars("piper/bytes_moved/send")[0].value == 2 * 4 * 2 * 4 * 4
    rate = events.Scalars("piper/samples_per_second")[0].value
    assert (
        rate == pytest.approx(4 / recorded[0]["batch_time"])
        and recorded[0]["batch_time"] > recorded[0]["step"]["step_time"]
    )
    memory = recorded[0]["fixed"]
    assert memory["0"] == {
        "parameters": (16 + 4) * 4,
        "optimizer": 2 * (16 + 4) * 4 + 2 * 4,
    }  # AdamW: two moments and a step each
    peak = events.Scalars("piper/peak_memory/device_0")[0].value
    assert peak == recorded[0]["step"]["devices"]["0"]["peak_bytes"] + sum(memory["0"].values())


def test_pictures_and_texts_are_in_the_log(fit: tuple[L.Trainer, Path]) -> None:
    events = logged(fit[1])
    assert {"piper/schedule/planned", "piper/schedule/measured"} <= set(events.Tags()["images"])
    image = events.Images("piper/schedule/measured")[0]
    assert image.width == 1600 and image.encoded_image_string.startswith(b"\x89PNG")
    texts = {
        name: events.Tensors(name)[0].tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
        if "piper/" in name
    }
    assert "3 {'op': 'split'" in texts["piper/directives/text_summary"]
    assert (
        "bitwise" in texts["piper/verification/text_summary"]
        and "place" in texts["piper/verification/text_summary"]
    )


def test_times_of_every_device_add_up_to_the_step(fit: tuple[L.Trainer, Path]) -> None:
    for step in steps(fit[1]):
        whole = step["step"]["step_time"]
        for figures in step["step"]["devices"].values():
            assert figures["busy"] + figures["exposed"] + figures["bubble"] == pytest.approx(whole, rel=0.01)
        shares = [row[key] for row in step["step"]["directives"] for key in ("busy", "exposed", "bubble")]
        assert sum(shares) == pytest.approx(3 * whole, rel=0.01)


def test_a_trace_for_perfetto(fit: tuple[L.Trainer, Path]) -> None:
    events = json.loads((fit[1] / "piper" / "trace_2.json").read_text())["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    recorded = steps(fit[1])[0]["step"]["boxes"]
    assert len(boxes) == len(recorded)
    chunk = next(event for event in boxes if event["name"] == "F[PP=1,MB=0]")
    (box,) = (b for b in recorded if f"%{b[3]}" == chunk["args"]["node"])
    assert chunk["pid"] == 1 and chunk["ts"] == pytest.approx(box[1] * 1e6) and chunk["args"]["PP"] == 1
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert len(starts) == 8 and starts.keys() == ends.keys()
    assert all(
        abs(starts[i]["pid"] - ends[i]["pid"]) == 1 and starts[i]["ts"] <= ends[i]["ts"] for i in starts
    )


def test_kernels_carry_the_nodes(fit: tuple[L.Trainer, Path]) -> None:
    (path,) = (fit[1] / "piper").glob("kernels_*_rank0.json")
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    number = next(i for i, node in plan(fit[1])["nodes"].items() if node["label"] == "F[PP=1,MB=0]")
    assert f"%{number} run F[PP=1,MB=0]" in names and any(name.startswith("aten::") for name in names)


def test_the_profiler_sums_up(fit: tuple[L.Trainer, Path]) -> None:
    profiler = fit[0].profiler  # type: ignore[attr-defined]
    assert f"recorded 2 steps in {fit[1] / 'piper'}" in profiler.summary()
    assert "device" in profiler.summary() and "exposed" in profiler.summary()


def program() -> Compiled:
    return piper.compile(Chain(3), torch.zeros(4, 4), piper.schedules.gpipe(3, 2))


def test_when_a_node_ran(fit: tuple[L.Trainer, Path]) -> None:
    compiled = program()
    node = next(i for i, n in compiled.dag.nodes.items() if n.label == "B[PP=2,MB=1]")
    lines = when_it_ran(compiled, node, fit[1])
    assert [line.split(":")[0] for line in lines] == [
        f"{what} in step {number} on device 2, stream compute"
        for number in (2, 3)
        for what in ("planned", "ran")
    ]
    other = piper.compile(Chain(3), torch.zeros(8, 4), piper.schedules.gpipe(3, 2))
    with pytest.raises(PiperError, match="recorded with another module, program or batch size"):
        when_it_ran(other, node, fit[1])


def test_without_a_profile_nothing_is_recorded(tmp_path: Path) -> None:
    module = Chain(2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    strategy = piper.PiperStrategy(piper.schedules.gpipe(2, 2), transport="local")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        default_root_dir=tmp_path,
        strategy=strategy,
        **quiet,
    )
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))
    assert isinstance(strategy.phase, Ended) and strategy.phase.fit.recording is None
    assert not list(tmp_path.rglob("piper"))


def test_a_plain_log_directory_will_do(tmp_path: Path) -> None:
    module = Chain(2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    quiet: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    profile = piper.Schedule(wait=0, warmup=0, active=1, repeat=1)
    strategy = piper.PiperStrategy(piper.schedules.gpipe(2, 2), transport="local", profile=profile)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        default_root_dir=tmp_path,
        strategy=strategy,
        **quiet,
    )
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))
    assert len(steps(tmp_path)) == 1
    assert len(logged(tmp_path).Scalars("piper/step_time")) == 1


def test_a_fit_that_records_no_step_warns(tmp_path: Path) -> None:
    def fit(profile: piper.Schedule) -> None:
        module = Chain(2)
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
        strategy = piper.PiperStrategy(piper.schedules.gpipe(2, 2), transport="local", profile=profile)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=2,
            default_root_dir=tmp_path,
            strategy=strategy,
            logger=False,
        )
        trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))

    with pytest.warns(
        UserWarning,
        match=r"recorded no step: the schedule leaves out the first 2 steps, and the fit had 2 steps\..*PIPER-W027",
    ):
        fit(piper.Schedule(wait=1, warmup=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recorded no step")
        fit(piper.Schedule(wait=1, warmup=0))


def recorded(tmp_path: Path, profile: Any, samples: int, *callbacks: L.Callback) -> L.Trainer:
    """Train two stages for one epoch in batches of 4 samples."""
    module = Chain(2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    strategy = piper.PiperStrategy(piper.schedules.gpipe(2, 2), transport="local", profile=profile)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
        strategy=strategy,
    )
    trainer.fit(module, DataLoader(torch.randn(samples, 4), batch_size=4))
    return trainer


def test_batches_of_another_size_have_a_plan_of_their_own(tmp_path: Path) -> None:
    recorded(tmp_path, piper.Schedule(wait=0, warmup=0, active=2, repeat=0), 10)
    assert [(step["number"], step["plan"]) for step in steps(tmp_path)] == [
        (0, "plan.json"),
        (1, "plan.json"),
        (2, "plan_2.json"),
    ]
    second = json.loads((tmp_path / "piper" / "plan_2.json").read_text())
    assert (plan(tmp_path)["samples"], second["samples"]) == (4, 2)


class CountsFiles(L.Callback):
    """Counts the step files in a folder at the end of each batch, and the programs that the recording keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts, self.kept = folder, list[int](), list[int]()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.counts.append(len(list(self.folder.rglob("step_*.json"))))
        self.kept.append(len(trainer.strategy.phase.fit.recording._prepared))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [
        ({"active": 1}, [0, 1, 2, 3, 4, 5]),
        ({"active": 2}, [0, 0, 2, 2, 4, 4]),
        ({"active": 2, "warmup": 1}, [0, 0, 0, 2, 2, 2]),
        ({"active": 6}, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_each_cycle_is_written_before_the_next_one_is_recorded(
    schedule: dict[str, int], counts: list[int], tmp_path: Path
) -> None:
    """The last schedule is the negative control: within a cycle, nothing is written."""
    counter = CountsFiles(tmp_path)
    profile = piper.Schedule(**{"wait": 0, "warmup": 0, "repeat": 0, **schedule})
    trainer = recorded(tmp_path, profile, 24, counter)
    assert counter.counts == counts
    assert counter.kept == [1] * 6
    recording = trainer.strategy.phase.fit.recording  # type: ignore[attr-defined]
    assert not recording._prepared and not recording._recorders
    assert len(steps(tmp_path)) == (4 if "warmup" in schedule else 6)


SHIFT = 3_000_000_000  # nanoseconds by which the clock of rank 1 is ahead


def _offsets(rank: int) -> list[int]:
    if rank == 1:
        clock.now = lambda: now() + SHIFT
    return clock.clock_offsets(World(rank, 2, torch.device("cpu")))


def test_clocks_are_brought_to_one(tmp_path: Path) -> None:
    for offsets in launch(2, _offsets, tmp_path):
        assert offsets[0] == 0
        assert (
            abs(offsets[1] + SHIFT) < SHIFT / 10
        )  # half of a round trip, which takes its time on a machine that is busy


@pytest.mark.parametrize(
    "given, says",
    [
        (
            ("profile", True),
            r"PiperStrategy\(profile=...\) records plans, but an uncaptured step on one device",
        ),
        (("profiler", piper.PiperProfiler()), "PiperProfiler records plans, but an uncaptured step on one"),
        (("profiler", "simple"), None),
    ],
    ids=["profile", "PiperProfiler", "another profiler"],
)
def test_an_uncaptured_step_on_one_device_is_not_recorded(
    given: tuple[str, Any], says: str | None, tmp_path: Path
) -> None:
    name, value = given
    argument = {name: value}
    of_strategy = argument if name == "profile" else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        strategy=piper.PiperStrategy(capture="never", transport="local", **of_strategy),
        **({} if of_strategy else argument),
    )
    module = Chain(2)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.randn(4, 4), batch_size=4))
    about = [str(each.message) for each in found if "PIPER-W003" in str(each.message)]
    assert len(about) == (says is not None)
    assert says is None or re.match(says, about[0])
