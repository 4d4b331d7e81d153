"""What is linked while calls of other workers may be missing, and when that is so."""

from __future__ import annotations

from typing import Any

import pytest

from ratchet.proxy.coordinator.linking.cautious_linker import CautiousLinker, Doubt
from ratchet.proxy.coordinator.linking.restore import leaf_from_store
from ratchet.proxy.coordinator.unheard_workers import TICK_SECONDS, UnheardWorkers
from ratchet.proxy.dialects.responses_renderer import response_id
from ratchet.store.content import messages as canon
from ratchet.store.records import UNLINKED, OpenLeaf
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.records import answered_trajectory
from tests.proxy.test_linking import NEXT, REPLY, USER, Message, answered, evidence, restore
from tests.proxy.test_linking_choices import STOPPED, assistant, stop

LONG: Message = {"role": "assistant", "content": "The budget of the spring meeting is 4,300, as the treasurer says."}
FUNCTION = {"name": "search", "arguments": "{}"}
RANDOM_ID, PLAIN_ID = (
    {"role": "assistant", "content": None, "tool_calls": [{"id": name, "type": "function", "function": FUNCTION}]}
    for name in ("chatcmpl-tool-0123456789abcdef0123456789abcdef", "call_0")
)


@pytest.fixture
def linker() -> CautiousLinker:
    return CautiousLinker(900, 2**20, 2**20)


@pytest.mark.parametrize(
    ("reply", "doubt", "continues"),
    [
        (REPLY, Doubt.NONE, True),
        (REPLY, Doubt.EARLIER, False),
        (LONG, Doubt.RECENT, True),
        (LONG, Doubt.ALL, False),  # another worker may have an equal one, or continued this one
        (RANDOM_ID, Doubt.ALL, True),
        (PLAIN_ID, Doubt.EARLIER, False),
    ],
)
def test_in_doubt_a_call_continues_only_what_its_answer_proves(
    linker: CautiousLinker, reply: Message, doubt: Doubt, continues: bool
) -> None:
    linker.doubt = lambda: Doubt.NONE
    first = answered(linker, [USER], reply)
    linker.doubt = lambda: doubt
    found = linker.find_link(evidence([USER, reply, NEXT]))
    assert (found.trajectory_id == first.trajectory_id) is continues
    assert found.purpose == ("live" if continues else UNLINKED)


@pytest.mark.parametrize("doubt", [Doubt.EARLIER, Doubt.RECENT, Doubt.ALL])
def test_in_doubt_a_call_whose_last_answer_is_not_known_continues_no_earlier_one(
    linker: CautiousLinker, doubt: Doubt
) -> None:
    linker.doubt = lambda: Doubt.NONE
    first = answered(linker, [USER], RANDOM_ID)
    linker.doubt = lambda: doubt
    found = linker.find_link(evidence([USER, RANDOM_ID, NEXT, LONG, NEXT]))  # another worker served LONG
    assert (found.trajectory_id == first.trajectory_id, found.purpose) == (False, UNLINKED)


@pytest.mark.parametrize("doubt", [Doubt.EARLIER, Doubt.RECENT, Doubt.ALL])
def test_in_doubt_the_beginning_of_a_stopped_answer_proves_nothing(linker: CautiousLinker, doubt: Doubt) -> None:
    linker.doubt = lambda: Doubt.NONE
    first = stop(linker, [USER])
    messages = evidence([USER, assistant(STOPPED[:35]), NEXT])
    assert linker.find_link(messages).trajectory_id == first.trajectory_id
    linker.doubt = lambda: doubt
    found = linker.find_link(messages)
    assert (found.trajectory_id == first.trajectory_id, found.purpose) == (False, UNLINKED)


def _as_text(*answers: Message) -> list[Message]:
    """A conversation whose tool calls are sent back as text."""
    return [USER, *({"role": "user", "content": f"Tools were called: {answer['tool_calls']}"} for answer in answers)]


def test_a_call_that_repeats_answers_of_an_unlinked_trajectory_and_another_is_marked(linker: CautiousLinker) -> None:
    linker.doubt = lambda: Doubt.NONE
    function = {"type": "function", "function": FUNCTION}
    first, second = (
        {"role": "assistant", "content": None, "tool_calls": [{"id": f"chatcmpl-tool-{sign * 32}", **function}]}
        for sign in ("a1", "b2")
    )
    answered(linker, [USER], first)
    linker.doubt = lambda: Doubt.ALL
    answered(linker, _as_text(first), second)  # unlinked: the text proves nothing now
    linker.doubt = lambda: Doubt.NONE
    rest = linker.find_link(evidence(_as_text(first, second)))
    assert (rest.version, rest.purpose) == (None, UNLINKED)
    assert linker.find_link(evidence([USER, REPLY, NEXT])).purpose == "live"


def test_a_response_that_names_one_of_an_unlinked_trajectory_stays_in_it(proxy: Proxy, store: Store) -> None:
    agent = proxy.agent()
    agent.responses.create(model="agent", input="hi")
    proxy.settled()
    (other,) = store.trajectories.page(9)
    answered_trajectory(store, "rest", dialect="responses", key_id=other.key_id, purpose=UNLINKED)  # by another process
    name = response_id("call_rest")
    for _ in range(2):
        name = agent.responses.create(model="agent", input="more?", previous_response_id=name).id
    proxy.settled()
    found = {one.id: (one.purpose, one.calls) for one in store.trajectories.page(9)}
    assert found == {other.id: ("live", 1), "rest": (UNLINKED, 3)}


def test_a_call_that_names_an_unlinked_trajectory_stays_in_it_when_the_proxy_has_forgotten_it(
    proxy: Proxy, store: Store
) -> None:
    agent = proxy.agent()
    agent.chat.completions.create(model="agent", messages=[{"role": "user", "content": "hi"}])
    proxy.settled()
    (other,) = store.trajectories.page(9)
    answered_trajectory(store, "rest", key_id=other.key_id, purpose=UNLINKED)  # what the proxy knew once
    for number in range(2):
        messages: Any = [USER, *[REPLY, NEXT] * (1 + number)]
        agent.chat.completions.create(model="agent", messages=messages, extra_headers={"x-ratchet-trajectory": "rest"})
    proxy.settled()
    found = {one.id: (one.purpose, one.calls) for one in store.trajectories.page(9)}
    assert found == {other.id: ("live", 1), "rest": (UNLINKED, 3)}


def test_in_doubt_a_long_answer_that_two_trajectories_have_proves_nothing(linker: CautiousLinker) -> None:
    linker.doubt = lambda: Doubt.NONE
    both = {answered(linker, [USER], LONG).trajectory_id for _ in range(2)}
    linker.doubt = lambda: Doubt.RECENT
    found = linker.find_link(evidence([USER, LONG, NEXT]))
    assert len(both) == 2
    assert (found.trajectory_id in both, found.purpose) == (False, UNLINKED)


@pytest.mark.parametrize(("doubt", "purpose"), [(Doubt.EARLIER, "live"), (Doubt.RECENT, UNLINKED)])
def test_a_call_without_history_is_marked_while_recent_calls_are_missing(
    linker: CautiousLinker, doubt: Doubt, purpose: str
) -> None:
    linker.doubt = lambda: doubt
    assert linker.find_link(evidence([USER])).purpose == purpose


def stored_answer(call_id: str) -> OpenLeaf:
    return OpenLeaf(
        trajectory_id="traj_old",
        call_id=call_id,
        choice=0,
        alias="agent",
        version=2,
        link_key=canon.link_keys([USER, REPLY])[-1],
        tool_call_ids=(),
        key_id="k",
        purpose="live",
        sequence=b"",
        last_active_at=5.0,
    )


def test_of_a_long_trajectory_the_latest_answers_stay_known_when_it_is_read_again(linker: CautiousLinker) -> None:
    for _ in range(2):
        linker.restore_answers([(one, leaf_from_store(one)) for one in map(stored_answer, map(str, range(2_500)))])
    assert {int(call_id) for call_id, _ in linker.answers_of("traj_old")} == set(range(500, 2_500))


def test_what_is_read_in_the_store_again_is_known_once_and_continued_where_it_was(linker: CautiousLinker) -> None:
    linker.doubt = lambda: Doubt.NONE
    stored = stored_answer("call_old")
    restore(linker, stored)
    size = linker.bytes
    restore(linker, stored)
    assert (len(linker), linker.bytes) == (1, size)
    found = linker.find_link(evidence([USER, REPLY, NEXT]))
    assert found.trajectory_id == "traj_old"
    assert found.parent is not None
    assert not found.parent.is_extended


class SetClock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def unheard(clock: SetClock) -> UnheardWorkers:
    workers = UnheardWorkers(["here/1"], 900.0, clock)
    for worker in ("here/1", "there/1"):
        workers.hear(worker, 0.0)
    return workers


def _ticks(unheard: UnheardWorkers, number: int, *received: str) -> None:
    for _ in range(number):
        unheard.tick(TICK_SECONDS)
        for worker in received:
            unheard.hear(worker, 0.0)


def test_a_silent_worker_of_another_machine_is_doubted_before_it_serves_alone(unheard: UnheardWorkers) -> None:
    _ticks(unheard, 8, "here/1")
    assert unheard.doubt() == Doubt.NONE
    _ticks(unheard, 1, "here/1")
    assert unheard.doubt() == Doubt.RECENT
    unheard.hear("there/1", 0.0)
    assert unheard.doubt() == Doubt.NONE


def test_a_silent_worker_of_this_machine_is_not_cut_off(unheard: UnheardWorkers) -> None:
    _ticks(unheard, 30, "there/1")
    assert unheard.doubt() == Doubt.NONE


def test_after_a_pause_of_the_coordinator_itself_every_worker_must_report(unheard: UnheardWorkers) -> None:
    unheard.tick(8.0)
    assert unheard.doubt() == Doubt.RECENT
    unheard.hear("here/1", 0.0)
    assert unheard.doubt() == Doubt.RECENT
    unheard.hear("there/1", 0.0)
    assert unheard.doubt() == Doubt.NONE


@pytest.mark.parametrize(
    ("age", "doubt"), [(1.0, Doubt.NONE), (4.0, Doubt.NONE), (4.5, Doubt.RECENT), (float("inf"), Doubt.RECENT)]
)
def test_a_message_that_was_delayed_ends_no_doubt(unheard: UnheardWorkers, age: float, doubt: Doubt) -> None:
    _ticks(unheard, 9, "here/1")
    assert unheard.doubt() == Doubt.RECENT
    unheard.hear("there/1", age)
    assert unheard.doubt() == doubt


def test_the_first_message_of_a_worker_begins_no_doubt(unheard: UnheardWorkers) -> None:
    unheard.hear("there/2", float("inf"))
    assert unheard.doubt() == Doubt.NONE
    unheard.expect("there/2")  # it greeted a coordinator that had not decided yet
    assert unheard.doubt() == Doubt.RECENT
    unheard.hear("there/2", 0.0)
    assert unheard.doubt() == Doubt.NONE


def test_silence_counts_from_the_last_answer_that_a_worker_received(unheard: UnheardWorkers) -> None:
    unheard.hear("there/1", 2.0)
    _ticks(unheard, 4, "here/1")
    assert unheard.doubt() == Doubt.NONE
    _ticks(unheard, 1, "here/1")
    assert unheard.doubt() == Doubt.RECENT


def test_a_worker_that_died_unheard_is_missing_until_its_calls_are_found(
    unheard: UnheardWorkers, clock: SetClock
) -> None:
    _ticks(unheard, 9, "here/1")
    unheard.end("there/1")
    assert (unheard.doubt(), unheard.is_missing("there/1")) == (Doubt.RECENT, True)
    clock.now = 300.0
    assert unheard.doubt() == Doubt.EARLIER
    unheard.find("there/1")
    assert unheard.doubt() == Doubt.NONE


def test_a_worker_that_never_comes_back_is_forgotten_with_its_trajectories(
    unheard: UnheardWorkers, clock: SetClock
) -> None:
    unheard.miss("gone/1")
    clock.now = 901.0
    assert (unheard.doubt(), unheard.is_missing("gone/1")) == (Doubt.NONE, False)


@pytest.mark.parametrize("ticks", [0, 9])
def test_a_worker_that_stopped_reported_everything(unheard: UnheardWorkers, ticks: int) -> None:
    _ticks(unheard, ticks, "here/1")
    unheard.leave("there/1")
    assert unheard.doubt() == Doubt.NONE
