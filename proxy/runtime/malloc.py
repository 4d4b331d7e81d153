"""Has glibc return large blocks to the system when they are freed.

By default glibc's threshold for separate mappings grows with use. Large bodies then come from the heap, where small
long-lived objects behind them keep the memory from being returned: megabytes per large body. With this, 24 bodies of
7 MiB leave less than 16 MiB behind (tests/proxy/test_token_contexts.py), half of what they leave without. Smaller
blocks stay on the heap, since a mapping costs page faults. Other C libraries are not affected.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's parameters, from malloc.h
_LARGE_BLOCK = 256 * 1024
_HEAP_RESERVE = 2**20  # bytes kept at the heap's end: calls need them again at once


def return_large_blocks() -> None:
    """Set the thresholds for this process."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE_BLOCK)
        mallopt(_TRIM_THRESHOLD, _HEAP_RESERVE)
