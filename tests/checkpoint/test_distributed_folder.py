"""Folders that Lightning's sharding strategies have saved become plain checkpoints, from which a training
continues with the same bits within rounding."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp

import lightning_piper as piper
from lightning_piper.checkpoint import distributed_folder
from lightning_piper.checkpoint.folders import LocalFolder
from lightning_piper.checkpoint.foreign_folders import conversion_of
from lightning_piper.strategy import consolidate
from tests.distributed.processes import launch
from tests.strategy import from_fsdp
from tests.strategy.fitting import QUIET

ROUNDING = 1e-12  # seen: 2e-16


def largest(one, other):
    assert set(one) == set(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that ModelParallelStrategy saved after one epoch, and the parameters after two."""
    folder = tmp_path_factory.mktemp("fsdp2")
    launch(2, from_fsdp.train, folder, "fsdp2", 1, None, folder / "fsdp2.ckpt")
    whole = launch(2, from_fsdp.train, folder, "fsdp2", 2, None, None)
    return folder / "fsdp2.ckpt", whole[0]


@pytest.mark.parametrize("kind", ["replicas", "zero3"])
def test_a_training_of_fsdp2_continues(kind, saved, tmp_path):
    folder, expected = saved
    consolidate(folder, tmp_path / "plain.ckpt", weights_only=False)
    found = launch(2, from_fsdp.train, tmp_path, kind, 2, str(tmp_path / "plain.ckpt"), None)
    assert largest(found[0], expected) <= ROUNDING
    fresh = launch(2, from_fsdp.train, tmp_path, kind, 1, None, None)
    assert largest(fresh[0], expected) > 1e-3


@pytest.mark.long
def test_fsdp2_continues_a_training_of_piper(tmp_path):
    # Lightning 2.6 gives the states of a plain checkpoint to parameters in the order of the module.
    path = tmp_path / "piper.ckpt"
    whole = launch(2, from_fsdp.train, tmp_path, "zero3", 2, None, None, True)
    launch(2, from_fsdp.train, tmp_path, "zero3", 1, None, path, True)
    found = launch(2, from_fsdp.train, tmp_path, "fsdp2", 2, str(path), None, True)
    assert largest(found[0], whole[0]) <= ROUNDING


def test_the_states_of_optimizers_have_the_order_of_the_groups(saved, tmp_path):
    consolidate(saved[0], tmp_path / "plain.ckpt", weights_only=False)
    (state,) = torch.load(tmp_path / "plain.ckpt", weights_only=False)["optimizer_states"]
    assert [group["params"] for group in state["param_groups"]] == [[0], [1, 2, 3, 4]]
    assert [group["initial_lr"] for group in state["param_groups"]] == [0.02, 0.05]
    assert state["state"][0]["exp_avg"].shape == (1, 6) and state["state"][1]["exp_avg"].shape == (6, 8)


def test_a_folder_of_fsdp_has_the_module_under_another_name(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"state": {"a": {"exp_avg": weight + 1}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    dcp.save({"model": {"a": weight}, "optimizer_0": state}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    torch.save({"epoch": 2}, tmp_path / "fsdp" / "meta.pt")
    consolidate(tmp_path / "fsdp", tmp_path / "plain.ckpt")
    found = torch.load(tmp_path / "plain.ckpt")
    assert found["epoch"] == 2 and torch.equal(found["state_dict"]["a"], weight)
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], weight + 1)
    assert found["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]


def test_the_command_converts(saved, tmp_path):
    arguments = [sys.executable, "-m", "lightning_piper.cli", "convert", saved[0], tmp_path / "plain.ckpt"]
    ended = subprocess.run([*arguments, "--unsafe"], capture_output=True, text=True, check=True)
    assert ended.stdout == f"{tmp_path / 'plain.ckpt'}: a plain Lightning checkpoint\n"
    assert torch.load(tmp_path / "plain.ckpt", weights_only=False)["global_step"] == from_fsdp.BATCHES


def test_damage_is_named(saved, tmp_path):
    broken = shutil.copytree(saved[0], tmp_path / "broken.ckpt")
    (broken / "__1_0.distcp").unlink()
    with pytest.raises(
        piper.PiperError,
        match=rf"{re.escape(str(broken))} does not have the file '__1_0.distcp'.*Copy the whole folder.*PIPER-K002",
    ):
        consolidate(broken, tmp_path / "plain.ckpt", weights_only=False)
    assert not (tmp_path / "plain.ckpt").exists()


def test_a_folder_without_a_module_is_refused(tmp_path):
    dcp.save({"other": {"a": torch.zeros(2)}}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    torch.save({}, tmp_path / "fsdp" / "meta.pt")
    with pytest.raises(piper.PiperError, match=r"has 'other', but not the module"):
        consolidate(tmp_path / "fsdp", tmp_path / "plain.ckpt")


def folder_of(path, **content):
    dcp.save(content, checkpoint_id=path, no_dist=True)
    torch.save({}, path / "meta.pt")
    return path


def test_a_folder_is_not_replaced(tmp_path):
    source = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2)})
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "notes.txt").write_text("precious")
    for out in (runs, source):
        with pytest.raises(piper.PiperError, match=r"is a folder.*PIPER-K005"):
            consolidate(source, out)
    assert (runs / "notes.txt").read_text() == "precious"
    consolidate(source, runs / "plain.ckpt")
    consolidate(source, runs / "plain.ckpt")  # an existing file is replaced
    assert torch.equal(torch.load(runs / "plain.ckpt")["state_dict"]["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state.a.exp_avg": torch.ones(2)}, "does not have 'param_groups'"),
        ({"state": {"a": {"exp_avg": torch.ones(2)}}, "param_groups": []}, "has the parameter 'a', but no"),
        ({"state": {"a": {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": ["a"]}]}, None),
    ],
)
def test_a_state_needs_its_groups(state, message, tmp_path):
    source = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2)}, optimizer_0=state)
    if message is None:
        consolidate(source, tmp_path / "plain.ckpt")
        return
    with pytest.raises(piper.PiperError, match=rf"'optimizer_0' {message}.*PIPER-K002"):
        consolidate(source, tmp_path / "plain.ckpt")


def flipped(file, at):
    """Write a file with one other bit in the byte `at`, and return its earlier content."""
    before = file.read_bytes()
    file.write_bytes(before[:at] + bytes([before[at] ^ 4]) + before[at + 1 :])
    return before


def test_one_bit_of_a_tensor_is_found(tmp_path):
    """Wherever its numbers are. And the control: without checksums, the folder is read with the other number."""
    weight = torch.arange(1.0, 1001.0)
    state = {"state": {"a": {"exp_avg": -weight}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    source = folder_of(tmp_path / "fsdp", model={"a": weight, "b": torch.ones(3)}, optimizer_0=state)
    file, out = source / "__0_0.distcp", tmp_path / "plain.ckpt"
    for name, values in (("model.a", weight), ("optimizer_0.state.a.exp_avg", -weight)):
        start = file.read_bytes().index(values.numpy().tobytes())
        for at in (start, start + 2001, start + 3999):
            before = flipped(file, at)
            with pytest.raises(
                piper.PiperError, match=rf"__0_0\.distcp \({name}\) does not have .*another checkpoint"
            ):
                consolidate(source, out)
            with mock.patch.object(distributed_folder, "_check_items"):
                consolidate(source, out)
            found = torch.load(out)
            assert torch.equal(found["state_dict"]["a"], weight) == (name != "model.a")
            file.write_bytes(before)
    consolidate(source, out)
    assert torch.equal(torch.load(out)["state_dict"]["a"], weight)


def test_one_bit_of_other_content_is_found(tmp_path):
    """In `meta.pt`, which has checksums, and in the start of a tensor's archive."""
    source = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2), "b": torch.ones(3)})
    torch.save({"epoch": 2, "note": "abcdefgh"}, source / "meta.pt")
    before = flipped(source / "meta.pt", (source / "meta.pt").read_bytes().index(b"abcdefgh"))
    with pytest.raises(piper.PiperError, match=r"meta\.pt does not have the content that was saved"):
        consolidate(source, tmp_path / "plain.ckpt")
    (source / "meta.pt").write_bytes(before)
    flipped(source / "__0_0.distcp", 0)
    with pytest.raises(piper.PiperError, match=r"__0_0\.distcp \(model\.\w\) does not have the content"):
        consolidate(source, tmp_path / "plain.ckpt")


def test_a_damaged_table_is_named(tmp_path):
    """torch saves `.metadata` without a checksum. What shows is an error that names the file."""
    source = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2), "b": torch.ones(3)})
    table = source / ".metadata"
    whole, named = table.read_bytes(), 0
    for at in range(0, len(whole), 7):
        flipped(table, at)
        try:
            consolidate(source, tmp_path / "plain.ckpt")
        except piper.PiperError as error:
            named += ".metadata" in str(error)
        table.write_bytes(whole)
    assert named > len(whole) / 7 / 2


def test_a_folder_of_another_strategy_says_how_to_convert_it(tmp_path):
    fsdp = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2)})
    torch.save({"pytorch-lightning_version": "2.6.0"}, fsdp / "meta.pt")
    deepspeed = tmp_path / "deepspeed"
    (deepspeed / "checkpoint").mkdir(parents=True)
    (deepspeed / "latest").write_text("checkpoint")
    (deepspeed / "zero_to_fp32.py").touch()
    (deepspeed / "checkpoint" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    (tmp_path / "other").mkdir()
    convert = "convert_zero_checkpoint_to_fp32_state_dict"
    for path, match in (
        (
            fsdp,
            rf"is a folder that FSDPStrategy or ModelParallelStrategy has saved.*convert {re.escape(str(fsdp))} plain\.ckpt",
        ),
        (
            deepspeed,
            rf"is a folder that DeepSpeed has saved.*convert {re.escape(str(deepspeed))} with \S*{convert}.*load_from_checkpoint",
        ),
        (deepspeed / "checkpoint", rf"convert the folder around it with \S*{convert}"),
        (tmp_path / "other", r"has no manifest\.json, so it is not a complete"),
    ):
        strategy = piper.PiperStrategy(transport="local")
        trainer = L.Trainer(**QUIET, accelerator="cpu", devices=1, strategy=strategy, max_epochs=1)
        with pytest.raises(piper.PiperError, match=rf"{match}.*PIPER-K002"):
            trainer.fit(from_fsdp.Net(False, True), from_fsdp.batches(0), ckpt_path=path)
        if path != fsdp:
            with pytest.raises(piper.PiperError, match=rf"{match}.*PIPER-K002"):
                consolidate(path, tmp_path / "plain.ckpt")


class Own:
    """A hyperparameter of the user's own class."""


@pytest.mark.parametrize(
    ("content", "foreign"),
    [
        ({"hyper_parameters": {"name": "lightning_piper", "own": Own()}, "x": torch.ones(2)}, True),
        ({"state_dict": {"w": 0}}, False),  # as a checkpoint of this package that has lost its manifest
        ({"pytorch-lightning_version": None}, True),
    ],
)
def test_the_keys_of_a_folder_tell_who_saved_it(content, foreign, tmp_path):
    folder = folder_of(tmp_path / "saved", model={"a": torch.ones(2)})
    torch.save({"pytorch-lightning_version": "2.6.0", **content}, folder / "meta.pt")
    with mock.patch.object(
        Own, "__setstate__", side_effect=AssertionError, create=True
    ):  # no code of it runs
        assert (conversion_of(LocalFolder(folder)) is not None) is foreign
    if not foreign:
        with pytest.raises(
            piper.PiperError, match=r"has no manifest\.json, so it is not a complete sharded checkpoint"
        ):
            consolidate(folder, tmp_path / "plain.ckpt")
    torch.save(["pytorch-lightning_version"], folder / "meta.pt")
    assert conversion_of(LocalFolder(folder)) is None


class Changed(Own):
    """A class whose code no longer fits its saved objects."""

    def __getstate__(self) -> dict[str, int]:
        return {"size": 1}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.size = self.width  # type: ignore[attr-defined]


def test_own_classes_and_damage_have_their_own_messages(tmp_path):
    source = folder_of(tmp_path / "fsdp", model={"a": torch.ones(2)})
    torch.save({"hyper_parameters": {"own": Own()}}, source / "meta.pt")
    with pytest.raises(
        piper.PiperError, match=r"meta\.pt has \S+\.Own, which weights_only=True.*--unsafe.*PIPER-K007"
    ):
        consolidate(source, tmp_path / "plain.ckpt")
    consolidate(source, tmp_path / "plain.ckpt", weights_only=False)
    with (
        mock.patch.dict(sys.modules, {"gone": sys.modules[__name__]}),
        mock.patch.object(Own, "__module__", "gone"),
    ):
        torch.save({"hyper_parameters": {"own": Own()}}, source / "meta.pt")
    with pytest.raises(piper.PiperError, match=r"class cannot be imported: .*'gone'.*PIPER-K007"):
        consolidate(source, tmp_path / "plain.ckpt", weights_only=False)
    torch.save({"hyper_parameters": {"own": Changed()}}, source / "meta.pt")
    with pytest.raises(piper.PiperError, match=r"cannot be read: .*has no attribute 'width'.*PIPER-K007"):
        consolidate(source, tmp_path / "plain.ckpt", weights_only=False)
    for content in (b"", bytes(64), b"not found\n", b"content\nof a page\n"):  # not an archive
        (source / "meta.pt").write_bytes(content)
        found = "cannot be read " if content else "is empty"
        with pytest.raises(piper.PiperError, match=rf"{found}.*another checkpoint \[PIPER-K002"):
            consolidate(source, tmp_path / "plain.ckpt")
    torch.save({}, source / "meta.pt")
    with (
        mock.patch.object(dcp, "load", side_effect=RuntimeError("can't allocate memory: 8 bytes")),
        pytest.raises(piper.PiperError, match=r"too little memory for its tensors"),
    ):
        consolidate(source, tmp_path / "plain.ckpt", weights_only=False)
    file = source / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(piper.PiperError, match=r"__0_0\.distcp \(model\.a\) does not have.*K002") as caught:
        consolidate(source, tmp_path / "plain.ckpt", weights_only=False)
    assert "--unsafe" not in str(caught.value)
