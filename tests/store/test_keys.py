"""Keys in the store: hashes only, revoked for good; each ended call counts once."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.calls.usage import first_day
from ratchet.store.errors import InvalidTransition, RecordNotFound
from ratchet.store.records import CallEnded
from ratchet.store.states import CallState, KeyScope, TrajectoryState
from ratchet.store.store import Store
from tests.harness.records import call_start, ended


def test_a_key_is_made_used_and_revoked(store: Store) -> None:
    made = store.keys.create("crawler", "a" * 64, KeyScope.AGENT, 60, 1000)
    boss = store.keys.create("boss", "b" * 64, KeyScope.OPERATOR)
    store.keys.record_use([made.id], 123.0)
    assert [key.name for key in store.keys.all()] == ["crawler", "boss"]
    revoked = store.keys.revoke(made.id)
    assert (revoked.last_used_at, revoked.requests_per_minute, revoked.tokens_per_minute) == (123.0, 60, 1000)
    assert revoked.revoked_at is not None
    assert store.keys.revoke(made.id) == revoked
    assert [key.revoked_at for key in store.keys.all() if key.id == boss.id] == [None]


def test_the_error_for_an_unknown_key_names_the_remedy(store: Store) -> None:
    with pytest.raises(RecordNotFound, match="ratchet keys list"):
        store.keys.revoke("key_x")


@pytest.mark.parametrize(("requests", "tokens"), [(0, None), (None, 0), (5, 0)])
def test_a_limit_that_lets_nothing_in_is_refused(store: Store, requests: int | None, tokens: int | None) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        store.keys.create("x", "a" * 64, KeyScope.AGENT, requests, tokens)


def test_limits_of_a_key_change_and_end(store: Store) -> None:
    made = store.keys.create("x", "a" * 64, KeyScope.AGENT, 60, tokens_per_day=5, expires_at=9.0)
    changed = store.keys.update(made.id, tokens_per_day=10**12, requests_per_minute=None, expires_at=None)
    assert (changed.tokens_per_day, changed.requests_per_minute, changed.expires_at) == (10**12, None, None)
    assert store.keys.all() == [changed]
    boss = store.keys.create("boss", "b" * 64, KeyScope.OPERATOR)
    assert store.keys.update(boss.id, expires_at=9.0).expires_at == 9.0
    with pytest.raises(InvalidTransition, match="an operator's key has no limits"):
        store.keys.update(boss.id, max_tokens=5)
    with pytest.raises(InvalidTransition, match="these can change: requests_per_minute"):
        store.keys.update(made.id, hash="c" * 64)
    with pytest.raises(RecordNotFound, match="ratchet keys list"):
        store.keys.update("key_x", max_tokens=5)
    store.keys.revoke(made.id)
    with pytest.raises(InvalidTransition, match="is revoked, for good"):
        store.keys.update(made.id, max_tokens=5)


def test_a_key_is_limited_to_agents_and_no_other(store: Store) -> None:
    limited = store.keys.create("office", "a" * 64, KeyScope.AGENT, agents=["support", "mail", "support"])
    full = store.keys.create("full", "b" * 64, KeyScope.AGENT)
    assert (limited.agents, full.agents) == (("mail", "support"), None)
    assert {key.id: key.agents for key in store.keys.all()} == {limited.id: ("mail", "support"), full.id: None}
    assert store.keys.revoke(limited.id).agents == ("mail", "support")
    with pytest.raises(InvalidTransition, match="at least one agent"):
        store.keys.create("none", "c" * 64, KeyScope.AGENT, agents=[])
    with pytest.raises(InvalidTransition, match="an operator's key opens all agents"):
        store.keys.create("boss", "d" * 64, KeyScope.OPERATOR, agents=["mail"])


def test_a_call_of_another_agent_never_joins_a_trajectory(store: Store) -> None:
    store.calls.ship([call_start("call_1", "job", alias="mail"), call_start("call_2", "job", alias="support", at=2.0)])
    store.calls.ship([call_start("call_3", "job", alias="support", at=3.0), call_start("call_4", "job", alias="mail")])
    found = {run.id: (run.alias, run.calls) for run in store.trajectories.page()}
    assert found == {"job": ("mail", 2), "job~1": ("support", 2)}


def test_one_key_is_one_row(store: Store) -> None:
    store.keys.create("x", "a" * 64, KeyScope.AGENT)
    with pytest.raises(sa.exc.IntegrityError):
        store.keys.create("y", "a" * 64, KeyScope.AGENT)


def test_a_call_with_another_key_never_joins_a_trajectory(store: Store) -> None:
    store.calls.ship([call_start("call_1", "job", key_id="key_a"), call_start("call_2", "job", key_id="key_b", at=2.0)])
    store.calls.ship(
        [call_start("call_3", "job", key_id="key_b", at=3.0), call_start("call_4", "job", key_id="key_a", at=4.0)]
    )
    found = {run.id: (run.key_id, run.calls, run.state) for run in store.trajectories.page()}
    assert found == {
        "job": ("key_a", 2, TrajectoryState.OPEN),
        "job~1": ("key_b", 2, TrajectoryState.OPEN),
    }


def test_without_keys_everyone_is_one(store: Store) -> None:
    store.calls.ship([call_start("call_1", "job", key_id="open:1"), call_start("call_2", "job", key_id=None, at=2.0)])
    assert [run.calls for run in store.trajectories.page()] == [2]


NOON = datetime(2026, 11, 23, 12, tzinfo=UTC).timestamp()
DAY = 86400.0


def call(name: str, key: str | None = "key_a", alias: str = "agent", at: float = NOON, **changes: Any) -> CallEnded:
    """A call that ended at a time, with 3 prompt tokens and 2 of the answer."""
    start = call_start(name, f"run-{name}", at=at - 1, alias=alias, key_id=key, **changes)
    return ended(start, {"role": "assistant", "content": "Oslo"}, ended_at=at)


def rows(store: Store, days: int = 7, by: Any = ("day", "key_id", "alias", "purpose"), **chosen: Any) -> list[Any]:
    found = store.usage.read(days, by, now=NOON, **chosen)
    return [
        (*(value for value in (one.day, one.key_id, one.alias, one.purpose) if value is not None), one.calls)
        for one in found
    ]


def test_calls_are_summed_by_day_key_agent_and_purpose(store: Store) -> None:
    store.calls.ship([call("c1"), call("c2"), call("c3", alias="mail"), call("c4", "key_b", at=NOON - DAY)])
    store.calls.ship([call("c5", purpose="eval"), call("c6", at=NOON - 30 * DAY)])
    assert rows(store) == [
        ("2026-11-23", "key_a", "agent", "live", 2),
        ("2026-11-23", "key_a", "agent", "eval", 1),
        ("2026-11-23", "key_a", "mail", "live", 1),
        ("2026-11-22", "key_b", "agent", "live", 1),
    ]
    assert rows(store, by=("key_id",)) == [("key_a", 4), ("key_b", 1)]
    assert rows(store, days=1, by=("key_id",)) == [("key_a", 4)]
    assert rows(store, days=31, by=()) == [(6,)]
    assert rows(store, by=("alias",), key_id="key_b") == [("agent", 1)]
    assert rows(store, by=("key_id",), alias="mail") == [("key_a", 1)]
    assert rows(store, by=(), alias="nobody") == []
    total = store.usage.read(31, ("alias",), "mail", now=NOON)[0]
    assert (total.prompt_tokens, total.completion_tokens, total.failed) == (
        3,
        len(call("c3").choices[0].token_ids) // 4,
        0,
    )


def test_the_names_of_keys_are_known_and_unchecked_ones_count_as_one(store: Store) -> None:
    key = store.keys.create("crawler", "a" * 64, KeyScope.AGENT)
    store.calls.ship(
        [call("c1", key.id), call("c2", None), call("c3", "open:1"), call("c4", "open:2"), call("c5", "env")]
    )
    found = {one.key_id: (one.key_name, one.calls) for one in store.usage.read(1, ("key_id",), now=NOON)}
    assert found == {key.id: ("crawler", 1), "": (None, 3), "env": (None, 1)}


def test_a_call_counts_once_when_its_end_is_stored(store: Store) -> None:
    end = call("c1")
    store.calls.ship([end.start])
    assert rows(store, by=()) == []
    store.calls.ship([end, end])
    store.calls.ship([end])
    assert rows(store, by=()) == [(1,)]
    lost = call("c2")
    store.calls.ship([lost.start])
    store.calls.mark_interrupted(["c2"])
    store.calls.ship([lost])
    assert rows(store, by=()) == [(2,)]
    failed = msgspec.structs.replace(
        call("c3"), state=CallState.FAILED, choices=(), nodes=(), error="x", prompt_tokens=0
    )
    store.calls.ship([failed])
    assert store.usage.read(1, (), now=NOON)[0].failed == 1


def test_deleted_trajectories_stay_counted(store: Store) -> None:
    store.calls.ship([call("c1"), call("c2")])
    store.deletions.delete(TrajectoryFilter(id="run-c1"), "operator")
    assert rows(store, by=()) == [(2,)]


def test_days_are_utc_and_include_today() -> None:
    assert (first_day(1, NOON), first_day(30, NOON)) == ("2026-11-23", "2026-10-25")
    assert first_day(1, NOON + 12 * 3600) == "2026-11-24"
