"""Memory of a file, mapped by the system's own calls.

Python's `mmap` keeps a descriptor for each mapping, of which a process may have few (1024, often), and cannot put a mapping in the
place of another one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from functools import cache

_FIXED = 0x10  # of Linux's mman.h: in the place of what is there
_FAILED = ctypes.c_void_p(-1).value


@cache
def _system() -> ctypes.CDLL:
    """Not where the package is imported, for it is there on Linux alone."""
    found = ctypes.CDLL(None, use_errno=True)
    found.mmap.restype = ctypes.c_void_p
    found.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    found.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    found.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return found


class Mapped:
    """A range of a file, mapped for as long as `room`, or a tensor made of it, is there.

    Attributes:
        room: a buffer of its bytes.

    Raises:
        OSError: there is no address space for it.
    """

    def __init__(self, file: int, begin: int, size: int) -> None:
        self._file, self._begin, self._size = file, begin, size
        self.address = self._map(None, mmap.MAP_SHARED)
        self.room = (ctypes.c_ubyte * size).from_address(self.address)
        weakref.finalize(self.room, _system().munmap, self.address, size).atexit = False  # tensors may outlive Python's end

    def part(self) -> None:
        """From now on what is written there is this process's alone, and not written to the file."""
        self._map(self.address, mmap.MAP_PRIVATE | _FIXED)

    def remove(self) -> None:
        """Let the system have its pages. They are zeros when they are used again.

        Raises:
            OSError: it does not take them.
        """
        if _system().madvise(self.address, self._size, mmap.MADV_REMOVE):
            raise _error()

    def _map(self, address: int | None, flags: int) -> int:
        found = _system().mmap(address, self._size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._file, self._begin)
        if found == _FAILED:
            raise _error()
        return int(found)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
