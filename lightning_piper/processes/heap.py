"""Memory that a step has freed stays with the process, for the next step asks for as much again.

The GNU C library gives the top of its heap back to the system when enough of it is free, and gets tensors of more than 32 MiB from
the system one by one. So a step may find pages gone that the step before had, and each of them is cleared again when it is touched:
between none and 20,000 of them in a step of 700 ms, up to 7 % of its time, as the addresses happen to lie; with a table of 60 MB,
half of its time. A process that trains has use for them until the end. (CUDA's allocator keeps what is freed, too.)
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of <malloc.h>
LARGE = 1 << 30  # bytes: what is larger is got from the system one by one, and goes back there
USUAL = 32 << 20  # the same, as the library sets it by itself in the end
FOREVER = -1


def keep_freed_memory() -> bool:
    """Of this process, from now on.

    Returns:
        Whether it is kept: not where the memory is another library's, the user has set how it is managed, or address space is
        limited, which threads and memory that is shared need, too.
    """
    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY and _set(LARGE, FOREVER)


def trim() -> None:
    """Give back what is free now: steps need less, or in other pieces, than what was before them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def give_freed_memory_back() -> None:
    """To the system: what is free now, and what will be, as it is without `keep_freed_memory`."""
    if _set(USUAL, 2 * USUAL):
        trim()


def _set(large: int, most: int) -> bool:
    """From how many bytes on memory is got one by one, and how many may be free at the top of the heap."""
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, large) and mallopt(TRIM_THRESHOLD, most))
