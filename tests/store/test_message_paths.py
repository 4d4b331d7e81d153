"""Which messages are followed by others: found without an index of parents."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.store.calls.calls import without_followers
from ratchet.store.content.messages import conversation_range, path
from ratchet.store.db import schema
from ratchet.store.db.engine import connect
from ratchet.store.store import Store
from tests.harness.records import call_start, ended

SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Paris"}


def dialogue(*questions: str) -> list[dict[str, Any]]:
    turns = [({"role": "user", "content": question}, ANSWER) for question in questions]
    return [message for turn in turns for message in turn][:-1]


@pytest.mark.parametrize("system", [[], SYSTEM, [*SYSTEM, {"role": "developer", "content": "In French."}]])
def test_only_the_last_messages_have_no_followers(store: Store, store_url: str, system: list[dict[str, Any]]) -> None:
    conversations = [[*system, *dialogue("Where?", *map(str, range(n)))] for n in (0, 3, 5)] + [
        [*system, *dialogue("Who?")]
    ]
    for number, messages in enumerate(conversations):
        start = call_start(f"call_{number}", f"t{number}", messages)
        store.calls.ship([ended(start, ANSWER, messages=messages)])
    paths = [[node.hash for node in path([*messages, ANSWER])] for messages in conversations]
    engine = connect(store_url)
    with engine.connect() as connection:
        every = set(connection.scalars(sa.select(schema.messages.c.hash)))
        assert every == {name for one in paths for name in one}
        followed = {name for one in paths for name in one[:-1]}
        assert without_followers(connection, sorted(every)) == every - followed
    engine.dispose()


def test_a_conversations_hashes_are_in_its_range_and_those_of_others_are_not() -> None:
    names = [node.hash for node in path([*SYSTEM, *dialogue("Where?", "Who?"), ANSWER])]
    others = [node.hash for node in path([*SYSTEM, *dialogue("When?"), ANSWER])]
    assert conversation_range(names[0]) is None
    (limits,) = {conversation_range(name) for name in names[1:]}
    assert limits is not None
    assert all(limits[0] <= name <= limits[1] for name in names[1:])
    assert not any(limits[0] <= name <= limits[1] for name in others)


@pytest.mark.parametrize("is_shared", [True, False])
def test_neither_kind_of_parent_reads_the_whole_table(store: Store, store_url: str, is_shared: bool) -> None:
    engine = connect(store_url)
    names = path([*SYSTEM, *dialogue("Where?")])
    plans: list[str] = []

    def explain(connection: sa.Connection, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and "messages" in statement:
            prefix = "EXPLAIN QUERY PLAN" if engine.dialect.name == "sqlite" else "EXPLAIN"
            rows = connection.connection.cursor().execute(f"{prefix} {statement}", parameters).fetchall()
            plans.append(" ".join(str(row[-1]) for row in rows))

    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.text("SET enable_seqscan = off"))
        sa.event.listen(engine, "after_cursor_execute", explain)
        without_followers(connection, [names[0 if is_shared else 1].hash])
    (plan,) = plans
    assert "Seq Scan" not in plan
    assert "SCAN" not in plan
    assert ("ix_messages_shared_parent" in plan) == is_shared
    engine.dispose()


def test_the_index_of_shared_parents_has_the_condition_of_the_table(store: Store, store_url: str) -> None:
    engine = connect(store_url)
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            query = "SELECT sql FROM sqlite_master WHERE name = 'ix_messages_shared_parent'"
            expected = str(schema.SHARED_PARENT["sqlite"])
        else:
            query = "SELECT indexdef FROM pg_indexes WHERE indexname = 'ix_messages_shared_parent'"
            expected = f"(parent < '\\x{schema.SHARED_PARENT['sqlite'].text.split(chr(39))[1]}'::bytea)"
        assert expected in str(connection.scalar(sa.text(query)))
    engine.dispose()
