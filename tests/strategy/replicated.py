"""Trainings with replicas, on two processes (DP2) or four (PP2 x DP2)."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import SumMetric

import lightning_piper as piper
from lightning_piper.directives import Directive, Replicate, replicate
from lightning_piper.passes import pipeline
from tests.distributed.processes import PATIENCE
from tests.strategy.fitting import Batches, Record, sharing_captures, trainer, values
from tests.strategy.models import MLP, make, texts, vectors
from tests.strategy.optimizers import Sharp

Program = list[Directive]
Outcome = dict[str, Any]


def dp2(microbatches: int = 2) -> Program:
    return [
        piper.Place(filter={}, devices=[0, 1]),
        piper.Split(filter={}, dim_name="MB", num_microbatches=microbatches),
        Replicate(filter={}, devices=[0, 1], bucket_size=0.0005),
    ]


def pp2_dp2(microbatches: int = 2) -> Program:
    groups = [[0, 2], [1, 3]]
    program = piper.schedules.one_f_one_b(stages=2, microbatches=microbatches)
    places: Program = [piper.Place(filter={"PP": stage}, devices=group) for stage, group in enumerate(groups)]
    return [*places, *program[2:], Replicate(filter={}, devices=groups)]


PROGRAMS: dict[int, Callable[[], Program]] = {2: dp2, 4: pp2_dp2}
PROCESSES = 2


class Seen(L.Callback):
    """Records the batches of this process."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)


def processes(
    program: Program | None = None, callbacks: Any = (), **options: Any
) -> tuple[L.Trainer, Record, Seen]:
    own = {k: options.pop(k) for k in ("verify",) if k in options}
    program = PROGRAMS[PROCESSES]() if program is None else program
    strategy = piper.PiperStrategy(program, timeout=PATIENCE, **own)
    seen = Seen()
    fit, record = trainer(strategy, [seen, *callbacks], devices=PROCESSES, **options)
    return fit, record, seen


def with_sgd(module: L.LightningModule) -> None:
    """An optimizer to which the scale of the gradients matters."""
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]


def with_sharp(module: L.LightningModule) -> None:
    """An optimizer that runs the step twice on one batch."""
    module.configure_optimizers = lambda: Sharp(module.parameters())  # type: ignore[method-assign]


def five_steps(name: str, change: Callable[[Any], None] = lambda module: None, **options: Any) -> Outcome:
    module, loader = make(name, samples=44, batch_size=4)
    change(module)
    fit, record, seen = processes(**options)
    torch.manual_seed(9)
    fit.fit(module, loader)
    return outcome(module, record, seen)


def outcome(module: L.LightningModule, record: Record, seen: Seen, **more: Any) -> Outcome:
    return {
        "values": values(module),
        "losses": record.losses,
        "logged": record.logged,
        "batches": seen.batches,
        **more,
    }


def mlp() -> Outcome:
    return five_steps("mlp", max_steps=7)  # goes on into the second epoch


def dropout() -> Outcome:
    return five_steps("dropout", verify="each")


def tied() -> Outcome:
    return five_steps("tied", verify="first_batch")


def clipped() -> Outcome:
    return five_steps("tied", change=with_sgd, gradient_clip_val=0.05)


def twice() -> Outcome:
    return five_steps("mlp", change=with_sharp)


def accumulated() -> Outcome:
    return five_steps("mlp", accumulate_grad_batches=2, max_steps=2)


def without_sum() -> Outcome:
    """Each replica trains on its own gradients, which nothing notices."""
    kept, complete = replicate.reduce_gradients, pipeline.complete
    replicate.reduce_gradients = lambda *_: []
    pipeline.complete = lambda dag: None
    try:
        return five_steps("mlp", verify="off", max_steps=7)
    finally:
        replicate.reduce_gradients, pipeline.complete = kept, complete


def long() -> Outcome:
    module, loader = make("mlp", samples=80, batch_size=4)
    fit, record, seen = processes(max_steps=20)
    fit.fit(module, loader)
    return outcome(module, record, seen)


def ddp() -> Outcome:
    """The same data under Lightning's own strategy."""

    class Known(MLP):
        def training_step(self, *args: Any) -> Any:
            return super().training_step(*args)["loss"]

    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Known()
    module.unused.requires_grad_(False)  # DDP would wait for its gradient
    loader = vectors(samples=80, batch_size=4)
    seen = Seen()
    from lightning.pytorch.strategies import DDPStrategy

    fit, record = trainer(DDPStrategy(process_group_backend="gloo"), [seen], devices=PROCESSES, max_steps=20)
    fit.fit(module, loader)
    return outcome(module, record, seen)


def last_smaller() -> Outcome:
    """Samplers of the user's; the last batch of an epoch has 2 samples instead of 4."""
    module, loader = make("mlp", samples=20, batch_size=4)
    replica = int(os.environ["LOCAL_RANK"]) * 2 // PROCESSES
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=2, rank=replica, shuffle=False
    )
    fit, record, seen = processes(max_steps=6, use_distributed_sampler=False)
    fit.fit(module, DataLoader(loader.dataset, batch_size=4, sampler=sampler))
    return outcome(module, record, seen)


class Counting(MLP):
    """Hooks log values and update metrics, each replica with its own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.total = SumMetric()
        self.totals: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.total.update(batch[0].sum())
        for how in ("mean", "sum", "max"):
            self.log(how, batch[0].sum(), sync_dist=True, reduce_fx=how)

    def on_train_epoch_end(self) -> None:
        self.totals.append(float(self.total.compute()))


def counting() -> Outcome:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Counting()
    fit, record, seen = processes(max_steps=5)
    fit.fit(module, vectors(batch_size=4))
    return outcome(module, record, seen, totals=module.totals)


FOLDER = Path()


def checkpoints() -> Outcome:
    """Write checkpoints on processes, and resume from one that one device has written."""
    module, loader = make("tied", samples=40, batch_size=4)
    save = ModelCheckpoint(FOLDER, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit, record, seen = processes(callbacks=[save], max_steps=10, enable_checkpointing=True)
    fit.fit(module, loader)
    resumed, _ = make("tied", seed=1)
    again, later, _ = processes(max_steps=10)
    again.fit(resumed, loader, ckpt_path=str(FOLDER / "step=5.ckpt"))
    one, _ = make("tied", seed=1)
    fit, _, _ = processes(max_steps=10)
    fit.fit(one, ordered(texts), ckpt_path=str(FOLDER.parent / "one" / "step=5.ckpt"))
    return outcome(module, record, seen, resumed=values(resumed), later=later.losses, from_one=values(one))


def ordered(data: Callable[..., DataLoader[Any]]) -> Any:
    """Each replica's half of batches of 8 samples, in the order of the samples."""
    rank = int(os.environ["LOCAL_RANK"]) * 2 // PROCESSES
    return Batches({k: x[4 * rank : 4 * rank + 4] for k, x in batch.items()} for batch in data())


def refused() -> Outcome:
    """Requests that raise the same error in all processes, and after which the processes can go on."""
    rank = int(os.environ["LOCAL_RANK"])
    replica = rank * 2 // PROCESSES
    data = vectors()

    class Pairs(MLP):
        """A model that reads two tensors of a batch, whatever else the batch has."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[:2], batch_idx)

    def error(loader: Any, *program: Any, **options: Any) -> str:
        fit, _, _ = processes(*program, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit.fit(Pairs(), loader)
            except (piper.PiperError, ValueError) as found:
                return f"{type(found).__name__}: {found}"
        return f"no error, {[str(w.message) for w in caught if 'same samples' in str(w.message)]}"

    sampler: DistributedSampler[Any] = DistributedSampler(data.dataset, num_replicas=2, rank=1 - replica)
    parts = [b for i, b in enumerate(vectors(samples=80)) if i % 2 == replica]
    late = [[x + (rank == PROCESSES - 1 and i == 2) for x in b] for i, b in enumerate(parts)]
    single = DataLoader(data.dataset, batch_size=8)
    late_end = [[4 * replica + k for k in range(4)], [0, 1]][: 2 - replica]
    return {
        "sampler": error(DataLoader(data.dataset, batch_size=8, sampler=sampler)),
        "length": error(
            DataLoader(data.dataset, batch_sampler=[[0, 1], [2, 3]][: 2 - replica]),
            use_distributed_sampler=False,
        ),
        "limited": error(
            DataLoader(data.dataset, batch_sampler=late_end),
            use_distributed_sampler=False,
            limit_train_batches=1,
        ),
        "size": error(DataLoader(data.dataset, batch_size=3)),
        "devices": error(data, pp2_dp2() if PROCESSES == 2 else dp2()),
        "same": error(single, use_distributed_sampler=False),
        "own": error(Batches(parts)),
        "named": error(
            Batches([[*b, [f"{replica}.{i}.{k}" for k in range(len(b[0]))]] for i, b in enumerate(parts)])
        ),
        "numbers": error(Batches([[*b, {"k": replica}] for b in parts])),
        "shapes": error(Batches([[x[: 8 - 4 * replica] for x in b] for b in parts])),
        "apart": error(Batches(late)) if PROCESSES == 4 else "",
    }


ALL = [
    mlp,
    dropout,
    tied,
    clipped,
    twice,
    accumulated,
    without_sum,
    long,
    ddp,
    last_smaller,
    counting,
    checkpoints,
    refused,
]
SCENARIOS = {work.__name__: work for work in ALL}


@sharing_captures
def train(rank: int, names: list[str], folder: Path, processes: int) -> dict[str, Outcome]:
    """Run trainings in this process, one after another."""
    global FOLDER, PROCESSES
    PROCESSES = processes
    found = {}
    for name in names:
        FOLDER = folder / name
        FOLDER.mkdir(parents=True, exist_ok=True)
        found[name] = SCENARIOS[name]()
    return found


def joined(batches: list[Any]) -> Any:
    """The batch that the batches of all replicas make together."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {k: joined([b[k] for b in batches]) for k in first}
    return [joined([b[i] for b in batches]) for i in range(len(first))]
