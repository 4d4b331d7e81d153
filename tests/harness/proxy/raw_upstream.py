"""An upstream that answers POST requests with any bytes, HTTP or not, and GET requests as vLLM does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator

MODELS = {"object": "list", "data": [{"id": "base", "object": "model", "parent": None, "max_model_len": 4096}]}


def http(body: bytes, status: int = 200, headers: bytes = b"", length: int | None = None) -> bytes:
    """Return an HTTP answer; `length` overrides its content-length."""
    result = len(body) if length is None else length
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (status, result)
    return head + headers + b"\r\n" + body


def stream(*events: bytes) -> bytes:
    """Return a whole stream of these events."""
    body = b"".join(b"data: " + event + b"\n\n" for event in (*events, b"[DONE]"))
    return b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + body


class RawUpstream:
    """The server. `answer` is sent to the next POST; then the connection is closed unless `keeps` is set.

    If `resets` is set it is reset instead. `answer_to` gives another answer to a body.
    """

    def __init__(self) -> None:
        self.answer = b""
        self.answer_to: Callable[[bytes], bytes] | None = None
        self.keeps = False
        self.resets = False
        self.posts = 0
        self._talks: set[asyncio.Task[None]] = set()
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        if (task := asyncio.current_task()) is not None:
            self._talks.add(task)
            task.add_done_callback(self._talks.discard)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                body = await reader.readexactly(int(length or b"0"))
                if head.startswith(b"post"):
                    self.posts += head.startswith(b"post /v1/chat/completions http")  # not the proxy's own questions
                    writer.write(self.answer_to(body) if self.answer_to else self.answer)
                    await writer.drain()
                    if self.keeps:
                        continue
                    if self.resets:
                        at_once = struct.pack("ii", 1, 0)
                        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
                    break
                writer.write(http(json.dumps(MODELS).encode()))
        writer.close()

    async def hang_up(self) -> None:
        """Close the connections that are open."""
        for task in list(self._talks):
            task.cancel()
        await asyncio.gather(*self._talks, return_exceptions=True)


@contextlib.contextmanager
def raw_upstream() -> Iterator[RawUpstream]:
    """Serve in a thread."""
    upstream, loop, listening = RawUpstream(), asyncio.new_event_loop(), threading.Event()

    async def serve(stop: asyncio.Event) -> None:
        server = await asyncio.start_server(upstream.talk, "127.0.0.1", 0)
        upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        listening.set()
        await stop.wait()
        server.close()
        await upstream.hang_up()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(stop),), daemon=True)
    thread.start()
    assert listening.wait(60)
    try:
        yield upstream
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
