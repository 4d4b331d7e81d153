"""Whose a trajectory is: the key's that it began with. One key never writes into what is another's."""

from __future__ import annotations

UNCHECKED = "open:"  # begins the id of a key that nobody checked, since the door was open


def may_share_trajectory(one: str | None, other: str | None) -> bool:
    """Return whether calls with these key ids may be of one trajectory.

    They may where they are the same, and where neither key was checked: without keys everyone on the machine is one.
    """
    return one == other or not (_is_checked(one) or _is_checked(other))


def owner(key_id: str | None) -> str:
    """Return under whom what this key said is remembered: itself where it was checked, else everyone, ""."""
    return key_id if key_id is not None and _is_checked(key_id) else ""


def _is_checked(key_id: str | None) -> bool:
    return key_id is not None and not key_id.startswith(UNCHECKED)
