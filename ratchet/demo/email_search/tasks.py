"""The task set: questions with one correct answer each, split into training, validation and held-out tasks.

The split is by (person, topic) pair and does not depend on the seed of the mailbox, so a warm start on `TRAIN_PAIRS`
never sees a held-out pair. A question occurs once in the whole set: the judge finds the correct answer by it.
`matches` decides whether an answer is correct.

The hard set goes beyond what the agent is trained on, in a mailbox of its own, and decides nothing: `new-names` asks
about people whose names occur nowhere else, `two-hops` about a mail that only names the person who knows the answer.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.demo.email_search.mailbox import PEOPLE, TOPICS, Mail, SyntheticMail, synthetic_mails, words

HELD_OUT = 150
VALIDATION = 50
HARD_PER_KIND = 50
NEW_NAMES, TWO_HOPS = "new-names", "two-hops"
NEW_PEOPLE = words("Astrid Benoit Camila Dmitri Esther Fatima Goran Hanako Imran Joyce")
FORWARD = "{other} has the {topic}."
QUESTIONS = {
    "city": ("Where is the {topic} that {person} wrote about?", "Which city did {person} choose for the {topic}?"),
    "month": ("When is the {topic} that {person} wrote about?", "Which month did {person} choose for the {topic}?"),
}
FILES = {"train": "train.jsonl", "validation": "validation.jsonl", "test": "test.jsonl"}
HARD = "hard"  # folder of the hard set, within the folder of the task set
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


def make_hard_set(seed: int, taken: Collection[str]) -> tuple[list[Mail], list[MailTask]]:
    """Return the mails and 100 tasks, whose questions are unique and none of `taken`."""
    rng, known = random.Random(f"{seed} hard"), synthetic_mails(seed + 1)
    used = {one.mail.message_id for one in known}
    free = [one for one in synthetic_mails(seed + 2) if one.mail.message_id not in used]
    new = [_renamed(one, *pair) for one, pair in zip(free, itertools.product(NEW_PEOPLE, TOPICS), strict=False)]
    tasks = [make_task(one, rng) for one in rng.sample(new, HARD_PER_KIND)]
    tasks = [replace(task, id=f"{NEW_NAMES}-{task.id}") for task in tasks]
    mails = {one.mail.message_id: one.mail for one in known + new}
    by_pair, chosen = {(one.person, one.topic): one for one in known}, TEST_PAIRS[:HARD_PER_KIND]
    for person, topic in chosen:
        other = rng.choice([name for name in PEOPLE if (name, topic) not in chosen])
        first, last = by_pair[person, topic], by_pair[other, topic]
        mails[first.mail.message_id] = replace(first.mail, body=FORWARD.format(other=other, topic=topic))
        tasks.append(_two_hops(first, last, rng, taken))
    return list(mails.values()), tasks


def _renamed(made: SyntheticMail, person: str, topic: str) -> SyntheticMail:
    subject, body = f"{person}: {topic} update", made.mail.body.replace(made.topic, topic)
    mail = replace(made.mail, sender=f"{person.lower()}@example.com", subject=subject, body=body)
    return SyntheticMail(mail, person, topic, made.city, made.month)


def _two_hops(first: SyntheticMail, last: SyntheticMail, rng: random.Random, taken: Collection[str]) -> MailTask:
    """Return a question about the first mail, in a wording not yet taken; the last mail holds the answer."""
    wordings = [(kind, text) for kind in sorted(QUESTIONS) for text in QUESTIONS[kind]]
    questions = [(kind, text.format(topic=first.topic, person=first.person)) for kind, text in wordings]
    kind, question = rng.choice([(kind, text) for kind, text in questions if text not in taken])
    answer, name = getattr(last, kind), f"{TWO_HOPS}-{kind}-{first.person}-{first.topic}"
    return MailTask(name, question, answer, kind, first.person, first.topic, last.mail.message_id)


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
    return [_read_line(path, number, line) for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)]


def every_task(folder: Path) -> list[MailTask]:
    """Return the tasks of all splits, and of the hard set if there is one. Raises as `read_tasks`."""
    places = [(place, split) for place in (folder, folder / HARD) for split in FILES]
    found = [task for place, split in places if (place / FILES[split]).is_file() for task in read_tasks(place, split)]
    return found or read_tasks(folder, "train")


def task_of(row: Mapping[str, Any], name: str = "") -> MailTask:
    """Return the task of a row with a question and an answer; `name` is its id if the row has none."""
    optional = {key: str(row.get(key, "")) for key in ("kind", "person", "topic", "message_id", "inbox", "date")}
    return MailTask(str(row.get("id", name)), str(row["question"]), str(row["answer"]), **optional)


def _read_line(path: Path, number: int, line: str) -> MailTask:
    try:
        return task_of(json.loads(line), str(number))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}:{number} is not a task with question and answer: {error!r}") from error


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
