"""Leases: one holder at a time, until it dies or gives it back."""

from __future__ import annotations

import os
import threading

import pytest

from ratchet.store.coordination import Leases
from ratchet.store.errors import StoreUnavailable
from ratchet.store.store import Store
from ratchet.trainer.errors import TrainerError
from ratchet.trainer.lease import Lease


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


def test_agents_have_leases_of_their_own(store: Store) -> None:
    stop = threading.Event()
    with Lease(store, "trainer:mail", seconds=5.0) as mail, Lease(store, "trainer:mail_2", seconds=5.0) as other:
        assert other.wait(stop)
        assert mail.wait(stop)
        assert {one.name for one in store.leases.holders("trainer:")} == {"trainer:mail", "trainer:mail_2"}
    assert not store.leases.holders("trainer:")


def test_the_loss_of_a_lease_is_reported_at_once(store: Store) -> None:
    lost = threading.Event()
    with Lease(store, "trainer:agent", 2.0, lost.set) as lease:
        assert lease.wait(threading.Event())
        store.leases.release("trainer:agent", lease.owner)
        assert store.leases.acquire("trainer:agent", "thief", 600.0)
        assert lost.wait(60.0)
        assert not lease.is_held()
    assert [one.owner for one in store.leases.holders("trainer:")] == ["thief"]
