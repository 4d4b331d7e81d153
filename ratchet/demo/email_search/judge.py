"""The judge: a rule that scores a recorded trajectory 1 or 0 by the correct answer of its task.

Without the task's row, as in production, the user's question finds the task in the task set of `EMAIL_SEARCH_HOME`
(default `.ratchet/email_search`). An unknown question is an error, not a score. Only the recorded answer of the policy
counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.tasks import FILES, MailTask, every_task, home, matches, task_of


class UnknownQuestionError(LookupError):
    """No user message of the trajectory is a question in the task set."""


def judge(trajectory: Mapping[str, Any], task: Mapping[str, Any] | str | None = None) -> dict[str, Any]:
    """Score one trajectory: `{"id", "messages", "tools", "task"}`, with messages as in Chat Completions.

    `task` is the row of the task set; if it is None or only a key, the question identifies the task.

    Returns `score` (1.0 if the argument of `return_final_answer` is the correct answer, else 0.0), `components`
    (`answered`, `correct`, `searched`, `read`, each 0.0 or 1.0; only `correct` is scored) and an `explanation`.
    Raises UnknownQuestionError, and FileNotFoundError without a task set.
    """
    messages = list(trajectory.get("messages") or [])
    attempted = task_of(task) if isinstance(task, Mapping) else task_of_question(messages)
    given, used = final_answer(messages), {name for name, _ in _tool_calls(messages)}
    correct = matches(given, attempted.answer, {one.answer for one in _known_tasks().values()})
    components = {
        "answered": float(given is not None),
        "correct": float(correct),
        "searched": float("search_inbox" in used),
        "read": float("read_email" in used),
    }
    text = "no answer was returned" if given is None else f"answered {given!r}"
    return {
        "score": float(correct),
        "components": components,
        "explanation": f"{text}; " + ("correct" if correct else f"the correct answer is {attempted.answer!r}"),
    }


def final_answer(messages: list[Mapping[str, Any]]) -> str | None:
    """Return the answer of the first valid call of `return_final_answer`; None if there is none."""
    for name, arguments in _tool_calls(messages):
        if name == "return_final_answer" and set(arguments) == {"answer"} and isinstance(arguments["answer"], str):
            return str(arguments["answer"])
    return None


def task_of_question(messages: list[Mapping[str, Any]]) -> MailTask:
    """Return the task whose question is a user message. Raises UnknownQuestionError."""
    tasks = _known_tasks()
    texts = [text_of(message.get("content")).strip() for message in messages if message.get("role") == "user"]
    for text in texts:
        if text in tasks:
            return tasks[text]
    first = texts[0][:120] if texts else "(no user message)"
    raise UnknownQuestionError(
        f"no task in {home()} asks {first!r}: set EMAIL_SEARCH_HOME to the folder of the agent's task set"
    )


def text_of(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _tool_calls(messages: list[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        for call in message.get("tool_calls") or [] if message.get("role") == "assistant" else []:
            function = call.get("function") or {}
            arguments = function.get("arguments")
            try:
                parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            except ValueError:
                parsed = None
            yield str(function.get("name")), parsed if isinstance(parsed, dict) else {}


def _known_tasks() -> dict[str, MailTask]:
    """Return the task set by question. The files' times are part of the key, so that a rebuilt set is read again."""
    files = [home() / name for name in FILES.values()]
    return _read_tasks(home(), tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files))


@lru_cache(maxsize=4)
def _read_tasks(folder: Path, stamp: tuple[int, ...]) -> dict[str, MailTask]:
    return {task.question.strip(): task for task in every_task(folder)}
