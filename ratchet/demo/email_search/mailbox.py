"""The mailbox: mails in an SQLite file with an FTS5 index, and synthetic mails.

`search` and `read` never write. The synthetic mails are a pure function of the seed.
"""

from __future__ import annotations

import random
import sqlite3
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ratchet.demo.email_search.words import CITIES, ID_FIRST, ID_SECOND, MONTHS, PEOPLE, TOPICS

DATABASE = "mailbox.sqlite"
TODAY = "2026-06-30"
USER_EMAIL = "robin@example.com"
MAX_HITS = 3
BODIES = (
    "The {topic} is in {city} in {month}.",
    "In {month} we meet in {city} for the {topic}.",
    "{city} has the {topic} in {month}.",
)


@dataclass(frozen=True, slots=True)
class Mail:
    """One mail. `date` is an ISO day; `body` is the text that `read_email` returns; `inboxes` are its owners."""

    message_id: str
    sender: str
    subject: str
    body: str
    date: str
    inboxes: tuple[str, ...] = ()  # addresses of senders and recipients; synthetic mails have none


class Searchable(Protocol):
    """What the agent's tools search: a whole mailbox, or the mail of one user."""

    def search(self, keywords: list[str], limit: int = MAX_HITS) -> list[tuple[str, str]]:
        """Return (message_id, subject) of at most `limit` mails with all keywords, best match first."""

    def read(self, message_id: str) -> str | None:
        """Return the body of a mail; None for an unknown id."""


@dataclass(frozen=True, slots=True)
class SyntheticMail:
    """A synthetic mail with its facts: author, topic, city and month."""

    mail: Mail
    person: str
    topic: str
    city: str
    month: str


def synthetic_mails(seed: int) -> list[SyntheticMail]:
    """Return one mail per person and topic (30 x 20); `seed` determines ids, facts and order."""
    rng = random.Random(seed)
    pairs = [(person, topic) for person in PEOPLE for topic in TOPICS]
    ids = rng.sample([f"{first}-{second}" for first in ID_FIRST for second in ID_SECOND], len(pairs))
    rng.shuffle(pairs)
    return [_synthetic_mail(rng, name, *pair) for name, pair in zip(ids, pairs, strict=True)]


def _synthetic_mail(rng: random.Random, message_id: str, person: str, topic: str) -> SyntheticMail:
    city, month = rng.choice(CITIES), rng.choice(MONTHS)
    body = rng.choice(BODIES).format(topic=topic, city=city, month=month)
    day = f"2026-{rng.randint(1, 6):02d}-{rng.randint(1, 28):02d}"
    mail = Mail(message_id, f"{person.lower()}@example.com", f"{person}: {topic} update", body, day)
    return SyntheticMail(mail, person, topic, city, month)


class Mailbox:
    """A mailbox file (or `:memory:`), used in the thread that opened it.

    `close()` closes the file; garbage collection does too.
    """

    def __init__(self, path: str | Path) -> None:
        if str(path) != ":memory:" and not Path(path).is_file():
            raise FileNotFoundError(f"no mailbox at {path}: run `python -m ratchet.demo.email_search build-db` first")
        self._db = sqlite3.connect(str(path), check_same_thread=False)  # the finalizer may run in another thread
        self.close = weakref.finalize(self, self._db.close)

    @classmethod
    def build(cls, path: str | Path, mails: Iterable[Mail]) -> Mailbox:
        """Write `mails` into a new mailbox at `path`; replaces an older one when complete."""
        if str(path) == ":memory:":
            box = cls(path)
            _fill(box._db, mails)
            return box
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        new_file = target.with_name(target.name + ".new")
        new_file.unlink(missing_ok=True)
        db = sqlite3.connect(str(new_file))
        try:
            _fill(db, mails)
        finally:
            db.close()
        new_file.replace(target)
        return cls(target)

    def search(self, keywords: list[str], limit: int = MAX_HITS) -> list[tuple[str, str]]:
        """Return (message_id, subject) of at most `limit` mails with all keywords, best match first."""
        return self.found(keywords, limit)

    def read(self, message_id: str) -> str | None:
        """Return the body of a mail; None for an unknown id."""
        row = self._db.execute("SELECT body FROM body WHERE message_id = ?", (_for_sqlite(message_id),)).fetchone()
        return None if row is None else str(row[0])

    def of(self, inbox: str, date: str) -> Searchable:
        """Return one user's mail up to a day (ISO), inclusive; "" means all users, or all days."""
        return _Inbox(self, inbox.casefold(), date) if inbox or date else self

    def found(
        self, keywords: list[str], limit: int, where: str = "", values: tuple[str, ...] = ()
    ) -> list[tuple[str, str]]:
        """Return the mails with all keywords that also meet the SQL condition `where`."""
        query = " ".join('"' + _for_sqlite(word).replace('"', '""') + '"' for word in keywords)
        sql = f"SELECT message_id, subject FROM mail WHERE mail MATCH ? {where} ORDER BY rank, rowid LIMIT ?"
        return [(row[0], row[1]) for row in self._db.execute(sql, (query, *values, limit))]

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM body").fetchone()[0])


@dataclass(frozen=True, slots=True)
class _Inbox:
    """One user's mail up to a day."""

    box: Mailbox
    address: str
    date: str

    def search(self, keywords: list[str], limit: int = MAX_HITS) -> list[tuple[str, str]]:
        where, values = self._condition()
        return self.box.found(keywords, limit, f"AND message_id IN ({where})", values)

    def read(self, message_id: str) -> str | None:
        where, values = self._condition()
        known = self.box._db.execute(f"{where} AND body.message_id = ?", (*values, _for_sqlite(message_id))).fetchone()
        return None if known is None else self.box.read(message_id)

    def _condition(self) -> tuple[str, tuple[str, ...]]:
        conditions, values = ["1"], []
        if self.address:
            conditions.append("message_id IN (SELECT message_id FROM inbox WHERE address = ?)")
            values.append(self.address)
        if self.date:  # a mail without a valid date is always included
            conditions.append("(substr(date, 1, 10) <= ? OR date NOT GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-*')")
            values.append(self.date[:10])
        return f"SELECT message_id FROM body WHERE {' AND '.join(conditions)}", tuple(values)


def _for_sqlite(text: str) -> str:
    """Replace characters that SQLite rejects: lone surrogates and NUL."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", " ")


def _fill(db: sqlite3.Connection, mails: Iterable[Mail]) -> None:
    db.execute("CREATE VIRTUAL TABLE mail USING fts5(message_id UNINDEXED, sender, subject, body)")
    db.execute("CREATE TABLE body (message_id TEXT PRIMARY KEY, date TEXT NOT NULL, body TEXT NOT NULL)")
    db.execute("CREATE TABLE inbox (address TEXT, message_id TEXT, PRIMARY KEY (address, message_id)) WITHOUT ROWID")
    for mail in mails:
        db.execute("INSERT INTO mail VALUES (?, ?, ?, ?)", (mail.message_id, mail.sender, mail.subject, mail.body))
        db.execute("INSERT INTO body VALUES (?, ?, ?)", (mail.message_id, mail.date, mail.body))
        owners = {(address.casefold(), mail.message_id) for address in mail.inboxes}
        db.executemany("INSERT INTO inbox VALUES (?, ?)", sorted(owners))
    db.commit()
