"""Messages: stored once by content, and which of them are followed by others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from ratchet.store.calls.calls import without_followers
from ratchet.store.content.messages import conversation_range, is_intact, is_intact_toolset, link_keys, path, tools_hash
from ratchet.store.db import schema
from ratchet.store.db.engine import connect
from ratchet.store.store import Store
from tests.harness.records import QUESTION, call_start, ended, tool_call


@pytest.mark.parametrize(
    "echo",
    [
        {**tool_call(), "refusal": None},
        {k: v for k, v in tool_call().items() if k != "content"},
        {**tool_call(), "content": ""},
        tool_call(arguments='{ "a":1 }'),
        tool_call(call_id="another"),
        {**tool_call(), "reasoning": "dropped by most agents", "provider_specific_fields": {"x": 1}},
    ],
    ids=["refusal null", "content missing", "content empty", "arguments re-serialised", "new ids", "added fields"],
)
def test_an_echoed_answer_keeps_its_linking_key(echo: dict[str, Any]) -> None:
    assert link_keys([*QUESTION, echo])[-1] == link_keys([*QUESTION, tool_call()])[-1]


@pytest.mark.parametrize(
    "other",
    [tool_call(arguments='{"a": 2}'), {"role": "assistant", "content": "x"}, {**tool_call(), "content": "thinking"}],
    ids=["other arguments", "no call", "other text"],
)
def test_a_different_answer_has_another_linking_key(other: dict[str, Any]) -> None:
    assert link_keys([*QUESTION, other])[-1] != link_keys([*QUESTION, tool_call()])[-1]


def test_text_parts_and_plain_text_are_the_same_message() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert link_keys(parts) == link_keys([{"role": "user", "content": "ab"}])


def test_argument_order_does_not_matter_and_json_is_compared_as_json() -> None:
    one = link_keys([tool_call(arguments='{"a": 1, "b": [2]}')])
    assert one == link_keys([tool_call(arguments='{"b":[2],"a":1}')])


def test_malformed_arguments_are_compared_as_text() -> None:
    assert link_keys([tool_call(arguments='{"a": ')]) != link_keys([tool_call(arguments='{"b": ')])


def answer_key(text: str, role: str = "assistant") -> str:
    return link_keys([*QUESTION, {"role": role, "content": text}])[-1]


@pytest.mark.parametrize("echo", ['{"a": 1, "b": ["x", {}]}', ' {\n  "b": ["x", {}],\n  "a": 1.0\n}\n'])
def test_an_answer_that_is_json_is_compared_as_json(echo: str) -> None:
    assert answer_key(echo) == answer_key('{"a":1,"b":["x",{}]}')
    assert answer_key(f"[{echo}]") == answer_key('[{"a":1,"b":["x",{}]}]')
    assert answer_key(f"<think>so</think>{echo}") == answer_key('{"a":1,"b":["x",{}]}')


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1}', '{"a":2}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":"b c"}', '{"a":"b  c"}'),
        ("[1,2]", "[2,1]"),
        ("{}", "[]"),
        ("{}", ""),
        ('{"a":1e998}', '{"a": 1e999}'),
        ("{a} or {b}", "{a} or  {b}"),
        ("say 1", "say  1"),
    ],
)
def test_other_json_and_other_text_is_another_answer(one: str, other: str) -> None:
    assert answer_key(one) != answer_key(other)


def test_json_that_was_sent_is_compared_as_text() -> None:
    assert answer_key('{"a":1}', "user") != answer_key('{"a": 1}', "user")


def test_a_hash_covers_everything_before_it() -> None:
    first = path([{"role": "user", "content": "a"}, {"role": "user", "content": "c"}])
    second = path([{"role": "user", "content": "b"}, {"role": "user", "content": "c"}])
    assert first[1].body == second[1].body
    assert first[1].hash != second[1].hash
    assert first[1].hash.startswith("b2:")


def test_a_changed_body_is_found_out() -> None:
    (stored,) = path([{"role": "user", "content": "a"}])
    assert is_intact(stored)
    assert not is_intact(msgspec.structs.replace(stored, body=b'{"role":"user","content":"z"}'))


def test_the_messages_of_a_conversation_are_neighbours_in_an_index() -> None:
    system, developer = {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}
    user, reply = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}

    def beginnings(*messages: dict[str, str]) -> list[str]:
        return [node.hash[len("b2:") :][:8] for node in path(messages)]

    own = beginnings(system, user)[1]
    assert own != "00000000"
    assert beginnings(system, user, reply, system, user) == ["00000000", own, own, own, own]
    assert beginnings(system, developer, user, reply)[:2] == ["00000000", "00000000"]
    assert beginnings(user, reply) != beginnings(system, user, reply)[1:]
    assert beginnings(system, {"role": "user", "content": "other"})[1] != own
    assert len({node.hash for node in path([system, user, user, user])}) == 4


def test_tool_ids_are_kept_in_the_stored_message() -> None:
    first, second = path([tool_call(call_id="one")]), path([tool_call(call_id="two")])
    assert first[0].hash != second[0].hash


def test_no_tools_have_no_hash() -> None:
    assert tools_hash(None) == ("", b"")
    assert tools_hash([]) == ("", b"")


def test_arguments_nested_deeper_than_the_stack_are_compared_as_text() -> None:
    deep = ["[" * depth + "]" * depth for depth in (3000, 100_000)]
    keys = {link_keys([tool_call(arguments=text)]) for text in (*deep, deep[0] + " ")}
    assert len(keys) == 2


def test_a_tool_lists_hash_is_blind_to_the_order_of_keys_and_its_json_keeps_it() -> None:
    one = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    other = [{"function": {"parameters": {"properties": {}, "type": "object"}, "name": "f"}, "type": "function"}]
    (name, body), (same, another) = tools_hash(one), tools_hash(other)
    assert name == same
    assert json.dumps(json.loads(body)) == json.dumps(one)
    assert json.dumps(json.loads(another)) == json.dumps(other)
    assert is_intact_toolset(name, body)
    assert is_intact_toolset(name, another)
    assert not is_intact_toolset(name, body.replace(b'"f"', b'"g"'))


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
