"""Shipping to both databases: several proxies at once, in any order, whatever agents wrote."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.errors import StoreError
from ratchet.store.reasons import DropReason
from ratchet.store.records import UNLINKED, CallEnded, Shipment, Verdict, pack_ids
from ratchet.store.states import CallState, TrajectoryState
from ratchet.store.store import Store, open_store
from ratchet.store.verify import verify
from tests.harness.records import QUESTION, answered_trajectory, call_start, ended, tool_call


def _pair(call_id: str, run: str, at: float = 1.0, **changes: Any) -> tuple[Shipment, CallEnded]:
    start = call_start(call_id, run, at=at, **changes)
    return start, ended(start, tool_call())


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_beginnings_and_ends_may_come_in_any_order(store: Store, order: tuple[int, ...]) -> None:
    records = [*_pair("call_1", "t1"), *_pair("call_2", "t1", at=2.0)]
    for place in order:
        store.calls.ship([records[place]])
    assert [(call.id, call.state) for call in store.calls.page()] == [
        ("call_2", CallState.ANSWERED),
        ("call_1", CallState.ANSWERED),
    ]
    assert store.trajectories.get("t1").last_active_at == 2.5


def test_an_end_that_comes_later_replaces_the_beginning_where_it_is(store: Store) -> None:
    start, end = _pair("call_1", "t1")
    store.calls.ship([start])
    store.trajectories.seal("t1", now=9.0)
    store.calls.ship([end])
    assert store.calls.read("call_1").trajectory_id == "t1"
    assert store.trajectories.get("t1").state is TrajectoryState.SEALED


def test_an_end_brings_its_prompt_back_where_the_beginning_was_deleted_meanwhile(store: Store, store_url: str) -> None:
    start, end = _pair("call_1", "t1")
    store.calls.ship([start])
    store.deletions.delete(TrajectoryFilter(id="t1"), "asked", timeout_seconds=0.0)
    store.calls.ship([end])
    assert len(store.trajectories.read("t1").messages) == len(QUESTION) + 1
    assert verify(store_url).sound


def test_proxies_that_ship_the_same_messages_and_trajectories_do_not_harm_each_other(store_url: str) -> None:
    open_store(store_url).close()
    refused: list[StoreError] = []

    def proxy(number: int) -> None:
        opened = open_store(store_url)
        for batch in range(15):
            records = [
                record
                for one in range(6)
                for record in _pair(
                    f"call_{number}_{batch}_{one}", f"t{(one * (1, -1)[number % 2]) % 6}", at=float(batch)
                )
            ]
            for _ in range(20):
                try:
                    opened.calls.ship(records)
                    break
                except StoreError as error:  # a deadlock is reported as a store that did not answer, and is retried
                    refused.append(error)
        opened.close()

    threads = [threading.Thread(target=proxy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened = open_store(store_url)
    calls = opened.calls.page(1000)
    assert len({call.id for call in calls}) == len(calls) == 4 * 15 * 6
    assert {call.state for call in calls} == {CallState.ANSWERED}
    assert sum(run.calls for run in opened.trajectories.page(1000)) == len(calls)
    assert len(refused) < 10
    opened.close()


def test_two_proxies_that_begin_one_trajectory_on_two_versions_make_two(store: Store) -> None:
    store.calls.ship([call_start("call_1", "t1", version=1)])
    store.calls.ship([call_start("call_2", "t1", version=2), call_start("call_3", "t1", version=1)])
    assert {run.id: (run.version, run.calls) for run in store.trajectories.page()} == {"t1": (1, 2), "t1~1": (2, 1)}


def test_no_text_of_an_agent_or_an_upstream_is_refused(store: Store) -> None:
    odd = "x\0y" * 3000
    messages = [{"role": odd, "content": odd}]
    start = call_start(
        "call_1", "t1", messages, task=odd, role=odd[:128], tags=(odd[:400], "plain"), sampling={"stop": odd}
    )
    store.calls.ship([start, ended(start, tool_call(), messages=messages, error=odd, upstream=odd)])
    call = store.calls.read("call_1")
    assert call.state is CallState.ANSWERED
    assert call.sampling == {"stop": odd}
    assert store.trajectories.read("t1").messages[0] == messages[0]  # content is kept as it is


def test_no_text_of_a_judge_is_refused(store: Store) -> None:
    answered_trajectory(store, "a")
    store.trajectories.seal("a", now=9.0)
    group = store.groups.create("k", "agent", ["a"], now=9.0)
    verdict = Verdict(trajectory_id="a", group_id=group.id, judge="j", judge_version="1", score=1.0, explanation="x\0y")
    store.groups.record_verdicts(group.id, [verdict])
    assert store.groups.verdicts(["a"])["a"].explanation == "x\ufffdy"


def test_a_forked_prompt_is_read_back_whole_and_stored_once(store: Store) -> None:
    prompt = list(range(1000))
    store.calls.ship([ended(call_start("call_0", "t1"), tool_call(), prompt=prompt)])
    for turn in range(1, 5):
        start = call_start(f"call_{turn}", "t1", QUESTION, at=1.0 + turn, parent_call=f"call_{turn - 1}")
        store.calls.ship([ended(start, tool_call(), prompt=prompt * turn, context="fork")])
    for turn in range(1, 5):
        assert store.calls.read(f"call_{turn}").prompt_ids == pack_ids(prompt * turn)
    assert [len(call.prompt_ids) // 4 for call in store.trajectories.read("t1").calls] == [1000, 1000, 2000, 3000, 4000]


def test_a_successor_never_joins_a_run_that_another_key_gave_its_name_to(store: Store) -> None:
    store.calls.ship([call_start("call_1", "t1~1", key_id="key_theirs"), call_start("call_2", "t1", key_id="key_ours")])
    store.trajectories.seal("t1", now=2.0)
    store.calls.ship([call_start("call_3", "t1", key_id="key_ours", at=3.0)])
    assert store.calls.read("call_3").trajectory_id == "t1~2"


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_histories_and_batches_of_any_length_are_stored_whole_and_once(
    store: Store, store_url: str, count: int
) -> None:
    history = [{"role": "user", "content": f"question {number}"} for number in range(count)]
    batch: list[Shipment] = []
    for number in range(count):  # every third call has an id of its engine, every second one is a fork
        start = call_start(f"call_{number:02}", f"t{number % 3}", history[: number + 1], at=float(number))
        response_id = f"resp_{number}" if number % 3 == 0 else None
        context = "fork" if number % 2 else "root"
        batch += [start, ended(start, tool_call(), context=context, prompt=range(300), response_id=response_id)]
    for _ in range(2):
        store.calls.ship(batch)
    calls = store.calls.page(limit=100)
    assert [call.id for call in reversed(calls)] == [f"call_{number:02}" for number in range(count)]
    assert {call.prompt_ids for call in calls} == {pack_ids(range(300))}
    assert [call.response_id is None for call in reversed(calls)] == [number % 3 != 0 for number in range(count)]
    assert len(store.trajectories.read(f"t{(count - 1) % 3}").messages) == count + 1
    assert sum(row.calls for row in store.usage.read(days=100_000)) == count
    assert verify(store_url).sound


def _turns(number: int, of: str = "here") -> list[dict[str, Any]]:
    """A conversation before its answer `number`."""
    more = {"role": "user", "content": "More?"}
    return [*QUESTION, *(one for n in range(number) for one in ({"role": "assistant", "content": f"{of} {n}"}, more))]


def _ship_turn(store: Store, call: str, number: int, of: str = "here", **changes: Any) -> tuple[str, str]:
    """Ship a call that names the trajectory `named`; return the id and the purpose of the trajectory that gets it."""
    messages = _turns(number, of)
    start = call_start(call, "named", messages, at=10.0 + len(store.calls.page()), **changes)
    store.calls.ship([ended(start, {"role": "assistant", "content": f"{of} {number}"}, messages=messages)])
    name = store.calls.read(call).trajectory_id
    return name, store.trajectories.get(name).purpose


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("state", ["open", "idle", "finished", "dropped"])
def test_the_rest_of_an_unlinked_trajectory_is_unlinked_when_its_proxy_has_forgotten_it(
    store: Store, state: str, version: int
) -> None:
    _ship_turn(store, "call_1", 0, purpose=UNLINKED)
    if state == "finished":
        store.trajectories.seal("named", now=99.0)
    elif state != "open":
        store.trajectories.seal_idle_trajectories("agent", now=99.0, idle_seconds=1.0)
    if state == "dropped":
        store.trajectories.drop(["named"], DropReason.UNLINKED)
    continued = version == 0 and state in ("open", "idle")
    for number in (1, 2):
        found = _ship_turn(store, f"call_{1 + number}", number, version=version)
        assert found == ("named" if continued else "named~1", UNLINKED)


def test_the_rest_of_an_unlinked_successor_is_unlinked(store: Store) -> None:
    _ship_turn(store, "call_1", 0)
    _ship_turn(store, "call_2", 1, purpose=UNLINKED)  # by a worker that did not know the trajectory
    store.trajectories.seal("named", now=99.0)
    assert _ship_turn(store, "call_3", 2) == ("named~1", UNLINKED)


def test_a_name_is_used_again_after_an_unlinked_trajectory(store: Store) -> None:
    _ship_turn(store, "call_1", 0, purpose=UNLINKED)
    assert _ship_turn(store, "call_2", 0, of="there") == ("named~1", "live")
    assert _ship_turn(store, "call_3", 1, of="there") == ("named~1", "live")
    assert _ship_turn(store, "call_4", 1) == ("named", UNLINKED)  # the one before goes on
    assert _ship_turn(store, "call_5", 2, of="there") == ("named~1", "live")


@pytest.mark.parametrize("changes", [{"key_id": "other"}, {"alias": "other"}, {"purpose": "eval"}])
def test_an_unlinked_trajectory_marks_no_call_of_another_key_agent_or_purpose(
    store: Store, changes: dict[str, str]
) -> None:
    _ship_turn(store, "call_1", 0, purpose=UNLINKED)
    assert _ship_turn(store, "call_2", 1, **changes) == ("named~1", changes.get("purpose", "live"))
