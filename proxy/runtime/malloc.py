"""Memory of large bodies goes back to the system when they end.

glibc lets the first large blocks be mapped by themselves, then takes others of their size from its heap, where small
things that live longer come to lie behind them: each large body could leave megabytes that nobody uses and nobody gets.
Here a block of `_LARGE` bytes or more always has a mapping of its own. Smaller ones are left to the heap: a mapping
costs page faults. Another C library than glibc is left as it is.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt's names for them, from malloc.h
_LARGE = 256 * 1024
_KEPT = 2**20  # bytes that stay at the heap's end, since calls need them at once again


def give_back() -> None:
    """From now on have large blocks given back as soon as they are free."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGE)
        mallopt(_TRIM_THRESHOLD, _KEPT)
