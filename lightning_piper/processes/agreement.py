"""Checks that all stages of a pipeline train on the same batch.

With replicas, each has a pipeline of its own, and batches of its own, of the same sizes.

Every process draws its own batches. What cannot be made equal (a dataset that reads a clock, a shuffle that depends on the rank)
is noticed: a checksum of each batch goes round, in the background, while the step runs. Nobody waits for it, except where a batch
has another batch spec than the one before: then a step on different plans could hang.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from lightning_piper.capture import BatchSpec
from lightning_piper.errors import PiperError
from lightning_piper.processes.settings import Settings, check_alike
from lightning_piper.processes.world import World

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
    own = (*(zlib.crc32(repr(part).encode()) for part in ((key, rest), shapes)), _checksum(leaves, step) ^ state)
    sums = [torch.iinfo(torch.int64).min] * 6 * world.count  # of each replica, the largest and the smallest of three sums
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


class BatchCheck:
    """Compares the batches of all processes: values within each replica, shapes everywhere. And how they train, which is the same
    everywhere."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._steps = 0
        self._batch_spec: BatchSpec | None = None
        self._sums = (0, 0)  # of the spec's shapes, and of the rest of it
        self._others: BatchSpec | None = None  # the spec of the others, if theirs is not new
        self._changed = False
        self._captured = 0
        self._running: tuple[dist.Work, torch.Tensor, Settings] | None = None
        self._warned = False

    @property
    def reads(self) -> bool:
        """Are values in the memory of a GPU compared with the next batch?"""
        return self._steps == 1 or self._steps % ON_GPU_EVERY == 0

    def start(
        self, batch_spec: BatchSpec, leaves: Sequence[torch.Tensor], settings: Settings, captured: int = 0, state: int = 0
    ) -> None:
        """Begin to compare this step's batch, and finish with the last one's.

        Args:
            batch_spec, leaves: of the batch.
            settings: how this process trains; what is known after a step comes with the next one.
            captured: number of the capture that is to run; -1 for one that is to be made.
            state: checksum of what the step reads in Python.

        Raises:
            PiperError: the batches or settings differ.
        """
        if self._world.size == 1:
            return
        self.finish()
        self._changed = self._batch_spec is None or batch_spec.key != self._batch_spec.key
        if self._changed:
            self._others, self._batch_spec = self._batch_spec, batch_spec
            rest, shapes = (zlib.crc32(repr(part).encode()) for part in batch_spec.key)
            self._sums = (shapes, rest)
        # In the second step the factors of `backward` are known.
        at_once = self._changed or self._steps == 1 or captured < 0 or captured != self._captured
        self._captured = captured
        data = _checksum(leaves, self._steps)
        self._steps += 1
        sums = [torch.iinfo(torch.int64).min] * 2 * self._world.count  # of each replica; the largest counts, and the smallest
        sums[2 * self._world.replica], sums[2 * self._world.replica + 1] = data, -data
        (shapes, rest), alike = self._sums, zlib.crc32(repr(settings).encode())
        message = torch.tensor([alike, -alike, -int(self._changed), shapes, -shapes, rest, -rest, state, -state, *sums])
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        assert work is not None
        self._running = (work, message, settings)
        if at_once:
            self.finish()

    def finish(self) -> None:
        """Wait for the comparison that is under way.

        Raises:
            PiperError: the batches or settings differ.
        """
        if self._running is None:
            return
        (work, message, settings), self._running = self._running, None
        work.wait()
        alike, alike_low, old, shapes, shapes_low, rest, rest_low, state, state_low, *sums = message.tolist()
        if alike != -alike_low:  # all processes see it
            check_alike(self._world.gather(settings))
        data, data_low = sums[::2], sums[1::2]
        apart = [r for r, (high, low) in enumerate(zip(data, data_low, strict=True)) if high != -low]
        what = "shapes" if shapes != -shapes_low else "numbers or strings" if rest != -rest_low else "values"
        found = self._difference(old == 0) if what != "values" else ""
        if what == "shapes" and self._world.count > 1:
            raise PiperError(
                f"the processes drew batches of different shapes in training batch {self._steps - 1} of this fit{found}, but every "
                "replica needs as many samples as the others, in tensors of the same shapes. Use a sampler that divides the data "
                "evenly (Lightning's own does), and pad all batches to the same lengths"
            )
        if what == "values" and state != -state_low:
            raise PiperError(
                f"the processes read different Python state in training batch {self._steps - 1} of this fit (attributes, counters, "
                "rates that training_step looks at), but all run one step. Let it not depend on the rank, on time, or on random "
                "numbers that differ"
            )
        if what == "numbers or strings" and self._world.count > 1:
            raise PiperError(
                f"the processes drew batches with different numbers or strings in training batch {self._steps - 1} of this fit"
                f"{found}; these are a part of the captured step, and all replicas run the same one. Make tensors of them in the "
                "collate function (one without dimensions is passed whole), or a list with an entry for each sample, which the "
                "step does not read; or leave them out"
            )
        if what != "values" or apart:
            who = "the processes" if self._world.count == 1 else f"the processes of replica {apart[0]}"
            raise PiperError(
                f"{who} drew different batches (other {what}) in training batch {self._steps - 1} of this fit{found}, but all "
                "stages of a pipeline train on the same one. Seed whatever draws the data (seed_everything(seed, workers=True)), "
                "and let it not depend on the rank or on time"
            )
        self._warn_of_same(data)

    def _difference(self, some_go_on: bool) -> str:
        """Where this process's batch spec and another one's differ, as far as it is known: those whose spec is not new may not wait
        here, and have the one before."""
        if some_go_on:
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

    def _warn_of_same(self, data: Sequence[int]) -> None:
        if len(data) > 1 and len(set(data)) == 1 and data[0] and not self._warned:
            self._warned = True
            self._world.warn(
                f"all {len(data)} replicas drew the same samples in training batch {self._steps - 1} of this fit, so they learn no "
                "more than one would. Give each replica its own: leave Trainer(use_distributed_sampler=True), or let an iterable "
                "dataset read another part in each replica"
            )


def _checksum(leaves: Iterable[torch.Tensor], step: int) -> int:
    """Of elements spread evenly over each tensor."""
    total = 0
    for leaf in leaves:
        if leaf.device.type != "cpu" and step % ON_GPU_EVERY:
            continue
        flat = leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLE)].contiguous().cpu()
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total
