"""`python -m tests.wheel`: build the package as a release does, install the wheel, and run it outside of the
repository.

The wheel is built from a source archive of the files that git tracks. A new virtual environment gets the wheel alone:
the dependencies come from the environment of the running Python, and there is no network.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = {  # folder of the repository -> package
    "lightning_piper/profile/plugin/lightning_piper_tensorboard": "lightning_piper_tensorboard",
    "lightning_piper": "lightning_piper",
    "lightning_piper_cli": "lightning_piper_cli",
}
# The installed Python runs this. It prints the files of the packages.
LOADED = """
from importlib.metadata import entry_points
import lightning_piper_cli, lightning_piper_tensorboard
from lightning_piper_tensorboard import tab

[point] = [point for point in entry_points(group="tensorboard_plugins") if point.name == "piper"]
assert point.load() is lightning_piper_tensorboard.PiperLoader
print(lightning_piper_cli.__file__, lightning_piper_tensorboard.__file__, tab.__file__, sep="\\n")
"""
# Comes after the README's example: the wheel has the files with the figures of hardware.
AFTER = """
from lightning_piper.simulate.hardware import Hardware

Hardware.read("h100-sxm")
print(piper.__file__)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder))
        if problems := differences(tracked(), zipfile.ZipFile(wheel).namelist()):
            sys.exit("\n".join(problems))
        python = install(wheel, Path(folder) / "environment")
        run(python, Path(folder))
    print("the wheel has all files, and the README's example runs from it")


def build(folder: Path) -> Path:
    """Build the wheel in `folder`, from a source archive, as `python -m build` does."""
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    call([sys.executable, "-c", archive], source)
    [built] = folder.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    call([*pip, "--wheel-dir", str(folder), str(built)], folder)
    [wheel] = folder.glob("*.whl")
    return wheel


def tracked() -> list[str]:
    """Return the files that git tracks, except deleted files."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in names.stdout.split("\0") if name and (ROOT / name).is_file()]


def differences(names: Iterable[str], packed: Iterable[str]) -> list[str]:
    """Return how the files of a wheel differ from the packages' files.

    Args:
        names: The files that git tracks.
        packed: The files of the wheel.
    """
    wanted = {packaged for name in names if (packaged := _packaged(name)) is not None}
    found = {name for name in packed if ".dist-info/" not in name}
    lacks = [
        f"the wheel does not have {name}. Add it to package-data in pyproject.toml" for name in wanted - found
    ]
    return sorted(lacks) + sorted(
        f"the wheel has {name}, which is not part of a package" for name in found - wanted
    )


def _packaged(name: str) -> str | None:
    """Return the name that a file of the repository has in the wheel. None if it is not a file of a package."""
    for folder, package in PACKAGES.items():
        if name.startswith(f"{folder}/"):
            return package + name[len(folder) :]
    return None


def install(wheel: Path, environment: Path) -> Path:
    """Install the wheel into a new environment, and return its Python."""
    call([sys.executable, "-m", "venv", "--without-pip", str(environment)], wheel.parent)
    python = environment / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    call([*pip, str(wheel)], wheel.parent)
    [packages] = environment.glob("lib/python*/site-packages")
    # Python searches these paths after the environment's own, and does not read their `.pth` files. So an editable
    # installation of the repository there has no effect.
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    return python


def run(python: Path, folder: Path) -> None:
    """Run the console script, the PIPER tab and the README's example outside of the repository."""
    work = folder / "work"
    work.mkdir()
    assert call([str(python.parent / "lightning-piper"), "--version"], work).startswith("lightning-piper ")
    (work / "example.py").write_text(example() + AFTER, encoding="utf-8")
    for command, lines in (["-c", LOADED], 3), (["example.py"], 2):
        out = call([str(python), *command], work)
        files = [line for line in out.splitlines() if line.endswith(".py")]
        assert len(files) == lines, out
        elsewhere = [name for name in files if not Path(name).is_relative_to(python.parents[1])]
        assert not elsewhere, f"imported from {elsewhere}, not from the wheel"


def example() -> str:
    """Return the README's example."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^## Example$.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None, "README.md does not have an example"
    return found[1]


def call(command: Sequence[str], folder: Path) -> str:
    """Run a command, and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
