"""What an operator read or changed."""

from __future__ import annotations

from ratchet.store.records.base import Record


class AuditEntry(Record, frozen=True):
    """Requests of one operator: one change, or equal reads of a quarter of an hour.

    `key_id` is null on a proxy without keys and for the command line, where `actor` is the user's name. `target` are
    the values that name what was read or changed. `status` is 0 for the command line, and null while the outcome is
    unknown: for good if the process died in between.
    """

    id: str
    at: float
    last_at: float
    count: int
    actor: str
    method: str  # CLI for the command line
    route: str  # without the values
    target: dict[str, str]
    key_id: str | None = None
    client: str | None = None  # its address
    status: int | None = None
