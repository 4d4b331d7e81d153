"""The stream: users come one after the other, the agent serves them, and their thumbs follow when they feel like it.

An answer is known by the id that the server gave it, a thumb is one POST to `/api/feedback`. Whether the user was
content is kept here for the figures of the run, and told to nobody: the server hears the thumbs and nothing else.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import httpx
from openai import AsyncOpenAI

from examples.production.users import USUAL, Habits, Thumb, Visit, thumbs
from ratchet.demo.email_search.agent import TIMEOUT_SECONDS, Agent, Rollout
from ratchet.demo.email_search.mailbox import Mailbox

_RETRIES = 5  # of a thumb that the server could not take


@dataclass(frozen=True, slots=True)
class Served:
    """One visit and what came of it: the agent's rollout, and the thumbs that follow it."""

    visit: Visit
    rollout: Rollout
    thumbs: tuple[Thumb, ...]


@dataclass(slots=True)
class Counter:
    """What became of the thumbs, by the server's status."""

    statuses: dict[int, int] = field(default_factory=dict)

    def add(self, status: int) -> None:
        """Counts one."""
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def serve(
    people: Iterable[Visit],
    *,
    base_url: str,
    api_key: str,
    model: str,
    box: Mailbox,
    concurrency: int = 24,
    seed: int = 0,
    habits: Habits = USUAL,
    on_served: Callable[[Served], None] | None = None,
) -> tuple[list[Served], Counter]:
    """Serves each of `people`, `concurrency` of them side by side, and returns them in the order in which they left.

    Thumbs are given behind the users' backs, each at its time; the call returns when the last one is given.
    """
    coming = enumerate(people)
    served: list[Served] = []
    given, told = Counter(), set[asyncio.Task[None]]()
    async with (
        AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_SECONDS) as client,
        httpx.AsyncClient(base_url=_operator(base_url), timeout=30.0) as web,
    ):
        agent = Agent(client, box, model)

        async def desk() -> None:
            for number, visit in coming:
                one = await _serve(agent, visit, number, random.Random(f"{seed} {number}"), habits)
                served.append(one)
                if one.rollout.response_id is not None:
                    task = asyncio.create_task(_tell(web, api_key, one.rollout.response_id, one.thumbs, given))
                    told.add(task)
                    task.add_done_callback(told.discard)
                if on_served is not None:
                    on_served(one)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(desk())
        await asyncio.gather(*told)
    return served, given


async def _serve(agent: Agent, visit: Visit, number: int, rng: random.Random, habits: Habits) -> Served:
    rollout = await agent.attempt(visit.task, number)
    return Served(visit, rollout, tuple(thumbs(visit, rollout.success, habits, rng)))


async def _tell(web: httpx.AsyncClient, key: str, response_id: str, said: tuple[Thumb, ...], given: Counter) -> None:
    began = time.monotonic()
    for thumb in said:  # one after the other: the last word of a user is the one that counts
        await asyncio.sleep(max(0.0, began + thumb.after - time.monotonic()))
        await say(web, key, response_id, thumb, given)


async def say(web: httpx.AsyncClient, key: str, response_id: str, thumb: Thumb, given: Counter) -> None:
    """Gives one thumb; tries again where the server asks for it."""
    said = {"response_id": response_id, "value": thumb.value, "end_user": thumb.end_user}
    for attempt in range(_RETRIES):
        try:
            answer = await web.post("/api/feedback", json=said, headers={"authorization": f"Bearer {key}"})
        except httpx.TransportError:
            status = 0
        else:
            status = answer.status_code
        if status not in (0, 503):
            break
        await asyncio.sleep(2.0**attempt)
    given.add(status)


def _operator(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")
