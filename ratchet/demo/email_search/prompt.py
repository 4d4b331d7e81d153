"""The system prompt: what the agent is told before each question.

It carries the number of turns, today's date and the user's address: those of the task, where it has them, else those of
the made mailbox. It is short on purpose: the tiny
policy reads it at every call.
"""

from __future__ import annotations

from typing import Any

from ratchet.demo.email_search.mailbox import TODAY, USER_EMAIL

MAX_TURNS = 6


def opening(question: str, max_turns: int = MAX_TURNS, inbox: str = "", date: str = "") -> list[dict[str, Any]]:
    """The first two messages of a rollout; `inbox` is the user's address, `date` the day on which is asked."""
    user, today = inbox or USER_EMAIL, date or TODAY
    system = f"Search the inbox of {user} with the tools. Today is {today}. You may take {max_turns} turns."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
