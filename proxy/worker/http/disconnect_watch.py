"""Cancels the processing of a call as soon as its client disconnects.

Listening starts `_DELAY_SECONDS` after the call. A faster call checks once, before it counts as answered (`check`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from starlette.types import Receive

from ratchet.proxy.errors import ClientDisconnected

_DELAY_SECONDS = 0.02


class DisconnectWatch:
    """Within the block, a disconnect cancels the block's task and sets `client_left`.

    The block catches the CancelledError. If `client_left` is set, it records what it has and calls `uncancel_task`;
    otherwise the server itself cancels the task.
    """

    __slots__ = ("_has_left", "_listener", "_receive", "_task", "_timer", "client_left")

    def __init__(self, receive: Receive, has_left: Callable[[], bool] | None = None) -> None:
        """`has_left` returns whether the client has disconnected, without waiting."""
        task = asyncio.current_task()
        assert task is not None, "only inside a task"
        self._task: asyncio.Task[None] | None = task
        self._receive = receive
        self._has_left = has_left
        self._listener: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_DELAY_SECONDS, self._listen)
        self.client_left = False

    def __enter__(self) -> DisconnectWatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise ClientDisconnected if the client has disconnected."""
        if self._has_left is not None and self._has_left():
            raise ClientDisconnected

    def stop(self) -> None:
        """Stop watching: from here on a disconnect cancels nothing."""
        self._task = None
        self._timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def uncancel_task(self) -> None:
        """Undo the cancellation that the disconnect caused."""
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()

    def _listen(self) -> None:
        self._listener = asyncio.get_running_loop().create_task(_wait_for_disconnect(self._receive))
        self._listener.add_done_callback(self._on_disconnect)

    def _on_disconnect(self, listener: asyncio.Task[None]) -> None:
        if self._task is not None and not listener.cancelled():
            self.client_left = True
            self._task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
