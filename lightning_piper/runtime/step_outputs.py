"""The outputs of a step: gradients, new values of buffers, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from lightning_piper.ir.buckets import Bucket
from lightning_piper.ir.values import Kind, view_as
from lightning_piper.ops.base import Bound, Bundle, Slots, take
from lightning_piper.plan.instructions import Deliver


class StepOutputs:
    """A collector of a step's outputs. Instructions fill the collector while the step runs, and `empty`
    returns the outputs at the end.

    The caller may change gradients in place (clipping, scaling), so no element of a gradient may also be an
    element of another tensor. A gradient that a chunk returns may break this rule: it may also be the
    gradient of another parameter, an expanded scalar, or a part of the batch. Such a gradient is copied.

    Args:
        buffers: The module's buffers, by name.
        given: Returns the addresses of the storages that no output may share: the storages of parameters, buffers,
            batch and loss gradients, and of graphs.

    Attributes:
        grads: Maps parameter names to gradients.
        results: Maps names to the tensors that a forward-only step returns.
        metrics: The vector of the loss and the logged values; None until an instruction has set it.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], given: Callable[[], set[int]]) -> None:
        self._module_buffers, self._given = buffers, given
        self.grads: dict[str, torch.Tensor] = {}
        self.results: dict[str, torch.Tensor] = {}
        self.metrics: torch.Tensor | None = None
        self._changed: dict[str, torch.Tensor] = {}  # name of a buffer -> its new value
        self._before: dict[str, torch.Tensor] = {}  # name of a buffer -> its value that `restore` puts back
        # Addresses of the storages of all tensors that chunks read, and of the outputs so far. A later output
        # must not share these storages. None until the first output that needs the check.
        self._foreign: set[int] | None = None
        self._kept: set[int] = set()  # storages of tensors that metric objects keep and only read

    def open(self) -> None:
        """Start a step."""
        self.grads, self.results, self.metrics, self._changed, self._foreign = {}, {}, None, {}, None
        self._kept = set()

    def bind_deliver(self, instruction: Deliver, slots: Slots, hands_over: bool) -> Bound:
        """Return the function that stores an output in this collector. A gradient or result is copied first
        if it could share memory; a buffer's new value waits for `commit`.

        Args:
            instruction: The delivery.
            slots: The slots of the executor.
            hands_over: Whether received tensors may be the sender's own.
        """
        (read,), names = instruction.reads, instruction.names
        source, last = read.slot, read.last
        copy = instruction.source == "peer" and hands_over
        if instruction.bucket is not None:
            return self._deliver_flat(instruction, instruction.bucket, take(instruction, slots), copy)
        returned = instruction.kind == Kind.RESULT
        owned = instruction.source == "sum" or (instruction.source == "peer" and not copy)

        def deliver() -> None:
            bundle = slots[source]
            if last:
                slots[source] = None
            if copy:
                bundle = [x.clone() for x in bundle]
            elif not owned:
                bundle = [self._own(x) for x in bundle]
            (self.results if returned else self.grads).update(zip(names, bundle, strict=True))

        def change() -> None:
            self._changed.update(zip(names, slots[source], strict=True))
            if last:
                slots[source] = None

        return change if instruction.kind == Kind.BUFFER else deliver

    def _deliver_flat(
        self, instruction: Deliver, bucket: Bucket, taken: Callable[[], Bundle], copy: bool
    ) -> Bound:
        """Return the function that stores the gradients that lie in a bucket's flat tensor, or in a shard of
        it, in the dtypes of their parameters. With `copy`, it copies the flat tensor first.
        """
        specs = dict(zip(bucket.names, bucket.tensors, strict=True))
        shard, own = instruction.shard, frozenset(instruction.names)
        ranges = [
            (name, at, at + stop - start)
            for name, start, stop, at in ([] if shard is None else bucket.local_shards(shard))
            if name in own
        ]
        converted = frozenset(name for name, spec in specs.items() if spec.dtype != bucket.dtype)

        def deliver() -> None:
            (flat,) = taken()
            if copy:
                flat = flat.clone()
            found = [(name, flat[start:stop]) for name, start, stop in ranges]
            if shard is None:
                views = zip(bucket.names, bucket.views(flat), strict=True)
                found = [(name, x) for name, x in views if name in own]
            elif bucket.whole_tensors:
                found = [(name, view_as(x, specs[name])) for name, x in found]
            for name, x in found:
                self.grads[name] = x.to(specs[name].dtype) if name in converted else x

        return deliver

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as a tensor that metric objects may read after the step: `x` itself, or a copy if
        another output or an input shares its memory. Several objects may read the same tensor.
        """
        if memory_of(x) not in self._kept:
            x = self._own(x)
            self._kept.add(memory_of(x))
        return x

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, or a copy if `x` is expanded or shares memory with an input or an earlier output. Later
        outputs that share memory with the result are copied."""
        if self._foreign is None:
            self._foreign = self._given()
        if memory_of(x) in self._foreign or 0 in x.stride():
            x = x.clone(memory_format=torch.contiguous_format)
        self._foreign.add(memory_of(x))
        return x

    def empty(self) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, torch.Tensor]]:
        """Return gradients, metrics and results, and drop the references to all three, because the caller
        owns the tensors. An instruction of the step must have set the metrics."""
        grads, metrics, results = self.grads, self.metrics, self.results
        assert metrics is not None
        self.grads, self.metrics, self.results = {}, None, {}
        return grads, metrics, results

    @property
    def changes_buffers(self) -> bool:
        return bool(self._changed)

    def commit(self, keep: bool = False) -> None:
        """Copy the new values into the module's buffers. With `keep`, `restore` can put back the old values."""
        if not self._changed:
            return
        with torch.no_grad():
            targets = {name: self._module_buffers[name] for name in self._changed}
            self._before = {name: x.clone() for name, x in targets.items()} if keep else {}
            memory = {memory_of(x) for x in targets.values()}
            # A new value may share memory with another buffer, so copy such values before overwriting any buffer.
            values = {name: x.clone() if memory_of(x) in memory else x for name, x in self._changed.items()}
            for name, target in targets.items():
                target.copy_(values[name])
        self._changed = {}

    def restore(self) -> None:
        """Put back the values of buffers from before the last `commit`, if it kept them."""
        for name, old in self._before.items():
            self._module_buffers[name].copy_(old)
        self._before = {}


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()
