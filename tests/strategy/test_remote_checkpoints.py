"""Fits that save into a real S3 server, and resume from it: bit for bit as with a local folder."""

from __future__ import annotations

import warnings

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_piper as piper
from lightning_piper.checkpoint.sharded_checkpoint import open_checkpoint
from lightning_piper.processes.world import World
from lightning_piper.strategy import consolidate, last_checkpoint
from tests.distributed.processes import launch_trainings, run_ranks
from tests.groups import marked, on_demand
from tests.strategy import s3
from tests.strategy.fitting import local, same, trainer
from tests.strategy.models import make
from tests.strategy.scenarios import equal

pytest.importorskip("moto")
pytest.importorskip("s3fs")
ALONE = World(0, 1, torch.device("cpu"))
ZERO3 = "DP2 ZeRO-3"


@pytest.fixture(scope="module")
def endpoint():
    with s3.start() as address:
        yield address


JOBS = {
    "local": {"folder": "sharded"},
    "s3": {"folder": "s3://bucket/sharded"},
    "local file": {"folder": "consolidated", "kind": "consolidated"},
    "s3 file": {"folder": "s3://bucket/consolidated", "kind": "consolidated"},
    "s3, behind": {"folder": "s3://bucket/behind", "behind": True},
    "s3 file, behind": {"folder": "s3://bucket/file behind", "kind": "consolidated", "behind": True},
}
QUICK = ["local", "s3"]


@pytest.fixture(scope="module")
def trained(endpoint, tmp_path_factory):
    """Trainings of three steps on two processes, by their names: where they saved, and what they returned."""
    local = tmp_path_factory.mktemp("local")

    def run(names):
        jobs = [{"how": ZERO3, "steps": 3, **JOBS[name]} for name in names]
        for job in jobs:
            job["folder"] = job["folder"] if "://" in job["folder"] else str(local / job["folder"])
        found = launch_trainings(2, s3.train_all, local / f"run of {names[0]}", endpoint, jobs)
        return {name: (job["folder"], found[0][job["folder"]]) for name, job in zip(names, jobs, strict=True)}

    return on_demand([QUICK, [name for name in JOBS if name not in QUICK]], run)


@pytest.mark.parametrize("name", marked(["s3", "s3, behind", "s3 file", "s3 file, behind"], ["s3"]))
def test_a_fit_into_s3_keeps_what_it_should(trained, name):
    folder, outcome = trained(name)
    _, expected = trained("local")
    assert same(outcome["values"], expected["values"])
    assert outcome["kept"] == expected["kept"]
    assert len(outcome["kept"]) == 2
    assert s3.names(folder) == sorted([*outcome["kept"], "last.ckpt"])
    if "file" not in name:
        for checkpoint in s3.names(folder):
            assert len(s3.names(f"{folder}/{checkpoint}")) == 1  # nothing is left of what was replaced


@pytest.mark.parametrize(
    "disk, remote",
    marked(
        [
            ("local", "s3"),
            ("local", "s3, behind"),
            ("local file", "s3 file"),
            ("local file", "s3 file, behind"),
        ],
        [("local", "s3")],
    ),
)
def test_the_checkpoints_are_equal(trained, disk, remote, tmp_path):
    contents = []
    for number, name in enumerate((disk, remote)):
        path = f"{trained(name)[0]}/last.ckpt"
        if "file" not in name:
            consolidate(path, tmp_path / f"{number}.ckpt")
            path = str(tmp_path / f"{number}.ckpt")
        with fsspec.open(path, "rb") as file:
            contents.append(torch.load(file, weights_only=True))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "loops"):
        assert equal(contents[0][key], contents[1][key]), key


@pytest.mark.parametrize(
    "disk, remote", marked([("local", "s3"), ("local file", "s3 file")], [("local", "s3")])
)
def test_it_resumes_on_another_number_of_processes(endpoint, trained, disk, remote, tmp_path):
    found = []
    for name in (disk, remote):
        with torch.random.fork_rng():
            into = f"s3://bucket/resumed {name}" if "s3" in name else str(tmp_path)
            resume = f"{trained(name)[0]}/last.ckpt"
            found.append(s3.train(0, endpoint, "one device", into, 5, resume))
    assert len(found[0]["losses"]) == 2
    assert equal(found[0]["losses"], found[1]["losses"])
    assert same(found[0]["values"], found[1]["values"])


@pytest.mark.long
@pytest.mark.parametrize("disk, remote", [("local", "s3"), ("local file", "s3 file")])
def test_it_resumes_on_four_processes(endpoint, trained, disk, remote, tmp_path):
    jobs = [
        {
            "how": "PP2 x DP2 ZeRO-3",
            "folder": f"s3://bucket/four {name}" if "s3" in name else str(tmp_path / "four"),
            "steps": 6,
            "resume": f"{trained(name)[0]}/last.ckpt",
        }
        for name in (disk, remote)
    ]
    found = launch_trainings(4, s3.train_all, tmp_path / "run", endpoint, jobs)
    for rank in found:
        a, b = (rank[job["folder"]] for job in jobs)
        assert equal(a["losses"], b["losses"])
        assert same(a["values"], b["values"])


@pytest.mark.long
@pytest.mark.parametrize("victim, file", [(0, 12), (0, 14), (0, 15), (1, 2), (1, 3)])
def test_a_process_is_killed_while_it_uploads(endpoint, victim, file, tmp_path):
    """The last checkpoint, or the one before it, loads."""
    folder = f"s3://bucket/killed {victim} {file}"
    ends = run_ranks(
        2, s3.train, tmp_path / "run", endpoint, ZERO3, folder, 4, None, "sharded", False, (victim, file),
        joined=False,
    )  # fmt: skip
    assert ends[victim].exitcode == -9
    opened = open_checkpoint(f"{folder}/last.ckpt", ALONE)
    assert opened.common["global_step"] >= 1
    with torch.random.fork_rng():
        found = s3.train(0, endpoint, "one device", f"{folder} resumed", 6, f"{folder}/last.ckpt")
    assert len(found["losses"]) == 6 - opened.common["global_step"]


def test_a_bucket_that_does_not_exist_is_an_error_at_once(endpoint, tmp_path):
    with pytest.raises(piper.PiperError, match=r"there is no checkpoint s3://bucket/none\.ckpt"):
        s3.train(0, endpoint, "one device", str(tmp_path), 1, "s3://bucket/none.ckpt")


def test_the_last_checkpoint(tmp_path):
    """Lightning does not find it in a store, and a fit that starts anew says so."""
    folder = f"memory://{tmp_path.name}"
    assert last_checkpoint(folder) is None
    assert last_checkpoint(tmp_path / "none") is None

    def fit(steps, **options):
        module, loader = make("mlp")
        save = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
        run, record = trainer(local(checkpoint="sharded"), [save], max_steps=steps, enable_checkpointing=True)
        run.fit(module, loader, **options)
        return len(record.losses)

    fit(2)
    assert last_checkpoint(folder) == f"{folder}/last.ckpt"
    with pytest.warns(UserWarning, match=r"starts from the beginning, but memory://.*/last.*PIPER-W028"):
        assert fit(2, ckpt_path="last") == 2
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*PIPER-W028")
        assert fit(3, ckpt_path=last_checkpoint(folder)) == 1
    incomplete = f"{folder}/last-v9.ckpt/save-000001-00000000/meta.pt"
    fsspec.filesystem("memory").pipe_file(incomplete, b"x")
    assert "last-v9" not in last_checkpoint(folder)


def test_the_last_checkpoint_on_a_disk(tmp_path):
    torch.save({"a": 1}, tmp_path / "last.ckpt")
    (tmp_path / "last-v1.ckpt").mkdir()
    torch.save({"a": 1}, tmp_path / "other.ckpt")
    assert last_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    assert last_checkpoint(tmp_path, "oth") == str(tmp_path / "other.ckpt")
