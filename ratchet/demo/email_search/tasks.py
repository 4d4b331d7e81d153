"""The task set: questions with one right answer each, split into training and held-out tasks.

The split is by (person, topic) pair and does not depend on the seed of the mailbox, so that a warm start that keeps
to `TRAIN_PAIRS` has never seen a held-out pair. A question occurs once in the whole set: it is the key by which the
judge finds the right answer. `matches` is the one rule by which an answer counts as right.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.mailbox import SyntheticMail
from ratchet.demo.email_search.words import PEOPLE, TOPICS

HELD_OUT = 150
QUESTIONS = {
    "city": ("Where is the {topic} that {person} wrote about?", "Which city did {person} choose for the {topic}?"),
    "month": ("When is the {topic} that {person} wrote about?", "Which month did {person} choose for the {topic}?"),
}
FILES = {"train": "train.jsonl", "test": "test.jsonl"}
_NEGATION = frozenset({"not", "no", "never", "or", "neither", "nor"})


@dataclass(frozen=True, slots=True)
class Task:
    """A question, its right answer, what the answer is (`kind`), the pair asked about, and the mail that tells.

    `inbox` is the address of the user who asks, `date` the day of asking (ISO); "" is the made mailbox's own.
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


def _split() -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    pairs = [(person, topic) for person in PEOPLE for topic in TOPICS]
    random.Random(7).shuffle(pairs)
    return tuple(pairs[HELD_OUT:]), tuple(pairs[:HELD_OUT])


TRAIN_PAIRS, TEST_PAIRS = _split()


def make_task(made: SyntheticMail, rng: random.Random) -> Task:
    """One question about one mail; kind and wording are drawn from `rng`."""
    kind = rng.choice(sorted(QUESTIONS))
    question = rng.choice(QUESTIONS[kind]).format(topic=made.topic, person=made.person)
    answer = made.city if kind == "city" else made.month
    name = f"{kind}-{made.person}-{made.topic}"
    return Task(name, question, answer, kind, made.person, made.topic, made.mail.message_id)


def make_tasks(mails: Sequence[SyntheticMail], seed: int) -> dict[str, list[Task]]:
    """450 training and 150 held-out tasks, one for each pair."""
    rng, by_pair = random.Random(seed), {(made.person, made.topic): made for made in mails}
    return {
        "train": [make_task(by_pair[pair], rng) for pair in TRAIN_PAIRS],
        "test": [make_task(by_pair[pair], rng) for pair in TEST_PAIRS],
    }


def home() -> Path:
    """The folder of the mailbox and the task set: `EMAIL_SEARCH_HOME`, by default `.ratchet/email_search`."""
    return Path(os.environ.get("EMAIL_SEARCH_HOME") or ".ratchet/email_search")


def write_tasks(folder: Path, splits: dict[str, list[Task]]) -> None:
    """Writes `train.jsonl` and `test.jsonl`, one task a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, tasks in splits.items():
        lines = "".join(json.dumps(_row(task), ensure_ascii=False) + "\n" for task in tasks)
        (folder / FILES[split]).write_text(lines, encoding="utf-8")


def read_tasks(folder: Path, split: str) -> list[Task]:
    """The tasks of one split. Raises FileNotFoundError that names the remedy, ValueError at a broken line."""
    path = folder / FILES[split]
    if not path.is_file():
        raise FileNotFoundError(f"no task set at {path}: run `python -m ratchet.demo.email_search build-db` first")
    return [_read_line(path, number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)]


def _row(task: Task) -> dict[str, str]:
    return {name: value for name, value in asdict(task).items() if value or name not in ("inbox", "date")}


def task_of(row: Mapping[str, Any], name: str = "") -> Task:
    """The task of one row: it needs a question and an answer; a row without an id is called `name`."""
    optional = {key: str(row.get(key, "")) for key in ("kind", "person", "topic", "message_id", "inbox", "date")}
    return Task(str(row.get("id", name)), str(row["question"]), str(row["answer"]), **optional)


def _read_line(path: Path, number: int, line: str) -> Task:
    try:
        return task_of(json.loads(line), str(number))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}:{number} is no task with question and answer: {error!r}") from error


def matches(given: str | None, right: str, others: Iterable[str] = ()) -> bool:
    """Whether `given` says `right`.

    Case, spacing and punctuation at the borders do not count. A longer text counts when it holds `right` between
    word borders, says none of the `others` (other answers of the same set), and holds no word that takes it back.
    """
    if given is None:
        return False
    said, wanted = _words(given), _words(right)
    if said == wanted:
        return bool(wanted)
    if not _holds(said, wanted) or _NEGATION & set(said):
        return False
    return not any(_holds(said, words) for words in map(_words, others) if words != wanted)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _holds(said: list[str], wanted: list[str]) -> bool:
    width = len(wanted)
    return width > 0 and any(said[i : i + width] == wanted for i in range(len(said) - width + 1))
