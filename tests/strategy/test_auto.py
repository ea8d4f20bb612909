"""Programs that a search finds at the first batch of a fit, in processes that each read their own data."""

from __future__ import annotations

import copy
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import lightning_piper as piper
from lightning_piper import cache
from lightning_piper.cache import CACHE
from lightning_piper.directives import parse
from lightning_piper.errors import NoProgram, PiperError, SearchError
from lightning_piper.processes.world import World
from lightning_piper.search import proposal
from lightning_piper.search.accounting import needed_by_replicas
from lightning_piper.search.costs.analytic_costs import analytic
from lightning_piper.search.costs.blocks import BlockCut, blocks_of
from lightning_piper.search.costs.microbatch_check import meets
from lightning_piper.search.costs.optimizers import states_of
from lightning_piper.search.program_writer import Written
from lightning_piper.search.proposal import Proposal, search
from lightning_piper.search.report import size
from lightning_piper.session import (
    auto_search,
    available_memory,
    concurrent_measurement,
    program_cache,
    step_times,
)  # fmt: skip
from lightning_piper.session.available_memory import memory_of
from lightning_piper.session.concurrent_measurement import measured_together
from lightning_piper.simulate import Link
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.strategy import strategy
from tests.distributed.processes import PATIENCE, launch, launch_trainings
from tests.groups import marked
from tests.strategy import alike
from tests.strategy.fitting import QUIET
from tests.tensors import far

ROUNDING = 1e-14  # 6e-17 measured
WIDTH, SAMPLES = 16, 24


class Net(L.LightningModule):
    """A model without annotations. Its loss is a mean over the elements that count, of which the processes
    have different numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, 3)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (SAMPLES,), generator=draw)
    y[::5] = -100
    return TensorDataset(torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64), y)


def fit(module: L.LightningModule, strategy: Any, rank: int | None = None, **options: Any) -> L.Trainer:
    """Train, and return the Trainer. `rank` is one of two ranks, each of which reads every other sample."""
    about: dict[str, Any] = (
        QUIET | {"max_epochs": 2, "num_sanity_val_steps": 1, "use_distributed_sampler": False} | options
    )
    processes = 1 if rank is None else 2
    trainer = L.Trainer(accelerator="cpu", devices=processes, strategy=strategy, precision="64-true", **about)
    own = TensorDataset(*(x if rank is None else x[rank::2] for x in data().tensors))
    loaders = [DataLoader(own, batch_size=8 // processes) for _ in range(2)]
    trainer.fit(module, *loaders)
    return trainer


# Sums over replicas are slow where links are; messages between stages are shorter. Where links cost nothing,
# a tensor axis divides the work on parameters, too, if it may.
LINKS = {"pipeline": Link(1e-7, 1e6), "replicas": Link(0, 1e15), "tensors": Link(0, 1e15)}


def hardware_of(kind: str) -> Hardware:
    return Hardware("some", 2**30, {"float64": 1e9}, 1e10, ((64, LINKS[kind]),), Link(), 2**30)


def looking_at(kind: str) -> Any:
    hardware = hardware_of(kind)

    def found(module: Any, batch: Any, *args: Any, **options: Any) -> Any:
        degrees = (2,) if kind == "tensors" else ()
        workload = analytic(
            module, batch, hardware, (1, 2, 4, 8), tensor=degrees, cut=options["cut"]
        )  # traced once
        return search(module, batch, *args, **(options | {"hardware": hardware, "workload": workload}))

    return found


def train(rank: int, kind: str, folder: str) -> dict[str, Any]:
    os.environ[CACHE] = folder
    auto_search.search = looking_at(kind)  # type: ignore[attr-defined]
    module = net()
    trainer = fit(module, piper.PiperStrategy("auto", whole=False), rank)
    values = {name: float(x) for name, x in trainer.callback_metrics.items()}
    (path,) = Path(folder).rglob("*.json")
    return {
        "state": module.state_dict(),
        "values": values,
        "chosen": json.loads(path.read_text()),
        "hooks": hooks(module),
    }


def hooks(module: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules())


@pytest.mark.parametrize("kind", marked(LINKS, ["pipeline"]))
def test_what_is_chosen_trains_as_one_device(kind, tmp_path):
    """On the batches of both processes as one."""
    outcomes = launch_trainings(2, train, tmp_path, kind, str(tmp_path))
    one, fewer = net(), net()
    values = {name: float(x) for name, x in fit(one, "auto").callback_metrics.items()}
    fit(fewer, "auto", max_epochs=1)
    for outcome in outcomes:
        trained = net()
        trained.load_state_dict(outcome["state"])
        ops = {directive["op"] for directive in outcome["chosen"]["directives"]}
        made = {
            "pipeline": outcome["chosen"]["annotate"]["PP"],
            "replicas": "replicate" in ops,
            "tensors": "shard_weights" in ops,
        }
        assert outcome["hooks"] == 0 and [name for name, there in made.items() if there] == [kind]
        assert far(trained, one) < ROUNDING < 1e-3 < far(trained, fewer)
        assert outcome["values"]["score"] == pytest.approx(values["score"], rel=1e-12)


class Alive(Net):
    """Hooks read, change, copy and run all of the module."""

    def on_fit_start(self) -> None:
        self.average = [*copy.deepcopy(self.layers).parameters()]  # a list, which is no part of the module

    def on_after_backward(self) -> None:
        self.log(
            "norm",
            torch.stack([p.grad.norm() for p in self.layers.parameters() if p.grad is not None]).norm(),
        )

    @torch.no_grad()
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for average, p in zip(self.average, self.layers.parameters(), strict=True):
            average.lerp_(p, 0.1)

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        self.last.weight.clamp_(-0.2, 0.2)
        self.first.bias.add_(0.1 * self(torch.ones(1, 6, dtype=torch.float64)).mean())


class Whole(torch.optim.SGD):
    """An optimizer that uses the norm of each parameter and of all parameters together, so that neither
    shards nor stages are possible.
    """

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(grads, 1 + torch.stack([x.norm() for x in grads]).norm())
        super().step()
        return loss


class Together(Net):
    def configure_optimizers(self) -> Any:
        return Whole(self.parameters(), lr=0.1)


CHOICES: dict[str, tuple[type[Net], str, bool]] = {  # the message, and whether the whole module is kept
    "replicas": (Alive, "replicas fit into memory", True),
    "no room": (Net, "stages on 2 ranks", True),
    "an optimizer": (Together, "chose 2 replicas at ZeRO 0", False),
}


def train_choices(rank: int, folder: str) -> dict[str, Any]:
    os.environ[CACHE] = folder
    auto_search.search = looking_at("pipeline")  # type: ignore[attr-defined]
    outcome = {}
    for kind, (cls, _, whole) in CHOICES.items():
        torch.manual_seed(0)
        module, told = cls().double(), list[str]()
        room = (
            33_000 if kind == "no room" else 2**30
        )  # in bytes; a replica needs 65 KB, and half of the module 24 KB
        with (
            mock.patch.object(strategy, "rank_zero_info", told.append),
            mock.patch.object(available_memory, "_own", return_value=room),
        ):
            fit(module, piper.PiperStrategy("auto", whole=whole), rank)
        averages = module.average if isinstance(module, Alive) else []
        outcome[kind] = module.state_dict(), "\n".join(told), averages
    return outcome


def test_what_nobody_asked_for_keeps_the_module_whole(tmp_path):
    """Where links favor a pipeline. Without room for replicas there is one; for an optimizer that needs
    whole gradients there are replicas, also where any program is allowed.
    """
    for outcome in launch_trainings(2, train_choices, tmp_path, str(tmp_path)):
        for kind, (cls, said, _) in CHOICES.items():
            state, told, averages = outcome[kind]
            torch.manual_seed(0)
            one, trained = cls().double(), cls().double()
            fit(one, "auto")
            trained.load_state_dict(state)
            assert far(trained, one) < ROUNDING
            assert told == "" or said in told, told
            assert (auto_search.LOST in told) == (kind == "no room" and told != "")
            wanted = one.average if isinstance(one, Alive) else []
            assert all(
                torch.allclose(x, y, rtol=0, atol=ROUNDING) for x, y in zip(averages, wanted, strict=True)
            )


@pytest.mark.parametrize(("optimizer", "levels", "ranks"), [
    (lambda params: torch.optim.AdamW(params), (0, 1, 2, 3), None),
    (lambda params: torch.optim.Adafactor(params), (0,), None),
    (lambda params: Whole(params, lr=0.1), (0,), 1),
    (lambda params: torch.optim.SparseAdam(list(params)), (0,), 1),  # it cannot be tried
])  # fmt: skip
def test_an_optimizer_is_known_before_the_choice(optimizer, levels, ranks):
    found = [
        auto_search.parts_for(optimizer(net().parameters()), torch.device("cpu"), whole)
        for whole in (False, True)
    ]
    wanted = auto_search.Part(levels, ranks)
    assert found == [[wanted], list(dict.fromkeys([auto_search.WHOLE, wanted]))]


class Counts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


class Averages(Counts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += batch[0].mean()
        return Net.training_step(self, batch, batch_idx)


def test_a_step_whose_buffers_follow_from_samples_has_no_microbatches():
    """A counter of steps moves once a step, whatever the number of microbatches."""
    batch = list(data()[:4])
    assert not meets(blocks_of(net(), batch), batch)
    assert not meets(blocks_of(Counts().double(), batch), batch)
    assert meets(blocks_of(Averages().double(), batch), batch)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(WIDTH))  # type: ignore[assignment]


@pytest.mark.parametrize("links", ["replicas", "pipeline"])
def test_replicas_as_under_ddp_are_a_candidate(links):
    """Also where no captured step can be replicated, if they are faster."""
    module, batch = Normed().double(), list(data()[:8])
    cut, hardware = blocks_of(module, batch), hardware_of(links)
    workload = analytic(module, batch, hardware, (1, 2, 4, 8), tensor=(), cut=cut)
    parts, limits = [auto_search.Part()], {"devices": 2, "memory": 2**30}
    choice, why = auto_search._searched(module, batch, cut, parts, workload, hardware, **limits).told()
    if links == "pipeline":
        assert choice is not None and "stages on 2 ranks" in choice.lines[0]
    else:
        assert choice is None and "uncaptured step, as under DDP" in why and "sync_batchnorm=True" in why


def test_a_replica_that_needs_far_less_is_not_looked_at_closely():
    program = [piper.Place(filter={}, devices=[0, 1]), piper.Replicate(filter={}, devices=[0, 1])]
    compiled = piper.compile(net(), list(data()[:8]), program)
    closely, roughly = (needed_by_replicas(compiled, 2.0, True, room) for room in (0, 2**30))
    assert 2 * sum(p.nbytes for p in net().parameters()) < closely < roughly < 2**20


class Asks(nn.Linear):
    """Cannot be captured, nor can the calls of other modules without it, if it asks for a value."""

    asks = False

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * 2 if self.asks and x.sum().item() > 1e9 else x


def choose_before_it_asks(module: Any, *args: Any) -> Any:
    found = auto_search.choose(module, *args)
    module.last.asks = True
    return found


def train_asking(rank: int, folder: str) -> dict[str, Any]:
    os.environ[CACHE] = folder
    auto_search.search = looking_at("pipeline")  # type: ignore[attr-defined]
    outcome: dict[str, Any] = {}
    for kind, given in (("one", "auto"), ("later", "auto"), ("replicas", None)):
        torch.manual_seed(0)
        module = Net()
        module.last = Asks(WIDTH, 3)
        module.double()
        module.last.asks = kind == "replicas" or (kind == "one" and rank == 1)
        told: list[str] = []
        with (
            mock.patch.object(strategy, "rank_zero_info", told.append),
            mock.patch.object(
                strategy, "choose", choose_before_it_asks if kind == "later" else auto_search.choose
            ),
        ):
            fit(module, piper.PiperStrategy(given, whole=False), rank, max_epochs=1)
        outcome[kind] = (
            module.state_dict(),
            "\n".join(told),
            hooks(module),
            len(list(Path(folder).rglob("*.json"))),
        )
    return outcome


def test_a_step_that_cannot_be_captured_trains_in_replicas(tmp_path):
    """Also where it is captured in some processes, which would wait for the others, or until a program has
    been chosen.
    """
    for outcome in launch_trainings(2, train_asking, tmp_path, str(tmp_path)):
        wanted = outcome["replicas"][0]
        assert "cannot search for a program and uses data parallelism: rank 1: " in outcome["one"][1]
        assert "stages on 2 ranks" in outcome["later"][1] and "drops the program" in outcome["later"][1]
        for state, _, left, kept in outcome.values():
            assert left == kept == 0 and all(torch.equal(x, wanted[name]) for name, x in state.items())


class Apart(Net):
    """Its loss counts each sample alike, and its validation step cannot be captured."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1].clamp(min=0))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        score = self(batch[0]).square()
        score.numpy()
        self.mean(score)
        self.log("mean", self.mean)
        super().validation_step(batch, batch_idx)


def train_apart(rank: int, folder: str) -> dict[str, Any]:
    os.environ[CACHE] = folder
    auto_search.search = looking_at("pipeline")  # type: ignore[attr-defined]
    outcome: dict[str, Any] = {}
    for fewer in (0, 1):
        for given, capture in (("auto", "auto"), (None, "never")):
            torch.manual_seed(0)
            module, told = Apart(), list[str]()
            module.mean = MeanMetric()
            own = TensorDataset(*(x[rank::2][: SAMPLES // 2 - fewer * rank] for x in data().tensors))
            with mock.patch.object(strategy, "rank_zero_info", told.append):
                about: dict[str, Any] = QUIET | {
                    "max_epochs": 2,
                    "use_distributed_sampler": False,
                    "precision": "64-true",
                }
                plans = piper.PiperStrategy(given, whole=False, capture=capture)
                trainer = L.Trainer(accelerator="cpu", devices=2, strategy=plans, **about)
                trainer.fit(module, *(DataLoader(own, batch_size=4) for _ in range(2)))
            values = {name: float(x) for name, x in trainer.callback_metrics.items()}
            outcome[f"{fewer} {given}"] = module.state_dict(), values, "\n".join(told)
    return outcome


def test_a_pipeline_that_nobody_asked_for_follows_what_processes_draw(tmp_path):
    """A later batch of other sizes in each process, and a validation of the samples of each: as replicas that
    are not captured.
    """
    outcomes = launch_trainings(2, train_apart, tmp_path, str(tmp_path))
    for outcome in outcomes:
        for fewer in (0, 1):
            (state, values, told), (wanted, same, _) = outcome[f"{fewer} auto"], outcome[f"{fewer} None"]
            assert told == "" or (
                "stages on 2 ranks" in told and ("drops the program" in told) == bool(fewer)
            )
            assert all(torch.allclose(x, wanted[name], rtol=0, atol=ROUNDING) for name, x in state.items())
            assert values == pytest.approx(same, rel=1e-12) and values["mean"] != 0
    (_, one, _), (_, other, _) = (outcome["0 auto"] for outcome in outcomes)
    assert one == other


def test_processes_have_as_many_threads_each(tmp_path):
    """Lightning's launcher divides the cores in the process that starts the others, and not in those. Where
    they had different numbers, a search waited for what never came.
    """
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {
        CACHE: str(tmp_path / "cache")
    }
    done = subprocess.run(
        [sys.executable, "-m", alike.__name__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    wanted = f"{max(1, len(os.sched_getaffinity(0)) // 2)} 2"
    assert [Path(tmp_path, f"rank{rank}").read_text() for rank in range(2)] == [wanted, wanted]


def measure_with_other_threads(rank: int) -> int | None:
    torch.set_num_threads(1 + rank)
    world = World(rank, 2, torch.device("cpu"), timeout=PATIENCE)
    _, hardware = measured_together(net(), tuple(x[:4] for x in data().tensors), world)
    torch.set_num_threads(1)
    return hardware.at_once


def test_processes_agree_how_many_of_them_work_at_once(tmp_path):
    found = launch(2, measure_with_other_threads, tmp_path)
    assert found == [max(1, min(2, len(os.sched_getaffinity(0)) // 2))] * 2


def measure_on_other_machines(rank: int) -> tuple[int | None, ...]:
    """Measure with both processes on one machine, where each of them uses all cores, and then as if each had
    a machine of its own.
    """
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    world = World(rank, 2, torch.device("cpu"), timeout=PATIENCE)
    batch, found = tuple(x[:4] for x in data().tensors), []
    for machine in ("one", f"of {rank}"):
        with mock.patch("lightning_piper.processes.world.machine", return_value=machine):
            found.append(measured_together(net(), batch, world)[1].at_once)
    return tuple(found)


def test_machines_do_not_share_their_cores(tmp_path):
    assert launch(2, measure_on_other_machines, tmp_path) == [(1, 2)] * 2


MACHINES = {
    "aabb": [2, 4],
    "aaaa": [4],
    "aaab": [4],
    "abab": [4],
    "abcd": [4],
}  # -> the sizes of measured links


def measure_links(rank: int) -> dict[str, tuple[list[int], bool]]:
    """Measure with four processes on machines with these names."""
    world, found = World(rank, 4, torch.device("cpu"), timeout=PATIENCE), {}
    for machines in MACHINES:
        with mock.patch("platform.node", return_value=machines[rank]):
            links = concurrent_measurement._links(world)
        found[machines] = [size for size, _ in links], all(link.bandwidth > 0 for _, link in links)
    return found


def test_links_within_and_between_machines_are_measured(tmp_path):
    """If each machine has as many processes, which are neighbors."""
    assert launch(4, measure_links, tmp_path) == [{key: (sizes, True) for key, sizes in MACHINES.items()}] * 4


def measure_three(rank: int) -> list[int]:
    module, batch = net(), tuple(x[:6] for x in data().tensors)
    # The user may choose this per process, as under DDP.
    torch.set_default_dtype(torch.float64 if rank == 0 else torch.float32)
    world = World(rank, 3, torch.device("cpu"), timeout=PATIENCE)
    _, hardware = measured_together(module, batch, world)
    return [*hardware.collectives]


def test_three_processes_are_measured_with_other_defaults(tmp_path):
    assert launch(3, measure_three, tmp_path) == [[3]] * 3


def memory_in_containers(rank: int, folder: str) -> tuple[int, ...]:
    """The memory of each process in one container, and in containers of their own with the same limit."""
    world, found = World(rank, 2, torch.device("cpu"), timeout=PATIENCE), []
    for name in ("one", f"of {rank}"):
        limit = Path(folder, name)
        limit.write_text(str(1 << 28))
        with mock.patch.object(available_memory, "_CONTAINERS", ((limit, limit),)):
            found.append(memory_of(net(), world))
    return tuple(found)


def test_containers_of_one_machine_do_not_share_their_limits(tmp_path):
    found = launch(2, memory_in_containers, tmp_path, str(tmp_path))
    assert found == [(int((1 << 27) * 0.9), int((1 << 28) * 0.9))] * 2


def memory_where_one_process_has_less(rank: int) -> tuple[int, int]:
    world, module = World(rank, 2, torch.device("cpu"), timeout=PATIENCE), net()
    whole = memory_of(module, world)
    if rank == 1:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30), resource.RLIM_INFINITY))
    return whole, memory_of(module, world)


def test_a_search_uses_what_the_process_with_least_memory_has(tmp_path):
    (whole, least), *others = launch(2, memory_where_one_process_has_less, tmp_path)
    assert others == [(whole, least)]
    assert 0 < least < 1 << 30 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def test_a_step_that_has_changed_is_searched_again():
    """A file of chosen programs is named by what the step computes, so that the program of another one is not
    taken.
    """

    def named(module: L.LightningModule, optimizer: Any = torch.optim.SGD, **options: Any) -> Path:
        batch = list(data()[:4])
        cut = blocks_of(module, batch)
        return program_cache.file_of(
            module,
            batch,
            cut,
            SimpleNamespace(size=2, device=torch.device("cpu")),
            2**30,
            made := optimizer(module.parameters(), **options),
            states_of(made, module),
            [auto_search.WHOLE],
        )  # type: ignore[arg-type]

    class Changed(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(self.first(x).tanh()) if layer is self.layers[0] else x + layer(x).tanh()
            return self.last(x)

    Changed.__qualname__, changed = Net.__qualname__, Changed().double()
    assert named(net()) == named(net(), lr=0.5) != named(changed)
    with_states = [named(net(), momentum=x) for x in (0.9, 0.5)] + [
        named(net(), torch.optim.AdamW, amsgrad=x) for x in (False, True)
    ]
    assert with_states[0] == with_states[1] and len({named(net()), *with_states}) == 4


def test_programs_are_kept_as_graphs_are(tmp_path, monkeypatch):
    """Nothing is read that others can write or that is damaged; the file is one of directives, and their
    number is bounded.
    """
    monkeypatch.setenv(CACHE, str(tmp_path))
    choice = program_cache.ChosenProgram(Written((), (piper.Place([0]),), 1), ("why",), 0.5)
    path = program_cache.folder() / "0.json"
    assert program_cache.write(path, choice)
    assert program_cache.read(path) == choice and not path.parent.stat().st_mode & 0o077
    assert parse(path) == list(choice.written.directives)
    for where, mode in ((path, 0o620), (path.parent, 0o770)):
        own = where.stat().st_mode
        where.chmod(mode)
        assert program_cache.read(path) is None
        where.chmod(own)
    for content in (b"", b"{", b"[" * 100_000, b"\xff", path.read_bytes()[:-9], b'{"directives": 3}'):
        (path.parent / "1.json").write_bytes(content)
        assert program_cache.read(path.parent / "1.json") is None
    (path.parent / "2.json").symlink_to(path)
    assert program_cache.read(path.parent / "2.json") is None and program_cache.read(path) == choice
    (path.parent / "3.json").mkdir()
    assert not program_cache.write(path.parent / "3.json", choice)
    with monkeypatch.context() as full:  # an older file is not the new choice
        full.setattr(cache, "LARGE", 9)
        assert not program_cache.write(path, choice)
    with monkeypatch.context() as full:

        def fail(*names):
            raise OSError("the disk is full")

        full.setattr(cache.os, "replace", fail)
        assert not program_cache.write(path, choice) and program_cache.read(path) == choice
    assert program_cache.write(path, choice)
    monkeypatch.setattr(cache, "MANY", 3)
    for i in range(4, 9):
        program_cache.write(path.parent / f"{i}.json", choice)
    files = [x for x in path.parent.iterdir() if x.is_file()]
    assert len(files) == 3 and program_cache.read(path.parent / "8.json") == choice


@pytest.fixture
def alone():
    """A world of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield World(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def test_a_search_says_that_it_measures(alone, tmp_path, monkeypatch):
    """Measuring takes long, so the line comes first. A kept program needs no measurement, so no line."""

    def measured(*args: Any) -> None:
        told.append("measured")
        raise PiperError("in vain")

    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(auto_search, "measured_together", measured)
    module, told = net(), list[str]()
    args = module, list(data()[:4]), alone, alone, told.append, torch.optim.SGD(module.parameters()), True
    assert auto_search.choose(*args) is None
    measures = "PiperStrategy measures the step on all processes, and then searches for a program"
    assert told[:2] == [measures, "measured"]
    kept = program_cache.ChosenProgram(Written((), (piper.Place([0]),), 1), ("kept",), 0.5)
    monkeypatch.setattr(auto_search, "read", lambda path: kept)
    assert auto_search.choose(*args) is not None and told[3:] == ["kept"]


class Searches(L.Callback):
    """Makes a fit of one process search, which has nothing to search otherwise."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.phase.searches = True  # type: ignore[attr-defined]


@pytest.mark.parametrize(("predicted", "reports"), [(1e-9, 1), (3600.0, 0)])
def test_a_searched_program_that_is_slower_than_predicted(predicted, reports, monkeypatch, caplog):
    kept = program_cache.ChosenProgram(Written((), (piper.Place([0]),), 1), ("kept",), predicted)
    monkeypatch.setattr(strategy, "choose", lambda *args: kept)
    steps = step_times.UNMEASURED + step_times.STEPS + 2
    with caplog.at_level("INFO", "lightning.pytorch"):
        trainer = L.Trainer(
            strategy=piper.PiperStrategy("auto", whole=False, transport="local"),
            callbacks=[Searches()],
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            **QUIET,
        )
        trainer.fit(net(), DataLoader(data(), batch_size=4))
    assert caplog.text.count("a step of the chosen program takes") == reports


@pytest.mark.parametrize("devices", [1, 7])
def test_a_search_that_finds_no_program(devices, monkeypatch):
    """Too few blocks and samples for all devices, or a check that refuses all: `auto` tells it from what does
    not fit.
    """
    monkeypatch.setattr(proposal, "compile", refused)
    batch = [x[:1] for x in data().tensors]
    with pytest.raises(
        NoProgram,
        match="failed the check. Reason for the best candidate: no"
        if devices == 1
        else "no program that uses all 7 devices",
    ):
        search(net(), batch, devices, hardware="cpu", all_devices=True, schedules=("gpipe",), budget=50)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"devices": 0}, "devices=0"),
        ({"objective": "speed"}, "objective='speed' is not usable. Give one of time, memory"),
        ({"memory": "24XB"}, "memory='24XB'"),
        ({"hardware": 3}, "hardware=3"),
        ({"gap": "x"}, "gap='x'"),
        ({"schedules": "gpipe"}, "schedules='gpipe' is not usable. Give a list of some of"),
        ({"levels": (4,)}, "levels="),
        ({"bugdet": 3}, "search(bugdet=...): the argument is unknown. Give one of"),
    ],
)
def test_what_cannot_be_used_is_told_before_anything_is_traced(given, told, monkeypatch):
    monkeypatch.setattr(proposal, "blocks_of", None)
    with pytest.raises(SearchError, match=re.escape(told)):
        search(net(), list(data()[:4]), **{"devices": 2, "hardware": "cpu", **given})


def test_a_plan_that_needs_more_than_was_estimated(monkeypatch):
    """The next ones are looked at; where the plans of several need more, the search goes on within less. All
    are told; without any, that nothing is better.
    """
    monkeypatch.setattr(BlockCut, "chunked", lambda cut: None)  # no second search with `ChunkLoss`
    batch = list(data()[:8])
    plain = search(net(), batch, 2, hardware="cpu", all_devices=True)
    used, limit = plain.memory / (1 + plain.found.space.margin), int(plain.memory * 1.5)

    def with_plans(*factors: float) -> Proposal:
        needed = iter(factors)
        monkeypatch.setattr(proposal, "bytes_needed", lambda compiled, states: {0: used * next(needed)})
        return search(net(), batch, 2, limit, hardware="cpu", all_devices=True)

    told = (
        f"according to its plan it needs {size(2 * plain.memory)} on the fullest device, more than estimated"
    )
    one = with_plans(2.0, 1.0)
    assert [why for _, why in one.refused].count(told) == 1 and one.found.space.memory == limit
    assert told in str(one) and told in "\n".join(auto_search._told(one).lines)
    many = with_plans(*[2.0] * proposal.LARGER, 1.0)
    large = [candidate for candidate, why in many.refused if why == told]
    assert len(large) == proposal.LARGER
    most = max(max(row.estimate.memory) for row in one.found.table if row.candidate in large)
    assert float(many.found.space.memory) == pytest.approx(limit * float(most) / (2 * plain.memory), abs=1)
    with pytest.raises(
        SearchError,
        match=r"may fit in .* by estimate, but none fits according to its plan\. Give \d+ bytes \(",
    ):
        with_plans(*[2.0] * 1000)
    lines = auto_search._told(plain).lines
    assert (
        f"  of {plain.found.size:,} programs, none is predicted to be better" in lines
        and "0 were" not in "".join(lines)
    )
    assert f"{plain.found.size:,} candidates:\n" in str(plain) and "\n  0 " not in str(plain)


def refused(*_: Any) -> None:
    raise PiperError("no")
