"""The mailbox: mails in an SQLite file with an FTS5 index, and synthetic mails, a pure function of the seed.

Every entry of the word lists is one word of letters only, so the tiny policy's tokenizer encodes it as the same single
token everywhere.
"""

from __future__ import annotations

import copy
import random
import sqlite3
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

words = str.split
PEOPLE = words(
    "Alice Bruno Carla Derek Elena Felix Grace Henry Irene Jonas Karen Louis Maria Nadia Oscar Paula Quinn Ralph "
    "Sofia Tomas Ursula Victor Wanda Xavier Yvonne Zoltan Amber Boris Celia Diego"
)
TOPICS = words(
    "budget audit lease picnic merger survey recall launch review retreat workshop hearing invoice pipeline payroll "
    "contract seminar renewal upgrade banquet"
)
CITIES = words("Oslo Paris Delhi Cairo Lima Tokyo Berlin Austin Denver Milan Dublin Boston Madrid Prague Vienna Geneva")
MONTHS = words("January February March April May June July August September October November December")
_ID_FIRST = words(
    "apple birch cedar delta ember flint grape hazel ivory jelly kiwi lemon mango nutmeg olive peach quartz raven "
    "silver tulip umber velvet walnut yellow zebra basil cocoa daisy fern ginger honey indigo"
)
_ID_SECOND = words(
    "bear crow deer eagle finch goat hawk ibis jackal koala lynx mole newt otter panda quail rabbit seal tiger viper "
    "wolf yak bison camel dingo ferret gecko heron lizard moose ostrich puma"
)
ENTITIES = frozenset([*PEOPLE, *TOPICS, *CITIES, *MONTHS, *_ID_FIRST, *_ID_SECOND])
_BODIES = (
    "The {topic} is in {city} in {month}.",
    "In {month} we meet in {city} for the {topic}.",
    "{city} has the {topic} in {month}.",
)
DATABASE = "mailbox.sqlite"
TODAY = "2026-06-30"
USER_EMAIL = "robin@example.com"
# What a user may see on a day; a mail without a valid date is always included.
_VISIBLE = (
    " AND (:inbox = '' OR message_id IN (SELECT message_id FROM inbox WHERE address = :inbox))"
    " AND (:date = '' OR message_id IN (SELECT message_id FROM body WHERE substr(date, 1, 10) <= :date"
    " OR date NOT GLOB '[0-9][0-9][0-9][0-9]-[0-9][0-9]-*'))"
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
    ids = rng.sample([f"{first}-{second}" for first in _ID_FIRST for second in _ID_SECOND], len(pairs))
    rng.shuffle(pairs)
    return [_synthetic_mail(rng, name, *pair) for name, pair in zip(ids, pairs, strict=True)]


def _synthetic_mail(rng: random.Random, message_id: str, person: str, topic: str) -> SyntheticMail:
    city, month = rng.choice(CITIES), rng.choice(MONTHS)
    body = rng.choice(_BODIES).format(topic=topic, city=city, month=month)
    day = f"2026-{rng.randint(1, 6):02d}-{rng.randint(1, 28):02d}"
    mail = Mail(message_id, f"{person.lower()}@example.com", f"{person}: {topic} update", body, day)
    return SyntheticMail(mail, person, topic, city, month)


class Mailbox:
    """A mailbox file (or `:memory:`), used in the thread that opened it; `close()` and garbage collection close it."""

    def __init__(self, path: str | Path) -> None:
        if str(path) != ":memory:" and not Path(path).is_file():
            raise FileNotFoundError(f"no mailbox at {path}: run `python -m ratchet.demo.email_search build-db` first")
        self._db = sqlite3.connect(str(path), check_same_thread=False)  # the finalizer may run in another thread
        self._user = {"inbox": "", "date": ""}
        self._whole: Mailbox | None = None
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

    def of(self, inbox: str, date: str) -> Mailbox:
        """Return this mailbox with only one user's mail up to a day (ISO), inclusive; "": all users, or all days."""
        view = copy.copy(self)
        view._whole = self  # its database is closed with it
        view._user = {"inbox": inbox.casefold(), "date": date[:10]}
        return view

    def search(self, keywords: list[str]) -> list[tuple[str, str]]:
        """Return (message_id, subject) of at most three mails with all keywords, best match first."""
        query = " ".join('"' + _for_sqlite(word).replace('"', '""') + '"' for word in keywords)
        sql = f"SELECT message_id, subject FROM mail WHERE mail MATCH :query{_VISIBLE} ORDER BY rank, rowid LIMIT 3"
        return [(row[0], row[1]) for row in self._db.execute(sql, {"query": query, **self._user})]

    def read(self, message_id: str) -> str | None:
        sql = f"SELECT body FROM body WHERE message_id = :id{_VISIBLE}"
        row = self._db.execute(sql, {"id": _for_sqlite(message_id), **self._user}).fetchone()
        return None if row is None else str(row[0])

    def __len__(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM body").fetchone()[0])


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
