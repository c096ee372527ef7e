# SPDX-License-Identifier: Apache-2.0
"""Setting of the C library's allocator in API server processes.

Captured rows of many requests arrive in messages of a few MiB per step and are copied into an array per request. By
default, glibc returns such memory to the system soon after it is freed. Each of its pages then costs a page fault when
it is used again, which takes longer than copying the rows.
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST_MMAP_THRESHOLD = 32 << 20
KEPT_BYTES = 512 << 20
"""Most bytes that are kept although they are free: the rows of 256 requests of 2 MiB, which end in one step."""
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Have glibc keep freed memory, up to `KEPT_BYTES`, for the next allocation.

    Returns:
        Whether it was set: not with another C library, or if the operator has set the allocator's variables.
    """
    if any(variable in os.environ for variable in _VARIABLES):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)])
