"""Rollouts of the demo's e-mail agent against a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ratchet.demo.email_search.agent import MAX_TURNS, Agent
from ratchet.demo.email_search.mailbox import Mailbox
from ratchet.demo.email_search.tasks import MailTask
from ratchet.demo.traffic import TaskRollout, connection, run_attempts


async def run_tasks(
    tasks: Iterable[MailTask],
    *,
    base_url: str,
    api_key: str,
    model: str,
    box: Mailbox,
    max_turns: int = MAX_TURNS,
    other_answers: Iterable[str] = (),
    **options: Any,
) -> list[TaskRollout]:
    """Attempt the tasks; `options` are those of `run_attempts`."""
    async with connection(base_url, api_key) as client:
        agent = Agent(client, box, model, max_turns=max_turns, other_answers=frozenset(other_answers))
        return await run_attempts(tasks, agent.attempt, **options)
