"""Prompts: system prompts that the proxy applies, identified by their content and immutable.

A policy version (policies.py) or a rollout (rollouts.py) that names a prompt is served with it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from hashlib import blake2b

import msgspec
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.bulk import insert_or_ignore
from ratchet.store.db.engine import write
from ratchet.store.db.verbs import MAX_PAGE, Verbs
from ratchet.store.errors import InvalidRecord
from ratchet.store.records import Prompt
from ratchet.store.states import PromptMode

MAX_CHARS = 200_000  # of all texts of a prompt


class Prompts(Verbs):
    """Operations on prompts."""

    def register(
        self, text: str, mode: str = "replace", origin: str = "", families: Mapping[str, str] | None = None
    ) -> Prompt:
        """Store a prompt unless it exists; return it. Raises InvalidRecord.

        `families`: texts by task family; calls with an empty text are unchanged.
        """
        _check(text, mode, families or {})
        texts = dict(families or {})
        prompt = Prompt(
            id=prompt_id(mode, text, texts),
            mode=PromptMode(mode),
            text=text,
            families=texts,
            origin=origin.replace("\0", "\ufffd"),
            created_at=time.time(),
        )
        with write(self._engine) as connection:
            insert_or_ignore(connection, schema.prompts, [msgspec.structs.asdict(prompt)])
        return self.get(prompt.id)

    def get(self, prompt_id: str) -> Prompt:
        """Return a prompt. Raises RecordNotFound."""
        query = sa.select(schema.prompts).where(schema.prompts.c.id == prompt_id)
        return self._one(Prompt, query, f"no prompt {prompt_id}")

    def page(self, limit: int = 100, before: str | None = None) -> list[Prompt]:
        """Return at most `limit` prompts older than the id `before`, newest first."""
        table = schema.prompts
        query = sa.select(table).order_by(table.c.created_at.desc(), table.c.id.desc()).limit(min(limit, MAX_PAGE))
        if before is not None:
            last = self.get(before)
            key = sa.tuple_(sa.literal(last.created_at), sa.literal(last.id))
            query = query.where(sa.tuple_(table.c.created_at, table.c.id) < key)
        return self._records(Prompt, query)


def prompt_id(mode: str, text: str, families: Mapping[str, str]) -> str:
    """Return the id of a prompt: `prm_` and the first 8 bytes of a BLAKE2b hash as hex."""
    content = msgspec.json.encode([mode, text, sorted(families.items())])
    return f"prm_{blake2b(content, digest_size=8).hexdigest()}"


def _check(text: str, mode: str, families: Mapping[str, str]) -> None:
    if mode not in list(PromptMode):
        raise InvalidRecord(f"prompt mode {mode!r}: use {' or '.join(PromptMode)}")
    texts = [text, *families.values()]
    if not any(one.strip() for one in texts):
        raise InvalidRecord("the prompt's text is empty: give a text")
    if (size := sum(map(len, texts))) > MAX_CHARS:
        raise InvalidRecord(f"the prompt's text has {size} characters, at most {MAX_CHARS} are allowed: shorten it")
    for one in (*texts, *families):
        try:
            one.encode()
        except UnicodeEncodeError as error:
            raise InvalidRecord(f"the prompt's text is not valid Unicode: {error.reason}") from error
        if "\0" in one:
            raise InvalidRecord("the prompt's text holds a NUL character: remove it")
