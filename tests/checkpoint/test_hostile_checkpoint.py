"""Sharded checkpoints that an attacker made to reveal other files, or to block. Piper does not open anything
outside of the directory.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib

import pytest
import torch

from lightning_piper.checkpoint import files
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.sharded_checkpoint import save
from lightning_piper.checkpoint.tensor_ranges import Reader
from lightning_piper.errors import PiperError
from lightning_piper.strategy import consolidate
from tests.checkpoint.test_sharded_files import ALONE, COMMON, example, expected, values


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "a.ckpt", example(0), COMMON, ALONE)
    return tmp_path / "a.ckpt"


def rewritten(path, change):
    """Change the manifest, and write it with a valid checksum."""
    body = json.loads((path / "manifest.json").read_text())["manifest"]
    change(body)
    (path / "manifest.json").write_text(json.dumps({"crc32": files._crc(body), "manifest": body}))


@pytest.fixture
def outside(saved):
    """Make a file that does not belong to the checkpoint."""
    saved.with_name("secret").write_bytes(b"secret of 19 bytes.")
    return saved.with_name("secret")


@pytest.mark.parametrize(
    "name", ["../secret", "/{}", "sub/../../secret", "secret", "", ".", "__0_0.distcp\n", "..", "./meta.pt"]
)
def test_a_manifest_names_only_files_of_a_checkpoint(name, saved, outside):
    name = name.format(outside)
    rewritten(saved, lambda body: body["files"].update({name: [1, 2]}))
    with pytest.raises(PiperError, match=r"manifest\.json names the file .*Use another checkpoint") as error:
        consolidate(saved, saved.with_name("out.ckpt"))
    assert "has 19" not in str(error.value) and f"{zlib.crc32(outside.read_bytes()):08x}" not in str(
        error.value
    )


@pytest.mark.parametrize(
    "spec",
    [
        {"dtype": "load"},
        {"dtype": 3},
        {"shape": [-1]},
        {"shape": [10**15]},
        {"shape": ["1"]},
        {"shape": [True]},
        {"layout": [1]},
        {"layout": [0, 0]},
        {"shape": None},
        {"shape": [1e3]},
    ],
)
def test_a_manifest_says_of_tensors_only_what_can_be(spec, saved):
    rewritten(saved, lambda body: body["tensors"]["state_dict.w"].update(spec))
    with pytest.raises(PiperError, match=r"manifest\.json says that 'state_dict.w' is"):
        consolidate(saved, saved.with_name("out.ckpt"))


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("files"),
        lambda body: body.update(tensors=[]),
        lambda body: body.update(id=[1]),
        lambda body: body["files"].update({"meta.pt": [1]}),
        lambda body: body["files"].update({"meta.pt": None}),
        lambda body: body.pop("version"),
    ],
)
def test_a_manifest_of_other_types(change, saved):
    rewritten(saved, change)
    with pytest.raises(PiperError, match=r"manifest\.json (lacks its table|gives|has version None)"):
        values(saved)


def test_a_manifest_nested_deeply(saved):
    (saved / "manifest.json").write_text('{"manifest":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(PiperError, match=r"manifest\.json is damaged"):
        values(saved)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "meta.pt", "manifest.json"])
def test_a_link_in_the_directory_is_not_followed(file, saved, outside):
    assert torch.equal(values(saved), expected(0))
    (saved / file).rename(saved.with_name("moved"))
    (saved / file).symlink_to(outside if file != "manifest.json" else saved.with_name("moved"))
    with pytest.raises(PiperError, match=r"is a link, which Piper does not follow") as error:
        values(saved)
    assert "has 19" not in str(error.value)
    with pytest.raises(PiperError, match=r"is a link, which Piper does not follow"):
        LocalFolder(saved).open(file)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "meta.pt"])
def test_a_link_that_comes_after_the_check_is_not_followed(file, saved, monkeypatch):
    def swap(folder, *_):
        (folder.path / file).rename(folder.path / "moved")
        (folder.path / file).symlink_to("moved")

    monkeypatch.setattr("lightning_piper.checkpoint.sharded_checkpoint.verify", swap)
    with pytest.raises(PiperError, match=r"is a link, which Piper does not follow"):
        values(saved)


def test_what_would_block_is_not_read(saved):
    (saved / "meta.pt").unlink()
    os.mkfifo(saved / "meta.pt")
    with pytest.raises(PiperError, match=r"meta\.pt is not a regular file.* another checkpoint \[PIPER-K002"):
        values(saved)
    (saved / "meta.pt").unlink()
    (saved / "meta.pt").mkdir()
    with pytest.raises(PiperError, match=r"meta\.pt"):
        values(saved)


def test_metadata_name_only_files_of_a_checkpoint(saved, outside):
    read = Reader(LocalFolder(saved)).read_metadata()
    for name in ("../secret", str(outside), ".metadata", "__0_0.distcp/../../secret", None):
        for info in read.storage_data.values():
            info.relative_path = name
        (saved / ".metadata").write_bytes(pickle.dumps(read))
        with pytest.raises(PiperError, match=r"\.metadata lists the data file"):
            Reader(LocalFolder(saved)).read_metadata()
