"""The system prompt: what the agent is told before each question.

It carries the number of turns, today's date in the mailbox and the user's address. It is short on purpose: the tiny
policy reads it at every call.
"""

from __future__ import annotations

from typing import Any

from examples.email_search.mailbox import TODAY, USER_EMAIL

MAX_TURNS = 6


def opening(question: str, max_turns: int = MAX_TURNS) -> list[dict[str, Any]]:
    """The first two messages of a rollout."""
    system = f"Search the inbox of {USER_EMAIL} with the tools. Today is {TODAY}. You may take {max_turns} turns."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
