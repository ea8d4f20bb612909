"""Read files that users write. Piper reads a file whole, after a check that it is a regular file and not too
large."""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_piper.common.limits import FILE, kind_of, shown


class UnsuitableFile(ValueError):
    """An error for a path that is not a file which Piper can read. Its message says what to give."""


def name_of(path: object) -> str:
    """Return a path for a message."""
    return shown(str(path) if isinstance(path, str | PathLike) else path)


def read_text(path: str | PathLike[str], limit: int = FILE) -> str:
    """Return the content of a UTF-8 file, with or without a byte order mark.

    Raises:
        OSError: The file does not exist, or cannot be read.
        UnsuitableFile: The path is not a path of a regular file, or the file has more than `limit` bytes.
        UnicodeDecodeError: The file is not UTF-8.
    """
    if not isinstance(path, str | PathLike):
        raise UnsuitableFile(f"{kind_of(path)} is not a path. Give a string or a Path")
    found = Path(path).stat()
    if not stat.S_ISREG(found.st_mode):
        raise UnsuitableFile(
            f"it is {'a directory' if stat.S_ISDIR(found.st_mode) else 'a pipe or a device'}. Give a file"
        )
    if found.st_size > limit:
        raise UnsuitableFile(f"it has {found.st_size} bytes. Give a file of at most {limit} bytes")
    return Path(path).read_bytes().decode("utf-8-sig")


def read_json(path: str | PathLike[str], limit: int = FILE) -> Any:
    """Return the content of a JSON file: plain JSON without NaN, infinity, and duplicate keys in an object.

    Raises:
        OSError, ValueError: As `read_text` does. Also ValueError if `parse_json` rejects the content.
    """
    return parse_json(read_text(path, limit))


def explained(error: OSError | ValueError) -> str:
    """Return an error of `read_json` as a text with a fix. If the error does not have a fix, add one."""
    if isinstance(error, OSError):
        return f"{error}. Give the path of a file that this process may read"
    if isinstance(error, UnsuitableFile):
        return str(error)
    return f"{error}. {'Write the file in UTF-8' if isinstance(error, UnicodeDecodeError) else 'Correct the file'}"


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; see `read_json`.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, has NaN or infinity, or repeats a key in an
            object.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shown(twice)} is given twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
