"""The PIPER tab of TensorBoard.

TensorBoard imports this package at its start. It is separate from `lightning_piper`, which would import torch
and lightning. Its imports must not fail, because an error here would keep TensorBoard from starting.
"""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins.base_plugin import TBLoader


class PiperLoader(TBLoader):  # type: ignore[misc]
    """The loader that the entry point names."""

    def load(self, context: Any) -> Any:
        """Return the tab. If this fails, return None with a warning in TensorBoard's log."""
        try:
            from .tab import PiperTab

            return PiperTab(context)
        except Exception as error:
            logging.getLogger(__name__).warning(
                "the PIPER tab is not available: %s: %s", type(error).__name__, error
            )
            return None
