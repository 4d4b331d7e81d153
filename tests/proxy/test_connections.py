"""Connections: limits, slow and silent clients, comments that keep silent streams alive."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from ratchet.store.store import open_store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually

LIMITS: Any = {"read_timeout_seconds": 0.5, "write_timeout_seconds": 0.5, "max_connections": 20, "max_body_bytes": 4096}
PATH = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxy")


@pytest.fixture(scope="module")
def running(scripted: tuple[ScriptedVllm, str], folder: Path) -> Iterator[ProxyProcess]:
    """A proxy in a process with tight limits, for all these tests."""
    started = ProxyProcess(folder, upstreams=[scripted[1]], **LIMITS)
    yield started
    started.stop()
    assert "Traceback" not in (folder / "proxy.log").read_text()


@pytest.fixture
def proxy(running: ProxyProcess, vllm: ScriptedVllm) -> Iterator[ProxyProcess]:
    eventually(lambda: httpx.get(f"{running.url}/health/ready").status_code == 200)
    yield running
    live = eventually(lambda: httpx.get(f"{running.url}/health/live"))
    assert live.status_code == 200, "it must outlive its clients"


@contextlib.contextmanager
def connected(proxy: ProxyProcess, seconds: float = 8.0) -> Iterator[socket.socket]:
    url = httpx.URL(proxy.url)
    with socket.socket() as line:
        line.settimeout(seconds)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        line.connect((url.host, url.port))
        yield line


def read_all(line: socket.socket, most: int = 2**20) -> bytes:
    """Read until the proxy closes the connection; fail if it does not."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := line.recv(65536):
            data += piece
            assert len(data) < most
    return data


def flood(line: socket.socket, piece: bytes, most: int) -> int:
    """Send a piece again and again until the proxy closes; return how much went out."""
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while sent < most:
            sent += line.send(piece)
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "again"),
    [
        (PATH + b"x: ", b"a" * 4096),
        (PATH, b"x: y\r\n" * 500),
        (b"GET /" + b"v" * 100, b"v" * 4096),
        (PATH + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"x: y\r\n" * 500),
        (PATH + b"Transfer-Encoding: chunked\r\n\r\n1;", b"e=f;" * 500),
    ],
    ids=["header", "headers", "url", "trailers", "chunk extension"],
)
def test_an_endless_head_is_cut_off(proxy: ProxyProcess, first: bytes, again: bytes) -> None:
    with connected(proxy) as line:
        line.sendall(first)
        assert flood(line, again, 64 * 2**20) < 8 * 2**20
    with connected(proxy) as line:
        line.sendall(first + again * (300_000 // len(again)))
        data = read_all(line)
    assert b" 431 " in data.splitlines()[0] or not data  # a reset may arrive first


def test_a_head_within_the_limit_is_served_however_it_arrives(proxy: ProxyProcess) -> None:
    body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = PATH + b"x-filler: " + b"a" * 60_000 + b"\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    with connected(proxy) as line:
        for start in range(0, len(head), 10_000):
            line.sendall(head[start : start + 10_000])
            time.sleep(0.01)
        line.sendall(body)
        assert read_all(line).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("first", "drip", "status"),
    [
        (b"", b"", None),
        (b"", b"\r\n", None),
        (b"POST /v1/ch", b"a", 408),
        (PATH + b"Content-Length: 1000\r\n\r\n", b"", 408),
        (PATH + b"Content-Length: 1000\r\n\r\n{", b" ", 408),
        (PATH + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", 408),
    ],
    ids=["silence", "empty lines", "slow head", "no body", "slow body", "slow chunks"],
)
def test_a_request_that_comes_too_slowly_is_ended(
    proxy: ProxyProcess, first: bytes, drip: bytes, status: int | None
) -> None:
    with connected(proxy, 0.1) as line:
        line.sendall(first)
        data, until = b"", time.monotonic() + 8
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < until:
                if drip:
                    line.sendall(drip)
                with contextlib.suppress(TimeoutError):
                    piece = line.recv(65536)
                    if not piece:
                        break
                    data += piece
        assert time.monotonic() < until, "the connection was never closed"
    if status and data:
        assert data.startswith(b"HTTP/1.1 %d " % status)
        assert b"read_timeout_seconds" in data


def test_too_many_connections_get_503_until_one_closes(proxy: ProxyProcess) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(connected(proxy)) for _ in range(30)]
        answers = []
        for line in lines:
            line.settimeout(0.2)
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                answers.append(line.recv(4096))
        assert sum(b" 503 " in answer and b"max_connections" in answer for answer in answers) >= 5
    eventually(lambda: httpx.get(f"{proxy.url}/v1/models").status_code == 200)


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected_and_its_call_aborted(proxy: ProxyProcess, folder: Path) -> None:
    content = "#tokens=40000"
    body = json.dumps({"model": "agent", "stream": True, "messages": [{"role": "user", "content": content}]}).encode()
    with connected(proxy) as line:
        line.sendall(PATH + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        store = open_store(str(folder / "store.db"))
        call = eventually(lambda: next((c for c in store.calls.page() if c.state == "aborted"), None), 60)
    assert 0 < call.completion_tokens < 40_000
    store.close()


@pytest.mark.slow
def test_a_body_over_the_limit_gets_413_and_is_not_read_for_long(proxy: ProxyProcess) -> None:
    began = time.monotonic()
    with connected(proxy, 20) as line:
        line.sendall(PATH + b"Content-Length: 100000000000\r\n\r\n" + b"a" * 5000)
        assert line.recv(4096).startswith(b"HTTP/1.1 413 ")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() - began < 20:
                line.sendall(b"a" * 1000)
                time.sleep(0.05)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        PATH + b"Content-Length: -5\r\n\r\n",
        PATH + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        PATH + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        PATH + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        PATH + b"bad header\r\n\r\n",
        PATH + b"x: a\x00b\r\n\r\n",
        b"GET http://[::1/ HTTP/1.1\r\n\r\n",
        b"\x00" * 1000,
    ],
)
def test_bytes_that_are_not_http_get_400_in_json_and_a_close(proxy: ProxyProcess, data: bytes) -> None:
    with connected(proxy) as line:
        line.sendall(data)
        answer = read_all(line)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


def _request(words: str, more: bytes = b"") -> bytes:
    """The bytes of a call that is answered with these words."""
    body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": f"#say={words}"}]}).encode()
    return PATH + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def test_pipelined_calls_are_answered_in_order(proxy: ProxyProcess) -> None:
    with connected(proxy) as line:
        line.sendall(_request("first") + _request("second") + _request("third", b"Connection: close\r\n"))
        data = read_all(line)
    first, second, third = data.split(b"HTTP/1.1 200 OK\r\n")[1:]
    assert (b"first" in first, b"second" in second, b"third" in third) == (True, True, True)
    assert [b"connection: close" in head for head in (first, second, third)] == [False, False, True]


def test_a_client_of_http_1_0_gets_its_answer_and_its_connection_is_closed(proxy: ProxyProcess) -> None:
    with connected(proxy) as line:
        line.sendall(b"GET /v1/models HTTP/1.0\r\nHost: localhost\r\n\r\n")
        head, _, body = read_all(line).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["object"] == "list"


def test_expect_100_continue_is_answered_once_and_only_before_the_response(
    proxy: ProxyProcess,
) -> None:
    head, _, body = _request("hello", b"Expect: 100-continue\r\nConnection: close\r\n").partition(b"\r\n\r\n")
    with connected(proxy) as line:
        line.sendall(head + b"\r\n\r\n")
        assert line.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(body)
        assert read_all(line).startswith(b"HTTP/1.1 200 ")
    with connected(proxy) as line:
        line.sendall(head.replace(b"/v1/chat/completions", b"/v1/models") + b"\r\n\r\n" + body)
        assert [part[:3] for part in read_all(line).split(b"HTTP/1.1 ")[1:]] == [b"405"]


def test_garbage_after_a_call_does_not_corrupt_its_answer(proxy: ProxyProcess) -> None:
    body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "#tokens=5 #delay=0.1"}]}).encode()
    with connected(proxy) as line:
        line.sendall(PATH + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        time.sleep(0.2)
        line.sendall(b"\x00garbage")
        answer = read_all(line)
    assert answer.count(b"HTTP/1.1") <= 1


@pytest.mark.parametrize("name", ["Upgrade", "upgrade", "UPGRADE", "uPgRaDe"])
def test_a_client_that_offers_an_upgrade_is_served_in_http_1_1(proxy: ProxyProcess, name: str) -> None:
    """Java's HTTP client and `curl --http2` do with every request; a body may name it, too."""
    body = b'{"model": "agent", "messages": [{"role": "user", "content": "#say=hello \\r\\n\\r\\n"}]}'
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        f"{name}: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body
    splits: list[tuple[int, ...]] = [
        (0,),
        *((at,) for at in range(head.index(b"\r\n" + name.encode()), head.index(b": h2c") + 2)),
    ]
    splits += [(at,) for at in range(len(head) - 5, len(head) + 1)] + [tuple(range(1, len(head) + 1, 7))]
    with connected(proxy) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for places in splits:
            for begin, end in itertools.pairwise([0, *places, len(whole)]):
                line.sendall(whole[begin:end])
                time.sleep(0.002 if len(places) > 1 else 0.02)
            reply = http.client.HTTPResponse(line)
            reply.begin()
            assert (reply.status, b"hello" in reply.read()) == (200, True)


def test_body_lines_that_look_like_an_upgrade_stay_unchanged(proxy: ProxyProcess) -> None:
    body = b"a\r\nUpgrade: h2c\r\n\r\nupgrade: b"
    head = b"POST /v1/audio/any HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: %d\r\n\r\n" % len(body)
    for places in ((0,), *((at,) for at in range(len(head) - 5, len(head) + 12))):
        with connected(proxy) as line:
            for begin, end in itertools.pairwise([0, *places, len(head + body)]):
                line.sendall((head + body)[begin:end])
                time.sleep(0.01)
            reply = http.client.HTTPResponse(line)
            reply.begin()
            assert json.loads(reply.read())["body"].encode() == body


SLOW = "#say=a.slow.answer #wait=0.5"


@pytest.fixture
def commenting(start: Start) -> Proxy:
    return start(keep_alive_seconds=0.1)


def chat(text: str) -> dict[str, Any]:
    return {"model": "agent", "stream": True, "messages": [{"role": "user", "content": text}]}


def test_a_stream_with_a_late_first_token_gets_comments_and_is_complete(commenting: Proxy) -> None:
    with commenting.http.stream("POST", "/v1/chat/completions", json=chat(SLOW)) as answer:
        text = answer.read().decode()
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-ratchet-policy"] == "agent@0"
    assert float(answer.headers["x-ratchet-overhead-ms"]) < 90, "the wait is the upstream's"
    before, comment, after = text.partition(": keep-alive\n\n")
    assert before == ""
    assert 2 <= text.count(comment) <= 5
    assert after.endswith("data: [DONE]\n\n")
    commenting.settled()
    (call,) = commenting.store.calls.page(9)
    assert (call.state, call.untrainable) == ("answered", None)


@pytest.mark.slow
def test_a_stream_that_pauses_gets_comments_between_its_events(commenting: Proxy) -> None:
    answer = commenting.http.post("/v1/chat/completions", json=chat("#tokens=3 #delay=0.25")).text
    assert answer.count(": keep-alive\n\n") >= 3
    assert all(event.startswith((": keep-alive", "data: ")) for event in answer.strip().split("\n\n"))


def test_a_quick_stream_gets_no_comments(start: Start) -> None:
    assert "keep-alive" not in start(keep_alive_seconds=3).http.post("/v1/chat/completions", json=chat("hi")).text


def test_an_unstreamed_answer_gets_no_comments(commenting: Proxy) -> None:
    whole = commenting.http.post("/v1/chat/completions", json=chat(SLOW) | {"stream": False})
    assert (whole.status_code, "keep-alive" in whole.text) == (200, False)


def test_with_0_a_silent_stream_stays_silent(start: Start) -> None:
    assert "keep-alive" not in start(keep_alive_seconds=0).http.post("/v1/chat/completions", json=chat(SLOW)).text


@pytest.mark.slow
def test_the_sdks_read_streams_with_comments(commenting: Proxy) -> None:
    agent = commenting.agent()
    request = chat(SLOW)
    chat_text = "".join(chunk.choices[0].delta.content or "" for chunk in agent.chat.completions.create(**request))
    with agent.responses.stream(model="agent", input=SLOW) as events:
        response = events.get_final_response()
    with (
        anthropic.Anthropic(base_url=commenting.url, api_key="k", max_retries=0) as claude,
        claude.messages.stream(model="agent", max_tokens=99, messages=request["messages"]) as stream,
    ):
        message = stream.get_final_message()
    assert (
        chat_text == response.output_text == "".join(getattr(b, "text", "") for b in message.content) == "a slow answer"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("script", "code"), [("#status=500", "status_500"), ("#status=429", "rate_limit_exceeded")])
def test_a_refusal_after_a_comment_is_an_error_event_in_every_dialect(
    commenting: Proxy, script: str, code: str
) -> None:
    agent = commenting.agent()
    text = f"{script} #wait=0.3"
    with pytest.raises(openai.APIError, match="scripted failure") as error:
        list(agent.chat.completions.create(**chat(text)))
    assert error.value.code == code
    kinds = [event.type for event in agent.responses.create(model="agent", input=text, stream=True)]
    assert kinds[-1] == "response.failed"
    messages: Any = chat(text)["messages"]
    with (
        anthropic.Anthropic(base_url=commenting.url, api_key="k", max_retries=0) as claude,
        pytest.raises(anthropic.APIStatusError, match="scripted failure"),
    ):
        list(claude.messages.create(model="agent", max_tokens=9, messages=messages, stream=True))
    commenting.settled()
    assert {(call.state, call.status) for call in commenting.store.calls.page(9)} == {("failed", 200)}


def test_an_overflow_after_a_comment_keeps_its_code(commenting: Proxy, vllm: ScriptedVllm) -> None:
    vllm.max_model_len = 10
    agent = commenting.agent(strict=False)  # Responses have no code of their own for a context that is too long
    with pytest.raises(openai.APIError) as error:
        list(agent.chat.completions.create(**chat("#wait=0.3")))
    assert error.value.code == "context_length_exceeded"
    *_, last = agent.responses.create(model="agent", input="#wait=0.3", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert str(last.response.error.code) == "context_length_exceeded"


def test_a_client_that_leaves_while_it_gets_comments_stops_the_upstream(commenting: Proxy) -> None:
    with commenting.http.stream("POST", "/v1/chat/completions", json=chat("#wait=4")) as answer:
        assert next(answer.iter_raw()).startswith(b": keep-alive")
    commenting.http.close()
    commenting.http = type(commenting.http)(base_url=commenting.url, timeout=60)
    commenting.settled()
    (call,) = commenting.store.calls.page(9)
    assert (call.state, call.error) == ("aborted", "the client disconnected")
