"""The part of `PiperStrategy` that Lightning's evaluation loops call."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn

from lightning_piper.strategy.agreement import agree_on_loader
from lightning_piper.strategy.checks import check_evaluation
from lightning_piper.strategy.evaluation import Evaluation, Standalone
from lightning_piper.strategy.machine import Settings
from lightning_piper.strategy.precision import check_precision
from lightning_piper.strategy.sharded_state import Loading
from lightning_piper.strategy.world import World


class EvaluatingStrategy(ParallelStrategy):
    """Runs `validation_step`, `test_step` and `predict_step` as plans over processes, if there is something to run them with.

    Where all devices are in one process the module is whole, and evaluation is as with any strategy.
    """

    _evaluation: Evaluation | None = None
    _standalone: Standalone | None = None  # without a fit

    _loading: Loading | None
    _local: bool

    @property
    @abstractmethod
    def world(self) -> World: ...

    @abstractmethod
    def _settings(self) -> Settings:
        """How to compile for the module."""

    def _setup_evaluation(self, trainer: pl.Trainer) -> None:
        """For `validate`, `test` or `predict` without a fit: the first step that is run distributes the module."""
        if self._local:
            super().setup(trainer)
            return
        module = self.lightning_module
        assert module is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        check_evaluation(module)
        check_precision(self.precision_plugin)
        self.model = self.precision_plugin.convert_module(module)
        settings = self._settings()
        if self._loading is not None:
            self._loading.whole()
        self._standalone = Standalone(module, settings, self.world)
        self._evaluation = self._standalone.evaluation
        self.setup_precision_plugin()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().validation_step(*args, **kwargs) if self._evaluation is None else self._evaluate("validation_step", *args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().test_step(*args, **kwargs) if self._evaluation is None else self._evaluate("test_step", *args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().predict_step(*args, **kwargs) if self._evaluation is None else self._evaluate("predict_step", *args)

    def _evaluate(self, name: str, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        assert self._evaluation is not None
        # Lightning's own precisions have one context for all steps without a backward pass.
        return self._evaluation.step(name, self.precision_plugin.forward_context, batch, dataloader_idx)

    def on_predict_start(self) -> None:
        if self._evaluation is not None:
            assert self.lightning_module is not None
            self._evaluation.expect(self.lightning_module.trainer.predict_loop.max_batches)

    def _evaluation_data(self, loader: object) -> object:
        """Data for an evaluation without a fit, as they are to be iterated over."""
        assert self.lightning_module is not None
        return agree_on_loader(loader, self.world, apart=self.lightning_module.trainer.state.fn == TrainerFn.PREDICTING)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The module's state dict: whole on the lead, also while parts of the module are elsewhere. Collective."""
        with contextlib.nullcontext() if self._standalone is None else self._standalone.whole_on_lead():
            return super().lightning_module_state_dict()

    def _end_evaluation(self, failed: bool) -> None:
        if self._standalone is not None:
            self._standalone.close(failed)
        self._evaluation = self._standalone = None
