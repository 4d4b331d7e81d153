"""Timed chat completions of one shape over persistent connections.

Prompts differ from the first word on, so the prefix cache never hits. A failed call carries its reason and no times.
Nothing is retried.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.proxy.errors import UpstreamError
from ratchet.proxy.upstreams.http_client import HttpClient
from ratchet.proxy.wire.upstream_response import UpstreamResponse

_WORDS = ("find", "the", "mail", "about", "a", "budget", "of", "spring", "and", "say", "who", "sent", "it", "when")
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_MAX_REASON_LENGTH = 300  # characters
_FAULT = b'{"error"'  # text of the model would be escaped


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The shape of every call."""

    stream: bool = True
    words: int = 100  # of the prompt
    max_tokens: int = 64  # exact: the end-of-turn token does not stop generation


@dataclass(frozen=True, slots=True)
class CallTarget:
    """A server: base URL without `/v1`, its name of the model, and additional fields of the body."""

    name: str
    url: str
    model: str
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of every call."""
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {"content-type": "application/json", "x-ratchet-tags": "bench"} | key


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One finished call: seconds to the first and the last byte; `overhead` as the proxy reports it."""

    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0
    overhead: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Concurrent calls, their wall time, and the CPU seconds of the proxy and of the client."""

    calls: tuple[TimedCall, ...]
    seconds: float
    proxy_cpu: float | None
    own_cpu: float


_numbers = itertools.count()


def body(way: CallTarget, shape: RequestShape, number: int) -> bytes:
    """Return the body of a call; `number` makes its prompt unique."""
    text = " ".join(itertools.islice(itertools.cycle(_WORDS), shape.words))
    message = {"role": "user", "content": f"{time.time_ns() % 10**9:09d}{number:06d} {text}"}
    sampled = {"max_tokens": shape.max_tokens, "temperature": 1.0, "ignore_eos": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if shape.stream else {}
    return json.dumps({"model": way.model, "messages": [message], **sampled, **streamed, **way.extra}).encode()


async def block(
    client: HttpClient,
    way: CallTarget,
    shape: RequestShape,
    count: int,
    concurrency: int,
    cpu: Callable[[], float] | None = None,
) -> CallBlock:
    """Make `count` calls, `concurrency` at a time. `cpu` returns the CPU seconds of the proxy so far."""
    left = iter(range(count))
    calls: list[TimedCall] = []
    before, own, began = cpu() if cpu else None, time.process_time(), time.perf_counter()
    await asyncio.gather(*(_worker(client, way, shape, left, calls) for _ in range(min(concurrency, count))))
    seconds, used = time.perf_counter() - began, time.process_time() - own
    return CallBlock(tuple(calls), seconds, cpu() - before if cpu and before is not None else None, used)


async def _worker(
    client: HttpClient, way: CallTarget, shape: RequestShape, left: Iterator[int], calls: list[TimedCall]
) -> None:
    while next(left, None) is not None:
        calls.append(await _call(client, way, body(way, shape, next(_numbers))))


async def _call(client: HttpClient, way: CallTarget, data: bytes) -> TimedCall:
    began = time.perf_counter()
    try:
        answer = await client.send(way.url, "POST", "/v1/chat/completions", data, way.headers)
        try:
            return await _read(answer, began)
        finally:
            answer.close()
    except UpstreamError as error:
        return TimedCall(
            failure=str(error).replace(" (the proxy's setting request_timeout_seconds)", "")[:_MAX_REASON_LENGTH]
        )


async def _read(answer: UpstreamResponse, began: float) -> TimedCall:
    first, parts = 0.0, []
    async for piece in answer.pieces():
        first = first or time.perf_counter() - began
        parts.append(piece)
    whole, content = time.perf_counter() - began, b"".join(parts)
    if answer.status != 200 or _FAULT in content:
        text = " ".join(content.decode("utf-8", "replace").split())
        return TimedCall(failure=f"{answer.status}: {text[:_MAX_REASON_LENGTH]}")
    counted, overhead = _USAGE.findall(content), answer.headers.get("x-ratchet-overhead-ms")
    return TimedCall(first, whole, int(counted[-1]) if counted else 0, float(overhead) / 1000 if overhead else None)
