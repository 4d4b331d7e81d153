"""Ownership of trajectories: a trajectory belongs to the API key of its first call, and no other key writes to it."""

from __future__ import annotations

UNCHECKED = "open:"  # prefix of key ids that were not checked, because authentication was off


def may_share_trajectory(one: str | None, other: str | None) -> bool:
    """Return whether calls with these key ids may share a trajectory: equal ids, or both unchecked."""
    return one == other or not (_is_checked(one) or _is_checked(other))


def owner(key_id: str | None) -> str:
    """Return the owner of what this key sends: the key if it was checked, else "" (everyone)."""
    return key_id if key_id is not None and _is_checked(key_id) else ""


def _is_checked(key_id: str | None) -> bool:
    return key_id is not None and not key_id.startswith(UNCHECKED)
