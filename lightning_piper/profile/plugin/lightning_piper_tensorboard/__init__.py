"""The PIPER tab of TensorBoard.

TensorBoard imports this package when it starts, so it is one of its own: importing `lightning_piper` would import torch and
lightning. And it imports nothing that could fail: an error here would keep TensorBoard from starting.
"""

from __future__ import annotations

import logging
from typing import Any

from tensorboard.plugins.base_plugin import TBLoader


class PiperLoader(TBLoader):  # type: ignore[misc]
    """What the entry point names."""

    def load(self, context: Any) -> Any:
        """The tab; None, with a warning in TensorBoard's log, if it cannot be made."""
        try:
            from .tab import PiperTab

            return PiperTab(context)
        except Exception as error:
            logging.getLogger(__name__).warning("the PIPER tab is not available: %s: %s", type(error).__name__, error)
            return None
