"""`PiperStrategy`: plans of lightning_piper under Lightning's Trainer.

Importing this package registers the strategy as `Trainer(strategy="piper")`, also in `pytorch_lightning`,
which has a registry and classes separate from `lightning`. It imports neither of them: if one is imported
later, its registry gets the strategy then.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_piper.common.lazy_imports import make_lazy, when_imported

if TYPE_CHECKING:
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

make_lazy(
    __name__,
    {
        "lightning_piper.session.local_sgd": ["LocalSGD"],
        "lightning_piper.strategy.checkpoints": ["consolidate", "last_checkpoint"],
        "lightning_piper.strategy.compatibility": ["grad_norm"],
        "lightning_piper.strategy.spikes": ["SpikeRecorder"],
        "lightning_piper.strategy.strategy": ["PiperStrategy"],
        "lightning_piper.strategy.whole_module": ["whole_module"],
    },
)


def _named(**arguments: Any) -> PiperStrategy:
    from lightning_piper.strategy.strategy import PiperStrategy

    return PiperStrategy(**arguments)


def _register_name(strategies: ModuleType) -> None:
    """Register the name in Lightning's module `strategies`, of either package."""
    if "piper" not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register(
            "piper",
            _named,
            description="Runs a program of directives, checked against one device. Searches for a program "
            "if none is given",
            directives="auto",
        )


def _register_class(own: ModuleType) -> None:
    """Make the class a strategy of `pytorch_lightning`; it inherits from a class of `lightning`."""
    when_imported(
        "pytorch_lightning.strategies", lambda other: other.ParallelStrategy.register(own.PiperStrategy)
    )


def _import_classes(cli: ModuleType) -> None:
    """Import the classes that a `LightningCLI` knows by their short names, because it knows imported classes."""
    import lightning_piper.profile
    import lightning_piper.strategy.spikes
    import lightning_piper.strategy.strategy  # noqa: F401


for _package in ("lightning.pytorch", "pytorch_lightning"):
    when_imported(f"{_package}.strategies", _register_name)
    when_imported(f"{_package}.cli", _import_classes)
when_imported(f"{__name__}.strategy", _register_class)
