"""The operator API's successful responses: records and pages as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi.responses import Response

from ratchet.store.records import Record


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def page_response(rows: list[dict[str, Any]], limit: int | None = None) -> Response:
    """Return a list; `next` is the value of `before` for the next page, null on the last one."""
    return json_response({"data": rows, "next": rows[-1]["id"] if limit and len(rows) == limit else None})


def plain(record: Record) -> dict[str, Any]:
    """Return the fields of a record."""
    return msgspec.structs.asdict(record)
