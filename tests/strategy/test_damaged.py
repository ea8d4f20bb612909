"""A checkpoint with changed bits is never loaded with other values than those that were saved."""

from __future__ import annotations

import contextlib
import random
import re
import zipfile
from collections import Counter

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_piper.checkpoint import records
from lightning_piper.checkpoint.locations import location_of
from lightning_piper.checkpoint.records import check_records
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World
from lightning_piper.strategy import consolidate
from lightning_piper.strategy.checkpoints import read_plain
from tests.strategy.fitting import Batches, local, trainer
from tests.strategy.models import make
from tests.strategy.scenarios import equal

ALONE = World(0, 1, torch.device("cpu"))
FLIPS = 200


@pytest.fixture(scope="module", params=["consolidated", "sharded"])
def saved(request, tmp_path_factory):
    """A checkpoint of each kind, and a Trainer that can load it."""
    path = tmp_path_factory.mktemp(request.param) / "a.ckpt"
    module, loader = make("mlp")
    module.save_hyperparameters({"rate": 0.1, "name": "abc", "sizes": [1, 2, 3]})
    fit, _ = trainer(local(checkpoint=request.param), max_steps=2)
    fit.fit(module, Batches(loader))
    fit.save_checkpoint(path)
    return path, fit.strategy


def content_of(path, strategy):
    """Everything that loading returns, through the strategy's own code."""
    if not path.is_dir():
        return strategy.load_checkpoint(path, weights_only=True)
    consolidate(path, path.with_name("plain.ckpt"))
    return torch.load(path.with_name("plain.ckpt"), weights_only=True)


def flips(path, count, pattern):
    """Change one bit of the files at a time, and restore it afterwards."""
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    before = {file: file.read_bytes() for file in files}
    bits = [(file, bit) for file, content in before.items() for bit in range(8 * len(content))]
    for file, bit in random.Random(0).sample(bits, count):
        changed = bytearray(before[file])
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        yield
        file.write_bytes(before[file])


def outcomes(saved, count=FLIPS, pattern="*"):
    expected = content_of(*saved)
    found = Counter()
    for _ in flips(saved[0], count, pattern):
        try:
            found["the same" if equal(content_of(*saved), expected) else "other values"] += 1
        except PiperError:
            found["error"] += 1
    return found


def test_no_flipped_bit_changes_what_is_loaded(saved):
    found = outcomes(saved)
    assert found["other values"] == 0 and found["error"] > 50, found


@pytest.mark.parametrize("saved", ["consolidated"], indirect=True)
def test_no_flipped_bit_of_the_table_of_records_does(saved):
    """Some say what a record is: as a folder it is not read at all."""
    path, content = saved[0], saved[0].read_bytes()
    expected = content_of(*saved)
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/0"))
    for at in range(entry, entry + 46):
        for bit in range(8):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
            with contextlib.suppress(PiperError):
                assert equal(content_of(*saved), expected), (at, bit)
    path.write_bytes(content)


def test_without_the_checksums_they_do(saved, monkeypatch):
    monkeypatch.setattr("lightning_piper.strategy.checkpoints.check_records", lambda *_: None)
    monkeypatch.setattr("lightning_piper.checkpoint.sharded_checkpoint.verify", lambda *_: None)
    assert outcomes(saved, 25, "*.distcp")["other values"] > 0


# One file


@pytest.fixture
def plain(tmp_path):
    torch.save({"a": torch.arange(1000.0), "b": [1, 2.5], "c": torch.zeros(0)}, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def flip(path, text):
    """Change one bit within the content that begins with `text`."""
    content = bytearray(path.read_bytes())
    content[content.index(text) + 10] ^= 4
    path.write_bytes(content)


def test_damage_is_named_on_every_process(plain):
    flip(plain, torch.arange(100.0, 110.0).numpy().tobytes())
    with pytest.raises(
        PiperError,
        match=r"a\.ckpt does not have the content that was saved, in its record 'a/data/0' \(Bad CRC",
    ):
        check_records(plain, ALONE)
    plain.write_bytes(plain.read_bytes()[:-30])
    with pytest.raises(
        PiperError,
        match=r"in its table of records .*\. Use another checkpoint",
    ):
        check_records(plain, ALONE)


def test_what_was_changed_and_saved_again_loads(plain):
    content = torch.load(plain, weights_only=True)
    content["a"][3] = -1.0
    del content["b"]
    torch.save(content, plain)
    check_records(plain, ALONE)
    # In place, past torch.save: as the message says, it can be saved again.
    flip(plain, content["a"][100:110].numpy().tobytes())
    with pytest.raises(PiperError, match=r"If you changed the file on purpose, write it with torch\.save"):
        check_records(plain, ALONE)
    torch.save(torch.load(plain, weights_only=True), plain)
    check_records(plain, ALONE)


@pytest.mark.parametrize("how", ["older format", "no checksums"])
def test_files_without_checksums_load_as_before(how, plain):
    content = torch.load(plain, weights_only=True)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(how != "no checksums")
    try:
        torch.save(content, plain, _use_new_zipfile_serialization=how != "older format")
    finally:
        torch.serialization.set_crc32_options(before)
    found = read_plain(plain, TorchCheckpointIO(), ALONE, lambda: torch.load(plain, weights_only=True))
    assert equal(found, content)


class Shared(World):
    """The world of one of several processes that run one after the other."""

    def __init__(self, rank, files):
        super().__init__(rank, len(files), torch.device("cpu"))
        self.files = files

    def gather(self, value):
        files, self.files = self.files, [None] * self.size
        return [(file, None) if rank != self.rank else value for rank, file in enumerate(files)]


def test_processes_divide_the_records_of_a_file_that_they_share(plain, monkeypatch):
    read = []
    monkeypatch.setattr(records, "_read", lambda archive, record: read.append(record.filename))
    names = zipfile.ZipFile(plain).namelist()
    one = location_of(plain).identity()
    for rank in range(3):
        check_records(plain, Shared(rank, [one] * 3))
    assert sorted(read) == sorted(names)
    read.clear()
    for rank in range(2):  # each has a file of its own on a machine of its own
        check_records(plain, Shared(rank, [(str(k), *one[1:]) if k != rank else one for k in range(2)]))
    assert sorted(read) == sorted(2 * names)


def test_an_empty_file_is_named(plain):
    plain.write_bytes(b"")
    with pytest.raises(
        PiperError, match=rf"{re.escape(str(plain))} is empty\. Use another checkpoint \[PIPER-K002"
    ):
        check_records(plain, ALONE)
