"""One HTTP/1.1 connection to an upstream, and the answers that come over it, on asyncio's transports and httptools.

Promises: bytes are given on as they come, unbuffered; a reader that is slower than the upstream stops the reading
(`_MOST_WAITING`), and an answer that is read whole has a bound (`ResponseLimits`), so that memory stays bounded; a
stream that has begun may go on for ever, as long as it is not silent; leaving an answer before its end aborts the
connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import httptools

from ratchet.proxy.errors import UpstreamDisconnected, UpstreamError, UpstreamTimeout

_MOST_WAITING = 2**20  # bytes of a stream's body that nobody has taken yet
_MOST_STATUS = 599
_MOST_HEAD = 2**18  # bytes of an answer's headers


class ResponseLimits(NamedTuple):
    """What one answer may take. Times are seconds."""

    whole: float  # until it is whole; of a stream, until its first piece
    idle: float  # of silence in a stream that has begun
    size: int  # bytes of one that is read whole


class ConnectionDropped(UpstreamDisconnected):
    """A kept connection was closed before the first byte of an answer: nothing was served."""


class HttpResponse:
    """An upstream's answer whose body may still be coming. `url` is the upstream's."""

    def __init__(self, url: str, connection: UpstreamConnection, limits: ResponseLimits) -> None:
        self._loop = asyncio.get_running_loop()
        self._limits = limits
        self._heard_at: float | None = None  # a stream's latest piece
        self.url = url
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(limits.whole, self._expire)
        self._waiter: asyncio.Future[None] | None = None
        self._parts: list[bytes] = []
        self._waiting = 0  # bytes in parts
        self._begun = self._ended = self._streamed = self._paused = False
        self._error: UpstreamError | None = None
        self._closed: Callable[[], None] | None = None

    def on_close(self, closed: Callable[[], None]) -> None:
        """Call `closed` once, when the answer is let go."""
        self._closed = closed

    async def head(self) -> None:
        """Wait for status and headers. Raises UpstreamError; it is closed then."""
        await self._until(lambda: self._begun)

    async def begin(self) -> None:
        """Wait for the body's first piece, which `pieces` yields. Raises UpstreamError; it is closed then."""
        self._streamed = True
        await self._until(lambda: bool(self._parts) or self._ended)
        self._live_on()

    async def read(self) -> bytes:
        """Return the whole body. Raises UpstreamError, also where it is larger than it may be."""
        while not self._ended:
            await self._news()
        return self._take()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes, unbuffered. Raises UpstreamError where it breaks off."""
        self._streamed = True
        self._live_on()
        while True:
            while not self._parts and not self._ended:
                await self._news()
            if not self._parts:
                return
            yield self._take()

    def close(self) -> None:
        """Let go: a finished connection is used again, an unfinished one is closed at once."""
        if not self._ended:
            self._fail(UpstreamDisconnected(f"the answer of upstream {self.url} was let go"))
            self._connection.abort()
        closed, self._closed = self._closed, None
        if closed is not None:
            closed()

    async def _until(self, claim: Callable[[], bool]) -> None:
        try:
            while not claim():
                await self._news()
        except BaseException:
            self.close()
            raise

    async def _news(self) -> None:
        """Wait until something has come. Raises UpstreamError."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _take(self) -> bytes:
        parts, self._parts, self._waiting = self._parts, [], 0
        if self._paused:
            self._paused = False
            self._heard_at = self._loop.time()
            self._connection.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # --- what the connection tells ----------------------------------------------------------------------------

    @property
    def until_close(self) -> bool:
        """Whether the body ends where the connection does."""
        return self._begun and not ("content-length" in self.headers or "transfer-encoding" in self.headers)

    def began(self, status: int, headers: Mapping[str, str]) -> None:
        """The headers are whole."""
        self.status, self.headers, self._begun = status, headers, True

    def grew(self, data: bytes) -> None:
        """The body has more."""
        if self._error is not None:
            return
        self._parts.append(data)
        self._waiting += len(data)
        if self._heard_at is not None:
            self._heard_at = self._loop.time()
        if self._streamed:
            if self._waiting > _MOST_WAITING and not self._paused:
                self._paused = True
                self._connection.pause()
        elif self._waiting > self._limits.size:
            most = f"{self._limits.size} bytes (the proxy's setting max_upstream_response_bytes)"
            self._fail(UpstreamDisconnected(f"the answer of upstream {self.url} is larger than {most}"))
            self._connection.abort()

    def ended(self) -> None:
        """The body is whole."""
        self._ended = True
        self._rest()

    def failed(self, reason: str, kind: type[UpstreamError] = UpstreamDisconnected) -> None:
        """The end will not come."""
        self._fail(kind(f"upstream {self.url} broke off: {reason}"))

    def wake(self) -> None:
        """There is news for the one who waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _live_on(self) -> None:
        """The stream has begun: from here on only silence ends it."""
        if self._heard_at is None and self._timer is not None:
            self._timer.cancel()
            self._heard_at = self._loop.time()
            self._timer = self._loop.call_later(self._limits.idle, self._look)

    def _look(self) -> None:
        """End a stream that is silent, unless it is we who do not read."""
        now = self._loop.time()
        left = self._limits.idle if self._paused else (self._heard_at or now) + self._limits.idle - now
        if left > 0.001:
            self._timer = self._loop.call_later(left, self._look)
            return
        silent = f"said nothing for {self._limits.idle:g} s in the middle of its stream"
        self._fail(UpstreamTimeout(f"upstream {self.url} {silent} (the proxy's setting stream_idle_timeout_seconds)"))
        self._connection.abort()

    def _expire(self) -> None:
        self._fail(
            UpstreamTimeout(f"upstream {self.url} did not answer in time (the proxy's setting request_timeout_seconds)")
        )
        self._connection.abort()

    def _fail(self, error: UpstreamError) -> None:
        if not self._ended:
            self._error = self._error or error
            self._rest()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.wake()


class UpstreamConnection(asyncio.Protocol):
    """A connection, with one answer at a time. `on_idle` is told when the next request may go out."""

    def __init__(
        self, on_idle: Callable[[UpstreamConnection], None], on_lost: Callable[[UpstreamConnection], None]
    ) -> None:
        self.idle_since = 0.0
        self.lost = False
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._transport: Any = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: HttpResponse | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._used = self._kept = self._heard = self._bodiless = False

    def ask(self, url: str, head: bytes, body: bytes, limits: ResponseLimits, *, bodiless: bool) -> HttpResponse:
        """Send a request; return its answer, of which nothing has come yet.

        `bodiless`: it has no body, whatever its headers say (HEAD).
        """
        answer = self._answer = HttpResponse(url, self, limits)
        self._kept, self._used = self._used, True
        self._heard, self._bodiless = False, bodiless
        self._headers, self._head_bytes = {}, 0
        if len(body) < _MOST_WAITING:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        return answer

    def abort(self) -> None:
        """Close it now."""
        self.lost = True
        self._transport.abort()

    def pause(self) -> None:
        """Read no further for now."""
        if not self.lost:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self.lost:
            self._transport.resume_reading()

    # --- what asyncio tells -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody asked
            self.abort()
            return
        self._heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            answer.failed(f"this is not an HTTP answer: {error}")
            self.abort()
        answer.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        answer, self._answer = self._answer, None
        if answer is not None:
            if answer.until_close and exc is None:
                answer.ended()
            elif self._kept and not self._heard:
                answer.failed("it closed the kept connection", ConnectionDropped)
            else:
                answer.failed(str(exc) if exc else "it closed the connection before the end of its answer")
        self._on_lost(self)

    # --- what the parser tells --------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MOST_HEAD:
            raise ValueError("its headers are too large")  # the parser wraps it
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        answer, status = self._answer, self._parser.get_status_code()
        if answer is None:
            return
        if status < 200:  # 100 to 103: the answer itself follows
            self._headers = {}
            return
        if status > _MOST_STATUS:
            raise ValueError(f"{status} is no status")
        answer.began(status, self._headers)
        if self._bodiless:
            self._over(answer)
            self._transport.close()  # the parser waits for a body that does not come

    def on_body(self, data: bytes) -> None:
        if self._answer is not None:
            self._answer.grew(data)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.status:
            return
        keep = self._parser.should_keep_alive()
        self._over(answer)
        if keep and not self.lost:
            self._on_idle(self)
        else:
            self._transport.close()

    def _over(self, answer: HttpResponse) -> None:
        self._answer = None
        answer.ended()
