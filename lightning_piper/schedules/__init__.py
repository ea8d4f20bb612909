"""Schedule builders: functions that return lists of directives, such as `gpipe(4, 8)`.

To write a builder of your own, return `program_of` the actions of each rank. To let a search choose your
builder, decorate it with `searched`.
"""

# ruff: noqa: I001  the order of these imports is the order in which a search tries the schedules
from lightning_piper.schedules.actions import Action, one_by_one, program_of
from lightning_piper.schedules.pipeline import gpipe, one_f_one_b, zb_h2, zero_bubble
from lightning_piper.schedules.interleaving import interleaved_one_f_one_b
from lightning_piper.schedules.zbv import zbv
from lightning_piper.schedules.vshape import v_half, v_min
from lightning_piper.schedules.dualpipe import dualpipe, dualpipev
from lightning_piper.schedules.csv_files import from_csv, to_csv
from lightning_piper.schedules.fitted_schedule import fitted
from lightning_piper.schedules.searched_schedules import searched
from lightning_piper.schedules.timing import StageCosts

__all__ = [
    "Action",
    "StageCosts",
    "dualpipe",
    "dualpipev",
    "fitted",
    "from_csv",
    "gpipe",
    "interleaved_one_f_one_b",
    "one_by_one",
    "one_f_one_b",
    "program_of",
    "searched",
    "to_csv",
    "v_half",
    "v_min",
    "zb_h2",
    "zbv",
    "zero_bubble",
]
