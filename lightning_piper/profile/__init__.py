"""Record real steps of a training run, to compare them with the plan::

    PiperStrategy(program, profile=Schedule(wait=5, active=3))
    Trainer(profiler=PiperProfiler(wait=5, active=3))  # the same for a strategy without `profile`

The files are in the trainer's log directory. The PIPER tab of TensorBoard shows `piper/plan.json` and
`piper/step_*.json` (see `files`). `piper/trace_*.json` is for Perfetto. Figures, images and texts go to the
trainer's loggers.
"""

from lightning_piper.profile.profiler import PiperProfiler, recording_of, requested_by
from lightning_piper.profile.recording import Recording
from lightning_piper.profile.schedule import Schedule, schedule_of

__all__ = ["PiperProfiler", "Recording", "Schedule", "recording_of", "requested_by", "schedule_of"]
