"""`sys.exit` in a user's code: the failure of that code, never the end of the process that runs it.

asyncio lets SystemExit out of the loop wherever a task raises it, so that one agent's argparse would end all others.
`exits_raise` is a task factory under which it is an exception like any other. KeyboardInterrupt is left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

_T = TypeVar("_T")


class UserCodeExited(Exception):
    """The user's code called sys.exit, or raised SystemExit."""


def exited(error: SystemExit) -> UserCodeExited:
    """Return the failure that a SystemExit stands for."""
    return UserCodeExited(f"it called sys.exit({error.code!r}); have it return or raise an exception")


def exits_raise(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, _T] | Generator[Any, None, _T], **given: Any
) -> asyncio.Task[_T]:
    """Make a task whose SystemExit is a UserCodeExited; for `loop.set_task_factory`."""
    return asyncio.Task(_Guarded(coro), loop=loop, **given)


class _Guarded(Coroutine[Any, Any, _T]):
    """A coroutine that raises UserCodeExited where the one inside raises SystemExit.

    No `async def`: a task that is cancelled before its first step would leave the inner one never awaited.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.__qualname__ = getattr(inner, "__qualname__", type(inner).__qualname__)

    def __await__(self) -> Generator[Any, Any, _T]:
        raise TypeError("a task awaits this coroutine by its methods")

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except SystemExit as error:
            raise exited(error) from error

    def throw(self, *raised: Any) -> Any:
        try:
            return self._inner.throw(*raised)
        except SystemExit as error:
            raise exited(error) from error

    def close(self) -> None:
        self._inner.close()
