"""The nesting depth of JSON, without parsing it. Pure.

The parser's own limit is the interpreter's stack, which differs between the places that parse the same text. The result
is exact for valid JSON and meaningless otherwise.
"""

from __future__ import annotations

from itertools import accumulate

_STEP = [0] * 256
_STEP[ord("[")] = _STEP[ord("{")] = 1
_STEP[ord("]")] = _STEP[ord("}")] = -1
_FLAT = bytes(set(range(256)) - set(b"[]{}"))


def strip_strings(text: bytes) -> bytes:
    """Return JSON text in which one quote stands for each string."""
    return b'"'.join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def depth(bare: bytes) -> int:
    """Return the maximum number of nested lists and objects, in JSON without strings."""
    return max(accumulate(map(_STEP.__getitem__, bare.translate(None, _FLAT))), default=0)


def depth_bound(text: bytes, enough: int) -> int:
    """Return the depth of JSON, or a number up to `enough` that it does not exceed, which costs less."""
    opened = text.count(b"{") + text.count(b"[")
    return opened if opened <= enough else depth(strip_strings(text))


def exceeds_depth(text: str, max_depth: int) -> bool:
    """Return whether JSON is nested deeper than `max_depth` levels."""
    if text.count("[") + text.count("{") <= max_depth:
        return False
    return depth(strip_strings(text.encode("utf-8", "surrogatepass"))) > max_depth
