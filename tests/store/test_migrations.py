"""A store that an earlier version made holds the same after its migration."""

from __future__ import annotations

from typing import Any

import msgspec
import sqlalchemy as sa

from ratchet.store.content.messages import path
from ratchet.store.db import engine as database
from ratchet.store.db import schema
from ratchet.store.records import CallBegun, pack_ids
from ratchet.store.store import open_store
from ratchet.store.verify import verify
from tests.harness.records import QUESTION, TOOLS, begun, ended

REPLY = {"role": "assistant", "content": "Oslo, since the letter says so. " * 5}
IDS = (5, 70_000, 151_000)


def _first_schema(url: str) -> None:
    """Make a store of the first schema, with one call of one trajectory in it."""
    engine = database.connect(url)
    database.migrate(engine, "0001")
    start = begun("call_1", "t1", tags=("a", "b"))
    end = ended(start, REPLY, prompt=(1, 2), ids=IDS)
    old = sa.MetaData()
    old.reflect(engine)
    call = msgspec.structs.asdict(start) | msgspec.structs.asdict(end) | {"id": "call_1"}
    columns = {name: value for name, value in call.items() if name in old.tables["calls"].c}
    choice = msgspec.structs.asdict(end.choices[0]) | {"call_id": "call_1", "choice": 0, "tool_call_ids": []}
    run: dict[str, Any] = {"id": "t1", "alias": "agent", "version": 0, "state": "open", "purpose": "live"}
    run |= {"root_node": start.prompt_node, "tools_hash": start.tools_hash, "opened_at": 1.0, "last_active_at": 1.5}
    with database.write(engine) as connection:
        nodes = [msgspec.structs.asdict(node) for node in (*start.nodes, *end.nodes)]
        connection.execute(sa.insert(old.tables["messages"]), nodes)
        toolset = {"hash": start.tools_hash, "body": start.tools}
        connection.execute(sa.insert(old.tables["toolsets"]), toolset)
        connection.execute(sa.insert(old.tables["trajectories"]), run)
        connection.execute(sa.insert(old.tables["calls"]), columns | {"tags": ["a", "b"], "sampling": {}})
        del choice["index"]
        connection.execute(sa.insert(old.tables["choices"]), choice)
    engine.dispose()


def test_a_store_of_the_first_schema_holds_the_same_after_the_migration(empty_url: str) -> None:
    _first_schema(empty_url)
    engine = database.connect(empty_url)
    database.migrate(engine)
    engine.dispose()
    store = open_store(empty_url)
    found = store.trajectories.read("t1")
    assert found.messages == (*QUESTION, REPLY)
    assert found.tools == tuple(TOOLS)
    assert found.trajectory.root_node == path(QUESTION)[-1].hash
    (call,) = found.calls
    assert (call.prompt_ids, call.choices[0].ids) == (pack_ids((1, 2)), pack_ids(IDS))
    assert call.choices[0].logprobs == ended(begun("call_1", "t1"), REPLY, ids=IDS).choices[0].logprobs
    store.calls.ship([ended(begun("call_1", "t1"), REPLY), ended(begun("call_2", "t1"), REPLY)])
    assert store.calls.message_count() == 3  # what comes again is known again
    store.close()
    assert verify(empty_url).sound


def test_versions_and_decisions_outlive_the_change_of_their_tables_rule(empty_url: str) -> None:
    engine = database.connect(empty_url)
    database.migrate(engine, "0009")
    old = sa.MetaData()
    old.reflect(engine)
    base = {
        "alias": "agent",
        "version": 0,
        "state": "retired",
        "served_name": "base",
        "created_at": 1.0,
        "evidence": {},
    }
    trained = base | {"version": 1, "state": "live", "served_name": "agent@1", "adapter": "/c/1", "share": 0.5}
    decided = {
        "alias": "agent",
        "version": 1,
        "action": "promote",
        "by": "release",
        "reason": "better",
        "evidence": {"a": 1},
    }
    with database.write(engine) as connection:
        for row in (base, trained):
            connection.execute(sa.insert(old.tables["policies"]), row)
        connection.execute(sa.insert(old.tables["decisions"]), decided | {"decided_at": 2.0})
    database.migrate(engine)
    engine.dispose()
    store = open_store(empty_url)
    first, second = store.policies.all("agent")
    assert (first.adapter, second.adapter, second.share, second.prompt_id) == (None, "/c/1", 0.5, None)
    (decision,) = store.decisions.of("agent")
    assert (decision.version, decision.reason, decision.evidence) == (1, "better", {"a": 1})
    assert store.policies.with_prompt("agent", store.prompts.remember("Be brief.").id, {}).version == 2
    assert store.policies.mark_unproven("agent", 2, {}, reason="lost in rounding").state == "unproven"
    store.policies.roll_back("agent", 0, {}, by="me", reason="r")
    store.close()
    assert verify(empty_url).sound


def test_runs_and_rollouts_outlive_the_change_of_their_tables_rules(empty_url: str) -> None:
    engine = database.connect(empty_url)
    database.migrate(engine, "0011")
    old = sa.MetaData()
    old.reflect(engine)
    run = {"alias": "agent", "state": "running", "started_at": 1.0}
    rollout: dict[str, Any] = {"tuning_id": "tun_1", "task_id": "t", "split": "train", "attempt": 0, "candidate": "a"}
    rollout |= {"purpose": "live", "scenario": {"seed": 3}, "step": 2, "planned_at": 1.0, "metrics": {}}
    rollout |= {"prompt_tokens": 3, "completion_tokens": 4}
    with database.write(engine) as connection:
        tunings = sa.insert(old.tables["tunings"])
        connection.execute(tunings, run | {"id": "tun_1", "kind": "eval", "config": {"candidates": ["doctor"]}})
        connection.execute(tunings, run | {"id": "tun_2", "kind": "eval", "config": {"doctor": "a:b", "task": "t"}})
        rollouts = sa.insert(old.tables["rollouts"])
        connection.execute(rollouts, rollout | {"id": "roll_1", "state": "planned"})
        connection.execute(
            rollouts, rollout | {"id": "roll_2", "state": "ended", "ended_at": 2.0, "score": 1.0, "judge": "j"}
        )
    database.migrate(engine)
    engine.dispose()
    store = open_store(empty_url)
    assert {one.id: str(one.kind) for name in (None, "doctor") for one in store.tunings.page(name)} == {
        "tun_1": "eval", "tun_2": "doctor",
    }  # fmt: skip
    store.tunings.resume("tun_1")
    first, second = store.rollouts.of("tun_1")
    assert (str(first.state), first.scenario, first.step) == ("abandoned", {"seed": 3}, 2)
    assert (str(second.state), second.score, second.completion_tokens) == ("ended", 1.0, 4)
    store.close()
    assert verify(empty_url).sound


def test_a_prompt_that_no_stored_answer_keeps_is_kept_by_its_call_after_the_migration(empty_url: str) -> None:
    engine = database.connect(empty_url)
    database.migrate(engine, "0015")
    waiting = begun("call_2", "t1", [{"role": "user", "content": "Does nobody answer?"}])
    end = ended(begun("call_1", "t1"), REPLY)
    run: dict[str, Any] = {"id": "t1", "alias": "agent", "version": 0, "state": "open", "purpose": "live"}
    run |= {"root_node": end.begun.prompt_node, "tools_hash": "", "opened_at": 1.0, "last_active_at": 1.5}
    rows = [_call_row(end.begun) | {"state": "answered", "ended_at": 2.0}, _call_row(waiting) | {"state": "begun"}]
    choice = msgspec.structs.asdict(end.choices[0]) | {"call_id": "call_1", "choice": 0, "tool_call_ids": []}
    del choice["index"]
    with database.write(engine) as connection:
        nodes = [msgspec.structs.asdict(node) for node in (*end.begun.nodes, *end.nodes, *waiting.nodes)]
        connection.execute(sa.insert(schema.messages), nodes)
        connection.execute(sa.insert(schema.trajectories).values(**run))
        for row in rows:
            connection.execute(sa.insert(schema.calls).values(**row))
        connection.execute(sa.insert(schema.choices).values(**choice))
    database.migrate(engine)
    with database.read(engine) as connection:
        held = {row.id: row.retained_node for row in connection.execute(sa.select(schema.calls))}
    engine.dispose()
    assert held == {"call_1": None, "call_2": waiting.prompt_node}
    assert verify(empty_url).sound


def _call_row(start: CallBegun) -> dict[str, Any]:
    said = msgspec.structs.asdict(start)
    row = {column.name: said[column.name] for column in schema.calls.c if column.name in said}
    row |= {"id": start.call_id, "tools_hash": "", "context": "root", "prompt_ids": b"", "prompt_tokens": 0}
    return row | {"completion_tokens": 0, "tags": [], "sampling": {}}


def test_versions_of_before_belong_to_no_known_base_model_until_one_is_taken_up(empty_url: str) -> None:
    engine = database.connect(empty_url)
    database.migrate(engine, "0016")
    old = sa.MetaData()
    old.reflect(engine)
    base = {"alias": "agent", "version": 0, "state": "retired", "served_name": "base", "created_at": 1.0}
    later = base | {"version": 1, "state": "live", "served_name": "agent@1", "adapter": "/c/1"}
    with database.write(engine) as connection:
        for row in (base, later):
            connection.execute(sa.insert(old.tables["policies"]), row | {"evidence": {}})
    database.migrate(engine)
    engine.dispose()
    store = open_store(empty_url)
    assert store.base_models.of("agent", 1) is None
    taken = store.base_models.register_base_model("agent", "/m", files={"weights": "w"})
    assert store.base_models.of("agent", 1) == taken
    store.close()
