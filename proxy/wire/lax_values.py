"""JSON values as vLLM parses them: pydantic's lax mode, in which `1`, `"true"`, `"1"`, `"yes"` and `"on"` are true.

A value that pydantic rejects is None here: vLLM answers it with 400. Pure.
"""

from __future__ import annotations

import re
from typing import Any

_WORDS = {
    "1": True, "on": True, "t": True, "true": True, "y": True, "yes": True,
    "0": False, "off": False, "f": False, "false": False, "n": False, "no": False,
}  # fmt: skip
_WHOLE = re.compile(r"\s*([+-]?[0-9]+(?:_[0-9]+)*)(?:\.0+)?\s*", re.ASCII)
_MAX_DIGITS = 4300  # characters of a number that pydantic accepts


def lax_bool(value: Any) -> bool | None:
    """Return a value as a boolean; None for null or an invalid value."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _WORDS.get(value.lower()) if value.isascii() else None
    return bool(value) if isinstance(value, (int, float)) and value in (0, 1) else None


def lax_int(value: Any) -> int | None:
    """Return a value as an integer; None for null or an invalid value."""
    if isinstance(value, float):
        return int(value) if abs(value) < 2.0**63 and value.is_integer() else None
    if isinstance(value, str):
        found = _WHOLE.fullmatch(value) if len(value) <= _MAX_DIGITS else None
        return int(found[1]) if found else None
    return int(value) if isinstance(value, int) else None
