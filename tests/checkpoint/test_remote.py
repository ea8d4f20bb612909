"""Checkpoints in a remote store: faults at every change, damage, and what a load reads."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_piper.checkpoint import sharded_checkpoint
from lightning_piper.checkpoint import tensor_ranges as ranges_module
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.locations import location_of
from lightning_piper.checkpoint.sharded_checkpoint import load, save
from lightning_piper.checkpoint.tensor_ranges import Reader, TensorRange
from lightning_piper.errors import CheckpointNotFoundError, PiperError
from lightning_piper.strategy import consolidate
from lightning_piper.strategy.checkpoints import found_at, read_plain, remove_in_one_go, save_in_one_go
from tests.checkpoint.faulty_store import KINDS, Fault, FaultyStore, Killed
from tests.checkpoint.test_sharded_files import ALONE, COMMON, example, expected, values
from tests.groups import marked

PATH = "faulty://bucket/run/last.ckpt"
FORMS = ("sharded", "consolidated")
IO = TorchCheckpointIO()


@pytest.fixture(autouse=True)
def empty():
    FaultyStore.empty()
    yield
    FaultyStore.empty()


def write(form, seed, path=PATH):
    if form == "sharded":
        save(path, example(seed), {"form": form, "seed": seed}, ALONE)
    else:
        save_in_one_go(IO, {"form": form, "seed": seed, "w": expected(seed)}, path, None)


def read(path=PATH):
    """Return form and seed of the checkpoint, as a fit finds and loads it. A wrong value fails."""
    place, sharded = found_at(path, IO, ALONE)
    if sharded:
        w = torch.empty(1000)
        content = load(place, [TensorRange("state_dict.w", (1000,), 0, 1000, w)], ALONE)
    else:
        content = read_plain(place, IO, ALONE, lambda: IO.load_checkpoint(place, weights_only=True))
        w = content["w"]
    assert torch.equal(w, expected(content["seed"]))
    return content["form"], content["seed"]


def tried(work):
    """Return the name of the error with which `work` ends."""
    try:
        work()
    except (Exception, Killed) as error:
        return type(error).__name__
    return None


def faults(work, kinds=KINDS):
    """Yield each kind of fault at each change that `work` makes."""
    FaultyStore.begin()
    work()
    for position in range(len(FaultyStore.changes)):
        for kind in kinds:
            yield Fault(kind, position)


@pytest.mark.parametrize(
    "before, after",
    marked(
        [(a, b) for a in FORMS for b in FORMS], [("sharded", "sharded"), ("consolidated", "consolidated")]
    ),
)
@pytest.mark.parametrize("kinds", [KINDS[:3], KINDS[3:]], ids=["killed", "other"])
def test_a_fault_at_any_change_loses_nothing(kinds, before, after):
    write(before, 0)
    seen, count = Counter(), 0
    for fault in faults(lambda: write(after, 1), kinds):
        FaultyStore.empty()
        write(before, 0)
        FaultyStore.begin(fault)
        error = tried(lambda: write(after, 1))
        FaultyStore.begin()
        found = read()
        assert found == ((before, 0) if found[1] == 0 else (after, 1)), fault
        assert error is not None or found[1] == 1, fault
        assert (error == "Killed") == fault.kind.startswith("killed"), (fault, error)
        seen[fault.kind, found[1]] += 1
        count += 1
        write(after, 2)
        assert read() == (after, 2)
        places = {name.partition("/save-")[0] for name in FaultyStore.store}
        assert places == {"/bucket/run/last.ckpt"}, fault
        assert len(FaultyStore.store) == (4 if after == "sharded" else 1), fault
    assert count >= 12
    assert {seed for (_, seed) in seen} == {0, 1}  # of some faults the earlier is left, of others the new one


@pytest.mark.parametrize("form", FORMS)
def test_a_fault_while_nothing_is_there_leaves_nothing_that_loads_in_part(form):
    for fault in faults(lambda: write(form, 1)):
        FaultyStore.empty()
        FaultyStore.begin(fault)
        error = tried(lambda: write(form, 1))
        FaultyStore.begin()
        try:
            assert read() == (form, 1)
        except PiperError as refused:
            assert error is not None
            assert isinstance(refused, CheckpointNotFoundError) or "last.ckpt" in str(refused)
            assert "Use another checkpoint" in str(refused) or "there is no checkpoint" in str(refused)


@pytest.mark.parametrize("form", FORMS)
def test_a_fault_while_it_is_removed(form):
    """It is there whole, or not there."""
    write(form, 0)
    for fault in faults(lambda: remove_in_one_go(IO, PATH)):
        FaultyStore.empty()
        write(form, 0)
        FaultyStore.begin(fault)
        tried(lambda: remove_in_one_go(IO, PATH))
        FaultyStore.begin()
        with contextlib.suppress(PiperError):
            assert read() == (form, 0)
        remove_in_one_go(IO, PATH)
        assert not FaultyStore.store
    changes = [change for change in FaultyStore.changes if change.startswith("delete")]
    assert form == "consolidated" or not changes or changes[0].endswith("manifest.json")


def damage(name, how):
    path = next(path for path in FaultyStore.store if path.endswith(name))
    content = bytearray(FaultyStore.store[path].getvalue())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    if how == "missing":
        del FaultyStore.store[path]
        return
    FaultyStore().pipe_file(path, bytes(content[:-1] if how == "cut off" else content))


@pytest.mark.parametrize("how", ["flipped", "cut off", "missing"])
@pytest.mark.parametrize("name", ["__0_0.distcp", "meta.pt", ".metadata", "manifest.json"])
def test_damage_is_refused_by_name(name, how):
    write("sharded", 0)
    damage(name, how)
    with pytest.raises(PiperError, match=rf"faulty://bucket/run/last\.ckpt.*save-0*1.*{name}.*Use another"):
        read()


@pytest.mark.parametrize("how", ["flipped", "cut off"])
def test_a_damaged_file_is_refused_by_name(how):
    write("consolidated", 0)
    damage("last.ckpt", how)
    with pytest.raises(PiperError, match=r"faulty://bucket/run/last\.ckpt does not have the content"):
        read()


def test_without_the_manifest_a_damaged_checkpoint_is_accepted(monkeypatch):
    """Which shows that the checks above refuse it, and not torch."""
    write("sharded", 0)
    path = next(path for path in FaultyStore.store if path.endswith(".distcp"))
    content = bytearray(FaultyStore.store[path].getvalue())
    place = content.index(expected(0)[500:510].numpy().tobytes())
    content[place + 2] ^= 1
    FaultyStore().pipe_file(path, bytes(content))
    with pytest.raises(PiperError, match="does not have the content that was saved in bytes"):
        values(PATH)
    monkeypatch.setattr(Reader, "_check", lambda *_: None)
    assert not torch.equal(values(PATH), expected(0))


def test_a_load_reads_only_the_chunks_that_it_needs():
    size, chunk, share = 40_000, 1000, 10_000
    with mock.patch.object(ranges_module, "CHUNK", chunk):
        save(PATH, example(0, size), COMMON, ALONE)
    stored = {path.rpartition("/")[2]: len(file.getvalue()) for path, file in FaultyStore.store.items()}
    data = stored.pop("__0_0.distcp")
    for start, chunks in (
        (0, 11),
        (share, 10),
        (share - 500, 11),
    ):  # the first range has a chunk of 3 elements
        room = torch.empty(share)
        FaultyStore.begin()
        load(PATH, [TensorRange("state_dict.w", (size,), start, start + share, room)], ALONE)
        assert torch.equal(room, expected(0, size)[start : start + share])
        overhead = 2 * sum(stored.values())  # the manifest, the metadata and the other content
        assert FaultyStore.bytes_read - overhead < data * chunks / (size / chunk) * 1.05
        assert FaultyStore.bytes_read < 0.45 * data + overhead


def test_the_folder_of_a_save_is_a_local_checkpoint_and_back(tmp_path):
    write("sharded", 3)
    (folder,) = {path.rpartition("/")[0] for path in FaultyStore.store}
    FaultyStore().get(folder, str(tmp_path / "one.ckpt"), recursive=True)
    FaultyStore().get("/bucket/run/last.ckpt", str(tmp_path / "all.ckpt"), recursive=True)
    for name in ("one.ckpt", "all.ckpt"):
        assert read(tmp_path / name) == ("sharded", 3)
    save(tmp_path / "local.ckpt", example(4), {"form": "sharded", "seed": 4}, ALONE)
    FaultyStore().put_file = None
    for path in (tmp_path / "local.ckpt").iterdir():
        FaultyStore().pipe_file(f"/bucket/run/up.ckpt/{path.name}", path.read_bytes())
    assert read("faulty://bucket/run/up.ckpt") == ("sharded", 4)
    write("sharded", 5, "faulty://bucket/run/up.ckpt")
    assert read("faulty://bucket/run/up.ckpt") == ("sharded", 5)
    assert {path.rpartition("/")[2] for path in FaultyStore.store if "/up.ckpt/s" not in path} == {
        path.rpartition("/")[2] for path in FaultyStore.store
    }
    assert sum("/up.ckpt/" in path for path in FaultyStore.store) == 4


def test_a_checkpoint_without_a_table_of_chunks_is_read_whole(tmp_path, monkeypatch):
    write_manifest = sharded_checkpoint.write_manifest
    with monkeypatch.context() as patch:
        patch.setattr(
            sharded_checkpoint,
            "write_manifest",
            lambda folder, content, files: write_manifest(
                folder, {k: v for k, v in content.items() if k != "chunks"}, files
            ),
        )
        write("sharded", 0)
    assert read() == ("sharded", 0)
    damage("__0_0.distcp", "flipped")
    with pytest.raises(PiperError, match="does not have the content that was saved"):
        read()


def test_consolidate_from_and_into_a_store(tmp_path):
    write("sharded", 0)
    consolidate(PATH, "faulty://bucket/run/plain.ckpt")
    consolidate("faulty://bucket/run/last.ckpt", tmp_path / "plain.ckpt")
    assert torch.load(tmp_path / "plain.ckpt", weights_only=True) == {"form": "sharded", "seed": 0}
    with pytest.raises(PiperError, match=r"plain\.ckpt is a file"):
        consolidate("faulty://bucket/run/plain.ckpt", tmp_path / "x.ckpt")
    with pytest.raises(PiperError, match=r"bucket/run is a folder"):
        consolidate("faulty://bucket/run/last.ckpt", "faulty://bucket/run")
    with pytest.raises(PiperError, match=r"bucket/run is a folder that is not a checkpoint"):
        write("consolidated", 0, "faulty://bucket/run")
    assert read("faulty://bucket/run/last.ckpt") == ("sharded", 0)
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint faulty://bucket/run/none"):
        consolidate("faulty://bucket/run/none.ckpt", tmp_path / "x.ckpt")


def test_a_file_address_is_a_local_path(tmp_path):
    write("sharded", 0, f"file://{tmp_path}/a.ckpt")
    assert LocalFolder(tmp_path / "a.ckpt").size("manifest.json")
    assert str(location_of(f"file://{tmp_path}/a.ckpt")) == str(Path(tmp_path / "a.ckpt"))
    assert read(f"file://{tmp_path}/a.ckpt") == ("sharded", 0)


def test_an_address_in_a_path_is_refused_and_a_folder_with_a_colon_is_not() -> None:
    with pytest.raises(PiperError, match=r"^s3:/bucket/a.ckpt is not an address: .*'s3://bucket/a.ckpt'"):
        location_of(Path("s3://bucket/a.ckpt"))
    assert str(location_of(Path("runs:/a.ckpt"))) == str(Path("runs:/a.ckpt").absolute())


def test_a_store_that_keeps_a_part_says_so():
    texts = []
    for fault in faults(lambda: write("sharded", 1)):
        if fault.kind == "cut off":
            FaultyStore.empty()
            FaultyStore.begin(fault)
            try:
                write("sharded", 1)
            except PiperError as error:
                texts.append(str(error))
    for name in ("meta.pt", "__0_0.distcp", ".metadata"):
        assert any(
            re.search(rf"the store has \d+ bytes of .*/{name}, but a process wrote \d+\.", x) for x in texts
        )
    assert any("the store does not have the manifest of" in text for text in texts)
    FaultyStore.empty()
    FaultyStore.begin(Fault("cut off", 0))
    with pytest.raises(PiperError, match=r"the store did not keep the whole content of .*last\.ckpt"):
        write("consolidated", 1)
