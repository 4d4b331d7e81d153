"""The agent as a workflow: one task of the task set, played once against the server that it is given.

`ratchet tune --workflow ratchet.demo.email_search.workflow:workflow` runs it. It is the agent as it is: the URL, the
key and the model are all that it takes, the mailbox is the one in `EMAIL_SEARCH_HOME`. It scores nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.demo.email_search.agent import Agent
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.openai_client import connection
from ratchet.demo.email_search.tasks import home, task_of


class NoAnswerError(RuntimeError):
    """The server answered an attempt with an error, so that there is nothing to score."""


async def workflow(task: Mapping[str, Any], *, base_url: str, api_key: str, model: str) -> str | None:
    """Returns what the agent gave as its answer, None where it gave none. Raises NoAnswerError on a server's error."""
    box = Mailbox(home() / DATABASE)
    try:
        async with connection(base_url, api_key) as client:
            rollout = await Agent(client, box, model).attempt(task_of(task))
    finally:
        box.close()
    if rollout.end == "api_error":
        raise NoAnswerError(rollout.errors[-1])
    return rollout.answer
