"""`PiperStrategy`: plans of lightning_piper under Lightning's Trainer.

Importing this package registers the strategy as `Trainer(strategy="piper")`, also in `pytorch_lightning`,
which has a registry and classes separate from `lightning`.
"""

from lightning.pytorch.strategies import StrategyRegistry
from lightning_utilities.core import rank_zero

from lightning_piper.session.local_sgd import LocalSGD
from lightning_piper.strategy.checkpoints import consolidate, last_checkpoint
from lightning_piper.strategy.compatibility import grad_norm
from lightning_piper.strategy.spikes import SpikeRecorder
from lightning_piper.strategy.strategy import PiperStrategy
from lightning_piper.strategy.whole_module import whole_module

__all__ = [
    "LocalSGD",
    "PiperStrategy",
    "SpikeRecorder",
    "consolidate",
    "grad_norm",
    "last_checkpoint",
    "whole_module",
]

log = rank_zero.log
import pytorch_lightning.strategies  # noqa: E402

# Importing Lightning has replaced this logger, whose level the user may have set before.
if log.name.startswith("lightning."):
    rank_zero.log = log
pytorch_lightning.strategies.ParallelStrategy.register(PiperStrategy)
for registry in (StrategyRegistry, pytorch_lightning.strategies.StrategyRegistry):
    if PiperStrategy.strategy_name not in registry:
        registry.register(
            PiperStrategy.strategy_name,
            PiperStrategy,
            description="Runs a program of directives, checked against one device. Searches for a program "
            "if none is given",
            directives="auto",
        )
