"""Work in the background, tasks of user code, and the pauses between looks at the store."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from ratchet.trainer.background_work import BackgroundWork
from ratchet.trainer.controller.process import QueryPacing
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.user_code import guarded_task

SECONDS = 60.0


def test_the_result_is_recorded_in_the_callers_thread() -> None:
    done = threading.Event()
    background = BackgroundWork("test", done.set)
    found: list[tuple[int, str, str]] = []

    def record(result: tuple[int, str]) -> bool:
        found.append((*result, threading.current_thread().name))
        return True

    background.start("a sum", lambda: (1 + 1, threading.current_thread().name), record)
    assert done.wait(SECONDS)
    assert (background.is_busy, background.what, found) == (True, "a sum", [])
    assert background.collect()
    assert found == [(2, "test", threading.main_thread().name)]
    assert not background.collect()
    assert not background.is_busy
    background.close()


def test_an_error_is_raised_once_and_work_goes_on() -> None:
    background = BackgroundWork("test")

    def fail() -> int:
        raise ValueError("scripted")

    background.start("a failure", fail, lambda _: True)
    assert background.wait(SECONDS)
    with pytest.raises(ValueError, match="scripted"):
        background.collect()
    background.start("a success", lambda: 1, lambda result: result == 1)
    assert background.wait(SECONDS)
    assert background.collect()
    background.close()


def test_nothing_starts_before_the_last_result_is_collected() -> None:
    gate = threading.Event()
    background = BackgroundWork("test")
    background.start("a wait", lambda: gate.wait(SECONDS), lambda _: False)
    assert not background.collect()
    assert not background.wait(0.0)
    with pytest.raises(RuntimeError, match="before a wait was collected"):
        background.start("another", lambda: None, lambda _: False)
    background.close()  # the work that runs may end
    gate.set()
    assert background.wait(SECONDS)
    assert not background.collect()


async def _leave() -> None:
    raise SystemExit(3)


def test_a_task_that_exits_has_failed() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(guarded_task)
        with pytest.raises(TrainerError, match=r"sys.exit\(3\)"):
            await asyncio.create_task(_leave())

    asyncio.run(main())


def test_a_task_group_of_anyio_ends_its_tasks_when_it_is_cancelled() -> None:
    """The clients of httpx connect in such a group; anyio looks at what each task's coroutine does."""
    ended: list[str] = []

    async def wait(name: str) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(name)

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(guarded_task)
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "one")
            await asyncio.sleep(0)
            group.start_soon(wait, "two")
            group.cancel_scope.cancel()

    asyncio.run(main())
    assert sorted(ended) == ["one", "two"]


def test_a_single_slow_query_makes_no_pause_longer() -> None:
    pacing = QueryPacing(0.5)
    assert [pacing.pause_after(seconds) for seconds in (0.8, 0.001, 0.001, 0.8, 0.8, 0.001)] == [0.5] * 6


def test_queries_that_are_always_slow_take_two_percent_of_the_time() -> None:
    pacing = QueryPacing(0.5)
    pauses = [pacing.pause_after(0.2) for _ in range(10)]
    assert pauses[-1] == pytest.approx(10.0)
    assert pauses[:2] == [0.5, 0.5]
