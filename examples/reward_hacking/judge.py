"""A judge that can be fooled: `ground_truth in text`, a common mistake.

It scores 1.0 if the correct answer occurs anywhere in the agent's answer, so listing every answer always succeeds. It
exists to be detected; use `ratchet.demo.email_search.judge` or the rule `answer` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.demo.email_search.judge import last_words, task_of_question
from ratchet.demo.email_search.tasks import home, task_of


def judge(trajectory: Mapping[str, Any], task: Mapping[str, Any] | str | None = None) -> float:
    """Score one trajectory 1.0 or 0.0. Raises UnknownQuestionError, and FileNotFoundError without a task set."""
    messages = list(trajectory.get("messages") or [])
    attempted = task_of(task) if isinstance(task, Mapping) else task_of_question(messages, home())
    return float(attempted.answer.casefold() in last_words(messages).casefold())
