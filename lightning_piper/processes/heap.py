"""Memory that a step has freed stays with the process, for the next step asks for as much again.

The GNU C library gives the top of its heap back to the system when enough of it is free, and gets tensors that are large from the
system one by one. So a step may find pages gone that the step before had, and each of them is cleared again when it is touched:
between none and 20,000 of them in a step of 700 ms, up to 7 % of its time, as the addresses happen to lie. A process that trains
has use for them until the end. (CUDA's allocator keeps what is freed, too.)
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of <malloc.h>
LARGE = 32 << 20  # bytes: what is larger is got one by one, so that holes do not add up; the library itself comes to no more
FOREVER = -1


def keep_freed_memory() -> bool:
    """Of this process, from now on.

    Returns:
        Whether it is kept: not where the memory is another library's, or the user has set how it is managed.
    """
    return _set(FOREVER)


def give_freed_memory_back() -> None:
    """To the system: what is free now, and what will be, as it is without `keep_freed_memory`."""
    if _set(2 * LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def _set(most: int) -> bool:
    """How many bytes may be free at the top of the heap."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, LARGE) and mallopt(TRIM_THRESHOLD, most))
