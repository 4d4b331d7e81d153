"""The store's errors, and how messages say what to install."""

from __future__ import annotations

from ratchet.errors import RatchetError

# How to install Ratchet, an extra or a plug-in of it. The packages are on no index: every message names a clone.


def install_hint(extra: str | None = None) -> str:
    """Return the clause of an error message that says how to install Ratchet, or one of its extras."""
    target = f"'.[{extra}]'" if extra else "."
    return f"from a clone of Ratchet: pip install {target}"


def plugin_hint(folder: str) -> str:
    """Return the clause that says how to install one of Ratchet's own plug-ins: a folder of plugins/."""
    return f"install ratchet-rl-{folder}, from a clone of Ratchet: pip install ./plugins/{folder}"


class StoreError(RatchetError):
    """Base of the store's errors."""


class SchemaMismatch(StoreError):
    """The database was made by another version of Ratchet; the message names the remedy."""


class StoreNotFound(StoreError):
    """There is no database file where one was expected."""


class StoreUnavailable(StoreError):
    """The database cannot be reached or is locked; nothing was written."""


class StoreDamaged(StoreUnavailable):
    """The database's files are not what it wrote; the message names the remedy."""


class RecordNotFound(StoreError):
    """No record has the given id."""


class RecordDamaged(StoreError):
    """A stored value is not what was written. `problem`: which value, and what is wrong with it.

    `trajectory_id`: the trajectory that cannot be read because of it; empty if that is not known.
    """

    def __init__(self, problem: str, trajectory_id: str = "") -> None:
        super().__init__(f"{problem}: `ratchet store verify` names the row and what to do")
        self.problem = problem
        self.trajectory_id = trajectory_id


class InvalidTransition(StoreError):
    """The transition table beside the state's enum has no such step."""


class InvalidRecord(StoreError):
    """A value cannot be stored; the message names the field and the remedy."""
