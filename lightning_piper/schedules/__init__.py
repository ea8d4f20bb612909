"""Schedule builders: functions that return lists of directives."""

from lightning_piper.schedules.csv_files import from_csv, to_csv
from lightning_piper.schedules.dualpipe import dualpipe, dualpipev
from lightning_piper.schedules.fitted_schedule import fitted
from lightning_piper.schedules.interleaving import interleaved_one_f_one_b
from lightning_piper.schedules.pipeline import gpipe, one_f_one_b, zb_h2, zero_bubble
from lightning_piper.schedules.timing import StageCosts
from lightning_piper.schedules.vshape import v_half, v_min
from lightning_piper.schedules.zbv import zbv

__all__ = [
    "StageCosts",
    "dualpipe",
    "dualpipev",
    "fitted",
    "from_csv",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "to_csv",
    "v_half",
    "v_min",
    "zb_h2",
    "zbv",
    "zero_bubble",
]
