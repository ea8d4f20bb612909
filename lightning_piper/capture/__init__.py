"""`training_step` -> joint forward and backward graph -> passes of regions."""

from lightning_piper.capture._torch import has_gradient_hooks, total_norm_replaced
from lightning_piper.capture.batch import BatchLayout, flatten
from lightning_piper.capture.step import CapturedStep, capture

__all__ = ["BatchLayout", "CapturedStep", "capture", "flatten", "has_gradient_hooks", "total_norm_replaced"]
