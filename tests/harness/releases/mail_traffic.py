"""Users of the demo's e-mail agent: endless rollouts through a proxy, in a thread, while a test or benchmark goes on.

Each task is attempted several times in a row, so that the trainer finds groups. A call that takes too long is given up,
as a user would. Every rollout is kept with the versions that answered it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType

from openai import AsyncOpenAI

from ratchet.demo.email_search.agent import MAX_TOKENS, Agent
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import read_tasks
from ratchet.demo.traffic import TaskRollout, shuffled


class MailTraffic:
    """Rollouts of one agent, `concurrency` at a time, from entering the context until leaving it.

    `home` is the folder of mailbox and tasks; `timeout` the seconds after which a user gives up a call.
    """

    def __init__(
        self,
        url: str,
        home: Path,
        agent: str,
        *,
        concurrency: int = 24,
        attempts: int = 8,
        seed: int = 0,
        timeout: float = 120.0,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self._url, self._home, self._agent = url, home, agent
        self._concurrency, self._attempts, self._seed = concurrency, attempts, seed
        self._timeout, self._max_tokens = timeout, max_tokens
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name=f"traffic of {agent}")
        self.rollouts: list[TaskRollout] = []
        self.started_at = time.monotonic()

    def __enter__(self) -> MailTraffic:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def failed(self) -> list[str]:
        """The errors of calls that the proxy did not answer."""
        return [error for one in list(self.rollouts) for error in one.errors]

    def served_by(self, version: str) -> list[TaskRollout]:
        """Return the rollouts that a version, `agent@number`, answered."""
        return [one for one in list(self.rollouts) if version in one.models]

    async def _run(self) -> None:
        box = Mailbox(self._home / DATABASE)
        tasks = (task for task in shuffled(read_tasks(self._home, "train"), self._seed) for _ in range(self._attempts))
        async with AsyncOpenAI(base_url=self._url, api_key="any", timeout=self._timeout, max_retries=0) as client:
            agent = Agent(client, box, self._agent, max_tokens=self._max_tokens)

            async def work() -> None:
                for task in tasks:
                    if self._stop.is_set():
                        return
                    self.rollouts.append(await agent.attempt(task, len(self.rollouts)))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(work())
        box.close()
