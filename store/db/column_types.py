"""Column types that store hashes, messages and token ids in fewer bytes, without loss.

A hash takes less than half its text: one byte for the algorithm, then the bytes of its digits. The body of a message is
deflated with a dictionary of common parts, if that makes it smaller. Token ids omit bytes that are zero in all of them:
three bytes per token instead of four. Logprobs stay float32.
"""

from __future__ import annotations

import zlib
from binascii import unhexlify
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import sqlalchemy as sa
from isal import isal_zlib

from ratchet.store.errors import RecordDamaged

_ALGORITHMS = {"b2": b"\1"}  # the name before the colon of a hash text -> its byte
_NAMES = {mark[0]: name for name, mark in _ALGORITHMS.items()}
NOT_DECODED = (msgspec.DecodeError, UnicodeDecodeError)  # what decoding damaged JSON raises
_PLAIN_TEXT = b"\0"  # in place of the algorithm: plain text, not a hash

_DEFLATED = b"\x01"
_MIN_DEFLATED = 64  # bytes; shorter bodies are not deflated
_MIN_OWN_CODES = 4096  # bytes; shorter bodies are deflated with the fixed Huffman codes of RFC 1951
# Part of the format: a changed dictionary needs another mark.
_DICTIONARY = (
    b'"name":"parameters":{"properties":{"type":"string","description":"}},"required":[]}}],"type":"object"'
    b"The the and for that with from this have are not you can will your was were which their what when would there "
    b"should about into more than "
    b'\\": \\", \\"url\\", \\"title\\", \\"date\\", \\"text\\", \\"result\\", \\"error\\", \\"path\\", \\"query\\", '
    b'\\"id\\": true, false, null, \\n\\n'
    b'{"content":[{"text":"","type":"text"}],"reasoning":"","role":"system"}{"content":"","role":"user"}'
    b'{"content":"","role":"tool","tool_call_id":"call_chatcmpl-tool-"}'
    b'{"content":"","role":"assistant","tool_calls":[{"function":{"arguments":"{\\"","name":"'
)


class Bytes(sa.LargeBinary):
    """Bytes passed to the driver unchanged: both drivers accept them without SQLAlchemy's wrapping."""

    cache_ok = True

    def bind_processor(self, dialect: sa.Dialect) -> None:
        """Return no conversion."""


def pack_hash(text: str) -> bytes:
    """Return a hash text as bytes."""
    if not text:
        return b""
    name, _, digits = text.partition(":")
    if name in _ALGORITHMS and digits == digits.lower():
        try:
            return _ALGORITHMS[name] + unhexlify(digits)
        except ValueError:
            pass
    return _PLAIN_TEXT + text.encode()


def unpack_hash(packed: bytes) -> str:
    """Return the text of `pack_hash`."""
    if not packed:
        return ""
    name = _NAMES.get(packed[0])
    return f"{name}:{packed[1:].hex()}" if name else packed[1:].decode()


def pack_body(body: bytes) -> bytes:
    """Return a body deflated, or unchanged if that is not longer. JSON never starts with the mark."""
    if len(body) < _MIN_DEFLATED:
        return body
    # Half the time of zlib; with so little memory an eighth of it in a process that gives memory back at once. Codes of
    # their own make bodies of 0.5 to 4 KB 13 to 26% shorter, and deflating them takes two to three times as long.
    level, strategy = (0, isal_zlib.Z_FIXED) if len(body) < _MIN_OWN_CODES else (1, isal_zlib.Z_DEFAULT_STRATEGY)
    deflate = isal_zlib.compressobj(level, isal_zlib.DEFLATED, -15, 1, strategy, zdict=_DICTIONARY)
    packed = _DEFLATED + deflate.compress(body) + deflate.flush()
    return packed if len(packed) < len(body) else body


def unpack_body(packed: bytes) -> bytes:
    """Return the body of `pack_body`. Raises RecordDamaged."""
    if not packed.startswith(_DEFLATED):
        return packed
    inflate = zlib.decompressobj(-15, _DICTIONARY)
    try:
        body = inflate.decompress(packed[1:])
    except zlib.error as error:
        raise RecordDamaged(f"a stored message is damaged ({error})") from error
    if not inflate.eof:
        raise RecordDamaged("a stored message is cut off")
    return body


def compress_token_ids(ids: bytes) -> bytes:
    """Return one byte for the width of a token, then all lowest bytes, all second bytes, and so on.

    Ids with a width of four bytes are not reordered. Raises ValueError if the length is not a multiple of 4.
    """
    if len(ids) % 4:
        raise ValueError(f"{len(ids)} bytes are not int32 token ids")
    if not ids:
        return b""
    planes: list[bytes] = []
    for place in (3, 2, 1, 0):
        plane = ids[place::4]
        if planes or not place or plane.strip(b"\0"):
            planes.append(plane)
    return b"\4" + ids if len(planes) == 4 else bytes([len(planes)]) + b"".join(reversed(planes))


def decompress_token_ids(packed: bytes) -> bytes:
    """Return the ids of `compress_token_ids`. Raises RecordDamaged."""
    if not packed:
        return b""
    width, count = packed[0], (len(packed) - 1) // max(1, packed[0])
    if not 1 <= width <= 4 or len(packed) != 1 + width * count:
        raise RecordDamaged("stored token ids are damaged")
    if width == 4:
        return packed[1:]
    ids = bytearray(4 * count)
    for place in range(width):
        ids[place::4] = packed[1 + place * count : 1 + (place + 1) * count]
    return bytes(ids)


def _or_none(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes | None]:
    return lambda value: None if value is None else pack(value)


class _Packed(sa.types.TypeDecorator[Any]):
    """Values that are stored in another form. Its kinds need their own `cache_ok`."""

    impl = Bytes
    pack: Callable[[Any], bytes | None]
    unpack: Callable[[bytes], Any]

    def bind_processor(self, dialect: sa.Dialect) -> Callable[[Any], bytes | None]:
        """Return the conversion to the stored form."""
        return type(self).pack

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        """Return the value."""
        return None if value is None else type(self).unpack(bytes(value))


class Hash(_Packed):
    """A hash text such as `b2:0011...` as bytes; the empty text (no parent) as empty bytes."""

    cache_ok = True
    pack = staticmethod(lru_cache(maxsize=4096)(_or_none(pack_hash)))  # the rows of one call repeat its hashes
    unpack = staticmethod(unpack_hash)


class Body(_Packed):
    """JSON bytes, deflated."""

    cache_ok = True
    pack, unpack = staticmethod(_or_none(pack_body)), staticmethod(unpack_body)


class Ids(_Packed):
    """Little-endian int32 token ids, without the bytes that are zero in all of them."""

    cache_ok = True
    pack, unpack = staticmethod(_or_none(compress_token_ids)), staticmethod(decompress_token_ids)
