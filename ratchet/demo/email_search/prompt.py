"""The system prompt: the user's address, today's date and the number of turns.

Address and date are those of the task, else of the synthetic mailbox. The prompt is short because the tiny policy reads
it in every call.
"""

from __future__ import annotations

from typing import Any

from ratchet.demo.email_search.mailbox import TODAY, USER_EMAIL

MAX_TURNS = 6


def opening(question: str, max_turns: int = MAX_TURNS, inbox: str = "", date: str = "") -> list[dict[str, Any]]:
    """Return the first two messages of a rollout; `inbox` is the user's address, `date` the day of the question."""
    user, today = inbox or USER_EMAIL, date or TODAY
    system = f"Search the inbox of {user} with the tools. Today is {today}. You may take {max_turns} turns."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
