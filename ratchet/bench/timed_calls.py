"""Calls of a measurement: chat completions of one shape over kept connections, and what each took.

Every call's prompt is different from its first word, so that no prefix cache answers. Promises: a call that fails is
told with its reason and never timed; nothing is retried.
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
_LONGEST_REASON = 300  # characters
_FAULT = b'{"error"'  # unescaped, so no word of the model's


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What every call is like."""

    stream: bool = True
    words: int = 100  # of the prompt
    max_tokens: int = 64  # generated, all of them: the end of a turn does not stop it


@dataclass(frozen=True, slots=True)
class CallTarget:
    """Where calls go, and as what: a base URL without `/v1`, the model's name there, and what the body has besides."""

    name: str
    url: str
    model: str
    key: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Return what goes with every call."""
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return {"content-type": "application/json", "x-ratchet-tags": "bench"} | key


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call that ended. Seconds to its first byte and its last; `overhead`: what the proxy said it took itself."""

    first: float = 0.0
    whole: float = 0.0
    tokens: int = 0
    overhead: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class CallBlock:
    """Calls that were made side by side, the seconds that they took together, and the processes' CPU seconds."""

    calls: tuple[TimedCall, ...]
    seconds: float
    proxy_cpu: float | None
    own_cpu: float


_numbers = itertools.count()


def body(way: CallTarget, shape: RequestShape, number: int) -> bytes:
    """Return the body of a call; the number makes it another one."""
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
    """Make so many calls, so many at a time. `cpu` tells the CPU seconds that the proxy has used so far."""
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
            failure=str(error).replace(" (the proxy's setting request_timeout_seconds)", "")[:_LONGEST_REASON]
        )


async def _read(answer: UpstreamResponse, began: float) -> TimedCall:
    first, parts = 0.0, []
    async for piece in answer.pieces():
        first = first or time.perf_counter() - began
        parts.append(piece)
    whole, said = time.perf_counter() - began, b"".join(parts)
    if answer.status != 200 or _FAULT in said:
        text = " ".join(said.decode("utf-8", "replace").split())
        return TimedCall(failure=f"{answer.status}: {text[:_LONGEST_REASON]}")
    counted, overhead = _USAGE.findall(said), answer.headers.get("x-ratchet-overhead-ms")
    return TimedCall(first, whole, int(counted[-1]) if counted else 0, float(overhead) / 1000 if overhead else None)
