"""Why a write to the journal failed, and what to do about it."""

from __future__ import annotations

import errno


class JournalFull(OSError):
    """The segments hold `max_journal_bytes`."""


class SegmentGone(OSError):
    """The current segment was moved or deleted."""


def remedy(error: OSError) -> str:
    """Return what to do about a failed write."""
    if isinstance(error, JournalFull):
        return "find out why the store takes no records, or raise max_journal_bytes"
    if isinstance(error, SegmentGone):
        return "leave the files in this folder alone; the next records go to a new segment"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk, or raise the quota"
    return "check that disk and the folder's permissions"
