"""Concurrent clients that request what makes a proxy wait, protocol upgrades in fragments, and a full log pipe.

Each function yields broken promises as sentences.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from ratchet.store.ids import new_id
from tests.harness.hostile.wire import read
from tests.harness.proxy.servers import ProxyProcess, eventually

CHAT = "/v1/chat/completions"
_CLIENTS = 24  # concurrent
_MAX_PROBES = 2  # of the upstream while readiness is requested


def _chat_body(words: str) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": words}]}


def waiters(url: str, key: str, proxy: psutil.Process) -> Iterator[str]:
    """Request unknown ids while the store writer is stopped: a large call of another client must not wait."""
    with (
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30) as client,
        ThreadPoolExecutor(_CLIENTS) as pool,
    ):
        shipping = proxy.children()
        for one in shipping:
            os.kill(one.pid, signal.SIGSTOP)
        try:
            client.post(CHAT, json=_chat_body("#say=waits")).raise_for_status()
            pending = [
                pool.submit(client.post, "/api/feedback", json={"call_id": new_id("call"), "value": 1})
                if number % 2
                else pool.submit(client.get, f"/v1/responses/{new_id('resp')}")
                for number in range(_CLIENTS)
            ]
            time.sleep(0.3)
            large = client.post(CHAT, json=_chat_body("x" * 300_000))
            if large.status_code != 200 or any(one.done() for one in pending):
                yield f"a large call waited for requests that wait for the store ({large.status_code})"
        finally:
            for one in shipping:
                os.kill(one.pid, signal.SIGCONT)
        yield from (f"{one.result().status_code} to an unknown id" for one in pending if _is_bad(one.result()))


def _is_bad(answer: httpx.Response) -> bool:
    return answer.status_code not in (202, 404, 429, 503)  # 503: the store may have it later


def is_of_a_busy_machine(status: int, body: bytes) -> bool:
    """Whether an answer says that the upstream did not answer its probe, or that the store is behind."""
    return status == 503 and (b"does not answer within" in body or b"is not in the store yet" in body)


def readiness(url: str, probes: Callable[[], int]) -> Iterator[str]:
    """Request readiness a hundred times; `probes` counts the upstream's `GET /v1/models`."""
    before = probes()
    with httpx.Client(base_url=url, timeout=20) as client:
        found = [client.get("/health/ready") for _ in range(100)]
    answers = {one.status_code for one in found if not is_of_a_busy_machine(one.status_code, one.content)}
    if not answers <= {200} or probes() - before > _MAX_PROBES:
        yield f"100 readiness requests made {probes() - before} upstream probes and returned {answers}"


def upgrade_offers(url: str, key: str) -> Iterator[str]:
    """Offer h2c in several spellings, in fragmented request heads: each call must be served over HTTP/1.1."""
    parts, body = urlsplit(url), b'{"model": "agent", "messages": [{"role": "user", "content": "#say=hello"}]}'
    for name in ("Upgrade", "upgrade", "UPGRADE", "uPGRADE"):
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\nconnection: close, "
            f"upgrade, http2-settings\r\n{name}: h2c\r\nhttp2-settings: x\r\ncontent-length: {len(body)}\r\n\r\n"
        ).encode()
        for size in (len(head + body), len(head), len(head) - 1, 97, head.index(b": h2c") - 3):
            with socket.create_connection((str(parts.hostname), parts.port or 80), 20) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for at in range(0, len(head + body), size):
                    line.sendall((head + body)[at : at + size])
                    time.sleep(0.005)
                reply = read(line)
            if reply.status != 200 or b"hello" not in reply.text:
                yield f"{reply.status} to an offer of h2c as {name}, sent {size} bytes at a time"


def unread_log(folder: Path, upstream_url: str, upstream_key: str) -> Iterator[str]:
    """Run a proxy whose stderr is a pipe that is never read, with successful and failing calls."""
    reader, writer = os.pipe()
    folder.mkdir()
    proxy = ProxyProcess(folder, writer, upstreams=[upstream_url, "http://127.0.0.1:9"], upstream_key=upstream_key)
    os.close(writer)
    with httpx.Client(base_url=proxy.url, timeout=10) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        bodies = itertools.cycle([_chat_body("#say=fine"), _chat_body(secrets.token_hex(8)) | {"model": "agent@9"}])
        answers = [client.post(CHAT, json=next(bodies)).status_code for _ in range(300)]
        live = client.get("/health/live").status_code
    if set(answers) != {200, 404} or live != 200 or proxy.stop() != 0:
        yield f"with an unread log: {set(answers)}, /health/live {live}"
    os.close(reader)
