"""A judge that can be fooled: `ground_truth in text`, a common mistake.

It scores 1.0 if the correct answer occurs anywhere in the agent's answer, so listing every answer always succeeds. It
exists to be detected; use `ratchet.demo.email_search.tasks` or the rule `answer` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.demo.email_search.tasks import final_answer, task_of, task_of_question, text_of


def judge(trajectory: Mapping[str, Any], task: Mapping[str, Any] | str | None = None) -> float:
    """Score one trajectory 1.0 or 0.0. Raises UnknownQuestionError, and FileNotFoundError without a task set."""
    messages = list(trajectory.get("messages") or [])
    attempted = task_of(task) if isinstance(task, Mapping) else task_of_question(messages)
    return float(attempted.answer.casefold() in last_words(messages).casefold())


def last_words(messages: list[Mapping[str, Any]]) -> str:
    """Return the agent's answer: by the tool, else its last text, else ""."""
    given = final_answer(messages)
    if given is not None:
        return given
    return next((text_of(one.get("content")) for one in reversed(messages) if one.get("role") == "assistant"), "")
