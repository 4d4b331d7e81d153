"""Ids that sort by time: a prefix, 48 bits of milliseconds and 80 random bits, in Crockford's base 32.

Ids of the same millisecond are distinct but unordered. Nothing is derived from the host or process. The random part is
not secret: it comes from Python's generator, which reseeds itself after a fork.
"""

from __future__ import annotations

import random
import time

ROLLOUT, RESAMPLE = "roll", "shad"  # prefixes: these are also the ids of the trajectories that were planned
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [first + second for first in _ALPHABET for second in _ALPHABET]  # ten bits each
_SHIFTS = tuple(range(120, -1, -10))


def moment(made_id: str) -> float:
    """Return the creation time of an id (Unix seconds, with milliseconds). Raises ValueError for a malformed id."""
    random_part = made_id.rpartition("_")[2]
    number = 0
    for character in random_part:
        number = number << 5 | _ALPHABET.index(character)
    return (number >> 80) / 1000


def is_planned(trajectory_id: str | None) -> bool:
    """Return whether a trajectory may be that of a rollout or resample, by its id."""
    return trajectory_id is not None and trajectory_id.startswith((f"{ROLLOUT}_", f"{RESAMPLE}_"))


def first_id(prefix: str, at: float) -> str:
    """Return the smallest id that could be made at that time (Unix seconds)."""
    return _encode(prefix, int(at * 1000) << 80)


def new_id(prefix: str) -> str:
    """Return `prefix_` + 26 characters, e.g. `call_06f3...`; ids of later milliseconds sort after earlier ones."""
    return _encode(prefix, (time.time_ns() // 1_000_000) << 80 | random.getrandbits(80))


def _encode(prefix: str, number: int) -> str:
    return f"{prefix}_{''.join([_PAIRS[number >> shift & 1023] for shift in _SHIFTS])}"


# Ownership of trajectories: a trajectory belongs to the API key of its first call, and no other key writes to it.

UNCHECKED = "open:"  # prefix of key ids that were not checked, because authentication was off


def may_share_trajectory(one: str | None, other: str | None) -> bool:
    """Return whether calls with these key ids may share a trajectory: equal ids, or both unchecked."""
    return one == other or not (_is_checked(one) or _is_checked(other))


def owner(key_id: str | None) -> str:
    """Return the owner of what this key sends: the key if it was checked, else "" (everyone)."""
    return key_id if key_id is not None and _is_checked(key_id) else ""


def _is_checked(key_id: str | None) -> bool:
    return key_id is not None and not key_id.startswith(UNCHECKED)
