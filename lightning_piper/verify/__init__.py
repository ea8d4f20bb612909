"""Verification: the static check, the reference interpreter, and equivalence by execution."""

from lightning_piper.verify.equivalence import Report, verify, verify_step
from lightning_piper.verify.interpreter import interpret
from lightning_piper.verify.static import check

__all__ = ["Report", "check", "interpret", "verify", "verify_step"]
