"""The HTTP client against servers that send exactly these bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamTimeout, UpstreamUnreachable
from ratchet.proxy.upstreams import http_client
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.upstreams.http_connection import ResponseLimits
from ratchet.proxy.wire.capture import Capture
from ratchet.proxy.wire.upstream_response import SseParser
from ratchet.store.records import unpack_ids

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Read one request, head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


@contextlib.asynccontextmanager
async def server(talk: Talk) -> AsyncIterator[str]:
    talks: set[asyncio.Task[Any]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        talks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await talk(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        for task in talks:
            task.cancel()
        await asyncio.gather(*talks)


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    opened = HttpClient(ResponseLimits(whole=2.0, idle=0.3, size=2**20), connect_timeout_seconds=1.0)
    yield opened
    opened.close()
    await asyncio.sleep(0)


async def fetch(client: HttpClient, url: str, method: str = "GET", body: bytes | None = None) -> tuple[int, bytes]:
    answer = await client.send(url, method, "/x", body, {"x-a": "b"})
    try:
        return answer.status, await answer.read()
    finally:
        answer.close()


def always(data: bytes) -> Talk:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data)
        await writer.drain()

    return talk


async def test_a_connection_is_reused_for_the_next_call(client: HttpClient) -> None:
    connections: list[list[bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append([])
        while True:
            connections[-1].append(await read_request(reader))
            writer.write(WHOLE)

    async with server(talk) as url:
        for body in (b"one", b"two", None):
            assert await fetch(client, url + "/prefix", "POST", body) == (200, b"ok")
    ((first, _, last),) = connections
    assert first.startswith(b"POST /prefix/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert first.endswith(b"x-a: b\r\ncontent-length: 3\r\n\r\none")
    assert last.endswith(b"content-length: 0\r\n\r\n")


async def test_idle_connections_to_a_server_that_is_not_used_any_more_are_closed(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_MAX_IDLE_SECONDS", 0.0)
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        assert await reader.read() == b""
        closed.set()

    async with server(talk) as gone, server(always(WHOLE)) as new:
        assert await fetch(client, gone) == (200, b"ok")
        assert not closed.is_set()
        assert await fetch(client, new) == (200, b"ok")
        await asyncio.wait_for(closed.wait(), 60)


async def test_a_stale_keep_alive_connection_fails_no_call(client: HttpClient) -> None:
    async with server(always(WHOLE)) as url:  # closes after each answer without saying so
        assert [await fetch(client, url) for _ in range(5)] == [(200, b"ok")] * 5


async def test_a_request_that_may_have_been_served_is_not_sent_again(client: HttpClient) -> None:
    requests = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            await read_request(reader)
            requests += 1
            if requests == 2:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-le")
                return
            writer.write(WHOLE)

    async with server(talk) as url:
        assert await fetch(client, url) == (200, b"ok")
        with pytest.raises(UpstreamDisconnected):
            await fetch(client, url)
    assert requests == 2


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + WHOLE, b"ok"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_every_way_of_delimiting_a_body_is_read(client: HttpClient, answer: bytes, body: bytes) -> None:
    async with server(always(answer)) as url:
        assert await fetch(client, url) == (200, body)


async def test_the_answer_to_head_has_no_body(client: HttpClient) -> None:
    async with server(always(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n")) as url:
        assert await fetch(client, url, "HEAD") == (200, b"")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-large: " + b"y" * 300_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
async def test_an_incomplete_answer_is_a_disconnect(client: HttpClient, answer: bytes) -> None:
    async with server(always(answer)) as url:
        with pytest.raises(UpstreamDisconnected, match="upstream http://127"):
            await fetch(client, url)


async def test_no_server_and_no_such_host_are_unreachable(client: HttpClient) -> None:
    async with server(always(WHOLE)) as url:
        pass
    for gone in (url, "http://no-such-host.invalid"):
        with pytest.raises(UpstreamUnreachable, match="cannot be reached"):
            await fetch(client, gone)


@pytest.mark.slow
async def test_silence_ends_with_a_timeout(client: HttpClient) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort")
        await reader.read()

    async with server(talk) as url:
        with pytest.raises(UpstreamTimeout, match="request_timeout_seconds"):
            await fetch(client, url)


async def test_an_abandoned_answer_closes_its_connection_at_once(client: HttpClient) -> None:
    requested, closed = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        requested.set()
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()

    async with server(talk) as url:
        answer = await client.send(url, "GET", "/x", None, {})
        async for piece in answer.pieces():
            assert piece == b"abc"
            break
        answer.close()
        await asyncio.wait_for(closed.wait(), 60)
        closed.clear()
        requested.clear()
        waiting = asyncio.create_task(fetch(client, url))
        await asyncio.wait_for(requested.wait(), 60)
        waiting.cancel()
        await asyncio.wait_for(closed.wait(), 60)


async def test_a_slow_reader_applies_backpressure(client: HttpClient) -> None:
    sent = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 * 2**20))
        for _ in range(64):
            writer.write(b"x" * 2**20)
            await writer.drain()
            sent += 1

    async with server(talk) as url:
        answer = await client.send(url, "GET", "/x", None, {})
        await answer.wait_for_body()
        await asyncio.sleep(0.3)
        assert sent < 32
        assert sum([len(piece) async for piece in answer.pieces()]) == 64 * 2**20
        answer.close()


@pytest.mark.parametrize("path", ["/x\r\nx-evil: 1", "/x HTTP/1.1", "/x\n"])
async def test_nothing_can_add_a_line_to_a_request(client: HttpClient, path: str) -> None:
    with pytest.raises(UpstreamDisconnected, match="line break"):
        await client.send("http://127.0.0.1:9", "GET", path, None, {})
    with pytest.raises(UpstreamDisconnected, match="line break"):
        await client.send("http://127.0.0.1:9", "GET", "/x", None, {"x-a": "b\r\nx-evil: 1"})


STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


async def read_on(client: HttpClient, url: str, pause: float = 0.0) -> bytes:
    """The body of a stream, read with a pause after the first piece."""
    answer = await client.send(url, "POST", "/x", b"{}", {})
    await answer.wait_for_body()
    body = b""
    try:
        async for piece in answer.pieces():
            body += piece
            await asyncio.sleep(pause)
            pause = 0.0
    finally:
        answer.close()
    return body


@pytest.mark.slow
async def test_a_stream_that_continues_is_not_cut_however_long_it_takes() -> None:
    client = HttpClient(ResponseLimits(whole=2.0, idle=1.5, size=2**20), connect_timeout_seconds=1.0)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM)
        for _ in range(30):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.1)
        writer.write(b"0\r\n\r\n")

    async with server(talk) as url:
        assert await read_on(client, url) == b"x" * 30
    client.close()


async def test_a_stream_that_hangs_is_closed_after_its_idle_timeout(client: HttpClient) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(STREAM + b"1\r\nx\r\n")
        await reader.read()

    async with server(talk) as url:
        with pytest.raises(UpstreamTimeout, match=r"sent nothing for 0\.3 s.*stream_idle_timeout_seconds"):
            await read_on(client, url)


async def test_a_stream_that_is_read_slowly_is_not_silent(client: HttpClient) -> None:
    size = 8 * 2**20

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        await writer.drain()
        await reader.read()

    async with server(talk) as url:
        assert len(await read_on(client, url, pause=1.0)) == size


async def test_an_unstreamed_answer_has_a_size_limit(client: HttpClient) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                writer.write(b"x" * 2**16)
                await writer.drain()

    async with server(talk) as url:
        with pytest.raises(UpstreamDisconnected, match=r"larger than 1048576 bytes"):
            await fetch(client, url)


EVENTS = b'data: {"a":1}\n\n: ping\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n'
DATA = [b'{"a":1}', None, b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_in_any_pieces_and_line_endings(size: int, ending: bytes) -> None:
    stream = EVENTS.replace(b"\n", ending) + (b": end" if ending == b"\r" else b"")
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


def captured(ids: Any, separator: str = ",") -> Capture:
    capture = Capture("agent", asks_ids=False, asks_logprobs=False, asks_usage=False)
    answer = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
    body = json.dumps({"id": "x", "choices": [answer], "prompt_token_ids": ids}, separators=(separator, ":"))
    capture.whole(body.encode())
    return capture


@pytest.mark.parametrize("separator", [",", ", ", " ,\n"])
@pytest.mark.parametrize("count", [0, 1, 10_000, 50_001])
def test_prompt_ids_of_any_number_are_captured_in_order(count: int, separator: str) -> None:
    ids = [number * 7919 % 150_000 for number in range(count)]
    capture = captured(ids, separator)
    assert unpack_ids(capture.prompt_ids) == tuple(ids)
    assert capture.prompt_tokens == count


@pytest.mark.parametrize("wrong", [-1, 2**31, 1.5, None, "1,2", [1, 2], {"a": 1, "b": 2}])
@pytest.mark.parametrize("before", [1, 40_000])
def test_a_wrong_id_is_refused_wherever_it_stands(wrong: Any, before: int) -> None:
    with pytest.raises(UpstreamDisconnected):
        captured([*range(before), wrong, *range(before)])
