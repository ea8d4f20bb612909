"""The errors of a fit over processes for requests that it cannot fulfill, and the results of collectives in
hooks. They run in one launch together with the trials of `options`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import callbacks as cb

import lightning_piper as piper
from tests.strategy.fitting import sharing_captures
from tests.strategy.optimizers import Clipping
from tests.strategy.options import Keeping, Net, Run, Seen, Sized, run_all


def refusals(run: Run) -> dict[str, str]:
    """Name of the request -> the error of a fit."""

    class SAM(torch.optim.SGD):
        """Takes a step uphill whose length depends on all gradients, and uses the gradients at that point."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            closure = torch.enable_grad()(closure)
            loss = closure()
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            uphill = [0.05 * p.grad / torch.nn.utils.get_total_norm([p.grad for p in params]) for p in params]
            torch._foreach_add_(params, uphill)
            closure()
            torch._foreach_sub_(params, uphill)
            super().step()
            return loss

    class Twice(Net):
        def configure_optimizers(self) -> Any:
            return SAM([p for p in self.parameters() if p.requires_grad], lr=0.1)

    class Foreign(Net):
        def backward(self, loss: Any) -> None:
            (loss + sum(p.square().sum() for p in self.parameters())).backward()

    class Together(Net):
        def configure_optimizers(self) -> Any:
            return Clipping([p for p in self.parameters() if p.requires_grad])

    class Zeroing(Net):
        def optimizer_zero_grad(self, *args: Any) -> None:
            self.zero_grad()  # also gradients that are not in this process's optimizer

    class Apart(Net):
        """The processes do different things, one thing at a time."""

        def __init__(self, what: str) -> None:
            super().__init__()
            self.what = what

        def by_rank(self, what: str, first: Any, second: Any) -> Any:
            return second if what == self.what and self.global_rank == 1 else first

        def configure_optimizers(self) -> Any:
            params = [p for p in self.parameters() if p.requires_grad]
            if self.by_rank("optimizer", False, True):
                return torch.optim.SGD(params, lr=0.1)
            cut = self.by_rank("group", 3, 2)
            groups = [
                {"params": params[:cut]},
                {"params": params[cut:], "betas": self.by_rank("betas", (0.8, 0.9), (0.8, 0.95))},
            ]
            return torch.optim.Adam(groups, lr=self.by_rank("rate", 0.1, 0.2))

        def backward(self, loss: Any) -> None:
            (loss * self.by_rank("factor", 2, 3)).backward()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                self.trainer.optimizers[0].param_groups[1]["lr"] = self.by_rank("later", 0.05, 0.06)

    class Norms(L.Callback):
        """Gives some gradients of the optimizer to torch's functions of norms."""

        def __init__(self, chosen: Any) -> None:
            self.chosen = chosen

        def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
            for params in self.chosen(module, optimizer):
                torch.nn.utils.clip_grad_norm_(params, 1.0)

    class Adds(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 1:
                trainer.optimizers[0].add_param_group({"params": [module.second[0].bias]})

    class Replaces(L.Callback):
        """Replaces the optimizer after a number of steps."""

        def __init__(self, steps: int) -> None:
            self.steps = steps

        def replace(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == self.steps:
                trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]

        on_train_start = on_train_batch_end = replace

    class Writes(L.Callback):
        @torch.no_grad()
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            for p in module.parameters():
                p.clamp_(-0.1, 0.1)

    class WritesAtTheEnd(L.Callback):
        on_train_end = Writes.on_train_batch_end

    class WritesAndSaves(Writes):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            super().on_train_batch_end(trainer, module)
            trainer.save_checkpoint(run.folder / "written.ckpt")
            raise RuntimeError("saved")

    class Early(L.Callback):
        @torch.no_grad()
        def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
            module.second[2].bias.fill_(0.25)

    def said(**options: Any) -> str:
        try:
            run.fit(max_epochs=1, **options)
        except (piper.PiperError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    again = Keeping()
    run.fit(module=again, max_epochs=1)
    with torch.device("meta"):
        blank, untouched = Net(), Net()
    return {
        "optimizer again": said(module=again),
        "blank": said(callbacks=[Early()], module=blank),
        "untouched": said(module=untouched),
        "groups": said(callbacks=[Adds()]),
        "replaced at the start": said(callbacks=[Replaces(0)]),
        "replaced later": said(callbacks=[Replaces(1)]),
        "in place": said(callbacks=[Writes()]),
        "in place, then saved": said(callbacks=[WritesAndSaves()]),
        "in place at the end": said(callbacks=[WritesAtTheEnd()]),
        "batch sizes": said(callbacks=[cb.BatchSizeFinder()], module=Sized()),
        "closure": said(module=Twice()),
        "together": said(module=Together()),
        "penalty": said(module=Foreign()),
        "control": said(),
        "norm of each": said(callbacks=[Norms(lambda m, o: o.param_groups[0]["params"])]),
        "norm of some": said(callbacks=[Norms(lambda m, o: [o.param_groups[0]["params"][:1]])]),
        "norms of other groups": said(
            callbacks=[Norms(lambda m, o: [o.param_groups[m.global_rank]["params"]])], module=Apart("nothing")
        ),
        "norm of the module": said(callbacks=[Norms(lambda m, o: [m.parameters()])], module=Zeroing()),
        **{
            f"another {what}": said(module=Apart(what))
            for what in ("optimizer", "group", "betas", "rate", "later", "factor")
        },
        "another factor at the end": said(module=Apart("factor"), limit_train_batches=1),
        "nothing else": said(module=Apart("nothing")),
    }


def collectives(run: Run) -> Seen:
    """The results in each process of the operations that hooks may use."""
    found: Seen = {}

    class Asks(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
            strategy, own = trainer.strategy, torch.tensor(float(trainer.global_rank + 1))
            found["all_gather"] = module.all_gather(own)
            found["mean"], found["sum"] = strategy.reduce(own), strategy.reduce(own, reduce_op="sum")
            found["broadcast"] = strategy.broadcast(f"from {trainer.global_rank}")
            found["any"] = strategy.reduce_boolean_decision(trainer.global_rank == 0, all=False)
            found["all"] = strategy.reduce_boolean_decision(trainer.global_rank == 0, all=True)
            strategy.barrier()
            module.log("rank", own, sync_dist=True)

    trainer = run.fit([Asks()], max_steps=1)
    return found | {"logged": trainer.callback_metrics["rank"]}


@sharing_captures
def work(rank: int, programs: list[str], folder: Path) -> dict[str, dict[str, Seen]]:
    """Run all trials of some programs in this process: program -> trial -> what it has seen."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, dict[str, Seen]] = {}
    for program in programs:
        found[program] = run_all(program, folder)
        found[program]["collectives"] = collectives(Run(program, folder))
        found[program]["refusals"] = refusals(Run(program, folder))
    return found
