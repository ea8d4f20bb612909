"""Verification: the static check, the reference interpreter, and equivalence by execution."""

from lightning_piper.verify.equivalence import verify_step
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.report import Report
from lightning_piper.verify.static_check import check

__all__ = ["Report", "check", "interpret", "verify_step"]
