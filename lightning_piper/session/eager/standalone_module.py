"""`Standalone`: the owner of a module on several processes without a fit, or before a fit's first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError
from lightning_piper.holdings.distributed_marks import UNREAD, parts_of
from lightning_piper.holdings.materialization import (
    Known,
    is_on_meta,
    materialize,
    places_of,
    put,
    tensor_at,
)
from lightning_piper.holdings.ownership import Ownership
from lightning_piper.holdings.tensor_binding import TensorBinding
from lightning_piper.processes.world import World
from lightning_piper.session.evaluation import Evaluation
from lightning_piper.session.process_runtime import ProcessRuntime, Settings, check_devices


class Standalone:
    """The owner of a module for `validate`, `test` and `predict` without a fit, and for the sanity check
    before a fit's first batch.

    The first step that runs distributes the module over the processes. `close` makes the module whole again.
    `EagerReplicas` and `Fit` take the module over with `distribute`.

    Args:
        module: The module with its values. The values of rank 0 count; parts may be on the meta device.
        known: Values from a checkpoint for tensors on the meta device. Other tensors on that device get
            initial values.
        seed: Seed of the steps' random numbers.
        drawn: Seed of initial values.
        distributed: Called after the module is distributed. Collective.
        resume: Called by `close`. Restores the features that the strategy has switched off
            (`strategy.compatibility.suspend`).

    Attributes:
        module, settings, known, seed, world: The arguments of these names.
        evaluation: Runs the steps.
        programs: The programs that earlier evaluations have compiled.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        known: Known,
        seed: int,
        drawn: int,
        world: World,
        distributed: Callable[[Ownership], None],
        resume: Callable[[], None],
    ) -> None:
        self.module, self.settings, self.known, self.world, self._distributed = (
            module,
            settings,
            known,
            world,
            distributed,
        )
        self.seed, self._drawn, self._resume = seed, drawn, resume
        if world.size == 1:
            materialize(module, drawn, known)
        self._ownership: Ownership | None = None  # None until a step has distributed the module
        self._closed = False
        # (name, tensor without values, its version), to notice that user code has changed the tensor in place
        self._blank = [
            (name, x, x._version) for name, at in places_of(module).items() if (x := tensor_at(at)).is_meta
        ]
        self.programs: list[Compiled] = []
        self.evaluation = self._new_evaluation()

    def _new_evaluation(self) -> Evaluation:
        runtime = ProcessRuntime(self.settings, self.world)
        return Evaluation(self.module, runtime, self.settings, self.world, self.seed, begin=self._begin)

    def _begin(self, first: Compiled) -> None:
        """Distribute the module as the first program needs it. Collective."""
        if not self.settings.local:
            check_devices(first, self.world, self.settings)
        self._ownership = own = self._distribute(Ownership(self.module, first, self.world))
        self.evaluation.runtime.bind(first, own)
        self.evaluation.follow = TensorBinding(self.module, own).follow

    def _distribute(self, own: Ownership) -> Ownership:
        """Distribute the module as `own` says. Collective.

        Raises:
            PiperError: A tensor on the meta device was changed in place.
        """
        before = parts_of(self.module)
        if before is not None:
            before.check_unwritten()
        for name, tensor, version in self._blank:
            if tensor._version != version:
                raise PiperError(
                    f"PiperStrategy: {name!r} was changed in place on the meta device, where it has no "
                    "values yet. Give all tensors their initial values in piper_init_parameters [PIPER-S009]"
                )
        own.distribute(self._drawn, self._known_now() if before is None else Known(), before)
        self._blank = []
        self._distributed(own)
        return own

    def _known_now(self) -> Known:
        """Return the known values without the values of tensors that user code has replaced since the start of
        the run, for example with `load_state_dict(assign=True)` in `configure_optimizers`.

        Raises:
            PiperError: user code has replaced a tensor that a sharded checkpoint would overwrite, or see
                `Known.with_stored`.
        """
        now = {name: tensor_at(at) for name, at in places_of(self.module).items()}
        replaced = {name for name, _, _ in self._blank if name in now and not now[name].is_meta}
        if lost := sorted(replaced & self.known.later):
            raise PiperError(
                f"PiperStrategy: {lost[0]!r} got a value after the checkpoint was loaded, but the values of a "
                "sharded checkpoint are read at the first batch and would replace it. Remove the code that sets the "
                "value, or train without ckpt_path [PIPER-S009]"
            )
        loaded = {name: value for name, value in self.known.loaded.items() if name not in replaced}
        return Known(loaded, self.known.later).with_stored(self.module)

    def materialize(self) -> None:
        """Give every process the values of a module on the meta device that no program has distributed yet.

        Raises:
            PiperError: Initializing a submodule fails.
        """
        materialize(self.module, self._drawn, self._known_now())

    @contextlib.contextmanager
    def with_values(self) -> Iterator[None]:
        """Like `materialize`, but afterwards the tensors are on the meta device again."""
        blank, places = {name: tensor for name, tensor, _ in self._blank}, places_of(self.module)
        self.materialize()
        try:
            yield
        finally:
            for name, tensor in blank.items():
                put(places[name], tensor)

    def distribute(self, training: Compiled) -> Ownership:
        """Distribute the module as the training step needs it, when a fit begins. The caller then calls
        `close`. Collective."""
        return self._distribute(Ownership(self.module, training, self.world))

    def under(self, settings: Settings, world: World) -> Standalone:
        """Return a new owner of the same module under another program, before its first step. Close the
        evaluation of this owner, because the new owner replaces it. Collective."""
        self.evaluation.close()
        return Standalone(
            self.module, settings, self.known, self.seed, self._drawn, world, self._distributed, self._resume
        )

    def give_back(self) -> None:
        """Undo the distribution after an evaluation before the first batch of a fit. Collective.

        Every process that had the whole module has it again, in host memory, because hooks may read and
        change it.
        """
        if self._ownership is None:
            return
        self._ownership.end()
        self.evaluation.runtime.metric_objects.release()
        self.evaluation.close()
        self._ownership = None
        if not is_on_meta(self.module):
            self.module.cpu()
        self.programs += self.evaluation.programs
        self.evaluation = self._new_evaluation()

    def close(self, failed: bool) -> None:
        """Restore the whole module on every process that had it, unless the run failed. Collective, unless
        the run failed."""
        # This runs even if the object is closed, because the start of a fit closes it and switches the
        # features off again.
        self._resume()
        if self._closed:
            return
        self._closed = True
        self.evaluation.runtime.metric_objects.release(failed)
        if self._ownership is not None:
            if not failed:
                self._ownership.end()
            self.evaluation.close(failed)

    def end(self, failed: bool) -> None:
        """End a run without a fit: close, and warn if the run has not loaded the checkpoint's values.
        Collective, unless the run failed."""
        self.close(failed)
        if (
            parts_of(self.module) is None
            and is_on_meta(self.module)
            and (self.known.loaded or self.known.later)
        ):
            self.module.__dict__[UNREAD] = True
            if not failed:
                self.world.warn(
                    "the module is on the meta device and has no values. Piper loads the checkpoint's "
                    "values at the first step, and this run had no step. Run at least one step before you "
                    "use the module [PIPER-W023]"
                )
