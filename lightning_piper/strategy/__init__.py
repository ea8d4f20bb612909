"""`PiperStrategy`: plans of lightning_piper under Lightning's Trainer.

Importing this makes the strategy known to Lightning as `Trainer(strategy="piper")`.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_piper.strategy.checkpoints import consolidate
from lightning_piper.strategy.compatibility import grad_norm
from lightning_piper.strategy.strategy import PiperStrategy

__all__ = ["PiperStrategy", "consolidate", "grad_norm"]

if PiperStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        PiperStrategy.strategy_name,
        PiperStrategy,
        description="A program of directives, checked against what one device computes",
    )
