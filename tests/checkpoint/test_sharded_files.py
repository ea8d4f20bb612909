"""Sharded checkpoints on disk: load any division into any other division, complete or incomplete, and find
damage. All tests but the test of planning use one process.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import signal
import sys
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_piper.checkpoint import tensor_ranges as ranges_module
from lightning_piper.checkpoint.files import earlier_of, prepare, publish, remove, temporary_of
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.sharded_checkpoint import Saving, load, open_checkpoint, read_whole, save
from lightning_piper.checkpoint.tensor_ranges import LoadRanges, Reader, SaveRanges, TensorRange
from lightning_piper.errors import PiperError
from lightning_piper.ir.values import TensorSpec, flattened, view_as
from lightning_piper.processes.world import World
from tests.groups import marked

ALONE = World(0, 1, torch.device("cpu"))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
COMMON = {"epoch": 3, "callbacks": {"x": [1, 2.5, "three"]}, "scalar": torch.tensor(7.0)}


def dense(shape, layout, dtype=torch.float32, seed=0):
    """Return random values in a memory layout: the whole tensor, and its elements in memory order."""
    values = torch.randint(-100, 100, (math.prod(shape),), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    stride, step = [0] * len(shape), 1
    for d in reversed(layout):
        stride[d], step = step, step * shape[d]
    spec = TensorSpec(tuple(shape), dtype, tuple(stride))
    return view_as(values, spec), values


@st.composite
def cuttings(draw, numel):
    """Draw ranges that together cover all elements. Some ranges overlap, and some are empty."""
    cuts = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=4))})
    ranges = list(itertools.pairwise(cuts)) or [(0, 0)]
    more = draw(
        st.lists(st.tuples(st.integers(0, numel), st.integers(0, numel)).map(sorted).map(tuple), max_size=2)
    )
    return draw(st.permutations(ranges + more))


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    layouts = st.permutations(range(len(shape))).map(tuple)
    numel = math.prod(shape)
    return {
        "shape": tuple(shape),
        "dtype": draw(st.sampled_from(DTYPES)),
        "layouts": (draw(layouts), draw(layouts)),
        "cuts": (draw(cuttings(numel)), draw(cuttings(numel))),
    }


def cut(key, shape, layout, flat, ranges):
    return [TensorRange(key, shape, a, b, flat[a:b], layout) for a, b in ranges]


@settings(deadline=None, max_examples=60)
@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 8))
def test_any_cutting_into_any_other(drawn, chunk):
    saved, wanted, expected = [], [], []
    for i, t in enumerate(drawn):
        key, shape = f"state_dict.t{i}", t["shape"]
        whole, flat = dense(shape, t["layouts"][0], t["dtype"], seed=i)
        saved += cut(key, shape, t["layouts"][0], flat, t["cuts"][0])
        _, room = dense(shape, t["layouts"][1], t["dtype"], seed=i + 100)
        order = flattened(whole, TensorSpec.of(dense(shape, t["layouts"][1], t["dtype"])[0]))
        for a, b in t["cuts"][1]:
            wanted.append(TensorRange(key, shape, a, b, torch.empty_like(room[a:b]), t["layouts"][1]))
            expected.append(order[a:b])
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(ranges_module, "CHUNK", chunk):
        save(f"{folder}/a.ckpt", saved, COMMON, ALONE)
        common = load(f"{folder}/a.ckpt", wanted, ALONE)
    assert common == COMMON
    assert all(torch.equal(part.tensor, values) for part, values in zip(wanted, expected, strict=True))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.data()), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_each_element_is_written_once_by_a_holder(keys, ranks, chunk):
    held = [[] for _ in range(ranks)]
    for i, (numel, data) in enumerate(keys):
        for a, b in data.draw(cuttings(numel)):
            for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append(TensorRange(f"k{i}", (numel,), a, b, torch.zeros(b - a)))
    planners = [SaveRanges(x) for x in held]
    with mock.patch.object(ranges_module, "CHUNK", chunk):
        plans, metadata = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    for i, (numel, _) in enumerate(keys):
        written = []
        for planner, plan in zip(planners, plans, strict=True):
            for item in plan.items:
                if item.index.fqn == f"k{i}":
                    size = item.tensor_data.chunk.sizes[0]
                    assert size <= chunk
                    assert planner.resolve_data(item).shape == (size,)
                    written += range(item.index.offset[0], item.index.offset[0] + size)
        assert sorted(written) == list(range(numel))
        assert metadata.state_dict_metadata[f"k{i}"].size == torch.Size([numel])


def test_replicas_share_the_work():
    planners = [
        SaveRanges([TensorRange(f"k{i}", (10,), 0, 10, torch.zeros(10)) for i in range(8)]) for _ in range(4)
    ]
    plans, _ = planners[0].create_global_plan([p.create_local_plan() for p in planners])
    assert [len(plan.items) for plan in plans] == [2, 2, 2, 2]


def test_elements_that_nobody_holds():
    with pytest.raises(PiperError, match=r"no process holds elements 3:5 of a, which has 9"):
        SaveRanges([]).create_global_plan(
            [
                SaveRanges(cut("a", (9,), None, torch.zeros(9), [r])).create_local_plan()
                for r in ((0, 3), (5, 9))
            ]
        )


def test_processes_that_disagree_on_a_tensor(tmp_path):
    tensor_ranges = [
        TensorRange("a", (2, 2), 0, 4, torch.zeros(4)),
        TensorRange("a", (4,), 0, 4, torch.zeros(4)),
    ]
    with pytest.raises(PiperError, match=r"a is .*\[4\].* on rank 1, but .*\[2, 2\].* on a lower rank"):
        SaveRanges([]).create_global_plan([SaveRanges([p]).create_local_plan() for p in tensor_ranges])


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "a.ckpt"
    save(path, example(0), COMMON, ALONE)
    return path


def example(seed, size=1000):
    _, flat = dense((size,), (0,), seed=seed)
    return cut("state_dict.w", (size,), None, flat, [(0, 3), (3, size)])


def values(path, size=1000):
    room = torch.empty(size)
    load(path, [TensorRange("state_dict.w", (size,), 0, size, room)], ALONE)
    return room


def expected(seed, size=1000):
    return torch.cat([p.tensor for p in example(seed, size)])


def test_torch_reads_it_too(saved):
    into = {"state_dict.w": torch.empty(1000)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(into, checkpoint_id=saved, no_dist=True)
    assert torch.equal(into["state_dict.w"], expected(0))


def test_reads_only_what_it_needs(tmp_path):
    with mock.patch.object(ranges_module, "CHUNK", 10):
        save(tmp_path / "a.ckpt", example(0), COMMON, ALONE)
    metadata = Reader(LocalFolder(tmp_path / "a.ckpt")).read_metadata()
    planner = LoadRanges([TensorRange("state_dict.w", (1000,), 295, 312, torch.empty(17))])
    planner.set_up_planner({}, metadata)
    plan = planner.create_local_plan()
    assert sorted(item.storage_index.offset[0] for item in plan.items) == [290, 300, 310]


def test_another_dtype_is_converted(saved):
    room = torch.empty(1000, dtype=torch.float64)
    load(saved, [TensorRange("state_dict.w", (1000,), 0, 1000, room)], ALONE)
    assert torch.equal(room, expected(0).double())


def test_whole_tensors_keep_their_memory_order(tmp_path):
    whole, flat = dense((2, 3, 4), (0, 2, 1))
    save(tmp_path / "a.ckpt", cut("w", (2, 3, 4), (0, 2, 1), flat, [(0, 7), (7, 24)]), {}, ALONE)
    found = read_whole(open_checkpoint(tmp_path / "a.ckpt", ALONE), ["w"])["w"]
    assert torch.equal(found, whole)
    assert found.stride() == whole.stride()


def flip(path, at=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def foreign(path):
    """Overwrite a file by a file of another save: the same name and size, but different content."""
    other = path.parent.with_name("other.ckpt")
    save(other, example(5), {**COMMON, "epoch": 4}, ALONE)
    assert (other / path.name).stat().st_size == path.stat().st_size
    path.write_bytes((other / path.name).read_bytes())


def unlink(path):
    path.unlink()


@pytest.mark.parametrize(
    "file, damage, text",
    [
        (file, damage, text)
        for file in ("__0_0.distcp", "meta.pt")
        for damage, text in [
            (flip, "CRC-32"),
            (truncate, "bytes instead of"),
            (foreign, "CRC-32"),
            (unlink, "is missing"),
        ]
    ]
    + [(".metadata", flip, "CRC-32"), (".metadata", unlink, "is missing")]
    + [("manifest.json", flip, "is damaged"), ("manifest.json", truncate, "is damaged")]
    + [("manifest.json", unlink, "it is not a complete sharded")],
)
def test_damage_is_named(saved, file, damage, text):
    assert torch.equal(values(saved), expected(0))
    damage(saved / file)
    with pytest.raises(
        PiperError, match=f"{file if damage is not unlink or file != 'manifest.json' else saved}.*{text}"
    ):
        values(saved)


def test_every_byte_of_the_manifest_counts(saved):
    """Flipping the lowest bit of any byte is noticed: no digit of a size or shape can change."""
    content = (saved / "manifest.json").read_bytes()
    for at in range(len(content)):
        flip(saved / "manifest.json", at)
        if (saved / "manifest.json").read_bytes().split() != content.split():
            with pytest.raises(PiperError, match=r"manifest\.json"):
                open_checkpoint(saved, ALONE)
        (saved / "manifest.json").write_bytes(content)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(PiperError, match=r"there is no checkpoint .*a\.ckpt"):
        values(tmp_path / "a.ckpt")
    (tmp_path / "file.ckpt").write_bytes(b"")
    with pytest.raises(PiperError, match=r"file\.ckpt is a file"):
        values(tmp_path / "file.ckpt")
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(PiperError, match=r"empty\.ckpt has no manifest\.json"):
        values(tmp_path / "empty.ckpt")


def test_what_the_module_wants_and_the_checkpoint_lacks(saved):
    with pytest.raises(PiperError, match=r"does not have state_dict\.v"):
        load(saved, [TensorRange("state_dict.v", (2,), 0, 2, torch.empty(2))], ALONE)
    with pytest.raises(
        PiperError,
        match=r"state_dict\.w has shape \[1000\] in the checkpoint .*a\.ckpt, but \[10, 100\] here",
    ):
        load(saved, [TensorRange("state_dict.w", (10, 100), 0, 2, torch.empty(2))], ALONE)


def test_a_piece_that_is_none(tmp_path):
    for start, stop, count in ((0, 2, 3), (3, 2, 0), (8, 12, 4)):
        message = "elements 0:2 of w" if stop == 2 and not start else f"range {start}:{stop} is given"
        with pytest.raises(PiperError, match=message):
            save(tmp_path / "a.ckpt", [TensorRange("w", (10,), start, stop, torch.empty(count))], {}, ALONE)
    assert not list(tmp_path.iterdir())


class Harmful:
    def __reduce__(self):
        return os.system, ("true",)


def test_no_file_runs_code(saved):
    import pickle

    (saved / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(PiperError, match=r"\.metadata names posix\.system"):
        Reader(LocalFolder(saved)).read_metadata()
    for name in ("os.system", "pickle.Unpickler", "FileSystem"):
        code = b"\x80\x04ctorch.distributed.checkpoint.filesystem\n" + name.encode() + b"\n."
        (saved / ".metadata").write_bytes(code)
        with pytest.raises(PiperError, match=name):
            Reader(LocalFolder(saved)).read_metadata()
    save(saved, example(0), {"hyper_parameters": Harmful()}, ALONE)
    with pytest.raises(PiperError, match=r"meta\.pt has \S+, which weights_only=True does not load"):
        values(saved)


def test_a_trusted_class_loads_when_asked_for(tmp_path):
    save(tmp_path / "a.ckpt", [], {"hyper_parameters": Path("x")}, ALONE)
    with pytest.raises(PiperError, match=r"weights_only=False"):
        load(tmp_path / "a.ckpt", [], ALONE)
    assert load(tmp_path / "a.ckpt", [], ALONE, weights_only=False) == {"hyper_parameters": Path("x")}


def failing(*args, **kwargs):
    raise OSError("disk full")


@pytest.mark.parametrize(
    "where", ["dcp.FileSystemWriter.write_data", "dcp.FileSystemWriter.finish", "json.dumps", "torch.save"]
)
def test_a_failed_save_leaves_the_earlier_checkpoint(saved, where, monkeypatch):
    owner, name = {
        "dcp.FileSystemWriter.write_data": (dcp.FileSystemWriter, "write_data"),
        "dcp.FileSystemWriter.finish": (dcp.FileSystemWriter, "finish"),
        "json.dumps": (sys.modules["json"], "dumps"),
        "torch.save": (torch, "save"),
    }[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, failing)
        with pytest.raises(PiperError, match=r"saving .*a\.ckpt failed on rank 0: OSError: disk full"):
            save(saved, example(1), COMMON, ALONE)
    assert torch.equal(values(saved), expected(0))
    assert list(saved.parent.iterdir()) == [saved]


def test_a_plan_is_made_again_only_for_what_is_held_otherwise(tmp_path):
    planned = mock.patch.object(
        SaveRanges, "create_global_plan", autospec=True, side_effect=SaveRanges.create_global_plan
    )
    path = tmp_path / "a.ckpt"
    with planned as plans:
        before = None
        for seed, calls in ((0, 1), (1, 1)):
            before = Saving(path, example(seed), COMMON, ALONE, before)
            before.write(ALONE)
            assert plans.call_count == calls and torch.equal(values(path), expected(seed))
        other = [TensorRange("x", (3,), 0, 3, torch.arange(3.0))]
        Saving(path, other, COMMON, ALONE, before).write(ALONE)
        assert plans.call_count == 2
    room = torch.empty(3)
    load(path, [TensorRange("x", (3,), 0, 3, room)], ALONE)
    assert torch.equal(room, torch.arange(3.0))


CHANGES = {"mkdir", "rename", "replace", "unlink", "rmdir", "open", "close", "fsync"}


def killed_at(event, work):
    """Run `work` in a child process that is killed where its n-th call that changes files begins or returns.
    Returns whether the child reached this call.
    """
    child = os.fork()
    if child == 0:
        try:
            count = 0

            def profile(frame, kind, called):
                nonlocal count
                if kind in ("c_call", "c_return") and called.__name__ in CHANGES:
                    count += 1
                    if count > event:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.setprofile(profile)
            work()
            sys.setprofile(None)
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("before", marked(["nothing", "sharded", "file", "leftovers"], ["sharded"]))
def test_killed_at_any_moment(before, tmp_path):
    """Either the earlier checkpoint or the new one can be loaded, and the next save leaves nothing but its
    own.
    """
    path = tmp_path / "last.ckpt"
    outcomes = set()
    event = 0
    while True:
        remove(path)
        if before == "file":
            path.write_bytes(b"a plain checkpoint")
        elif before != "nothing":
            save(path, example(0, 5), COMMON, ALONE)
        if before == "leftovers":
            os.rename(path, earlier_of(path))
            temporary_of(path).mkdir()
        killed = killed_at(event, lambda: save(path, example(1, 5), COMMON, ALONE))
        outcomes.add(state(path, before))
        assert state(last_of(tmp_path) or path, before) == state(path, before)
        save(path, example(2, 5), COMMON, ALONE)
        assert torch.equal(values(path, 5), expected(2, 5))
        assert list(tmp_path.iterdir()) == [path]
        if not killed:
            break
        event += 1
    assert event > 40
    assert outcomes == {"before", "after"}


def last_of(folder):
    """Return the checkpoint from which `fit(ckpt_path="last")` continues: the newest that Lightning finds."""
    found = ModelCheckpoint(folder)._find_last_checkpoints(None)
    return Path(max(found, key=os.path.getmtime)) if found else None


def state(path, before):
    try:
        found = values(path, 5)
    except PiperError as error:
        if before == "nothing":
            assert "there is no checkpoint" in str(error)
        else:
            assert before == "file"
            assert "is a file" in str(error)
        return "before"
    if torch.equal(found, expected(1, 5)):
        return "after"
    assert before in ("sharded", "leftovers")
    assert torch.equal(found, expected(0, 5))
    return "before"


def test_removed_at_any_moment(tmp_path):
    """It is there whole, or not there; never in part, and never an earlier one."""
    path = tmp_path / "last.ckpt"
    event = 0
    while True:
        save(path, example(1, 5), COMMON, ALONE)
        killed = killed_at(event, lambda: remove(path))
        if path.exists():
            assert torch.equal(values(path, 5), expected(1, 5))
        else:
            with pytest.raises(PiperError, match="there is no checkpoint"):
                values(path, 5)
        if not killed:
            break
        event += 1
    assert event > 5
    assert not list(tmp_path.iterdir())


def test_a_link_is_replaced_not_followed(saved):
    link = saved.with_name("last.ckpt")
    link.symlink_to(saved)
    assert torch.equal(values(link), expected(0))
    save(link, example(1), COMMON, ALONE)
    assert torch.equal(values(link), expected(1))
    assert torch.equal(values(saved), expected(0))
    link.rename(saved.with_name("real.ckpt"))
    link.symlink_to(saved)
    remove(link)
    assert torch.equal(values(saved), expected(0))


def test_a_file_takes_the_place_of_a_directory(saved):
    temporary = prepare(saved)
    temporary.write_bytes(b"plain")
    publish(temporary, saved)
    assert saved.read_bytes() == b"plain"
    assert list(saved.parent.iterdir()) == [saved]


def test_the_format_stays(saved):
    """What the manifest says, for files that are read years later."""
    import json

    found = json.loads((saved / "manifest.json").read_text())["manifest"]
    assert found.keys() == {"kind", "version", "id", "processes", "tensors", "files", "chunks"}
    assert found["kind"] == "lightning_piper sharded checkpoint"
    assert found["version"] == 1
    assert found["tensors"] == {"state_dict.w": {"shape": [1000], "layout": [0], "dtype": "float32"}}
    data = (saved / "__0_0.distcp").read_bytes()
    assert found["files"]["__0_0.distcp"] == [len(data), zlib.crc32(data)]
    parts = found["chunks"]["__0_0.distcp"]
    assert [start for start, _, _ in parts] == [0, parts[0][1]]
    assert sum(size for _, size, _ in parts) == len(data)
    assert all(zlib.crc32(data[start : start + size]) == crc for start, size, crc in parts)
    assert found["files"].keys() == {"__0_0.distcp", ".metadata", "meta.pt"}
    assert torch.load(io.BytesIO((saved / "meta.pt").read_bytes()), weights_only=True)["epoch"] == 3


def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(saved):
    prepare(saved)
    other = saved.with_name("runs")
    other.mkdir()
    prepare(other)  # an empty folder has nothing to lose
    (other / "notes.txt").write_text("precious")
    with pytest.raises(PiperError, match=r"runs is a folder that is not a checkpoint.*PIPER-K005"):
        prepare(other)
    assert (other / "notes.txt").read_text() == "precious"
