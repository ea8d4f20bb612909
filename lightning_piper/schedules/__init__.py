"""Schedule builders: ordinary functions that return lists of directives."""

from lightning_piper.schedules.pipeline import gpipe, one_f_one_b

__all__ = ["gpipe", "one_f_one_b"]
