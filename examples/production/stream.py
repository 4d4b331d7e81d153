"""The stream: the agent serves users concurrently, and their feedback follows later.

A thumb is one POST to `/api/feedback` with the id of the response. Whether a user was content is only recorded for the
figures of the run; the server receives nothing but thumbs.
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
from ratchet.demo.email_search.agent import Agent
from ratchet.demo.email_search.mailbox import Mailbox
from ratchet.demo.traffic import TIMEOUT_SECONDS, TaskRollout

_RETRIES = 5  # of a thumb that the server did not accept


@dataclass(frozen=True, slots=True)
class Served:
    """One visit with the agent's rollout, and the thumbs that follow."""

    visit: Visit
    rollout: TaskRollout
    thumbs: tuple[Thumb, ...]


@dataclass(slots=True)
class Counter:
    """Counts thumbs by the server's HTTP status; 0: unreachable."""

    statuses: dict[int, int] = field(default_factory=dict)

    def add(self, status: int) -> None:
        """Count one thumb."""
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
    """Serve each of `people`, `concurrency` at a time; return them in the order of their end.

    Thumbs are sent in the background, each at its time; the call returns after the last one.
    """
    queue = enumerate(people)
    served: list[Served] = []
    counter, sending = Counter(), set[asyncio.Task[None]]()
    async with (
        AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_SECONDS) as client,
        httpx.AsyncClient(base_url=_operator(base_url), timeout=30.0) as http,
    ):
        agent = Agent(client, box, model)

        async def serve_next() -> None:
            for number, visit in queue:
                one = await _serve(agent, visit, number, random.Random(f"{seed} {number}"), habits)
                served.append(one)
                if one.rollout.response_id is not None:
                    task = asyncio.create_task(
                        _send_thumbs(http, api_key, one.rollout.response_id, one.thumbs, counter)
                    )
                    sending.add(task)
                    task.add_done_callback(sending.discard)
                if on_served is not None:
                    on_served(one)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(serve_next())
        await asyncio.gather(*sending)
    return served, counter


async def _serve(agent: Agent, visit: Visit, number: int, rng: random.Random, habits: Habits) -> Served:
    rollout = await agent.attempt(visit.task, number)
    return Served(visit, rollout, tuple(thumbs(visit, rollout.success, habits, rng)))


async def _send_thumbs(
    http: httpx.AsyncClient, key: str, response_id: str, pending: tuple[Thumb, ...], counter: Counter
) -> None:
    began = time.monotonic()
    for thumb in pending:  # in order: the newest thumb of a user counts
        await asyncio.sleep(max(0.0, began + thumb.after - time.monotonic()))
        await send_thumb(http, key, response_id, thumb, counter)


async def send_thumb(http: httpx.AsyncClient, key: str, response_id: str, thumb: Thumb, counter: Counter) -> None:
    """Send one thumb, with retries while the server is unavailable."""
    body = {"response_id": response_id, "value": thumb.value, "end_user": thumb.end_user}
    for attempt in range(_RETRIES):
        try:
            answer = await http.post("/api/feedback", json=body, headers={"authorization": f"Bearer {key}"})
        except httpx.TransportError:
            status = 0
        else:
            status = answer.status_code
        if status not in (0, 503):
            break
        await asyncio.sleep(2.0**attempt)
    counter.add(status)


def _operator(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")
