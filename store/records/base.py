"""The base class of every record that leaves the store."""

from __future__ import annotations

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen record; `msgspec.structs.replace` makes changed copies."""
