"""Checks each record of a checkpoint that is one file against its checksum.

`torch.save` writes a zip archive with a CRC-32 of each record: one for the pickled objects, and one for the
data of each tensor. `torch.load` ignores these checksums, so Piper checks the records before it calls
`torch.load`.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

from lightning_piper.checkpoint.folders import BLOCK
from lightning_piper.checkpoint.locations import Location, location_of
from lightning_piper.errors import PiperError
from lightning_piper.processes.world import World, together

START = b"PK\x03\x04"  # first bytes of a zip archive
FOLDER = 0x10  # flag of a folder in a record's attributes
# Exceptions of `zipfile` for a damaged archive.
DAMAGES = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
    struct.error,
    zlib.error,
)


def check_records(path: str | Path, world: World) -> None:
    """Check every record of a checkpoint that is one file, by reading the record once. Collective.

    Processes that see the same file divide the records. Files without checksums pass: files in torch's older
    format, and files saved after `torch.serialization.set_crc32_options(False)`.

    Raises:
        PiperError: On every process, if any process finds a damaged record, or cannot read the file.
    """
    location, doing = location_of(path), f"loading {path}"
    files = together(world, doing, location.identity)
    same_file = [rank for rank, file in enumerate(files) if file == files[world.rank]]
    together(world, doing, lambda: _check(location, same_file.index(world.rank), len(same_file)))


def _check(location: Location, first: int, step: int) -> None:
    """Check the records number `first`, `first + step`, ... A file that is not a zip archive, or does not
    have checksums, passes.

    Raises:
        PiperError: A record, or the archive's table of records, is damaged.
    """
    with location.open_file() as file:
        check_archive(file, str(location), first, step)


def check_archive(file: IO[bytes], name: str, first: int = 0, step: int = 1) -> bool:
    """Check the records number `first`, `first + step`, ... of a file. Return whether the file is a zip archive
    with checksums.

    Args:
        file: The file, at its start.
        name: The name of the file for errors.

    Raises:
        PiperError: The file is empty. Or a record, or the archive's table of records, is damaged.
    """
    start = file.read(len(START))
    if not start:
        raise PiperError(f"{name} is empty. Use another checkpoint [PIPER-K002]")
    if start != START and not zipfile.is_zipfile(file):
        return False
    what = "its table of records"
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            if not any(record.CRC for record in records):
                return False
            for record in records[first::step]:
                what = f"its record {record.filename!r}"
                _read(archive, record)
    except DAMAGES as error:
        raise PiperError(
            f"{name} does not have the content that was saved, in {what} "
            f"({error or type(error).__name__}). Use another checkpoint. If you changed the file "
            "on purpose, write it with torch.save [PIPER-K002]"
        ) from error
    return True


def _read(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record to its end, where a wrong CRC-32 shows. Raise one of `DAMAGES` if the record is
    damaged."""
    if record.compress_type == zipfile.ZIP_STORED and record.file_size != record.compress_size:
        raise zipfile.BadZipFile(
            f"{record.compress_size} bytes are stored, but {record.file_size} were saved"
        )
    # torch would read nothing from a record that is marked as a folder, and leave the tensor uninitialized.
    if record.external_attr & FOLDER and record.file_size:
        raise zipfile.BadZipFile("it is marked as a folder")
    with archive.open(record) as content:
        while content.read(BLOCK):
            pass
