"""Tasks of user code under `guarded_task`: `sys.exit` is a failure, everything else as in any task."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from ratchet.trainer.errors import UserCodeExited
from ratchet.trainer.user_code.exit_guard import guarded_task


async def _leave() -> None:
    raise SystemExit(3)


def test_a_task_that_exits_has_failed() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(guarded_task)
        with pytest.raises(UserCodeExited, match=r"sys.exit\(3\)"):
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
