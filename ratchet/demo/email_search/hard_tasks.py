"""The hard set: tasks beyond what the agent is trained on, in a mailbox of their own. It decides nothing.

Two kinds, each about pairs and facts that no training episode has: `new-names` asks about people whose names occur
nowhere else, and `two-hops` asks about a mail that only names the person who knows the answer.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

from ratchet.demo.email_search.mailbox import Mail, SyntheticMail, synthetic_mails
from ratchet.demo.email_search.tasks import QUESTIONS, TEST_PAIRS, MailTask, make_task
from ratchet.demo.email_search.words import NEW_PEOPLE, PEOPLE, TOPICS

PER_KIND = 50
NEW_NAMES, TWO_HOPS = "new-names", "two-hops"
FORWARD = "{other} has the {topic}."


def make_hard_set(seed: int, taken: Collection[str]) -> tuple[list[Mail], list[MailTask]]:
    """Return the mails and 100 tasks, whose questions are unique and none of `taken`."""
    rng, known = random.Random(f"{seed} hard"), synthetic_mails(seed + 1)
    new = _mails_of_new_people(seed + 2, {one.mail.message_id for one in known})
    tasks = [_of_new_people(one, rng) for one in rng.sample(new, PER_KIND)]
    mails = {one.mail.message_id: one.mail for one in known + new}
    by_pair, chosen = {(one.person, one.topic): one for one in known}, TEST_PAIRS[:PER_KIND]
    for person, topic in chosen:
        other = rng.choice([name for name in PEOPLE if (name, topic) not in chosen])
        first, last = by_pair[person, topic], by_pair[other, topic]
        mails[first.mail.message_id] = replace(first.mail, body=FORWARD.format(other=other, topic=topic))
        tasks.append(_two_hops(first, last, rng, taken))
    return list(mails.values()), tasks


def _mails_of_new_people(seed: int, taken: Collection[str]) -> list[SyntheticMail]:
    """Return one mail for each new person and topic, with message ids that are not `taken`."""
    made = [one for one in synthetic_mails(seed) if one.mail.message_id not in taken]
    pairs = [(person, topic) for person in NEW_PEOPLE for topic in TOPICS]
    return [_renamed(one, *pair) for one, pair in zip(made, pairs, strict=False)]


def _renamed(made: SyntheticMail, person: str, topic: str) -> SyntheticMail:
    mail = replace(
        made.mail,
        sender=f"{person.lower()}@example.com",
        subject=f"{person}: {topic} update",
        body=made.mail.body.replace(made.topic, topic),
    )
    return SyntheticMail(mail, person, topic, made.city, made.month)


def _of_new_people(made: SyntheticMail, rng: random.Random) -> MailTask:
    task = make_task(made, rng)
    return replace(task, id=f"{NEW_NAMES}-{task.id}")


def _two_hops(first: SyntheticMail, last: SyntheticMail, rng: random.Random, taken: Collection[str]) -> MailTask:
    """Return a question about the first mail, in a wording not yet taken; the last mail holds the answer."""
    wordings = [(kind, text) for kind in sorted(QUESTIONS) for text in QUESTIONS[kind]]
    questions = [(kind, text.format(topic=first.topic, person=first.person)) for kind, text in wordings]
    kind, question = rng.choice([(kind, text) for kind, text in questions if text not in taken])
    answer = last.city if kind == "city" else last.month
    name = f"{TWO_HOPS}-{kind}-{first.person}-{first.topic}"
    return MailTask(name, question, answer, kind, first.person, first.topic, last.mail.message_id)
