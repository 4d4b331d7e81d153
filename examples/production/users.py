"""Simulated users: what they ask of the mail agent, and what they say of its answers afterwards, if anything.

A user knows what the mails say, so that an honest thumb is known; most thumbs are honest. Like people, users are often
silent, take their time, err, change their mind, and have colleagues who see it otherwise. All of it follows from the
seed. They never say what would have been right: a thumb is all that anybody learns.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratchet.demo.email_search.mailbox import SyntheticMail, synthetic_mails
from ratchet.demo.email_search.tasks import TRAIN_PAIRS, Task, make_task

UP, DOWN = "up", "down"


@dataclass(frozen=True, slots=True)
class Habits:
    """How people give feedback: shares of all visits, but `contradicted` and `revised` of those that are spoken of."""

    silent: float = 0.35
    mistaken: float = 0.08  # a thumb that says the opposite of what its user found
    revised: float = 0.10  # a first thumb in haste, the opposite of the one that follows
    contradicted: float = 0.08  # a colleague's thumb beside it, the opposite one
    delay: float = 4.0  # seconds from the answer to the thumb, on average; half as much to what follows it


USUAL = Habits()


@dataclass(frozen=True, slots=True)
class Visit:
    """A user with a question. `task` holds what the mails say: the user's own knowledge, which nobody else is given."""

    user: str
    task: Task


@dataclass(frozen=True, slots=True)
class Thumb:
    """What somebody says of an answer, and how many seconds after it."""

    after: float
    end_user: str
    value: str


def visits(seed: int, mailbox_seed: int = 42) -> Iterator[Visit]:
    """Users without end, each with a question about a mail of the mailbox; hardly a question comes twice."""
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
    """What is said of an answer that the user was content with or not, in the order in which it is said."""
    if rng.random() < habits.silent:
        return ()
    value = _thumb(content != (rng.random() < habits.mistaken))
    said = [Thumb(rng.expovariate(1 / habits.delay), visit.user, value)]
    if rng.random() < habits.revised:
        said.insert(0, Thumb(said[0].after, visit.user, _other(value)))
        said[1] = Thumb(said[0].after + rng.expovariate(2 / habits.delay), visit.user, value)
    if rng.random() < habits.contradicted:
        later = said[-1].after + rng.expovariate(2 / habits.delay)
        said.append(Thumb(later, f"colleague of {visit.user}", _other(value)))
    return said


def _thumb(up: bool) -> str:
    return UP if up else DOWN


def _other(value: str) -> str:
    return DOWN if value == UP else UP
