"""How deep JSON goes, without reading it: the reader's own depth is bounded by the interpreter's stack, which is not
equally deep wherever the same text is read again. Exact for JSON; for what is none a number that means nothing. Pure.
"""

from __future__ import annotations

from itertools import accumulate

_STEP = [0] * 256
_STEP[ord("[")] = _STEP[ord("{")] = 1
_STEP[ord("]")] = _STEP[ord("}")] = -1
_FLAT = bytes(set(range(256)) - set(b"[]{}"))


def strip_strings(text: bytes) -> bytes:
    """Return JSON without its strings."""
    return b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])


def depth(bare: bytes) -> int:
    """Return the most lists and objects that are open at once, in JSON without strings."""
    return max(accumulate(map(_STEP.__getitem__, bare.translate(None, _FLAT))), default=0)


def exceeds_depth(text: str, most: int) -> bool:
    """Return whether JSON goes deeper than `most` levels."""
    if text.count("[") + text.count("{") <= most:
        return False
    return depth(strip_strings(text.encode("utf-8", "surrogatepass"))) > most
