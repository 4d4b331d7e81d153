"""Which tasks are set aside for evaluation: they are served and recorded like any, and nothing is learnt from them.

A fixed share of all hashes of a task's key (`trainer.release.held_out_share`). Whatever gives records to a learner asks
here: grouping, warm starts and exports. Pure.
"""

from __future__ import annotations

from hashlib import blake2b

from ratchet.store.reasons import DropReason
from ratchet.store.records import Trajectory


def is_held_out(group_key: str, share: float) -> bool:
    """Return whether a task is set aside; a larger share keeps those of a smaller."""
    return int.from_bytes(blake2b(group_key.encode(), digest_size=8).digest()) / 2**64 < share


def is_set_aside(run: Trajectory, share: float) -> bool:
    """Return whether a trajectory is of a task that is set aside, or was when it was grouped."""
    return run.drop_reason == DropReason.HELD_OUT or is_held_out(run.group_key, share)
