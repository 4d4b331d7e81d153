"""Parsing server-sent events from chunks of any size."""

from __future__ import annotations

import time

import pytest

from ratchet.proxy.wire.upstream_response import SseParser

STREAM = b'data: {"a":1}\n\n: ping\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n'
DATA = [b'{"a":1}', None, b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_in_any_pieces_and_line_endings(size: int, ending: bytes) -> None:
    stream = STREAM.replace(b"\n", ending) + (b": end" if ending == b"\r" else b"")
    events = SseParser()
    found = [data for at in range(0, len(stream), size) for data, _ in events.feed(stream[at : at + size])]
    assert found == DATA


def test_a_long_event_costs_its_bytes_once_however_many_pieces_it_has() -> None:
    text = b"x" * 2**24
    stream, events = b"data: " + text + b"\n\n", SseParser()
    began = time.process_time()
    found = [data for at in range(0, len(stream), 4096) for data, _ in events.feed(stream[at : at + 4096])]
    assert time.process_time() - began < 2.0  # searched again from its start with each piece, it takes 20 s
    assert found == [text]
