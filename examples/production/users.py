"""Simulated users: their questions to the mail agent, and their feedback on its answers.

A user knows the mails, so the honest thumb is known. Like people, users are often silent, late or wrong, change their
mind, and have colleagues who disagree. Everything is determined by the seed. A thumb is their only feedback; they never
give the correct answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratchet.demo.email_search.mailbox import SyntheticMail, synthetic_mails
from ratchet.demo.email_search.tasks import TRAIN_PAIRS, MailTask, make_task

UP, DOWN = "up", "down"


@dataclass(frozen=True, slots=True)
class Habits:
    """Habits of giving feedback: shares of all visits; `contradicted` and `revised` of visits with feedback."""

    silent: float = 0.35
    mistaken: float = 0.08  # the thumb is the opposite of the user's opinion
    revised: float = 0.10  # a hasty first thumb, the opposite of the next one
    contradicted: float = 0.08  # a colleague gives the opposite thumb
    delay: float = 4.0  # mean seconds from the answer to the thumb; half as much to later ones


USUAL = Habits()


@dataclass(frozen=True, slots=True)
class Visit:
    """A user with a question. The answer in `task` is known only to the user."""

    user: str
    task: MailTask


@dataclass(frozen=True, slots=True)
class Thumb:
    """Feedback on an answer; `after` is seconds since the answer."""

    after: float
    end_user: str
    value: str


def visits(seed: int, mailbox_seed: int = 42) -> Iterator[Visit]:
    """Yield users endlessly, each with a question about a mail; questions rarely repeat."""
    rng = random.Random(f"{seed} visits")
    by_pair = {(made.person, made.topic): made for made in synthetic_mails(mailbox_seed)}
    number = 0
    while True:
        for pair in rng.sample(TRAIN_PAIRS, len(TRAIN_PAIRS)):
            number += 1
            yield _visit(number, by_pair[pair], rng)


def _visit(number: int, made: SyntheticMail, rng: random.Random) -> Visit:
    return Visit(f"user-{number}", make_task(made, rng))


def thumbs(visit: Visit, content: bool, habits: Habits, rng: random.Random) -> Sequence[Thumb]:
    """Return the thumbs for an answer, in the order of their time; `content`: whether the answer was good."""
    if rng.random() < habits.silent:
        return ()
    value = _thumb(content != (rng.random() < habits.mistaken))
    feedback = [Thumb(rng.expovariate(1 / habits.delay), visit.user, value)]
    if rng.random() < habits.revised:
        feedback.insert(0, Thumb(feedback[0].after, visit.user, _other(value)))
        feedback[1] = Thumb(feedback[0].after + rng.expovariate(2 / habits.delay), visit.user, value)
    if rng.random() < habits.contradicted:
        later = feedback[-1].after + rng.expovariate(2 / habits.delay)
        feedback.append(Thumb(later, f"colleague of {visit.user}", _other(value)))
    return feedback


def _thumb(up: bool) -> str:
    return UP if up else DOWN


def _other(value: str) -> str:
    return DOWN if value == UP else UP
