"""Memory of a file, mapped by system calls.

Python's `mmap` keeps a file descriptor for each mapping, and a process may have few descriptors (often 1024).
`mmap` also cannot replace a mapping at the same address.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

_FIXED = 0x10  # MAP_FIXED in Linux's mman.h: replaces the mapping at this address
_FAILED = ctypes.c_void_p(-1).value


@cache
def _system() -> ctypes.CDLL:
    """Return the C library. It is loaded at the first call and not at import, because this works on Linux
    only."""
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


class Mapped:
    """A range of a file that is mapped into this process's memory. The system unmaps the range when `room`
    and all tensors made from `room` are gone.

    Args:
        file: The file's descriptor, open for reading and writing.
        begin, size: The range in bytes. `begin` must be a multiple of the page size.

    Attributes:
        address: The address of the first byte.
        `room`: The bytes of the range, as a buffer (`torch.frombuffer`).

    Raises:
        OSError: The system cannot map the range.
    """

    def __init__(self, file: int, begin: int, size: int) -> None:
        self._file, self._begin, self._size = file, begin, size
        self.address = self._map(None, mmap.MAP_SHARED)
        self.room = (ctypes.c_ubyte * size).from_address(self.address)
        # Tensors may outlive the interpreter.
        weakref.finalize(self.room, _system().munmap, self.address, size).atexit = False

    def make_private(self) -> None:
        """Make later writes private to this process (copy on write), so that they do not reach the file."""
        self._map(self.address, mmap.MAP_PRIVATE | _FIXED)

    def remove(self) -> None:
        """Return the range's pages to the system. Then the range reads as zeros.

        Raises:
            OSError: The system does not support this.
        """
        if _system().madvise(self.address, self._size, mmap.MADV_REMOVE):
            raise _error()

    def _map(self, address: int | None, flags: int) -> int:
        found = _system().mmap(
            address, self._size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._file, self._begin
        )
        if found == _FAILED:
            raise _error()
        return int(found)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
