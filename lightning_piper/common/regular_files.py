"""Open files in folders that another process may have written, where a name may be a link or a device."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from lightning_piper.errors import PiperError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading bytes. A link is not followed, but the folder's path may contain links.

    Raises:
        PiperError: The path is a link, a folder, a FIFO or a device.
        OSError: The file does not exist, or cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise PiperError(
            f"{path} is a link, which Piper does not follow here. Replace it by the file itself [PIPER-R003]"
        ) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise PiperError(
            f"{path} is not a regular file, so Piper does not read it. Give the path of a file [PIPER-R003]"
        )
    return os.fdopen(handle, "rb")
