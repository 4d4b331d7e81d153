"""The leases of several controllers: fair shares, what is given up, what is lost, and a store that is away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.store.store import Store
from ratchet.trainer.controller_service.agent_leases import AgentLeases, LeaseState
from tests.harness.proxy.servers import eventually

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
