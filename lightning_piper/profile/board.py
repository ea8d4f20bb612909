"""The part of a recording that TensorBoard shows without a plugin: scalars, two images and two texts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_piper.common.lightning_packages import is_a
from lightning_piper.simulate import Simulation


def scalars(step: Mapping[str, Any]) -> dict[str, float]:
    """Return name in the log -> figure, such as `{"piper/step_time": 0.012, ...}`. `step` is the content of a
    step file.

    Unknown figures are left out. The peak memory of a device includes parameters and optimizer states.
    """
    figures = step["step"]
    found = {
        "piper/step_time": figures["step_time"],
        "piper/bubble_fraction": figures["bubble_fraction"],
        "piper/exposed_communication_fraction": figures["exposed_fraction"],
    }
    if step["batch_time"]:
        found["piper/batch_time"] = step["batch_time"]
        if step["samples_per_second"]:
            found["piper/samples_per_second"] = step["samples_per_second"]
        if step["tokens_per_second"]:
            found["piper/tokens_per_second"] = step["tokens_per_second"]
    found |= {f"piper/bytes_moved/{kind}": n for kind, n in step["bytes_moved"].items()}
    for device, f in figures["devices"].items():
        found[f"piper/peak_memory/device_{device}"] = f["peak_bytes"] + sum(step["fixed"][device].values())
    return found


class Board:
    """A writer to the trainer's loggers. `Recording` makes one on rank 0.

    Scalars go to all loggers. Images and texts go to the first TensorBoard logger. Without a TensorBoard
    logger, the writer makes TensorBoard files in `folder`, which get scalars, images and texts.
    """

    def __init__(self, trainer: pl.Trainer, folder: Path) -> None:
        # Imported only if a run records, because the import takes a second.
        from torch.utils.tensorboard import SummaryWriter

        self._loggers = trainer.loggers
        own = next((logger for logger in self._loggers if is_a(logger, TensorBoardLogger)), None)
        self._writer: SummaryWriter | None = None
        self._experiment = own.experiment if own is not None else None
        if own is None:
            self._writer = self._experiment = SummaryWriter(str(folder))

    def step(self, step: Mapping[str, Any]) -> None:
        """Log the figures of a recorded step. `step` is the content of its step file."""
        self.values(scalars(step), step["global_step"])

    def values(self, values: Mapping[str, float], at: int) -> None:
        """Log figures by name, at a global step."""
        for logger in self._loggers:
            logger.log_metrics(dict(values), at)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, at)

    def schedule(self, planned: Simulation, measured: Simulation, at: int) -> None:
        """Log the planned and the measured schedule as images, at a global step."""
        from lightning_piper.profile.picture import picture

        assert self._experiment is not None
        for name, simulation in (("planned", planned), ("measured", measured)):
            self._experiment.add_image(
                f"piper/schedule/{name}", picture(simulation, name), at, dataformats="HWC"
            )

    def texts(self, plan: Mapping[str, Any], at: int) -> None:
        """Log the directives and the verification report, at a global step. `plan` is the content of a plan
        file."""
        assert self._experiment is not None
        listed = "\n".join(f"    {i} {directive}" for i, directive in enumerate(plan["directives"]))
        self._experiment.add_text("piper/directives", listed, at)
        report = plan["verification"] or "not verified by execution. See PiperStrategy(verify=...)"
        self._experiment.add_text(
            "piper/verification", "\n".join(f"    {line}" for line in report.splitlines()), at
        )

    def close(self) -> None:
        """Close the TensorBoard files in `folder`, or flush the TensorBoard logger, which the trainer
        closes."""
        if self._writer is not None:
            self._writer.close()
        elif self._experiment is not None:
            self._experiment.flush()
