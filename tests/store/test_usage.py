"""Usage of keys: each ended call counts once, whatever is shipped again, deleted or pruned."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.calls.usage import first_day
from ratchet.store.records import CallEnded
from ratchet.store.states import CallState, KeyScope
from ratchet.store.store import Store
from tests.harness.records import call_start, ended

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
