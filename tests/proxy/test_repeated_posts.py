"""A worker's connection to the coordinator: the same POST with other bodies is answered by a shorter way."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ratchet.proxy.messages import coordinator_messages as messages
from tests.harness.ports import free_port
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess

TOKEN = "a secret of all the machines"
BODY = messages.encode(messages.Goodbye("nobody", "session"))


@pytest.fixture(scope="module")
def running(
    scripted: tuple[ScriptedVllm, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ProxyProcess, Path]]:
    """A coordinator without workers."""
    folder = tmp_path_factory.mktemp("coordinator")
    started = ProxyProcess(
        folder, upstreams=[scripted[1]], workers=0, coordinator_listen=f"127.0.0.1:{free_port()}",
        coordinator_token=TOKEN, read_timeout_seconds=3.0,
    )  # fmt: skip
    yield started, folder / "proxy.log"
    started.stop()


@pytest.fixture
def line(running: tuple[ProxyProcess, Path]) -> Iterator[socket.socket]:
    url = httpx.URL(running[0].url)
    with socket.create_connection((url.host, url.port or 0), 8.0) as connection:
        yield connection
    assert "Traceback" not in running[1].read_text()


def _post(body: bytes = BODY, token: str = TOKEN) -> bytes:
    head = f"POST {messages.PATH} HTTP/1.1\r\nhost: here\r\nauthorization: Bearer {token}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


GET = b"GET /health/live HTTP/1.1\r\nhost: here\r\n\r\n"


def _answers(line: socket.socket, count: int) -> list[tuple[int, bytes, bool]]:
    """Return status and body of the next responses, and whether each came by the shorter way, which sends no date."""
    found = []
    with line.makefile("rb") as file:
        for _ in range(count):
            status = int(file.readline().split()[1])
            headers = http.client.parse_headers(file)
            found.append((status, file.read(int(headers["content-length"])), "date" not in headers))
    return found


USUAL, SHORT = (200, messages.encode(messages.Stranger()), False), (200, messages.encode(messages.Stranger()), True)


def test_posts_with_the_same_head_are_answered_alike_with_other_requests_between_them(line: socket.socket) -> None:
    longer = messages.encode(messages.Goodbye("nobody" * 100, "session"))
    line.sendall(_post() + _post())
    assert _answers(line, 2) == [USUAL, USUAL]  # both were parsed at once
    line.sendall(_post(longer))
    assert _answers(line, 1) == [SHORT]
    line.sendall(_post() + _post(longer) + GET + _post())
    *first, health, last = _answers(line, 4)
    assert (*first, last) == (SHORT, SHORT, USUAL)
    assert health[0] == 200
    line.sendall(_post())
    assert _answers(line, 1) == [SHORT]


@pytest.mark.parametrize("size", [5, 100])
def test_a_post_that_arrives_in_pieces_is_answered(line: socket.socket, size: int) -> None:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(2):
        data = _post()
        for start in range(0, len(data), size):
            line.sendall(data[start : start + size])
            time.sleep(0.002)
        assert _answers(line, 1)[0][:2] == USUAL[:2]
    line.sendall(_post())
    whole = _answers(line, 1)
    line.sendall(_post()[:-5])
    time.sleep(0.05)
    line.sendall(BODY[-5:])
    assert _answers(line, 1)[0][:2] == whole[0][:2] == USUAL[:2]


def test_the_token_is_checked_whatever_was_sent_before(line: socket.socket) -> None:
    wrong = _post(token=TOKEN[:-1] + "x")
    line.sendall(wrong + _post())
    assert [status for status, *_ in _answers(line, 2)] == [403, 200]
    for request, status in ((_post(), 200), (wrong, 403), (_post(), 200), (wrong, 403)):
        line.sendall(request)
        assert _answers(line, 1)[0][0] == status


def test_a_body_that_cannot_be_read_gets_its_error_on_both_ways(line: socket.socket) -> None:
    found = []
    for body in (b"\xc1", BODY, b"\xc1", BODY):
        line.sendall(_post(body))
        found += _answers(line, 1)
    assert [(status, short) for status, _, short in found] == [(400, False), (200, False), (400, False), (200, True)]
    assert b"cannot be read" in found[2][1]


def test_a_repeated_post_that_comes_too_slowly_is_ended(line: socket.socket) -> None:
    line.sendall(_post())
    assert _answers(line, 1) == [USUAL]
    line.sendall(_post()[:-1])
    assert line.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert line.recv(65536) == b""
