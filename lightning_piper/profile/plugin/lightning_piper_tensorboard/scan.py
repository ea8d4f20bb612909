"""Which recordings there are under the log directories, and which of their files may be served."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

FOLDER = "piper"
_FILE = re.compile(r"plan(_\d+)?\.json|step_\d+\.json")

Files = dict[str, Path]  # by name


def scan(roots: Mapping[str, Path]) -> dict[str, Files]:
    """Run -> its plan and step files. A run is a folder with a folder `piper`; its name is its path in the log directory.

    A link that leads out of the log directory is not followed, so nothing outside can be asked for.

    Args:
        roots: prefix of the run's names -> log directory.
    """
    runs: dict[str, Files] = {}
    for prefix, root in roots.items():
        inside = root.resolve()
        for folder, names, _ in os.walk(inside):
            if FOLDER not in names:
                continue
            names.remove(FOLDER)
            files = _files(Path(folder) / FOLDER, inside)
            if any(name.startswith("step_") for name in files):
                relative = Path(folder).relative_to(inside).as_posix()
                runs["/".join(part for part in (prefix, relative) if part not in ("", ".")) or "."] = files
    return dict(sorted(runs.items()))


def _files(folder: Path, inside: Path) -> Files:
    try:
        found = sorted(folder.iterdir())
    except OSError:  # deleted since
        return {}
    return {path.name: path for path in found if _FILE.fullmatch(path.name) and path.is_file() and _is_within(path, inside)}


def _is_within(path: Path, root: Path) -> bool:
    return path.resolve().is_relative_to(root)


def roots_of(logdir: str | None, spec: str | None) -> dict[str, Path]:
    """Prefix -> directory, from TensorBoard's `--logdir` or `--logdir_spec` (`name:path,name:path`)."""
    if logdir:
        return {"": Path(logdir).expanduser()}
    roots: dict[str, Path] = {}
    for part in (spec or "").split(","):
        name, colon, path = part.partition(":")
        if colon and "/" not in name:
            roots[name] = Path(path).expanduser()
        elif part:
            roots[""] = Path(part).expanduser()
    return roots


def number_of(name: str) -> int:
    """Of a step file."""
    return int(name.removeprefix("step_").removesuffix(".json"))
