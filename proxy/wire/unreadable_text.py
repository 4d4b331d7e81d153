"""Names the field of a request body whose text is not Unicode: half of a surrogate pair, or bytes that are not UTF-8.

Clients that cut a text between two UTF-16 units send the first. Only bodies that could not be read come here: they are
parsed again with Python's parser, which accepts such text. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ratchet.proxy.errors import BadRequest

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def unreadable_body(body: bytes, error: Exception) -> BadRequest:
    """Return the error for a body that could not be read as a JSON object, because of `error`."""
    may_be_text = isinstance(error, UnicodeDecodeError) or _SURROGATE.search(body)
    path = _path_of_broken_text(body) if may_be_text else None
    if path is None:
        return BadRequest(f"the body is not a JSON object: {error}")
    half = "half of a UTF-16 surrogate pair (such as \\ud83d), or bytes that are not UTF-8"
    return BadRequest(f"{path}: its text is not Unicode: {half}", param=path.partition(".")[0])


def _path_of_broken_text(body: bytes) -> str | None:
    """Return the first field, of a list its item, whose text is not Unicode; None if the body is no JSON object."""
    try:
        fields = json.loads(body.decode("utf-8", "surrogateescape"))
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if not _is_unicode(value):
                items = enumerate(value) if isinstance(value, list) else ()
                return next((f"{name}.{place}" for place, item in items if not _is_unicode(item)), str(name))
    except (ValueError, RecursionError):
        pass
    return None


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
