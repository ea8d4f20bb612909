"""Makes the process keep the memory that a step frees, because the next step allocates as much again.

The GNU C library returns the top of its heap to the system when enough of it is free, and maps tensors of
more than 32 MiB one by one. So a step may find that pages of the previous step are gone, and the system
clears each page again at its first use. In steps of 700 ms on a 2-core CPU, this was done for 0 to 20,000
pages, depending on the addresses, and took up to 7 % of the step's time. In a step with a tensor of 60 MB, it
took half of the step's time. A training process needs this memory until the end. CUDA's allocator also keeps
freed memory.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # names of <malloc.h>
LARGE = 1 << 30  # bytes; larger blocks are mapped one by one and returned to the system when freed
USUAL = 32 << 20  # bytes; by itself, the library chooses a size up to this one instead of `LARGE`
FOREVER = -1  # number of free bytes at the top of the heap that the library keeps: all


def keep_freed_memory() -> bool:
    """Keep the memory that this process frees from now on.

    Returns:
        Whether the memory is kept. It is not kept if another C library manages it, if the user has configured
        malloc, or if the address space is limited, because threads and shared memory also need address space.
    """
    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY and _set(LARGE, FOREVER)


def trim() -> None:
    """Return the memory that is free now to the system. Called before the first step, because steps need less
    memory, or blocks of other sizes, than the work before them."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def give_freed_memory_back() -> None:
    """Return the memory that is free now to the system, and undo `keep_freed_memory`."""
    if _set(USUAL, 2 * USUAL):
        trim()


def _set(large: int, most: int) -> bool:
    """Set the size from which blocks are mapped one by one, and how many bytes may be free at the top of the
    heap. Return whether both were set."""
    if platform.libc_ver()[0] != "glibc" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(MMAP_THRESHOLD, large) and mallopt(TRIM_THRESHOLD, most))
