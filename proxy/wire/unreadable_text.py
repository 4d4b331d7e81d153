"""Names the field of a request body whose text is not Unicode: half of a surrogate pair, or bytes that are not UTF-8.

Clients that cut a text between two UTF-16 units send the first. Only bodies that could not be read come here: they are
parsed again with Python's parser, which accepts such text. Pure.
"""

from __future__ import annotations

import json
import re
from typing import Any

from ratchet.proxy.errors import BadRequest

_MAX_BYTES = 2**20  # of a body whose field is named: this costs more than reading it
_MAX_NAME = 100  # characters of a field's name
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def unreadable_body(body: bytes, error: Exception) -> BadRequest:
    """Return the error for a body that could not be read as a JSON object, because of `error`."""
    may_be_text = isinstance(error, UnicodeDecodeError) or _SURROGATE.search(body)
    half = "half of a UTF-16 surrogate pair (such as \\ud83d), or bytes that are not UTF-8"
    path = _path_of_broken_text(body) if may_be_text and len(body) <= _MAX_BYTES else None
    if path is not None and not path:
        return BadRequest(f"the name of a field is not Unicode: {half}")
    if path is not None:
        return BadRequest(f"{path}: its text is not Unicode: {half}", param=path.partition(".")[0])
    if may_be_text and len(body) > _MAX_BYTES:
        return BadRequest(f"the body is not a JSON object, or a text in it is not Unicode ({half}): {error}")
    return BadRequest(f"the body is not a JSON object: {error}")


def _path_of_broken_text(body: bytes) -> str | None:
    """Return the first field, of a list its item, whose text is not Unicode; an empty text if a field's name is not.

    None if the body is no JSON object.
    """
    try:
        fields = json.loads(body.decode("utf-8", "surrogateescape"))
        for name, value in fields.items() if isinstance(fields, dict) else ():
            if not _is_unicode(name):
                return ""
            if not _is_unicode(value):
                items, name = enumerate(value) if isinstance(value, list) else (), str(name)[:_MAX_NAME]
                return next((f"{name}.{place}" for place, item in items if not _is_unicode(item)), name)
    except (ValueError, RecursionError):
        pass
    return None


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
