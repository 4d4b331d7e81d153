"""A history that was parsed before is not parsed again, with the same result."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import Raw

from ratchet.proxy.wire.message_history import History, MessageReader
from ratchet.store.content import messages as canon


def turns(count: int) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n} " * 50} for n in range(count)]


def read(history: MessageReader, messages: list[dict[str, Any]], indent: int = 0) -> History:
    return history.read(Raw(msgspec.json.format(msgspec.json.encode(messages), indent=indent)))


def test_incremental_reading_gives_what_reading_at_once_gives() -> None:
    history = MessageReader()
    for count in (3, 9, 9, 6):
        found = read(history, turns(count))
        assert list(found.messages) == turns(count)
        assert tuple(found.nodes) == canon.path(turns(count))
        assert found.keys == canon.link_keys(turns(count))


def test_an_unchanged_prefix_is_not_parsed_again() -> None:
    history = MessageReader()
    before, after = read(history, turns(20)), read(history, turns(22))
    assert all(old is new for old, new in zip(before.messages, after.messages, strict=False))


def test_of_a_long_list_what_every_call_repeats_is_not_parsed_again_after_a_few_calls() -> None:
    history = MessageReader()

    def read_edited(number: int) -> list[dict[str, Any]]:
        messages = turns(200)
        messages[150]["content"] += str(number)
        found = read(history, messages)
        assert list(found.messages) == messages
        assert tuple(found.nodes) == canon.path(messages)
        return list(found.messages)

    before, after = [read_edited(number) for number in range(10)][-2:]
    assert [old is new for old, new in zip(before, after, strict=True)] == [True] * 150 + [False] * 50


def test_equal_messages_at_different_positions_are_distinguished() -> None:
    history = MessageReader()
    same = {"role": "user", "content": "again"}
    found = read(history, [same, same, same])
    assert len(set(found.hashes)) == len(set(found.keys)) == 3


def test_differently_formatted_equal_messages_give_equal_nodes() -> None:
    history = MessageReader()
    assert read(history, turns(3)).nodes == read(history, turns(3), indent=2).nodes


def test_memory_is_bounded_and_histories_in_use_stay_cached() -> None:
    history = MessageReader(max_bytes=100_000)
    kept = read(history, turns(5)).messages[0]
    for number in range(3000):
        assert read(history, [*turns(5), {"role": "user", "content": f"{number} " * 20}]).messages[0] is kept
        assert len(history._current) + len(history._previous) < 1000


@pytest.mark.parametrize("sent", [b"{}", b"[1]", b'["a"]', b"[[]]", b"null", b'[{"role": 1}, "x"]'])
def test_anything_but_a_list_of_objects_is_refused(sent: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        MessageReader().read(Raw(sent))
