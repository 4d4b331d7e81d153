"""A client that costs next to nothing: raw requests over kept connections, answers read to their end and thrown away.

Used inside the benchmark's own process; every call's prompt is different, as real ones are.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks import agent_shapes

SYSTEM = "You find messages in a mailbox and answer from them alone. " * 25  # 1.5 KB, the same in every call
USER = "Find the message about the budget of the spring meeting. " * 40  # 2.3 KB
LARGE_USER = USER * 44  # 100 KB

Make = Callable[[int], bytes]

_numbers = itertools.count(10**9)


@dataclass(frozen=True)
class Target:
    """Where calls go: a server, the model's name there, and what the body has besides."""

    port: int
    model: str
    extra: dict[str, Any] = field(default_factory=dict)
    key: str = "sk-bench"


def request(target: Target, *, stream: bool = False, user: str = USER) -> Make:
    """Return what makes a whole request, another one for each number."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "##########" + user}]
    body = {"model": target.model, "messages": messages, "temperature": 1.0, "max_tokens": 256, **target.extra}
    if stream:
        body |= {"stream": True}
    before, after = raw_request(target, json.dumps(body, separators=(",", ":")).encode()).split(b"##########")
    return lambda number: b"%b%010d%b" % (before, number, after)


def agent_request(target: Target, seed: int) -> Make:
    """Return what makes the request of an agent of 40 turns whose answers another server gave."""
    messages = agent_shapes.conversation(random.Random(seed))
    messages[1]["content"] = "##########" + messages[1]["content"]
    return request_of(target, messages)


def request_of(target: Target, messages: list[dict[str, Any]]) -> Make:
    """Return what makes the request with these messages; a text of theirs that begins with ten `#` gets a number."""
    body = agent_shapes.body(messages, agent_shapes.tools(), target.model, target.extra)
    before, _, after = raw_request(target, body).partition(b"##########")
    return lambda number: b"%b%010d%b" % (before, number, after) if after else before


def raw_request(target: Target, data: bytes) -> bytes:
    """Return a request with this body."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{target.port}\r\naccept: application/json\r\n"
        f"content-type: application/json\r\nauthorization: Bearer {target.key}\r\nuser-agent: OpenAI/Python 3.52.0\r\n"
        f"x-stainless-retry-count: 0\r\ncontent-length: {len(data)}\r\n\r\n"
    ).encode()
    return head + data


class _LoadConnection(asyncio.Protocol):
    """One kept connection, one call at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._done: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._missing = -1  # bytes; -1 while the head is not whole, -2 in a chunked body
        self.body: list[bytes] = []  # of the latest answer that is not chunked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def call(self, data: bytes) -> asyncio.Future[None]:
        self._parts, self._missing = [], -1
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._missing == -1:
            self._parts.append(data)
            data = b"".join(self._parts)
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return
            head = data[:end].lower()
            if not data.startswith(b"HTTP/1.1 200"):
                self._fail(data[:2000].decode("utf-8", "replace"))
                return
            at = head.find(b"content-length:")
            self._missing = int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else -2
            self._parts, data, self.body = [], data[end + 4 :], []
        if self._missing >= 0:
            self.body.append(data)
            self._missing -= len(data)
            over = self._missing <= 0
        else:
            self._parts = [(b"".join(self._parts) + data)[-64:]]  # only the end is looked at
            over = self._parts[0].endswith(b"0\r\n\r\n")
        if over and self._done is not None and not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection broke: {exc}")

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(reason))


async def _worker(target: Target, make: Make, seconds: list[float], turns: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(_LoadConnection, "127.0.0.1", target.port)
    try:
        while turns():
            data = make(next(_numbers))
            started = time.perf_counter()
            await connection.call(data)
            seconds.append(time.perf_counter() - started)
    finally:
        connection.close()


class Agents:
    """Agents whose answers all come from one server."""

    def __init__(self, target: Target, count: int) -> None:
        self._target = target
        self._chance = random.Random(next(_numbers))
        self._conversations = [agent_shapes.opening(self._chance) for _ in range(count)]

    def turns(self, count: int) -> list[float]:
        """Make so many calls of each agent, all at once; return the seconds of each call. Raises RuntimeError."""
        return uvloop.run(self._turns(count))

    async def _turns(self, count: int) -> list[float]:
        seconds: list[float] = []
        await asyncio.gather(*(self._turns_of(messages, count, seconds) for messages in self._conversations))
        return seconds

    async def _turns_of(self, messages: list[dict[str, Any]], count: int, seconds: list[float]) -> None:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_LoadConnection, "127.0.0.1", self._target.port)
        try:
            for _ in range(count):
                data = request_of(self._target, messages)(0)
                started = time.perf_counter()
                await connection.call(data)
                seconds.append(time.perf_counter() - started)
                answer = json.loads(b"".join(connection.body))["choices"][0]["message"]
                answer = {name: value for name, value in answer.items() if value}
                messages += [answer, *agent_shapes.tool_result(self._chance, answer)]
        finally:
            connection.close()


async def _many(target: Target, make: Make, calls: int, concurrency: int) -> list[float]:
    left = iter(range(calls))
    seconds: list[float] = []
    workers = (_worker(target, make, seconds, lambda: next(left, None) is not None) for _ in range(concurrency))
    await asyncio.gather(*workers)
    return seconds


def many(target: Target, make: Make, calls: int, concurrency: int) -> list[float]:
    """Make so many calls, so many at a time; return the seconds that each took. Raises RuntimeError."""
    return uvloop.run(_many(target, make, calls, concurrency))


async def _during(
    target: Target, make: Make, seconds: float, concurrency: int, other: Make | None, others: int
) -> list[float]:
    until = time.monotonic() + seconds
    found: list[float] = []
    workers = [(make, found)] * concurrency
    if other is not None:
        workers += [(other, [])] * others
    await asyncio.gather(*(_worker(target, one, to, lambda: time.monotonic() < until) for one, to in workers))
    return found


def during(target: Target, make: Make, seconds: float, concurrency: int) -> list[float]:
    """Make calls for so long, so many at a time; return the seconds that each took. Raises RuntimeError."""
    return uvloop.run(_during(target, make, seconds, concurrency, None, 0))


def beside(target: Target, make: Make, other: Make, seconds: float, others: int) -> list[float]:
    """Make calls one at a time for so long while `others` clients make calls of another kind; return their seconds."""
    return uvloop.run(_during(target, make, seconds, 1, other, others))
