"""The task set: questions with one correct answer each, in three splits; and the judge, a rule that compares answers.

The split is by (person, topic) pair and does not depend on the seed of the mailbox, so a warm start on `TRAIN_PAIRS`
never sees a held-out pair. A question occurs once in the whole set: the judge finds the correct answer by it.
`matches` decides whether an answer is correct.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.mailbox import PEOPLE, TOPICS, SyntheticMail

HELD_OUT = 150
VALIDATION = 50
QUESTIONS = {
    "city": ("Where is the {topic} that {person} wrote about?", "Which city did {person} choose for the {topic}?"),
    "month": ("When is the {topic} that {person} wrote about?", "Which month did {person} choose for the {topic}?"),
}
FILES = {"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}
_NEGATION = frozenset({"not", "no", "never", "or", "neither", "nor"})


@dataclass(frozen=True, slots=True)
class MailTask:
    """A question, its correct answer and kind of answer, the (person, topic) pair, and the mail with the answer.

    `inbox` is the user's address, `date` the day of the question (ISO); "": those of the synthetic mailbox.
    """

    id: str
    question: str
    answer: str
    kind: str
    person: str
    topic: str
    message_id: str
    inbox: str = ""
    date: str = ""


def _split() -> tuple[tuple[tuple[str, str], ...], ...]:
    pairs = [(person, topic) for person in PEOPLE for topic in TOPICS]
    random.Random(7).shuffle(pairs)
    test, validation, train = pairs[:HELD_OUT], pairs[HELD_OUT : HELD_OUT + VALIDATION], pairs[HELD_OUT + VALIDATION :]
    return tuple(train), tuple(validation), tuple(test)


TRAIN_PAIRS, VALIDATION_PAIRS, TEST_PAIRS = _split()


def make_task(made: SyntheticMail, rng: random.Random) -> MailTask:
    """Return a question about one mail; `rng` draws its kind and wording."""
    kind = rng.choice(sorted(QUESTIONS))
    question = rng.choice(QUESTIONS[kind]).format(topic=made.topic, person=made.person)
    name = f"{kind}-{made.person}-{made.topic}"
    return MailTask(name, question, getattr(made, kind), kind, made.person, made.topic, made.mail.message_id)


def make_tasks(mails: Sequence[SyntheticMail], seed: int) -> dict[str, list[MailTask]]:
    """Return 400 training, 50 validation and 150 held-out tasks, one per pair."""
    rng, by_pair = random.Random(seed), {(made.person, made.topic): made for made in mails}
    splits = {"train": TRAIN_PAIRS, "validation": VALIDATION_PAIRS, "test": TEST_PAIRS}
    return {split: [make_task(by_pair[pair], rng) for pair in pairs] for split, pairs in splits.items()}


def home() -> Path:
    """Return the folder of mailbox and task set: `EMAIL_SEARCH_HOME`, by default `.ratchet/email_search`."""
    return Path(os.environ.get("EMAIL_SEARCH_HOME") or ".ratchet/email_search")


def write_tasks(folder: Path, splits: dict[str, list[MailTask]]) -> None:
    """Write a file for each split, and remove the files of other splits, which belong to an earlier task set."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in FILES.keys() - splits.keys():
        (folder / FILES[split]).unlink(missing_ok=True)
    for split, tasks in splits.items():
        lines = "".join(json.dumps(asdict(task), ensure_ascii=False) + "\n" for task in tasks)
        (folder / FILES[split]).write_text(lines, encoding="utf-8")


def read_tasks(folder: Path, split: str) -> list[MailTask]:
    """Return the tasks of one split. Raises FileNotFoundError with the remedy, ValueError for a malformed line."""
    path = folder / FILES[split]
    if not path.is_file():
        raise FileNotFoundError(f"no task set at {path}: run `python -m ratchet.demo.email_search build-db` first")
    tasks = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            tasks.append(task_of(json.loads(line), str(number)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number} is not a task with question and answer: {error!r}") from error
    return tasks


def every_task(folder: Path) -> list[MailTask]:
    """Return the tasks of all splits. Raises as `read_tasks`."""
    splits = [split for split in FILES if (folder / FILES[split]).is_file()] or ["train"]
    return [task for split in splits for task in read_tasks(folder, split)]


def task_of(row: Mapping[str, Any], name: str = "") -> MailTask:
    """Return the task of a row with a question and an answer; `name` is its id if the row has none."""
    optional = {key: str(row.get(key, "")) for key in ("kind", "person", "topic", "message_id", "inbox", "date")}
    return MailTask(str(row.get("id", name)), str(row["question"]), str(row["answer"]), **optional)


def matches(given: str | None, right: str, others: Iterable[str] = ()) -> bool:
    """Return whether `given` is the answer `right`.

    Case, spacing and punctuation do not matter. A longer text is correct if it contains the words of `right`, none of
    the `others` (other answers of the set), and no negation.
    """
    if given is None:
        return False
    words, expected = _words(given), _words(right)
    if words == expected:
        return bool(expected)
    if not _contains(words, expected) or _NEGATION & set(words):
        return False
    return not any(_contains(words, other) for other in map(_words, others) if other != expected)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _contains(words: list[str], expected: list[str]) -> bool:
    width = len(expected)
    return width > 0 and any(words[i : i + width] == expected for i in range(len(words) - width + 1))


# The judge. Without the task's row, as in production, the user's question finds the task in the task set of
# `EMAIL_SEARCH_HOME`. An unknown question is an error, not a score. Only the recorded answer of the policy counts.


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
