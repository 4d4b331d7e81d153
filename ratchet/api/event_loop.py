"""The synchronous form of the async functions, also where an event loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_POLL = 0.05  # seconds


def synchronous(function: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, _T]:
    """Return the synchronous form of an async function `NAME_async`: `NAME`, with its parameters, types and text."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return run_to_end(function(*args, **kwargs))

    run.__name__ = run.__qualname__ = function.__name__.removesuffix("_async")
    return run


def run_to_end(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Return the coroutine's result. Ctrl-C cancels it, and waits until it has ended."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        is_loop_running = False
    else:
        is_loop_running = True
    return _in_a_thread(coroutine) if is_loop_running else asyncio.run(coroutine)


def _in_a_thread(coroutine: Coroutine[Any, Any, _T]) -> _T:
    cancel: list[Callable[[], object]] = []

    async def cancellable() -> _T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancel.append(lambda: loop.call_soon_threadsafe(task.cancel))
        return await coroutine

    with ThreadPoolExecutor(1, "ratchet") as thread:
        result = thread.submit(contextvars.copy_context().run, asyncio.run, cancellable())
        try:
            while not result.done():
                check_interrupted()
                wait([result], _POLL)
            return result.result()
        except KeyboardInterrupt:
            for end in cancel:
                end()
            raise


def check_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C cancelled the task that calls this and blocks its event loop.

    `asyncio.run` handles Ctrl-C so: it cancels the main task, and raises nothing in code that does not await.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return
    if task is not None and task.cancelling():
        raise KeyboardInterrupt
