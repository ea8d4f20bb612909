"""Checks that all processes of a replica train on the same batch.

With replicas, each replica has its own pipeline and its own batches. All replicas have the same number of
samples, unless each process is a replica of the whole module.

Every process draws its own batches. Piper cannot force them to be equal if a dataset reads a clock or a
shuffle depends on the rank. It detects such differences: the processes all-reduce a checksum of each batch in
the background while the step runs. A process usually continues without the result. It waits, for example, if
its batch has a different batch spec than its previous batch, because a step on different plans could hang.

If each process is its own replica, the processes often all-reduce the values that the step reports. Then this
message carries a digest instead (`digest`): a checksum of everything that is compared except the batch's
values. The processes make the full comparison when digests differ, in the first steps, and in steps whose
number is a power of two.

After replicas had batches of different shapes once, all processes wait in each step. A process may need a
program that the other processes already have, and all processes compile together. In the first step with
different shapes, a process whose batch has the same spec as its previous batch may have continued. All
processes had the same plans until that step. So a process that needs a program then compiles it alone, and
must arrive at the plans of the processes that have continued.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from lightning_piper.capture import BatchSpec
from lightning_piper.errors import BatchError, CaptureError, ExecutionError, PiperError
from lightning_piper.processes.settings import Settings, always_alike, check_alike
from lightning_piper.processes.world import World

# The least integer. A message has it in the entries of other replicas, so that each replica's own entries win
# the all-reduced maximum.
NOTHING = torch.iinfo(torch.int64).min
SAMPLE = 2048  # At least this many elements of a tensor enter the checksum, or all of a smaller tensor.
# Steps between checks of values in GPU memory, which are rare because reading a GPU tensor makes the host
# wait.
ON_GPU_EVERY = 16

# The kinds of differences between two batches, as errors name them.
SHAPES, ENTRIES, VALUES = "shapes or dtypes", "entries, numbers or strings", "values"
ABSENT = "nothing"  # stands in a text for an entry that one of two batches does not have
SAME = "Make the code that draws the data independent of the rank, the time and unseeded random numbers"
Difference = tuple[str, str, str]  # path in the batch, and its content here and in another process


def agree_on_batch(
    world: World,
    key: object,
    batch_spec: BatchSpec,
    leaves: Sequence[torch.Tensor],
    lacking: bool,
    step: int,
    state: int = 0,
) -> tuple[bool, bool]:
    """Compare the processes' batches of an evaluation step before the step runs. All processes of one replica
    need the same batch. Collective.

    Args:
        key: Everything the step's plan depends on, except the batch spec.
        leaves: The tensors of the batch.
        lacking: Whether this process does not have a plan for the batch yet.
        step: Number of the step; it decides whether values in GPU memory are compared.
        state: Checksum of the Python state that the step reads.

    Returns:
        Whether any process lacks a plan, and whether the replicas' batches have different shapes.

    Raises:
        PiperError: The processes of one replica have different batches, Python state or `key`.
        BatchError: Some replicas have batches that can be cut by samples, and other replicas have not.
    """
    if world.size == 1:
        return lacking, False
    rest, shapes = batch_spec.key
    own = (_sum((key, rest)), _sum(shapes), _checksum(leaves, step), state)
    # For each replica and each of the four checksums in `own`: the largest value, and the largest negated
    # value, which shows the smallest value.
    sums = [NOTHING] * 8 * world.count
    sums[8 * world.replica : 8 * world.replica + 8] = [end for x in own for end in (x, -x)]
    message = torch.tensor([int(lacking), *_cut(batch_spec), *sums])
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=world.host_group)
    anybody, some_cut, some_whole, *found = message.tolist()
    for replica in range(world.count):
        ends = found[8 * replica : 8 * replica + 8]
        rest_differs, shapes_differ, data_differs, state_differs = (
            high != -low for high, low in zip(ends[::2], ends[1::2], strict=True)
        )
        who = "the processes" if world.count == 1 else f"the processes of replica {replica}"
        if rest_differs or shapes_differ or data_differs:
            what = SHAPES if shapes_differ else ENTRIES if rest_differs else VALUES
            raise PiperError(
                f"{who} drew different batches (different {what}) in evaluation step {step}, but all processes of "
                f"a replica must read the same batch. {SAME} [PIPER-L004]"
            )
        if state_differs:
            raise PiperError(
                f"the Python values that evaluation step {step} reads differ between {who}, but all processes of "
                "a replica must read the same values. Set them independently of the rank and the time [PIPER-L006]"
            )
    if some_cut and some_whole:
        raise _mixed(f"evaluation step {step}")
    return bool(anybody), len(set(found[2::8])) > 1


def _cut(batch_spec: BatchSpec) -> tuple[int, int]:
    """Return 1 and 0 if the batch can be cut by samples, and 0 and 1 if it cannot."""
    return int(batch_spec.undivided is None), int(batch_spec.undivided is not None)


def _mixed(where: str) -> BatchError:
    """Return the error if only some replicas have a batch that can be cut by samples. Their programs would differ."""
    return BatchError(
        f"the replicas drew batches that do not fit together in {where}: only some of these batches have the same "
        "first dimension in all tensors. If a tensor does not belong to the samples, register it as a buffer, or make "
        "it in the step [PIPER-L004]"
    )


def _fix(what: str, found: Difference | None, whole: bool) -> str:
    """Return what to do about the batches of replicas that do not fit together.

    Args:
        what: `SHAPES` or `ENTRIES`, which differ.
        found: The first difference; None if it is unknown.
        whole: Whether each process is a replica of the whole module, which may have its own number of samples.
    """
    one, two = ("", "") if found is None else found[1:]
    if ABSENT in (one, two) or (what == ENTRIES and not one):
        return "Give the batches of all replicas the same entries"
    if what == ENTRIES:
        fix = "Convert the number to a tensor in the collate function"
        if one[:1] in "'\"":
            fix = "Remove the string, or give a list with one string for each sample"
        return (
            f"Numbers and strings are a part of the captured step, which is the same in all replicas. {fix}"
        )
    kinds = [(dtype, shape.count(",")) for dtype, _, shape in (text.partition("[") for text in (one, two))]
    if whole or kinds[0] != kinds[1]:
        return "Give tensors the same dtype and the same number of dimensions in all replicas"
    return "Give all replicas the same number of samples, in tensors of the same dtypes"


class Agreed(NamedTuple):
    """The result of comparing the processes before a step.

    Attributes:
        together: Whether all processes compile, because some process does not have a program for its batch.
            If not, a process without a program compiles it alone.
        apart: Whether each replica needs its own captures, because the replicas' batches have different
            shapes, or had different shapes in an earlier step.
    """

    together: bool
    apart: bool = False


class BatchCheck:
    """A comparison of the batches and the training settings of all processes.

    Within each replica, values and shapes must be equal. Across replicas, the structure of the batch, its
    numbers, strings and dtypes, and the numbers of dimensions must be equal. The number of samples must also
    be equal, unless `whole` returns True. Batches that cannot be cut by samples (graphs, for example) may
    differ across replicas. `check_alike` says which settings must be equal.

    Args:
        whole: Returns whether each process is a replica of the whole module. Such a process may update its
            own parameters differently from the other processes.
    """

    def __init__(self, world: World, whole: Callable[[], bool] = lambda: False) -> None:
        self._world, self._whole = world, whole
        self._drift = False  # whether the replicas' optimizer options have differed
        self._steps = 0  # number of steps of this fit that were compared, or are being compared
        self._batch_spec: BatchSpec | None = None  # this process's batch spec in the last comparison
        # Checksums of the spec's shapes, of the part of the shapes that all replicas must share, and of
        # everything else in the spec; then the number of samples.
        self._sums = (0, 0, 0, 0)
        # whether replicas' shapes differed in some step, or batches cannot be cut by samples
        self._apart = False
        self._shapes = False  # whether replicas' shapes differed in some step
        # The batch spec that this process had before its last change of spec. A process whose spec does not
        # change in this step still has that spec.
        self._others: BatchSpec | None = None
        self._changed = False  # whether this process's batch spec differs from its previous one
        self._captured = 0  # number of the capture in the previous comparison
        # The checksum of a batch spec and settings, which is computed again only if one of them changes.
        self._digested: tuple[BatchSpec | None, Settings, int] = (None, (), 0)
        # The comparison under way: its all-reduce, the message, and this process's settings.
        self._running: tuple[dist.Work, torch.Tensor, Settings] | None = None
        # whether this process has warned of equal samples, and of different numbers of samples
        self._warned, self._uneven = False, False

    @property
    def reads(self) -> bool:
        """Whether the settings for the next comparison include numbers in GPU memory."""
        return self._steps == 1 or self._steps % ON_GPU_EVERY == 0

    def digest(self, batch_spec: BatchSpec, settings: Settings, state: int, plans: int) -> int:
        """Return a checksum, never 0, of everything that `start` would compare except the batch's values.

        Like `start`, this finishes the previous comparison and counts the step. The arguments are as in
        `start`, except that `plans` is 0 if the plans are yet to be compiled.
        """
        self.finish()
        self._steps += 1
        if batch_spec is not self._digested[0] or settings is not self._digested[1]:
            self._digested = (
                batch_spec,
                settings,
                _sum((batch_spec.key, batch_spec.undivided is not None, self._compared(settings))),
            )
        return 1 + hash((self._digested[2], state, plans)) % 2**62

    @property
    def may_use_digests(self) -> bool:
        """Whether digests suffice to compare the next step. The answer is the same on all processes."""
        steps = self._steps
        return (
            steps > 2
            and steps & (steps - 1) > 0
            and not self._apart
            and self._world.count == self._world.size
        )

    def start(
        self,
        batch_spec: BatchSpec,
        leaves: Sequence[torch.Tensor],
        settings: Settings,
        captured: int = 0,
        state: int = 0,
        plans: int | None = None,
        digests_differed: bool = False,
        retraced: bool = False,
    ) -> Agreed:
        """Finish the comparison of the previous step, then start comparing this step's batch. Collective.

        If this process waits for the result in this step, the method finishes the new comparison also.

        Args:
            leaves: The tensors of the batch.
            settings: How this process trains. Settings that are known only after a step are compared in the
                next step.
            captured: Number of the capture to run; -1 if the capture is yet to be made. The first batch of a
                fit passes 0.
            state: Checksum of the Python state that the step reads.
            plans: Checksum of the plans to run; None if they are yet to be compiled.
            digests_differed: Whether the digests of the processes differed in this step.
            retraced: Whether the processes have traced the step again, so one of them may know that the step
                has changed.

        Returns:
            The result of the new comparison, or `Agreed(False)` if this process does not wait for it. With
            one process, `together` says whether it lacks plans.

        Raises:
            PiperError: As `finish` does, in either comparison.
        """
        if self._world.size == 1 or self._world.is_sole:
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
        # The second step is compared immediately, because the factors of `backward` are known from that step
        # on.
        at_once = (
            digests_differed
            # Only replicas can continue uncaptured together. In a pipeline, the error of one process ends the
            # run.
            or (retraced and self._world.count == self._world.size)
            or self._changed
            or self._steps == 1
            or captured < 0
            or captured != self._captured
            or plans is None
            or self._apart
        )
        self._captured = captured
        own = (_checksum(leaves, self._steps), self._sums[0], state)
        self._steps += not digests_differed
        # For each replica and each sum: the largest value, and the largest negated value.
        sums = [NOTHING] * 6 * self._world.count
        sums[6 * self._world.replica : 6 * self._world.replica + 6] = [end for x in own for end in (x, -x)]
        run = [NOTHING, NOTHING] if plans is None else [plans, -plans]
        same = [end for x in (_sum(self._compared(settings)), *self._sums[1:]) for end in (x, -x)]
        message = torch.tensor([int(not at_once), int(plans is None), *_cut(batch_spec), *run, *same, *sums])
        work = dist.all_reduce(message, op=dist.ReduceOp.MAX, group=self._world.host_group, async_op=True)
        assert work is not None
        self._running = (work, message, settings)
        return self.finish() if at_once else Agreed(False)

    def finish(self) -> Agreed:
        """Wait for the running comparison, check and return its result. Return `Agreed(False)` if none is
        running. Collective.

        Warn if the replicas have different optimizer options, different numbers of samples, or the same
        samples.

        Raises:
            PiperError: The batches, settings, plans or Python state differ. It is a BatchError if the batches
                of different replicas do not fit one captured step.
            CaptureError: The Python state differs, each replica is one process, and no process has run the
                step yet. The replicas may then continue uncaptured.
            ExecutionError: Another process has failed.
        """
        if self._running is None:
            return Agreed(False)
        (work, message, settings), self._running = self._running, None
        try:
            work.wait()
        except RuntimeError as error:  # another process has ended, or does not answer
            raise ExecutionError(
                f"device {self._world.rank}: the comparison with the other processes in training batch "
                f"{self._steps - 1} of this fit failed: {error}. Look for the first error in the logs of the other "
                "processes [PIPER-L001]"
            ) from error
        going_on, lacking, some_cut, whole, *found = message.tolist()
        plans, alike, form, rest, even, *sums = (
            high == -low for high, low in zip(found[::2], found[1::2], strict=True)
        )
        if not alike:  # all processes see the same result, so all reach this collective
            self._warn_of_drift(
                check_alike(
                    self._world.gather(settings), self._world.count == self._world.size and self._whole()
                )
            )
        # for each replica, whether its processes have the same values, shapes and Python state
        data, shapes, states = sums[::3], sums[1::3], sums[2::3]
        self._check_batches(form or bool(whole), rest or bool(whole), data, shapes, bool(going_on))
        if some_cut and whole:
            mixed = _mixed(f"training batch {self._steps - 1} of this fit")
            mixed.late = bool(going_on)
            raise mixed
        of_replicas = found[10::2]  # for each replica: the checksums of its values, its shapes and its state
        apart = len(set(of_replicas[1::3])) > 1
        self._shapes |= apart
        self._apart |= apart or bool(whole)
        # With different shapes, the step's code may have read different state.
        if not all(states) or (len(set(of_replicas[2::3])) > 1 and not self._apart):
            # If all processes wait here, none of them has run the step, and replicas may continue without a
            # captured step.
            kind = CaptureError if self._world.count == self._world.size and not going_on else PiperError
            raise kind(
                f"the processes read different Python state in training batch {self._steps - 1} of this fit "
                "(attributes, counters or rates that training_step reads), but all processes must run the same "
                "step. Make the state independent of the rank, the time and unseeded random numbers [PIPER-L006]"
            )
        if not all(data):
            self._refuse("values", data, "")
        if not plans and (found[0], found[1]) != (NOTHING, NOTHING):
            raise other_plans(f" in training batch {self._steps - 1} of this fit")
        self._warn_of_same(of_replicas[::3])
        if not (even or whole):
            self._warn_of_uneven(-found[9], found[8])
        return Agreed(bool(lacking) and not going_on, self._shapes)

    def _check_batches(
        self, form: bool, rest: bool, data: Sequence[bool], shapes: Sequence[bool], going_on: bool
    ) -> None:
        """Raise an error for batches with different shapes or constants.

        Args:
            form: Whether all processes have the same number of dimensions and the same dtypes and, unless
                each process is a replica of the whole module, the same number of samples. Also True if the
                batch of a process is not divided.
            rest: Whether all processes have the same structure, numbers and strings. Also True if the batch
                of a process is not divided.
            data: For each replica, whether its processes have the same values.
            shapes: For each replica, whether its processes have the same shapes.
            going_on: Whether some processes do not wait for the comparison.

        Raises:
            BatchError: The batches of different replicas differ.
            PiperError: The batches within a replica differ.
        """
        what = SHAPES if not form or not all(shapes) else ENTRIES if not rest else VALUES
        if what == VALUES:
            return
        found = self._difference(going_on)
        shown = "" if found is None else f" (batch{found[0]}: {found[1]} and {found[2]})"
        if self._world.count > 1 and (what == ENTRIES or all(shapes)):
            error = BatchError(
                f"the replicas drew batches that do not fit together in training batch {self._steps - 1} of this "
                f"fit{shown}. {_fix(what, found, self._whole())} [PIPER-L004]"
            )
            error.late = going_on
            raise error
        self._refuse(what, shapes if what == SHAPES else data, shown)

    def _refuse(self, what: str, alike: Sequence[bool], found: str) -> NoReturn:
        who = "the processes" if self._world.count == 1 else f"the processes of replica {alike.index(False)}"
        raise PiperError(
            f"{who} drew different batches (different {what}) in training batch {self._steps - 1} of this "
            f"fit{found}, but all processes of a replica must train on the same batch. {SAME} [PIPER-L004]"
        )

    def _difference(self, going_on: bool) -> Difference | None:
        """Return where this process's batch spec and another process's spec differ. None if this process does
        not know. Collective, unless `going_on`.

        If some processes do not wait for the comparison, they still have the previous spec (`_others`). This
        process then compares its spec with that spec, without communication.
        """
        if going_on:
            others = [] if self._others is None or not self._changed else [self._others.described()]
        else:
            assert self._batch_spec is not None
            others = self._world.gather(self._batch_spec.described())
        mine = {} if self._batch_spec is None else self._batch_spec.described()
        for other in others:
            for path in [*mine, *(path for path in other if path not in mine)]:
                one, two = mine.get(path, ABSENT), other.get(path, ABSENT)
                if one != two:
                    return path, one, two
        return None

    def _compared(self, settings: Settings) -> Settings:
        return always_alike(settings) if self._drift else settings

    def _warn_of_drift(self, found: str | None) -> None:
        self._drift, self._digested = True, (None, (), 0)
        self._world.warn(
            f"{found}. So the replicas update their copies of the parameters differently, and the copies "
            "drift apart, as with DistributedDataParallel. Checkpoints hold the copy of rank 0. If you do "
            "not want this, make the setting independent of the rank and of unseeded random numbers"
            " [PIPER-W015]"
        )

    def _warn_of_uneven(self, least: int, most: int) -> None:
        if not self._uneven:
            self._uneven = True
            self._world.warn(
                f"the replicas drew {least} to {most} samples in training batch {self._steps - 1} of this "
                "fit. If the loss is a mean over samples, all replicas have the same weight, as with "
                "DistributedDataParallel. If the step divides the loss by a count (for example, of tokens), "
                "all counted items have the same weight, as on one device. If each sample must count the "
                "same, give all replicas the same number of samples [PIPER-W014]"
            )

    def _warn_of_same(self, data: Sequence[int]) -> None:
        if len(data) > 1 and len(set(data)) == 1 and data[0] and not self._warned:
            self._warned = True
            self._world.warn(
                f"all {len(data)} replicas drew the same samples in training batch {self._steps - 1} of this "
                "fit, so they learn no more than a single replica would. For a dataset with a length, keep "
                "Trainer(use_distributed_sampler=True). Let an iterable dataset read a different part in each "
                "replica [PIPER-W013]"
            )


def other_plans(where: str = "") -> PiperError:
    """Return the error for replicas that would run different plans. `where` names the batch, after a space."""
    return PiperError(
        f"the replicas drew batches of different shapes{where}, and their steps run different regions or use "
        "different parameters, so Piper cannot sum the gradients. Pad the batches to one shape "
        "[PIPER-L004]"
    )


def _sum(value: object) -> int:
    return zlib.crc32(repr(value).encode())


def _checksum(leaves: Iterable[torch.Tensor], step: int) -> int:
    """Return the checksum of elements spread evenly over each tensor.

    Tensors outside of host memory count only every `ON_GPU_EVERY` steps.
    """
    total = 0
    for leaf in leaves:
        if leaf.device.type != "cpu" and step % ON_GPU_EVERY:
            continue
        sample = (
            leaf.detach().reshape(-1)[:: max(1, leaf.numel() // SAMPLE)].cpu().resolve_conj().resolve_neg()
        )
        # torch cannot view a tensor with a stride of 0 as bytes. A copy does not have such a stride.
        flat = sample.clone(memory_format=torch.contiguous_format)
        total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
    return total
