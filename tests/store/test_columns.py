"""Columns and records: what is held instead of text, JSON and ids comes back exactly; records are light to import."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace

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
from ratchet.store.records import Prompt, Round, pack_ids, row_to
from ratchet.store.states import PromptMode, RoundState


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


@pytest.mark.parametrize("module", ["records", "operation_records", "states", "content.messages", "ids"])
def test_records_and_states_load_no_sqlalchemy(module: str) -> None:
    program = f"import sys, ratchet.store.{module}; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_row_becomes_a_record_with_its_enums() -> None:
    row = SimpleNamespace(id="prm_1", mode="append", text="Be brief.", origin="me", created_at=1.0, families={})
    prompt = row_to(Prompt, row, origin="you")
    assert (prompt.mode, prompt.text, prompt.origin) == (PromptMode.APPEND, "Be brief.", "you")


def test_a_column_without_a_value_is_none() -> None:
    times = {"started_at": 1.0, "ended_at": None}
    row = SimpleNamespace(
        id="rnd_1", alias="a", state="started", from_version=0, to_version=None, checkpoint=None, metrics={},
        reason=None, **times,
    )  # fmt: skip
    assert row_to(Round, row) == Round(
        id="rnd_1", alias="a", state=RoundState.STARTED, from_version=0, to_version=None, checkpoint=None, metrics={},
        reason=None, started_at=1.0, ended_at=None,
    )  # fmt: skip
