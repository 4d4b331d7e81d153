"""Verification: damage of every kind is found, and trajectories that lack messages or tools; on both databases."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import connect
from ratchet.store.records import CallStarted
from ratchet.store.store import Store, open_store
from ratchet.store.verify import verify
from tests.harness import records
from tests.harness.records import answered_trajectory, call_start, commit_round, ended, judged_group, tool_call

calls, choices, messages, runs = schema.calls, schema.choices, schema.messages, schema.trajectories


@pytest.fixture
def filled(store: Store) -> Store:
    """A store with something of everything."""
    return _fill(store)


def _fill(store: Store) -> Store:
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    store.policies.register_base("agent", "base")
    commit_round(store, "agent", 1, groups=[group.id])
    judged_group(store, ["c", "d"], [0.0, 1.0], task="u")
    flat = judged_group(store, ["e", "f"], [1.0, 1.0], task="v")
    store.groups.drop(flat.id, "no_variance")
    first = call_start("call_t1", "t1")
    fork = call_start("call_t2", "t1", at=2.0, parent_call="call_t1")
    exact = call_start("call_t3", "t1", at=3.0, parent_call="call_t2")
    store.calls.ship(
        [
            ended(first, tool_call()),
            ended(fork, tool_call(), prompt=range(600), context="fork", prompt_tokens=600),
            ended(exact, tool_call(), prompt=(1, 2), context="exact", prompt_tokens=604),
        ]
    )
    store.trajectories.seal("t1", now=9.0)
    store.calls.ship([ended(call_start("call_t4", "t1", at=10.0, parent_call="call_t3"), tool_call(), context="exact")])
    store.calls.ship([call_start("call_open", "open")])
    return store


def _do(*statements: sa.Executable) -> Callable[[sa.Connection], None]:
    def damage(connection: sa.Connection) -> None:
        for statement in statements:
            connection.execute(statement)

    return damage


_USER = sa.select(calls.c.prompt_node).where(calls.c.id == "call_t1").scalar_subquery()
_RAW: Any = sa.LargeBinary()
DAMAGE: dict[str, tuple[Callable[[sa.Connection], None], str, str]] = {
    "body": (_do(sa.update(messages).where(messages.c.hash == _USER).values(body=b'{"role":"x"}')), "message", "hash"),
    "body cut": (
        _do(sa.update(messages).where(messages.c.hash == _USER).values(body=sa.literal(b"\x01abc", _RAW))),
        "message", "inflate",
    ),
    "parent": (_do(sa.update(messages).where(messages.c.hash == _USER).values(parent="b2:" + "0" * 32)), "message",
               "parent"),
    "leftover": (_do(sa.insert(messages).values(hash="b2:" + "1" * 32, parent="", role="user", body=b"{}")), "message",
                 "no call, answer or message names it"),
    "toolset": (_do(sa.update(schema.toolsets).values(body=b"[]")), "tool list", "hash"),
    "agent": (_do(sa.update(calls).where(calls.c.id == "call_t1").values(alias="other")), "call call_t1",
              "it is of other, its trajectory t1 of agent"),
    "no toolset": (_do(sa.delete(schema.toolsets)), "call call_a", "tool list"),
    "prompt": (
        _do(sa.update(calls).where(calls.c.id == "call_t1").values(prompt_ids=sa.literal(b"\x02abc", _RAW))),
        "call call_t1", "damaged",
    ),
    "prompt tokens": (_do(sa.update(calls).where(calls.c.id == "call_t1").values(prompt_tokens=9)), "call call_t1",
                      "3 token ids, the engine reported 9"),
    "sampling": (_do(sa.text("UPDATE calls SET sampling = '[nope' WHERE id = 'call_t1'")), "calls call_t1",
                 "its sampling is not JSON"),
    "tool call ids": (_do(sa.text("UPDATE choices SET tool_call_ids = '' WHERE call_id = 'call_t1'")),
                      "choices call_t1 0", "its tool_call_ids is not JSON"),
    "metrics": (_do(sa.text("UPDATE rounds SET metrics = '{'")), "rounds ", "its metrics is not JSON"),
    "evidence": (_do(sa.text("UPDATE policies SET evidence = '{'")), "policies agent 0", "its evidence is not JSON"),
    "block": (_do(sa.delete(schema.prompt_blocks)), "call call_t2", "block"),
    "circle": (
        _do(sa.update(calls).where(calls.c.id == "call_t2").values(parent_call="call_t3", context="exact")),
        "call call_t2", "is a cycle",
    ),
    "other run": (_do(sa.update(calls).where(calls.c.id == "call_t3").values(parent_call="call_a")), "call call_t3",
                  "another run"),
    "no end": (_do(sa.update(calls).where(calls.c.id == "call_t1").values(ended_at=None)), "call call_t1", "no end"),
    "numbers": (_do(sa.update(choices).where(choices.c.call_id == "call_t1").values(choice=1)), "call call_t1",
                "one is missing"),
    "logprobs": (_do(sa.update(choices).where(choices.c.call_id == "call_t1").values(logprobs=b"1234")),
                 "call call_t1 choice 0", "2 token ids and 1 logprobs"),
    "no call": (_do(sa.delete(calls).where(calls.c.id == "call_open")), "trajectory open", "no call"),
    "sealed": (_do(sa.update(runs).where(runs.c.id == "a").values(sealed_at=None)), "trajectory a", "never sealed"),
    "round": (_do(sa.update(schema.rounds).values(state="abandoned")), "trajectory a", "second time"),
    "member": (_do(sa.update(runs).where(runs.c.id == "c").values(state="sealed")), "group", "its member c is sealed"),
    "verdict": (_do(sa.delete(schema.verdicts).where(schema.verdicts.c.trajectory_id == "c")), "group", "no verdict"),
    "verdict's group": (_do(sa.update(runs).where(runs.c.id == "c").values(group_id=None, state="sealed")), "verdict",
                        "its trajectory is of None"),
    "policy": (_do(sa.update(schema.policies).values(round_id=None)), "round", "does not name it"),
}  # fmt: skip


def test_a_sound_store_has_no_violation_and_every_row_was_checked(filled: Store, store_url: str) -> None:
    checked: dict[str, int] = {}
    found = verify(store_url, lambda table, rows, total: checked.update({table: checked.get(table, 0) + rows}))
    assert found.findings == []
    assert found.sound
    assert found.rows == checked
    assert (checked["calls"], checked["trajectories"], checked["groups"]) == (11, 9, 3)


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound SQLite store; PostgreSQL is verified above."""
    file = tmp_path_factory.mktemp("sound") / "store.db"
    store = _fill(open_store(str(file)))
    store.close()
    return file


@pytest.mark.parametrize("name", DAMAGE)
def test_each_damage_is_reported_with_its_row_and_a_remedy(sound_file: Path, tmp_path: Path, name: str) -> None:
    damage, row, problem = DAMAGE[name]
    url = str(shutil.copy(sound_file, tmp_path))
    engine = connect(url)
    with engine.begin() as connection:
        damage(connection)
    engine.dispose()
    found = verify(url)
    assert not found.sound
    assert any(one.row.startswith(row) and problem in one.problem and one.remedy for one in found.findings), found


def test_a_dangling_reference_is_reported(sound_file: Path, tmp_path: Path) -> None:
    url = str(shutil.copy(sound_file, tmp_path))
    engine = connect(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
        connection.execute(sa.delete(runs).where(runs.c.id == "t1"))
        connection.commit()
    engine.dispose()
    found = verify(url)
    assert any("calls rowid" in one.row and "trajectories" in one.problem for one in found.findings)


@pytest.mark.slow
def test_memory_is_bounded_where_much_is_wrong(store: Store, store_url: str) -> None:
    for number in range(30):
        answered_trajectory(store, f"t{number}", f"answer {number}")
    engine = connect(store_url)
    with engine.begin() as connection:
        rows = [{"hash": f"b2:{number:032x}", "parent": "", "role": "user", "body": b"{}"} for number in range(1500)]
        connection.execute(sa.insert(messages), rows)
    engine.dispose()
    found = verify(store_url)
    assert (found.count, len(found.findings), found.rows["messages"]) == (3000, 1000, 1532)


REPLY = {"role": "assistant", "content": "Oslo"}


def without_first_message(name: str) -> CallStarted:
    question = [{"role": "system", "content": f"Answer {name}."}, {"role": "user", "content": "Where?"}]
    start = records.call_start(f"call_{name}", name, question)
    return msgspec.structs.replace(start, nodes=start.nodes[1:])


def test_a_trajectory_whose_first_message_is_not_there_is_incomplete_until_somebody_sends_it_again(
    store: Store,
) -> None:
    torn, bare = without_first_message("torn"), records.call_start("call_bare", "bare", tools_hash="b2:none", tools=b"")
    whole = records.call_start("call_whole", "whole")
    store.calls.ship([records.ended(one, REPLY) for one in (torn, bare, whole)])
    names = ["torn", "bare", "whole", "unknown"]
    assert store.trajectories.incomplete(names) == {"torn", "bare"}
    assert store.trajectories.incomplete([]) == set()
    again = records.call_start("call_again", "again", [{"role": "system", "content": "Answer torn."}])
    store.calls.ship([records.ended(again, REPLY)])
    assert store.trajectories.incomplete(names) == {"bare"}
