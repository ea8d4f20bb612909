"""Checks that all stages of a pipeline train on the same batch.

With replicas, each has a pipeline of its own, and batches of its own. All have as many samples, unless each process is a replica of
the whole module.

Every process draws its own batches. What cannot be made equal (a dataset that reads a clock, a shuffle that depends on the rank)
is noticed: a checksum of each batch goes round, in the background, while the step runs. Nobody waits for it, except where a batch
has another batch spec than the one before: then a step on different plans could hang.

Where each process is a replica of its own, and sums what it reports with the others, a note goes with that instead: a checksum of
all that is compared but the values of the batches (`note`). The whole comparison follows where notes differ, and now and then.

Once replicas had batches of different shapes, all wait in each step, for one may need a program that others have, and they compile
together. In the first such step, some may have gone on: those whose batch is as the one before. Until then all had the same plans,
so who needs a program compiles it alone, and it must have these plans.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lightning_piper.capture import BatchSpec
from lightning_piper.errors import BatchError, CaptureError, PiperError
from lightning_piper.processes.settings import Settings, always_alike, check_alike
from lightning_piper.processes.world import World

NOTHING = torch.iinfo(torch.int64).min
SAMPLE = 2048  # elements of each tensor that enter the checksum
ON_GPU_EVERY = 16  # reading a GPU tensor makes the host wait, so only every so many steps


def agree_on_batch(
    world: World, key: object, batch_spec: BatchSpec, leaves: Sequence[torch.Tensor], lacking: bool, step: int, state: int = 0
) -> tuple[bool, bool]:
    """Compare the batches of an evaluation step before it is run: those of one replica are the same. Collective.

    Args:
        key: what the step's plan depends on, besides the spec of the batch.
        batch_spec, leaves: of the batch.
        lacking: this process has no plan for it yet.
        step: number of the step, for which the values are compared.
        state: checksum of what the step reads in Python.

    Returns:
        Whether any process lacks a plan, and whether the replicas' batches have different shapes.

    Raises:
        PiperError: the processes of one replica have different batches.
    """
    if world.size == 1:
        return lacking, False
    rest, shapes = batch_spec.key
    own = (_sum((key, rest)), _sum(shapes), _checksum(leaves, step) ^ state)
    sums = [NOTHING] * 6 * world.count  # of each replica, the largest and the smallest of three sums
    sums[6 * world.replica : 6 * world.replica + 6] = [end for x in own for end in (x, -x)]
    message = torch.tensor([int(lacking), *sums])
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=world.host_group)
    anybody, *found = message.tolist()
    for replica in range(world.count):
        rest, rest_low, shapes, shapes_low, data, data_low = found[6 * replica : 6 * replica + 6]
        what = "shapes" if shapes != -shapes_low else "numbers or strings" if rest != -rest_low else "values"
        if what != "values" or data != -data_low:
            who = "the processes" if world.count == 1 else f"the processes of replica {replica}"
            raise PiperError(
                f"{who} drew different batches (other {what}) in evaluation step {step}, but all "
                "stages of a pipeline run on the same one, and read the same Python state. Seed whatever draws the data "
                "(seed_everything(seed, workers=True)), and let it not depend on the rank or on time"
            )
    return bool(anybody), len(set(found[2::6])) > 1


class Agreed(NamedTuple):
    """What the processes have agreed on before a step.

    Attributes:
        together: some have no program for their batch, and all compile.
        apart: the replicas' batches have different shapes, or had in a step before, so that replicas have captures of their own.
    """

    together: bool
    apart: bool = False


class BatchCheck:
    """Compares the batches of all processes: values and shapes within each replica, numbers of samples and dtypes everywhere, but
    for batches that nothing can cut by samples (graphs, say). And how they train, which is the same everywhere.

    Args:
        world: the processes.
        whole: is each process a replica of the whole module? Then it may update its own in another way than the others.
    """

    def __init__(self, world: World, whole: Callable[[], bool] = lambda: False) -> None:
        self._world, self._whole = world, whole
        self._drift = False  # replicas update their parameters in different ways
        self._steps = 0
        self._batch_spec: BatchSpec | None = None
        # Of the spec's shapes, of what all replicas have alike of them, of the rest of it; and how many samples there are.
        self._sums = (0, 0, 0, 0)
        self._apart = False  # were replicas' shapes different in some step, or are batches not cut by samples?
        self._shapes = False  # were replicas' shapes different in some step?
        self._others: BatchSpec | None = None  # the spec of the others, if theirs is not new
        self._changed = False
        self._captured = 0
        self._noted: tuple[BatchSpec | None, Settings, int] = (None, (), 0)
        self._running: tuple[dist.Work, torch.Tensor, Settings] | None = None
        self._warned, self._uneven = False, False

    @property
    def reads(self) -> bool:
        """Are values in the memory of a GPU compared with the next batch?"""
        return self._steps == 1 or self._steps % ON_GPU_EVERY == 0

    def note(self, batch_spec: BatchSpec, settings: Settings, state: int, plans: int) -> int:
        """A checksum, never 0, of what `start` would compare, but for values."""
        self.finish()
        self._steps += 1
        if batch_spec is not self._noted[0] or settings is not self._noted[1]:
            self._noted = (batch_spec, settings, _sum((batch_spec.key, batch_spec.undivided is not None, self._compared(settings))))
        return 1 + hash((self._noted[2], state, plans)) % 2**62

    @property
    def may_note(self) -> bool:
        """May notes do in the next step? The same in all processes."""
        steps = self._steps
        return steps > 2 and steps & (steps - 1) > 0 and not self._apart and self._world.count == self._world.size

    def start(
        self, batch_spec: BatchSpec, leaves: Sequence[torch.Tensor], settings: Settings, captured: int = 0, state: int = 0,
        plans: int | None = None, noted: bool = False,
    ) -> Agreed:  # fmt: skip
        """Begin to compare this step's batch, and finish with the last one's.

        Args:
            batch_spec, leaves: of the batch.
            settings: how this process trains; what is known after a step comes with the next one.
            captured: number of the capture that is to run; -1 for one that is to be made.
            state: checksum of what the step reads in Python.
            plans: checksum of the plans that are to run; None if they are to be compiled.
            noted: in this step, the processes have brought different notes.

        Raises:
            PiperError: the batches or settings differ.
        """
        if self._world.size == 1:
            return Agreed(plans is None)
        self.finish()
        self._changed = self._batch_spec is None or batch_spec.key != self._batch_spec.key
        if self._changed:
            self._others, self._batch_spec = self._batch_spec, batch_spec
            rest, shapes = batch_spec.key
            form = [(() if self._whole() else shape[:1], len(shape), dtype) for shape, dtype in shapes]
            whole = batch_spec.undivided is not None
            count = next((shape[0] for shape, _ in shapes if shape), 1)
            self._sums = _sum((shapes, rest) if whole else shapes), _sum(form), _sum(rest), count
        # In the second step the factors of `backward` are known.
        at_once = (
            noted or self._changed or self._steps == 1 or captured < 0 or captured != self._captured or plans is None or self._apart
        )
        self._captured = captured
        own = (_checksum(leaves, self._steps), self._sums[0], state)
        self._steps += not noted
        sums = [NOTHING] * 6 * self._world.count  # of each replica; the largest count, and the smallest
        sums[6 * self._world.replica : 6 * self._world.replica + 6] = [end for x in own for end in (x, -x)]
        run = [NOTHING, NOTHING] if plans is None else [plans, -plans]
        same = [end for x in (_sum(self._compared(settings)), *self._sums[1:]) for end in (x, -x)]
        undivided = int(batch_spec.undivided is not None)
        message = torch.tensor([int(not at_once), int(plans is None), undivided, *run, *same, *sums])
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        assert work is not None
        self._running = (work, message, settings)
        return self.finish() if at_once else Agreed(False)

    def finish(self) -> Agreed:
        """Wait for the comparison that is under way.

        Raises:
            PiperError: the batches or settings differ.
            CaptureError: replicas read different Python state, and all have waited to know.
        """
        if self._running is None:
            return Agreed(False)
        (work, message, settings), self._running = self._running, None
        work.wait()
        going_on, lacking, whole, *found = message.tolist()
        plans, alike, form, rest, even, *sums = (high == -low for high, low in zip(found[::2], found[1::2], strict=True))
        if not alike:  # all processes see it
            self._warn_of_drift(check_alike(self._world.gather(settings), self._world.count == self._world.size and self._whole()))
        data, shapes, states = sums[::3], sums[1::3], sums[2::3]
        self._check_batches(form or bool(whole), rest or bool(whole), data, shapes, bool(going_on))
        of_replicas = found[10::2]
        apart = len(set(of_replicas[1::3])) > 1
        self._shapes |= apart
        self._apart |= apart or bool(whole)
        # With other shapes, code may have read other state.
        if not all(states) or (len(set(of_replicas[2::3])) > 1 and not self._apart):
            # Where all wait here, none has run it, and replicas may go on without a captured step.
            kind = CaptureError if self._world.count == self._world.size and not going_on else PiperError
            raise kind(
                f"the processes read different Python state in training batch {self._steps - 1} of this fit (attributes, counters, "
                "rates that training_step looks at), but all run one step. Let it not depend on the rank, on time, or on random "
                "numbers that differ"
            )
        if not all(data):
            self._refuse("values", data, "")
        if not plans and (found[0], found[1]) != (NOTHING, NOTHING):
            raise other_plans(f"in training batch {self._steps - 1} of this fit")
        self._warn_of_same(of_replicas[::3])
        if not (even or whole):
            self._warn_of_uneven(-found[9], found[8])
        return Agreed(bool(lacking) and not going_on, self._shapes)

    def _check_batches(self, form: bool, rest: bool, data: Sequence[bool], shapes: Sequence[bool], going_on: bool) -> None:
        """Refuse batches of other shapes, or with other constants.

        Args:
            form: all have the same numbers of samples, dimensions, and dtypes.
            rest: all have the same structure, numbers and strings.
            data, shapes: within each replica, they are the same.
            going_on: some processes do not wait here.
        """
        what = "shapes" if not form or not all(shapes) else "numbers or strings" if not rest else "values"
        if what == "values":
            return
        found = self._difference(going_on)
        if what == "shapes" and self._world.count > 1 and all(shapes):
            error = BatchError(
                f"the processes drew batches of different shapes in training batch {self._steps - 1} of this fit{found}, but every "
                "replica needs as many samples as the others, in tensors of as many dimensions and of the same dtypes. Use a "
                "sampler that divides the data evenly (Lightning's own does), or give PiperStrategy(capture='never')"
            )
            error.late = going_on
            raise error
        if what == "numbers or strings" and self._world.count > 1:
            error = BatchError(
                f"the processes drew batches with different numbers or strings in training batch {self._steps - 1} of this fit"
                f"{found}; these are a part of the captured step, and all replicas run the same one. Make tensors of them in the "
                "collate function (one without dimensions is passed whole), or a list with an entry for each sample, which the "
                "step does not read; or leave them out; or give PiperStrategy(capture='never')"
            )
            error.late = going_on
            raise error
        self._refuse(what, shapes if what == "shapes" else data, found)

    def _refuse(self, what: str, alike: Sequence[bool], found: str) -> NoReturn:
        who = "the processes" if self._world.count == 1 else f"the processes of replica {alike.index(False)}"
        raise PiperError(
            f"{who} drew different batches (other {what}) in training batch {self._steps - 1} of this fit{found}, but all "
            "stages of a pipeline train on the same one. Seed whatever draws the data (seed_everything(seed, workers=True)), "
            "and let it not depend on the rank or on time"
        )

    def _difference(self, going_on: bool) -> str:
        """Where this process's batch spec and another one's differ, as far as it is known: those who do not wait here have the one
        before."""
        if going_on:
            others = [] if self._others is None or not self._changed else [self._others.described()]
        else:
            assert self._batch_spec is not None
            others = self._world.gather(self._batch_spec.described())
        mine = {} if self._batch_spec is None else self._batch_spec.described()
        for other in others:
            for path in [*mine, *(path for path in other if path not in mine)]:
                one, two = mine.get(path, "nothing"), other.get(path, "nothing")
                if one != two:
                    return f" (batch{path}: {one} and {two})"
        return ""

    def _compared(self, settings: Settings) -> Settings:
        return always_alike(settings) if self._drift else settings

    def _warn_of_drift(self, found: str | None) -> None:
        self._drift, self._noted = True, (None, (), 0)
        self._world.warn(
            f"{found}. So each replica updates its own copy of the parameters in its own way, and the copies drift apart, as with "
            "DistributedDataParallel; rank 0's are saved. Where this is not meant, let it depend neither on the rank nor on random "
            "numbers that were not seeded"
        )

    def _warn_of_uneven(self, least: int, most: int) -> None:
        if not self._uneven:
            self._uneven = True
            self._world.warn(
                f"the replicas drew {least} to {most} samples in training batch {self._steps - 1} of this fit. If the loss is a "
                "mean over samples, each replica counts as much as the others, as with DistributedDataParallel. If the step "
                "divides the loss by a count (of tokens, say), each of these counts as much as the others, as on one device"
            )

    def _warn_of_same(self, data: Sequence[int]) -> None:
        if len(data) > 1 and len(set(data)) == 1 and data[0] and not self._warned:
            self._warned = True
            self._world.warn(
                f"all {len(data)} replicas drew the same samples in training batch {self._steps - 1} of this fit, so they learn no "
                "more than one would. Give each replica its own: leave Trainer(use_distributed_sampler=True), or let an iterable "
                "dataset read another part in each replica"
            )


def other_plans(where: str) -> PiperError:
    """The error where replicas would run different plans."""
    return PiperError(
        f"the replicas' batches have different shapes {where}, for which the step has other regions, or they use other parameters; "
        "so gradients cannot be summed. Let the step run the same regions for all shapes, or pad the batches to one"
    )


def _sum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _checksum(leaves: Iterable[torch.Tensor], step: int) -> int:
    """Of elements spread evenly over each tensor."""
    total = 0
    for leaf in leaves:
        if leaf.device.type != "cpu" and step % ON_GPU_EVERY:
            continue
        flat = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLE)].contiguous().cpu()
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total
