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

from ratchet.demo.email_search.tasks import FILES, HARD, MailTask, every_task, home, matches, task_of


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
    folder = home()
    attempted = task_of(task) if isinstance(task, Mapping) else task_of_question(messages, folder)
    given, used = final_answer(messages), {name for name, _ in _tool_calls(messages)}
    correct = matches(given, attempted.answer, _answers(str(folder), _stamp(folder)))
    components = {
        "answered": float(given is not None),
        "correct": float(correct),
        "searched": float("search_inbox" in used),
        "read": float("read_email" in used),
    }
    return {"score": float(correct), "components": components, "explanation": _explain(given, attempted, correct)}


def final_answer(messages: list[Mapping[str, Any]]) -> str | None:
    """Return the answer of the first valid call of `return_final_answer`; None if there is none."""
    for name, arguments in _tool_calls(messages):
        if name == "return_final_answer" and set(arguments) == {"answer"} and isinstance(arguments["answer"], str):
            return str(arguments["answer"])
    return None


def last_words(messages: list[Mapping[str, Any]]) -> str:
    """Return the agent's answer: by the tool, else its last text, else ""."""
    given = final_answer(messages)
    if given is not None:
        return given
    return next((_text(one.get("content")) for one in reversed(messages) if one.get("role") == "assistant"), "")


def _tool_calls(messages: list[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages:
        if message.get("role") != "assistant":
            continue
        for call in message.get("tool_calls") or []:
            function = call.get("function") or {}
            arguments = function.get("arguments")
            try:
                parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
            except ValueError:
                parsed = None
            yield str(function.get("name")), parsed if isinstance(parsed, dict) else {}


def task_of_question(messages: list[Mapping[str, Any]], folder: Path) -> MailTask:
    """Return the task whose question is a user message. Raises UnknownQuestionError."""
    tasks = _by_question(str(folder), _stamp(folder))
    texts = [_text(message.get("content")) for message in messages if message.get("role") == "user"]
    for text in texts:
        if text.strip() in tasks:
            return tasks[text.strip()]
    first = texts[0][:120] if texts else "(no user message)"
    raise UnknownQuestionError(
        f"no task in {folder} asks {first!r}: set EMAIL_SEARCH_HOME to the folder of the agent's task set"
    )


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def _stamp(folder: Path) -> tuple[int, ...]:
    """Return the modification times of the task files, so that a rebuilt task set is read again."""
    files = [place / name for place in (folder, folder / HARD) for name in FILES.values()]
    return tuple(path.stat().st_mtime_ns if path.is_file() else 0 for path in files)


@lru_cache(maxsize=4)
def _by_question(folder: str, stamp: tuple[int, ...]) -> dict[str, MailTask]:
    return {task.question.strip(): task for task in every_task(Path(folder))}


@lru_cache(maxsize=4)
def _answers(folder: str, stamp: tuple[int, ...]) -> frozenset[str]:
    return frozenset(task.answer for task in _by_question(folder, stamp).values())


def _explain(given: str | None, task: MailTask, correct: bool) -> str:
    if given is None:
        return f"no answer was returned; the correct one is {task.answer!r}"
    return f"answered {given!r}, " + ("which is correct" if correct else f"but the correct answer is {task.answer!r}")
