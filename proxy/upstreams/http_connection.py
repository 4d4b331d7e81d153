"""One HTTP/1.1 connection to an upstream, and its responses, on asyncio's transports and httptools.

`http_client.py` has the measurements behind writing this instead of using a library.

Promises: bytes are passed on as they arrive, unbuffered. A reader slower than the upstream pauses the reading
(`_MAX_BUFFERED`), and a response that is read whole is limited (`ResponseLimits`), so memory is bounded. A stream may
last for ever while it is not silent. Closing a response before its end aborts the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import httptools

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamTimeout

_MAX_BUFFERED = 2**20  # bytes of a stream that were not read yet
_MAX_STATUS = 599
_MAX_HEADER_BYTES = 2**18


class ResponseLimits(NamedTuple):
    """The limits of one response. Times are in seconds."""

    whole: float  # until it is complete; for a stream, until its first piece
    idle: float  # of silence in a started stream
    size: int  # bytes of a response that is read whole


class ConnectionDropped(UpstreamDisconnected):
    """A persistent connection was closed before the first byte of a response: nothing was served."""


class HttpResponse:
    """A response whose body may still be arriving. `url` is the upstream's."""

    def __init__(self, url: str, connection: UpstreamConnection, limits: ResponseLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._last_piece_at: float | None = None  # of a stream
        self.url = url
        self.status = 0
        self._raw_headers: Sequence[tuple[bytes, bytes]] = ()
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(limits.whole, self._expire)
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._buffered = 0  # bytes in parts
        self._has_head = self._is_complete = self._streamed = self._paused = False
        self._error: UpstreamError | None = None
        self._on_close: Callable[[], None] | None = None

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, when the response is closed."""
        self._on_close = callback

    async def wait_for_head(self) -> None:
        """Wait for status and headers. Raises UpstreamError after closing the response."""
        await self._until(lambda: self._has_head)

    async def wait_for_body(self) -> None:
        """Wait for the body's first piece, which `pieces` yields. Raises UpstreamError after closing the response."""
        self._streamed = True
        await self._until(lambda: bool(self._parts) or self._is_complete)
        self._start_idle_timer()

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError, also if it is larger than the limit."""
        while not self._is_complete:
            await self._wait_for_data()
        return self._take()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, unbuffered. Raises UpstreamError if it breaks off."""
        self._streamed = True
        self._start_idle_timer()
        while True:
            while not self._parts and not self._is_complete:
                await self._wait_for_data()
            if not self._parts:
                return
            yield self._take()

    def close(self) -> None:
        """Close the response: a complete one frees its connection, an incomplete one aborts it."""
        if not self._is_complete:
            self._fail(UpstreamDisconnected("had its response closed", url=self.url))
            self._connection.abort()
        callback, self._on_close = self._on_close, None
        if callback is not None:
            callback()

    async def _until(self, condition: Callable[[], bool]) -> None:
        try:
            while not condition():
                await self._wait_for_data()
        except BaseException:
            self.close()
            raise

    async def _wait_for_data(self) -> None:
        """Wait until something arrives. Raises UpstreamError."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _take(self) -> bytes:
        parts, self._parts, self._buffered = self._parts, [], 0
        if self._paused:
            self._paused = False
            self._last_piece_at = self._loop.time()
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """The headers, once they are complete, by lower-case name; the last one of several counts."""
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in self._raw_headers}

    # --- events of the connection -----------------------------------------------------------------------------

    @property
    def until_close(self) -> bool:
        """Whether the body ends with the connection."""
        return self._has_head and not ("content-length" in self.headers or "transfer-encoding" in self.headers)

    def on_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """The headers are complete."""
        self.status, self._raw_headers, self._has_head = status, headers, True

    def on_data(self, data: bytes) -> None:
        """A piece of the body arrived."""
        if self._error is not None:
            return
        self._parts.append(data)
        self._buffered += len(data)
        if self._last_piece_at is not None:
            self._last_piece_at = self._loop.time()
        if self._streamed:
            if self._buffered > _MAX_BUFFERED and not self._paused:
                self._paused = True
                self._connection.pause()
        elif self._buffered > self._limits.size:
            problem = f"sent a response larger than {self._limits.size} bytes"
            self._fail(UpstreamDisconnected(problem, url=self.url))
            self._connection.abort()

    def on_complete(self) -> None:
        """The body is complete."""
        self._is_complete = True
        self._stop_timer()

    def on_failure(self, reason: str, kind: type[UpstreamError] = UpstreamDisconnected) -> None:
        """The response broke off."""
        self._fail(kind("broke off its response", url=self.url, detail=reason))

    def wake(self) -> None:
        """Wake the reader."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _start_idle_timer(self) -> None:
        """Replace the timeout of the whole response by the idle timeout."""
        if self._last_piece_at is None and self._timer is not None:
            self._timer.cancel()
            self._last_piece_at = self._loop.time()
            self._timer = self._loop.call_later(self._limits.idle, self._check_idle)

    def _check_idle(self) -> None:
        """End a silent stream, unless its reader has paused it."""
        now = self._loop.time()
        left = self._limits.idle if self._paused else (self._last_piece_at or now) + self._limits.idle - now
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._check_idle)
            return
        silent = f"sent nothing for {self._limits.idle:g} s in the middle of its stream"
        self._fail(UpstreamTimeout(f"{silent} (the proxy's setting stream_idle_timeout_seconds)", url=self.url))
        self._connection.abort()

    def _expire(self) -> None:
        self._fail(
            UpstreamTimeout("did not answer in time (the proxy's setting request_timeout_seconds)", url=self.url)
        )
        self._connection.abort()

    def _fail(self, error: UpstreamError) -> None:
        if not self._is_complete:
            self._error = self._error or error
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()


class UpstreamConnection(asyncio.Protocol):
    """A connection with one response at a time. `on_idle` is called when it can send the next request."""

    def __init__(
        self, on_idle: Callable[[UpstreamConnection], None], on_closed: Callable[[UpstreamConnection], None]
    ) -> None:
        self.idle_since = 0.0
        self.is_closed = False
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._response: HttpResponse | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._used = self._is_reused = self._has_data = self._bodiless = False

    def send(self, url: str, head: bytes, body: bytes, limits: ResponseLimits, *, bodiless: bool) -> HttpResponse:
        """Send a request; return its response, before anything of it has arrived.

        `bodiless`: the response has no body, whatever its headers say (HEAD).
        """
        response = self._response = HttpResponse(url, self, limits)
        self._is_reused, self._used = self._used, True
        self._has_data, self._bodiless = False, bodiless
        self._headers, self._head_bytes = [], 0
        if len(body) < _MAX_BUFFERED:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return response

    def abort(self) -> None:
        """Close the connection now."""
        self.is_closed = True
        self._transport.abort()

    def pause(self) -> None:
        """Pause reading."""
        if not self.is_closed:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Resume reading."""
        if not self.is_closed:
            self._transport.resume_reading()

    # --- callbacks of asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:  # no request is open
            self.abort()
            return
        self._has_data = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            response.on_failure(f"this is not an HTTP response: {error}")
            self.abort()
        response.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        response, self._response = self._response, None
        if response is not None:
            if response.until_close and exc is None:
                response.on_complete()
            elif self._is_reused and not self._has_data:
                response.on_failure("it closed the persistent connection", ConnectionDropped)
            else:
                response.on_failure(str(exc) if exc else "it closed the connection before the end of its response")
        self._on_closed(self)

    # --- callbacks of the parser ------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MAX_HEADER_BYTES:
            raise ValueError("its headers are too large")  # the parser wraps it
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        response, status = self._response, self._parser.get_status_code()
        if response is None:
            return
        if status < 200:  # 100 to 103: the final response follows
            self._headers = []
            return
        if status > _MAX_STATUS:
            raise ValueError(f"{status} is not a valid status")
        response.on_head(status, self._headers)
        if self._bodiless:
            self._finish(response)
            self._transport.close()  # the parser would wait for a body

    def on_body(self, data: bytes) -> None:
        if self._response is not None:
            self._response.on_data(data)

    def on_message_complete(self) -> None:
        response = self._response
        if response is None or not response.status:
            return
        keep = self._parser.should_keep_alive()
        self._finish(response)
        if keep and not self.is_closed:
            self._on_idle(self)
        else:
            self._transport.close()

    def _finish(self, response: HttpResponse) -> None:
        self._response = None
        response.on_complete()
