"""A connection on which a client sends the same POST again and again, with other bodies: a worker's to its coordinator.

uvicorn parses the first one. Its application may then pass what answers further ones to `scope[ANSWER_REPEATED]`: a
request with the same head, byte for byte up to the value of `content-length` at its end, is answered by that, without
parser, scope and middleware. Every other request takes the usual way, before, between and after them.

Why: half of the coordinator's CPU for a call was uvicorn's and the middleware's. All processes on one core, it took
527 us a call and takes 357 us so, one call at a time; 142 and 107 us, 32 at a time (medians of three and four pairs).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from ratchet.proxy.errors import ProxyError
from ratchet.proxy.wire.asgi import ANSWER_REPEATED
from ratchet.proxy.worker.http.connections import ClientConnection, ReceivePhase

log = logging.getLogger("ratchet.proxy")

_LENGTH = b"\r\ncontent-length: "
_HEAD_END = b"\r\n\r\n"
_MAX_DIGITS = 8  # of a length; a longer body takes the usual way

Answer = Callable[[bytes], Awaitable[tuple[bytes, bytes]]]  # content type and body of the response, whose status is 200


class RepeatedPosts(ClientConnection):
    """One connection."""

    def __init__(self, *values: Any, **more: Any) -> None:
        super().__init__(*values, **more)
        self._first = b""  # what arrived first of the request that the parser reads
        self._head = b""  # of a request that may be repeated, up to its length; empty: of none
        self._answer: Answer | None = None
        self._parts: list[bytes] | None = None  # of the body of a repeated request, until it is answered
        self._missing = 0  # bytes of that body; below 0, the next request has begun

    def data_received(self, data: bytes) -> None:
        if self._parts is not None:
            if not self.transport.is_closing():
                self._receive(data)
            return
        if self._is_between_requests:
            if self._head and data.startswith(self._head) and self._begin(data):
                return
            self._first = data
        super().data_received(data)

    def on_headers_complete(self) -> None:
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope[ANSWER_REPEATED] = partial(self._repeat, self._first)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._first = b""  # a further request in the same bytes has another head
        super().on_message_complete()

    def shutdown(self) -> None:
        """Close after the response in progress, or at once."""
        if self._parts is None:
            super().shutdown()
        else:
            self._is_stopping = True

    @property
    def _is_between_requests(self) -> bool:
        answered = self.cycle is None or self.cycle.response_complete
        return (
            answered
            and self._phase is not ReceivePhase.RECEIVING
            and not (self._undecided or self.transport.is_closing())
        )

    def _repeat(self, first: bytes, answer: Answer) -> None:
        """Answer requests whose head is that of `first` by `answer` from now on."""
        head = first[: first.find(_HEAD_END)]
        value = head.rfind(_LENGTH) + len(_LENGTH)
        if value >= len(_LENGTH) and head[value:].isdigit():
            self._head, self._answer = head[:value], answer

    def _begin(self, data: bytes) -> bool:
        """Begin a repeated request; return whether it is one."""
        end = data.find(_HEAD_END, len(self._head), len(self._head) + _MAX_DIGITS + len(_HEAD_END))
        digits = data[len(self._head) : end]
        if end < 0 or not digits.isdigit():
            return False
        self._unset_keepalive_if_required()
        self._mark_idle()
        self._phase = ReceivePhase.RECEIVING
        self._parts, self._missing = [], int(digits)
        self._receive(data[end + len(_HEAD_END) :])
        return True

    def _receive(self, data: bytes) -> None:
        assert self._parts is not None
        is_answering = self._phase is ReceivePhase.RECEIVED
        self._parts.append(data)
        self._received += len(data)
        self._missing -= len(data)
        if self._missing <= 0 and not is_answering:
            self._phase = ReceivePhase.RECEIVED
            whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            task = self.loop.create_task(self._run(whole[: self._missing or None]))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _run(self, body: bytes) -> None:
        assert self._answer is not None
        try:
            kind, answer = await self._answer(body)
        except ProxyError:  # its response is the middleware's
            later = self._end()
            super().data_received(b"%b%d\r\n\r\n%b%b" % (self._head, len(body), body, later))
            return
        except Exception:
            log.exception("event=repeated_post_failed")
            self.transport.abort()
            return
        if not self.transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(answer))
            self.transport.writelines((head, answer))
        self.server_state.total_requests += 1
        later = self._end()
        if self._is_stopping:
            self.transport.close()
        elif later:
            self.data_received(later)

    def _end(self) -> bytes:
        """End a repeated request; return what has arrived after it."""
        later = b"".join(self._parts or ())[self._missing :] if self._missing else b""
        self._parts, self._missing = None, 0
        self._mark_idle()
        return later
