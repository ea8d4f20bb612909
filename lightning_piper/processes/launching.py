"""What Lightning's launcher starts: for each further device the script, once more."""

from __future__ import annotations

import os
import sys

from lightning_piper.errors import PiperError

NO_FILES = {"-c": "`python -c`", "-": "the standard input", "": "the standard input"}  # by what stands for the script's name


def check_one_process(devices: int, nodes: int) -> None:
    """For `transport="local"`.

    Raises:
        PiperError: the Trainer is to have more.
    """
    if devices * nodes != 1:
        raise PiperError(
            f"PiperStrategy(transport='local') runs all logical devices in one process; found Trainer(devices={devices}, "
            f"num_nodes={nodes}), give devices=1"
        )


def check_script() -> None:
    """Can this process's program be started again, as Lightning's launcher does it: by its file, or by its module's name?

    Raises:
        PiperError: it came from elsewhere.
    """
    name = sys.argv[0] if sys.argv else ""
    if hasattr(sys, "ps1"):
        found = "a notebook or an interactive session"
    elif (spec := getattr(sys.modules["__main__"], "__spec__", None)) is not None:
        if spec.name != "__main__":  # python -m name
            return
        found = f"the archive or folder {name!r}"
    elif name in NO_FILES:
        found = NO_FILES[name]
    elif "hydra" in sys.modules or os.path.isfile(script := os.path.abspath(name)):  # hydra changes the folder, and knows it
        return
    else:
        found = f"{script!r}, which is not there (has the current folder, or sys.argv[0], been changed?)"
    raise PiperError(
        "PiperStrategy(transport='process') runs the script once for each device, and cannot do so with a program that comes from "
        f"{found}; use transport='local' with devices=1 here, or run a script: python train.py, or python -m package.train"
    )
