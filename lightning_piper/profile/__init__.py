"""What really happened: records steps of a training, next to what the plan says.

PiperStrategy(program, profile=Schedule(wait=5, active=3))      # or Trainer(profiler=PiperProfiler(active=3))

Under the trainer's log directory: `piper/plan.json`, `piper/step_*.json` (see `files`), which the PIPER tab of TensorBoard shows,
and `piper/trace_*.json` for Perfetto. Figures, pictures and texts are where the trainer logs.
"""

from lightning_piper.profile.profiler import PiperProfiler, recording_of
from lightning_piper.profile.recording import Recording
from lightning_piper.profile.schedule import Schedule, schedule_of

__all__ = ["PiperProfiler", "Recording", "Schedule", "recording_of", "schedule_of"]
