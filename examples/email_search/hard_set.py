"""100 tasks beyond what the agent is trained on, in a mailbox of their own: they are never trained.

    python -m examples.email_search.hard_set [--home DIR] [--seed 42]       after `build-db`; writes DIR/hard
    python -m ratchet.demo.email_search test --home DIR/hard

`new-names` asks about people whose names occur nowhere else, `two-hops` about a mail that only names the person who
knows the answer.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ratchet.demo.email_search.mailbox import DATABASE, PEOPLE, TOPICS, Mail, Mailbox, SyntheticMail, synthetic_mails
from ratchet.demo.email_search.tasks import QUESTIONS, TEST_PAIRS, MailTask, every_task, home, make_task, write_tasks

PER_KIND = 50
NEW_NAMES, TWO_HOPS = "new-names", "two-hops"
NEW_PEOPLE = ["Astrid", "Benoit", "Camila", "Dmitri", "Esther", "Fatima", "Goran", "Hanako", "Imran", "Joyce"]
FORWARD = "{other} has the {topic}."


def make_hard_set(seed: int, taken: Collection[str]) -> tuple[list[Mail], list[MailTask]]:
    """Return the mails and 100 tasks, whose questions are unique and none of `taken`."""
    rng, known = random.Random(f"{seed} hard"), synthetic_mails(seed + 1)
    used = {one.mail.message_id for one in known}
    free = [one for one in synthetic_mails(seed + 2) if one.mail.message_id not in used]
    new = [_renamed(one, *pair) for one, pair in zip(free, itertools.product(NEW_PEOPLE, TOPICS), strict=False)]
    tasks = [make_task(one, rng) for one in rng.sample(new, PER_KIND)]
    tasks = [replace(task, id=f"{NEW_NAMES}-{task.id}") for task in tasks]
    mails = {one.mail.message_id: one.mail for one in known + new}
    by_pair, chosen = {(one.person, one.topic): one for one in known}, TEST_PAIRS[:PER_KIND]
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


def main() -> None:
    """Write the hard set beside a task set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, default=home(), help="folder of mailbox and tasks (EMAIL_SEARCH_HOME)")
    parser.add_argument("--seed", type=int, default=42, help="of mails and questions, that of build-db")
    chosen = parser.parse_args()
    mails, tasks = make_hard_set(chosen.seed, {task.question for task in every_task(chosen.home)})
    Mailbox.build(chosen.home / "hard" / DATABASE, mails).close()
    write_tasks(chosen.home / "hard", {"test": tasks})
    print(chosen.home / "hard")


if __name__ == "__main__":
    main()
