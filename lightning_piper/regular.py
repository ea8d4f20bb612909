"""Opens files in folders whose content this process did not write: what is there may be a link, or nothing that can be read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from lightning_piper.errors import PiperError


def open_regular(path: Path) -> BinaryIO:
    """A regular file, for reading bytes. Its own name is not followed if it is a link; the folder is the caller's to choose.

    Raises:
        PiperError: it is a link, a folder, a FIFO or a device.
        OSError: it is not there, or cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a FIFO would block
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PiperError(f"{path} is a link, which is not followed here; put the file itself in its place") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PiperError(f"{path} is not a regular file, and is not read")
    return os.fdopen(handle, "rb")
