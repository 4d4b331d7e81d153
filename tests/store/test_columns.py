"""What the database holds instead of text, JSON and ids comes back exactly as it was given."""

from __future__ import annotations

import random

import pytest

from ratchet.store.content.messages import path
from ratchet.store.db.column_types import (
    compress_token_ids,
    decompress_token_ids,
    pack_body,
    pack_hash,
    unpack_body,
    unpack_hash,
)
from ratchet.store.errors import RecordDamaged
from ratchet.store.records import pack_ids


@pytest.mark.parametrize("text", ["", path([{"role": "user"}])[0].hash, "b2:short", "b2:" + "G" * 32, "b2:" + "A" * 32])
def test_every_text_comes_back(text: str) -> None:
    assert unpack_hash(pack_hash(text)) == text


def test_a_hash_takes_half_of_its_text() -> None:
    assert len(pack_hash(path([{"role": "user"}])[0].hash)) == 21


@pytest.mark.parametrize("size", [0, 10, 63, 64, 1000, 100_000])
def test_every_body_comes_back(size: int) -> None:
    body = b'{"content":"' + random.Random(size).randbytes(size).hex().encode() + b'"}'
    assert unpack_body(pack_body(body)) == body
    assert len(pack_body(body)) <= len(body)


def test_a_body_that_was_cut_off_is_an_error() -> None:
    packed = pack_body(b'{"content":"' + b"word " * 100 + b'"}')
    with pytest.raises(RecordDamaged, match="cut off"):
        unpack_body(packed[:-3])


@pytest.mark.parametrize(("most", "size"), [(255, 1), (65_535, 2), (151_000, 3), (2**31 - 1, 4)])
def test_every_id_comes_back_and_takes_no_more_than_it_needs(most: int, size: int) -> None:
    ids = pack_ids([0, 7, most, *range(100)])
    assert decompress_token_ids(compress_token_ids(ids)) == ids
    assert len(compress_token_ids(ids)) == 1 + size * 103


def test_ids_that_are_damaged_are_an_error() -> None:
    with pytest.raises(RecordDamaged, match="damaged"):
        decompress_token_ids(compress_token_ids(pack_ids([1, 2, 300]))[:-1])
    with pytest.raises(ValueError, match="int32"):
        compress_token_ids(b"abc")
