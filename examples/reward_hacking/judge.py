"""The judge that is fooled: `ground_truth in text`, as it stands in many first notebooks.

It gives 1.0 where the right answer occurs anywhere in what the agent gave as its answer. Whoever lists every answer is
always right. It is here to be caught; use `ratchet.demo.email_search.judge`, or the rule `answer`, for anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.demo.email_search.judge import asked, last_words
from ratchet.demo.email_search.tasks import home, task_of


def judge(trajectory: Mapping[str, Any], task: Mapping[str, Any] | str | None = None) -> float:
    """Scores one trajectory 1.0 or 0.0. Raises UnknownQuestionError, and FileNotFoundError without a task set."""
    messages = list(trajectory.get("messages") or [])
    tried = task_of(task) if isinstance(task, Mapping) else asked(messages, home())
    return float(tried.answer.casefold() in last_words(messages).casefold())
