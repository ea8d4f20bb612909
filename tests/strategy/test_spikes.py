"""`SpikeRecorder` saves the batch of a loss that jumps, before the update."""

from __future__ import annotations

import threading

import lightning as L
import pytest
import torch

import lightning_piper as piper
from lightning_piper.strategy import spikes
from tests.distributed.processes import PATIENCE, launch_trainings
from tests.strategy.fitting import Batches, sharing_captures, trainer

BAD = 9  # the index of the batch whose loss jumps


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        with torch.no_grad():
            self.layer.weight.fill_(0.1)
            self.layer.bias.zero_()

    def training_step(self, batch, batch_idx):
        return (self.layer(batch["x"]) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(factor=30.0, count=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 8, 4, generator=g)
    x[BAD] *= factor
    return [{"x": each} for each in x]


def run(folder, data, strategy, **options):
    recorder = piper.SpikeRecorder(folder, factor=3.0, window=5)
    module = Net()
    made, record = trainer(strategy, [recorder], max_steps=-1, max_epochs=1, **options)
    made.fit(module, Batches(data))
    return record, module


def found(folder):
    return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*"))}


def strategies():
    return {
        "captured": piper.PiperStrategy(transport="local"),
        "uncaptured": piper.PiperStrategy(transport="local", capture="never"),
        "plain": "auto",
    }


@pytest.mark.parametrize("name", ["captured", "uncaptured", "plain"])
def test_the_batch_of_a_spike_is_saved(name, tmp_path):
    data = batches()
    record, module = run(tmp_path, data, strategies()[name])
    (spike,) = found(tmp_path).values()
    assert list(found(tmp_path)) == [f"step={BAD}-batch={BAD}-replica=0.pt"]
    assert torch.equal(spike["batch"]["x"], data[BAD]["x"])
    assert spike["loss"] == pytest.approx(record.losses[BAD].item())
    assert spike["median"] == pytest.approx(sorted(float(x) for x in record.losses[BAD - 5 : BAD])[2])
    loss = module.training_step(spike["batch"], spike["batch_idx"])
    norms = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(module.parameters()))])
    assert spike["norm"] == pytest.approx(norms.norm().item(), rel=1e-5)
    assert (spike["epoch"], spike["step"]) == (0, BAD)


def test_without_a_spike_nothing_is_saved(tmp_path):
    run(tmp_path, batches(factor=1.0), strategies()["captured"])
    assert found(tmp_path) == {}


def test_a_batch_in_the_middle_of_an_accumulation(tmp_path):
    of_four, alone = tmp_path / "of four", tmp_path / "alone"
    run(of_four, batches(), strategies()["captured"], accumulate_grad_batches=4)
    run(alone, batches(), strategies()["captured"])
    assert list(found(of_four)) == [f"step=2-batch={BAD}-replica=0.pt"]
    first, second = (spike for folder in (of_four, alone) for spike in found(folder).values())
    assert first["loss"] == pytest.approx(second["loss"])


@pytest.mark.parametrize(("most", "written"), [(2, 2), (20, 3)])
def test_the_files_of_a_fit_are_limited_within_an_accumulation(tmp_path, monkeypatch, most, written):
    monkeypatch.setattr(spikes, "MOST", most)
    data = batches()
    for i in (BAD - 1, BAD + 1):
        data[i]["x"] *= 30.0
    run(tmp_path, data, strategies()["captured"], accumulate_grad_batches=4)
    assert len(found(tmp_path)) == written


def test_a_nan_is_saved_before_the_error(tmp_path):
    with pytest.raises(piper.ExecutionError, match="is NaN or infinite in step 9"):
        run(tmp_path, batches(factor=float("nan")), strategies()["captured"])
    assert list(found(tmp_path)) == [f"step={BAD}-batch={BAD}-replica=0.pt"]


def test_the_losses_are_in_checkpoints(tmp_path):
    first = piper.SpikeRecorder(tmp_path, window=3)
    first._losses.extend([1.0, 2.0, 3.0])
    second = piper.SpikeRecorder(tmp_path, window=3)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"losses": [1.0, 2.0, 3.0]}


def on_processes(rank, folder):
    data = [{"x": each["x"][rank * 4 : rank * 4 + 4]} for each in batches()]
    run(folder, data, piper.PiperStrategy("zero3", timeout=PATIENCE), devices=2)
    return {}


def test_each_replica_saves_its_part(tmp_path):
    launch_trainings(2, on_processes, tmp_path / "run", tmp_path / "spikes")
    first, second = found(tmp_path / "spikes").values()
    assert torch.equal(torch.cat([first["batch"]["x"], second["batch"]["x"]]), batches()[BAD]["x"])
    assert (first["loss"], first["norm"]) == (second["loss"], second["norm"])
    run(tmp_path / "one", batches(), strategies()["captured"])
    (whole,) = found(tmp_path / "one").values()
    assert (first["loss"], first["norm"]) == pytest.approx((whole["loss"], whole["norm"]), rel=1e-5)


def test_refusals(tmp_path):
    for wrong in ({"factor": 1.0}, {"factor": "3"}, {"window": 0}, {"window": 2.5}):
        with pytest.raises(
            piper.PiperError, match="Give a factor above 1 and a window of at least one batch"
        ):
            piper.SpikeRecorder(tmp_path, **wrong)
    module = Net()
    module.automatic_optimization = False
    made, _ = trainer("auto", [piper.SpikeRecorder(tmp_path)])
    with pytest.raises(piper.PiperError, match="needs a step that returns one loss"):
        made.fit(module, Batches(batches()))


def test_a_full_disk_warns(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match=r"could not write .*Give another folder \[PIPER-W030\]"):
        sharing_captures(run)(tmp_path / "file", batches(), strategies()["captured"])


@pytest.mark.parametrize("extra", [threading.Lock(), lambda: 0], ids=["lock", "function"])
def test_a_batch_that_torch_cannot_save_warns(tmp_path, extra):
    data = [{**batch, "extra": extra} for batch in batches()]
    with pytest.warns(
        UserWarning, match=r"could not save the batch: .*In the collate function, .*\[PIPER-W030"
    ):
        record, _ = run(tmp_path, data, strategies()["uncaptured"])
    assert found(tmp_path) == {} and len(record.losses) == len(data)
