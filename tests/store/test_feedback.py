"""Feedback is kept once, finds its trajectory whichever comes first, and never reaches another key's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from ratchet.store.records import Feedback
from ratchet.store.store import Store
from ratchet.store.training.rounds import descendants
from tests.harness.records import call_start, commit_round, ended, judged_group

REPLY = {"role": "assistant", "content": "Oslo"}


def feedback(name: str, kind: str = "call", target: str = "call_1", **changes: Any) -> Feedback:
    values: dict[str, Any] = {"source": "user:ann", "given_at": 5.0, "value": 1.0, "key_id": "k1"} | changes
    return Feedback(id=name, kind=kind, target=target, **values)


def answered(name: str = "call_1", run: str = "t1", **changes: Any) -> Any:
    return ended(call_start(name, run, key_id="k1"), REPLY, **changes)


TARGETS = [
    ("call", "call_1"),
    ("response", "chatcmpl-9"),
    ("response", "resp_1"),
    ("response", "msg_1"),
    ("trajectory", "t1"),
]


@pytest.mark.parametrize(("kind", "target"), TARGETS)
@pytest.mark.parametrize("order", ["call first", "feedback first", "together"])
def test_feedback_finds_its_trajectory_whichever_comes_first(store: Store, kind: str, target: str, order: str) -> None:
    call, word = answered(response_id="chatcmpl-9"), feedback("fb_1", kind, target)
    together = [word, call] if order == "together" else [call]
    if order == "feedback first":
        store.calls.ship([word])
        assert store.trajectories.page() == []
    store.calls.ship(together)
    if order == "call first":
        store.calls.ship([word])
    store.calls.ship([word])  # again changes nothing
    (kept,) = store.trajectories.read("t1").feedback
    assert (kept.id, kept.trajectory_id, kept.value) == ("fb_1", "t1", 1.0)
    assert kept.call_id == (None if kind == "trajectory" else "call_1")


def test_feedback_is_attached_when_two_proxies_ship_it_and_its_call_at_the_same_time(store: Store) -> None:
    turns = 40
    ready = Barrier(2)

    def ship(records: Iterator[Any]) -> None:
        for record in records:
            ready.wait(60)
            store.calls.ship([record])

    calls = (answered(f"call_{n}", f"t{n}") for n in range(turns))
    words = (feedback(f"fb_{n}", target=f"call_{n}") for n in range(turns))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(ship, calls), pool.submit(ship, words)]:
            done.result()
    assert [one.id for one in store.feedback.page() if one.trajectory_id is None] == []
    assert len(store.feedback.page()) == turns


def test_a_call_start_attaches_earlier_feedback(store: Store) -> None:
    store.calls.ship([feedback("fb_1")])
    store.calls.ship([call_start("call_1", "t1", key_id="k1")])
    store.calls.ship([answered()])  # replaces the beginning's row
    assert [one.id for one in store.trajectories.read("t1").feedback] == ["fb_1"]


@pytest.mark.parametrize(("kind", "target"), TARGETS)
def test_a_key_never_speaks_of_anothers_trajectory(store: Store, kind: str, target: str) -> None:
    store.calls.ship([feedback("fb_early", kind, target, key_id="k2"), answered(response_id="chatcmpl-9")])
    store.calls.ship([feedback("fb_late", kind, target, key_id="k2")])
    store.calls.ship(
        [feedback("fb_open", kind, target, key_id="open:1"), feedback("fb_nobody", kind, target, key_id=None)]
    )
    assert store.trajectories.read("t1").feedback == ()
    store.calls.ship([feedback("fb_operator", kind, target, key_id=None, trusted=True)])
    assert [one.id for one in store.trajectories.read("t1").feedback] == ["fb_operator"]


def test_an_id_that_an_engine_gave_twice_means_the_newest_call_of_the_speaker(store: Store) -> None:
    for name, run, key in (("call_1", "t1", "k1"), ("call_2", "t2", "k1"), ("call_3", "t3", "k2")):
        store.calls.ship([ended(call_start(name, run, key_id=key), REPLY, response_id="chatcmpl-9")])
    store.calls.ship([feedback("fb_1", "response", "chatcmpl-9")])
    assert [one.id for one in store.trajectories.read("t2").feedback] == ["fb_1"]


def test_pages_go_from_the_newest_on(store: Store) -> None:
    store.calls.ship([answered(), *(feedback(f"fb_{number}", given_at=float(number // 2)) for number in range(6))])
    first = store.feedback.page(limit=4)
    rest = store.feedback.page(limit=4, before=first[-1].id)
    assert [one.id for one in (*first, *rest)] == [f"fb_{number}" for number in (5, 4, 3, 2, 1, 0)]
    assert store.feedback.page(trajectory="nobody's") == []


def test_late_feedback_is_listed_until_it_is_applied(store: Store) -> None:
    judged_group(store, ["a", "b"], [0.0, 1.0])
    assert store.feedback.applied_too_late("agent") == []
    store.feedback.add(
        [feedback("fb_1", "trajectory", "a", trusted=True), feedback("fb_2", "trajectory", "b", trusted=True)]
    )
    store.feedback.add([feedback("fb_3", "trajectory", "b", trusted=True, value=None, comment="words alone")])
    assert store.feedback.applied_too_late("agent") == ["a", "b"]
    assert store.feedback.applied_too_late("another") == []
    store.feedback.mark_applied(["fb_1"], 9.0)
    assert store.feedback.applied_too_late("agent") == ["b"]


def test_what_a_trajectory_trained_is_the_version_and_all_that_descend_from_it(store: Store) -> None:
    for number, origin in ((1, 0), (2, 1), (3, 2)):
        group = judged_group(store, [f"a{number}", f"b{number}"], [0.0, 1.0], task=f"t{number}")
        commit_round(store, "agent", number, base=origin, groups=[group.id])
    judged_group(store, ["idle", "still"], [0.0, 1.0], task="later")
    versions = store.lineage.versions_of(["a2", "b3", "idle"])
    assert versions == {"a2": ("agent@2", "agent@3"), "b3": ("agent@3",)}


def test_descent_follows_the_rounds_and_not_the_numbers() -> None:
    assert descendants([(0, 1), (0, 2), (1, 3), (3, 5)], 1) == [1, 3, 5]


def test_trajectories_that_wait_for_feedback_are_listed_when_it_arrives_or_times_out(store: Store) -> None:
    for name, at in (("old", 1.0), ("new", 50.0), ("spoken", 60.0)):
        store.calls.ship([ended(call_start(f"call_{name}", name, key_id="k1", at=at), REPLY)])
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    store.feedback.add(
        [feedback("fb_1", target="call_spoken", given_at=70.0), feedback("fb_2", target="call_new", value=None)]
    )

    def sealed(silent_before: float | None) -> list[str]:
        return [run.id for run in store.trajectories.sealed("agent", silent_before=silent_before)]

    assert sealed(None) == ["old", "new", "spoken"]
    assert sealed(0.0) == ["spoken"]
    assert sealed(10.0) == ["old", "spoken"]
    assert store.trajectories.sealed("another", silent_before=999.0) == []
    assert store.feedback.first_value_at(["old", "new", "spoken"]) == {"spoken": 70.0}
