"""Turns `sys.exit` in user code into a failure of that code; the process continues.

asyncio lets the SystemExit of a task end the event loop, so one agent's argparse would stop all others. The task
factory `guarded_task` raises TrainerError instead. KeyboardInterrupt is not changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

from ratchet.trainer.errors import TrainerError

_T = TypeVar("_T")


def exit_failure(error: SystemExit) -> TrainerError:
    """Return the failure for a SystemExit."""
    return TrainerError(f"it called sys.exit({error.code!r}); have it return or raise an exception")


def guarded_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **options: Any
) -> asyncio.Task[_T]:
    """Create a task whose SystemExit becomes a TrainerError; for `loop.set_task_factory`."""
    return asyncio.Task(_Guarded(coro), loop=loop, **options)


class _Guarded(Coroutine[Any, Any, _T]):
    """A coroutine that raises TrainerError if the inner one raises SystemExit.

    It is no `async def`, because then a task cancelled before its first step would never await the inner one.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.__qualname__ = getattr(inner, "__qualname__", type(inner).__qualname__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # anyio looks at `cr_running` and others before it cancels a task

    def __await__(self) -> Generator[Any, Any, _T]:
        raise TypeError("only a task can run this coroutine")

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except SystemExit as error:
            raise exit_failure(error) from error

    def throw(self, *exception: Any) -> Any:
        try:
            return self._inner.throw(*exception)
        except SystemExit as error:
            raise exit_failure(error) from error

    def close(self) -> None:
        self._inner.close()
