"""Leases: of one trainer and of several controllers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.store.coordination import Leases
from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import Store
from ratchet.trainer.controller.agent_leases import AgentLeases, LeaseState
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.lease import Lease
from tests.harness.proxy.servers import eventually


class AwayAtFirst(Leases):
    """The leases of a store that is away for the first few asks."""

    def __init__(self, store: Store, away: int = 1) -> None:
        super().__init__(store._engine)
        self.away = away
        self.requests = 0

    def acquire(self, name: str, owner: str, seconds: float) -> bool:
        self.requests += 1
        if self.away:
            self.away -= 1
            raise StoreUnavailable("scripted outage")
        return super().acquire(name, owner, seconds)


def test_one_trainer_leads_and_another_takes_over(store: Store) -> None:
    stop = threading.Event()
    with Lease(store, "trainer:agent", seconds=5.0) as first:
        assert first.wait(stop)
        second = Lease(store, "trainer:agent", seconds=5.0)
        threading.Timer(0.1, stop.set).start()
        assert not second.wait(stop)
    with Lease(store, "trainer:agent", seconds=5.0) as third:
        assert third.wait(threading.Event())


def test_a_trainer_waits_for_a_store_that_is_away(store: Store) -> None:
    store.leases = AwayAtFirst(store)
    with Lease(store, "trainer:agent", seconds=0.5) as lease:
        assert lease.wait(threading.Event())
    assert store.leases.requests >= 2


def test_a_trainer_that_was_suspended_past_its_lease_checks_it_before_it_continues(store: Store) -> None:
    store.leases = unavailable_leases = AwayAtFirst(store, away=0)
    with Lease(store, "trainer:agent", seconds=0.2) as lease:
        assert lease.wait(threading.Event())
        unavailable_leases.away = 10**6  # it cannot renew, as a process that is stopped cannot
        threading.Event().wait(0.3)
        with pytest.raises(StoreUnavailable):
            lease.check()
        assert Leases(store._engine).acquire("trainer:agent", "successor", seconds=60.0)
        unavailable_leases.away = 0
        with pytest.raises(TrainerError):
            lease.check()


def test_a_trainer_whose_lease_was_taken_stops(store: Store) -> None:
    with Lease(store, "trainer:agent", seconds=0.2) as lease:
        assert lease.wait(threading.Event())
        lease.check()
        for _ in range(100):  # any process that can write to the store can take it
            store.leases.release("trainer:agent", lease.owner)
            if store.leases.acquire("trainer:agent", "thief", seconds=60.0):
                break
        with pytest.raises(TrainerError):  # noqa: PT012  the renewing thread needs a moment to find out
            for _ in range(200):
                lease.check()
                threading.Event().wait(0.01)


def test_a_lease_that_is_renewed_is_refused_with_its_holder_and_since_when(store: Store) -> None:
    waited: list[str] = []
    with Lease(store, "tuning:tun_1", seconds=2.0) as first, Lease(store, "tuning:tun_1", seconds=2.0) as second:
        first.claim()
        with pytest.raises(
            TrainerError, match=rf"process {os.getpid()} on .+, since 20\d\d-\d\d-\d\d .* UTC, which is alive"
        ):
            second.claim(waited.append)
        assert len(waited) == 1
        assert first.confirmed()
    with Lease(store, "tuning:tun_1", seconds=2.0) as third:
        third.claim()
        assert [one.owner for one in store.leases.holders("tuning:")] == [third.owner]
        assert store.leases.holders("trainer:") == []
    assert store.leases.holders("tuning:") == []


def test_the_lease_of_a_dead_holder_is_taken_over_once_it_has_expired(store: Store) -> None:
    assert store.leases.acquire("tuning:tun_1", "host:1_06f3", 0.5)  # and nobody renews it
    with Lease(store, "tuning:tun_1", seconds=2.0) as lease:
        lease.claim()
        assert lease.confirmed()
        assert not store.leases.acquire("tuning:tun_1", "thief", 60.0)


SECONDS = 60.0  # far more than needed: the machine may be busy
AGENTS = ("a", "b", "c", "d", "e")

MakeLeases = Callable[..., AgentLeases]


@pytest.fixture
def make_leases(store: Store) -> Iterator[MakeLeases]:
    made: list[AgentLeases] = []

    def make(*agents: str, seconds: float = 5.0) -> AgentLeases:
        leases = AgentLeases(store, seconds, lambda: None)
        for agent in agents:
            leases.request(agent)
        made.append(leases)
        return leases

    yield make
    for leases in made:
        leases.close()


def held(leases: AgentLeases) -> set[str]:
    return {agent for agent in AGENTS if leases.state_of(agent) is LeaseState.HELD}


def owners(store: Store) -> dict[str, str]:
    return {one.name.removeprefix("trainer:"): one.owner for one in store.leases.holders("trainer:")}


def test_one_controller_takes_all_agents_and_gives_them_back(store: Store, make_leases: MakeLeases) -> None:
    leases = make_leases(*AGENTS)
    eventually(lambda: held(leases) == set(AGENTS), SECONDS)
    assert leases.surplus == 0
    leases.release("a")
    assert set(owners(store)) == set(AGENTS) - {"a"}
    leases.close()
    assert not owners(store)
    assert not store.leases.holders("controller:")


@pytest.mark.slow
def test_a_second_controller_makes_half_of_the_leases_a_surplus_and_takes_them(make_leases: MakeLeases) -> None:
    first = make_leases(*AGENTS)
    eventually(lambda: held(first) == set(AGENTS), SECONDS)
    second = make_leases(*AGENTS)
    eventually(lambda: first.surplus == 2, SECONDS)
    for agent in ("a", "b"):
        first.give_up(agent)
    eventually(lambda: held(second) == {"a", "b"}, SECONDS)
    eventually(lambda: first.surplus == second.surplus == 0, SECONDS)
    assert held(first) == {"c", "d", "e"}


def test_a_controller_of_other_agents_takes_nothing_away(make_leases: MakeLeases) -> None:
    first = make_leases("a", "b")
    eventually(lambda: held(first) == {"a", "b"}, SECONDS)
    other = make_leases("c")
    eventually(lambda: held(other) == {"c"}, SECONDS)
    assert first.surplus == other.surplus == 0


@pytest.mark.slow
def test_what_was_given_up_and_nobody_took_is_taken_again(make_leases: MakeLeases) -> None:
    leases = make_leases("a", seconds=0.5)
    eventually(lambda: held(leases) == {"a"}, SECONDS)
    leases.give_up("a")
    assert held(leases) == set()
    eventually(lambda: held(leases) == {"a"}, SECONDS)


def test_a_lease_that_another_took_is_lost_and_the_others_stay(store: Store, make_leases: MakeLeases) -> None:
    leases = make_leases("a", "b", seconds=2.0)
    eventually(lambda: held(leases) == {"a", "b"}, SECONDS)
    store.leases.release("trainer:a", owners(store)["a"])
    assert store.leases.acquire("trainer:a", "thief", 600.0)
    eventually(lambda: leases.state_of("a") is LeaseState.WAITING, SECONDS)
    assert held(leases) == {"b"}


@pytest.mark.slow
def test_a_lease_is_not_trusted_while_the_store_is_away(
    store: Store, store_file: Path, tmp_path: Path, make_leases: MakeLeases
) -> None:
    leases = make_leases("a", seconds=0.5)
    eventually(lambda: held(leases) == {"a"}, SECONDS)
    aside = tmp_path / "aside.db"
    store_file.rename(aside)
    eventually(lambda: leases.state_of("a") is LeaseState.OVERDUE, SECONDS)
    aside.rename(store_file)
    eventually(lambda: held(leases) == {"a"}, SECONDS)
