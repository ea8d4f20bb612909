"""The part of `PiperStrategy` that Lightning's evaluation loops call, and what Lightning asks all processes together."""

from __future__ import annotations

import contextlib
import zipfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_piper.errors import PiperError
from lightning_piper.strategy.agreement import agree_on_loader, draw_seed
from lightning_piper.strategy.checks import check_evaluation
from lightning_piper.strategy.evaluation import Evaluation, Standalone
from lightning_piper.strategy.machine import Settings
from lightning_piper.strategy.materialize import Known, is_on_meta, load_state, materialize
from lightning_piper.strategy.ownership import Ownership, parts_of
from lightning_piper.strategy.precision import check_precision
from lightning_piper.strategy.sharded_state import Loading
from lightning_piper.strategy.world import World

T = TypeVar("T")


class EvaluatingStrategy(ParallelStrategy):
    """Runs `validation_step`, `test_step` and `predict_step` as plans over processes, if there is something to run them with.

    Where all devices are in one process the module is whole, and evaluation is as with any strategy.
    """

    _evaluation: Evaluation | None = None
    _standalone: Standalone | None = None  # without a fit, or before its first batch

    _loading: Loading | None
    _local: bool
    _loaded: Mapping[str, torch.Tensor] = MappingProxyType({})  # from a plain checkpoint, for what is on the meta device

    @property
    @abstractmethod
    def world(self) -> World: ...

    @abstractmethod
    def _settings(self) -> Settings:
        """How to compile for the module."""

    def _setup_evaluation(self, trainer: pl.Trainer) -> None:
        """For `validate`, `test` or `predict` without a fit."""
        module, known = self.lightning_module, self._known
        assert module is not None
        check_evaluation(module, known)
        if self._local:
            materialize(module, draw_seed(self.world), known)
            super().setup(trainer)
            return
        self._setup_standalone(trainer)
        self.setup_precision_plugin()

    def _setup_standalone(self, trainer: pl.Trainer, seed: int | None = None) -> Standalone:
        """The module as it is to begin with; the first step that is run distributes it.

        Args:
            trainer: that runs.
            seed: from a checkpoint.
        """
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        check_precision(self.precision_plugin)
        self.model = self.precision_plugin.convert_module(module)
        settings = self._settings()
        if self._loading is not None and not is_on_meta(module):
            self._loading.whole()
        self._standalone = Standalone(module, settings, self._known, seed, self.world, self._read)
        self._evaluation = None if self._local else self._standalone.evaluation
        return self._standalone

    @property
    def _known(self) -> Known:
        """What a checkpoint brings for a module on the meta device."""
        return Known(self._loaded, frozenset() if self._loading is None else self._loading.waiting)

    def _read(self, parts: Ownership) -> None:
        """The module is distributed: read what a sharded checkpoint has of this process's part. Collective."""
        if self._loading is not None:
            self._loading.distributed(parts)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For `Trainer.init_module` and `configure_model`: tensors on the meta device, with `empty_init=True`."""
        if not empty_init:
            with super().tensor_init_context(empty_init):
                yield
            return
        with torch.device("meta"), self.precision_plugin.tensor_init_context():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().validation_step(*args, **kwargs) if self._evaluation is None else self._evaluate("validation_step", *args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*args, **kwargs) if self._evaluation is None else self._evaluate("test_step", *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs) if self._evaluation is None else self._evaluate("predict_step", *args)

    def _evaluate(self, name: str, batch: Any, batch_idx: int = 0, dataloader_idx: int | None = None) -> Any:
        assert self._evaluation is not None
        # Lightning's own precisions have one context for all steps without a backward pass.
        return self._evaluation.step(name, self.precision_plugin.forward_context, batch, batch_idx, dataloader_idx)

    def on_validation_end(self) -> None:
        """What follows in a fit, up to the first batch, sees the module as it was before a sanity check."""
        assert self.lightning_module is not None
        fits = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        if fits and self._standalone is not None and self._evaluation is not None:
            self._standalone.give_back()
            self._evaluation = self._standalone.evaluation

    def on_predict_start(self) -> None:
        if self._evaluation is not None:
            assert self.lightning_module is not None
            self._evaluation.expect(self.lightning_module.trainer.predict_loop.max_batches)

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        return agree_on_loader(dataloader, self.world, apart=self.lightning_module.trainer.state.fn == TrainerFn.PREDICTING)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole on the lead, also while parts of the module are elsewhere. Collective."""
        assert self.lightning_module is not None
        parts = parts_of(self.lightning_module)
        if parts is None and is_on_meta(self.lightning_module):
            raise PiperError(
                "PiperStrategy: the module is on the meta device, and has no values to be saved before the first step of a run; "
                "save after it"
            )
        with contextlib.nullcontext() if parts is None else parts.whole_on_lead():
            return super().lightning_module_state_dict()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """A plain checkpoint. For a module on the meta device its tensors stay in the file, and are read where they are used."""
        ours = type(self.checkpoint_io) is TorchCheckpointIO and zipfile.is_zipfile(checkpoint_path)
        if not ours or self.world.size == 1 or self.lightning_module is None or not is_on_meta(self.lightning_module):
            return super().load_checkpoint(checkpoint_path, weights_only)
        content: dict[str, Any] = torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
        return content

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load what the module has memory for, and keep the rest until it is known what goes where."""
        module = self.lightning_module
        assert module is not None
        if not is_on_meta(module):
            super().load_model_state_dict(checkpoint, strict)
            return
        parts = parts_of(module)
        self._loaded = load_state(module, checkpoint["state_dict"], strict, keep=parts is not None and parts.ended)

    def _end_evaluation(self, failed: bool) -> None:
        if self._standalone is not None:
            self._standalone.end(failed)
        self._evaluation = self._standalone = None
        self._loaded = MappingProxyType({})

    # Collectives. What is reduced is reduced over replicas: the processes of one have the same.

    def reduce(self, tensor: torch.Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> torch.Tensor | Any:
        return self.world.over_replicas(tensor, reduce_op) if isinstance(tensor, torch.Tensor) else tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self.world.decide(decision, all)

    def all_gather(self, tensor: torch.Tensor, group: Any | None = None, sync_grads: bool = False) -> torch.Tensor:
        return tensor if self._local else super().all_gather(tensor, group, sync_grads)

    def barrier(self, name: str | None = None) -> None:
        if self._local or not dist.is_initialized():
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._local or not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]
