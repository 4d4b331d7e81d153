"""An unproven version serves nobody and keeps what resuming needs; an outage delays the work and costs nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ratchet.store.records import Policy
from ratchet.store.states import GroupState, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.controller.agent_controller import Outages
from ratchet.trainer.controller.learner_work import retained
from ratchet.trainer.errors import AdapterStoreUnreachable, LearnerUnreachable
from ratchet.trainer.observability.metrics import TrainerMetrics
from ratchet.trainer.rounds.backlog import age, oldest_fresh, versions_ahead
from ratchet.trainer.rounds.round_runner import RoundRunner
from ratchet.trainer.rows.token_row import contexts
from ratchet.trainer.settings.learner_settings import LearnerSettings
from tests.harness.ports import free_port
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_row


def coarse(exact: Faithful) -> Callable[[str, Sequence[int]], float]:
    """An engine that rounds by about 0.05 nats, each version in its own way."""
    return lambda name, ids: exact(name, ids) + random.Random(f"{name} {ids}").gauss(0.0, 0.05)


@pytest.mark.slow
def test_training_continues_from_an_unproven_version_until_its_distance_is_provable(
    store: Store, make_controller: Callable[..., SteppedController], engine: ScriptedEngine
) -> None:
    controller = make_controller(learner=LearnerSettings(learning_rate=1e-4))
    exact = engine.scorer
    assert isinstance(exact, Faithful)
    engine.scorer = coarse(exact)
    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [1.0, 0.0])
    controller.step(1000.0)
    assert store.policies.get("agent", 1).state is PolicyState.UNPROVEN
    assert store.policies.live()["agent"].version == 0
    assert list(engine.loaded) == []
    assert [alarm.name for alarm in store.alarms.active()] == ["swap_unproven:agent"]
    assert "ratchet_unproven_versions" in (text := _metrics(store))
    assert 'ratchet_unproven_versions{alias="agent"} 1.0' in text
    engine.scorer = exact
    agents_work(store, "c", [0.0, 1.0])
    agents_work(store, "d", [1.0, 0.0])
    controller.step(2000.0)
    assert [held.from_version for held in store.rounds.page("agent")] == [1, 0]
    assert controller.learner.step == 2
    assert store.policies.live()["agent"].version == 2
    assert store.policies.get("agent", 1).state is PolicyState.UNPROVEN
    assert "swap_unproven:agent" not in {alarm.name for alarm in store.alarms.active()}
    assert 'ratchet_unproven_versions{alias="agent"} 0.0' in _metrics(store)


def _metrics(store: Store) -> str:
    from prometheus_client import generate_latest

    return generate_latest(TrainerMetrics("agent", store).registry).decode()


def versions(**states: PolicyState) -> list[Policy]:
    """Versions `vN` in the states given, each made by a round."""
    made = [(0, PolicyState.RETIRED), *((int(name[1:]), state) for name, state in states.items())]
    return [
        Policy(
            alias="agent", version=number, state=state, served_name=f"agent@{number}", created_at=1.0,
            adapter=f"/c/{number}" if number else None, round_id=f"r{number}" if number else None,
        )
        for number, state in made
    ]  # fmt: skip


def test_rejected_numbers_are_no_staleness() -> None:
    """Live is 20, built on 10: what 10 sampled is one step old, and what 9 sampled two."""
    states = {f"v{number}": PolicyState.RETIRED for number in range(1, 11)}
    states |= {f"v{number}": PolicyState.REJECTED for number in range(11, 20)} | {"v20": PolicyState.LIVE}
    known = versions(**states)
    assert [oldest_fresh(known, most) for most in (0, 1, 2)] == [20, 10, 9]
    assert (age(known, 10, 20), versions_ahead(known)) == (1, 0)


def test_every_unproven_version_makes_what_the_live_one_samples_a_version_older() -> None:
    states = {"v1": PolicyState.LIVE} | {f"v{number}": PolicyState.UNPROVEN for number in (2, 3, 4)}
    known = versions(**states)
    assert [age(known, sampled, 4) for sampled in (0, 1, 4)] == [4, 3, 0]
    assert versions_ahead(known) == 3
    assert [oldest_fresh(known, most) for most in (0, 2, 3)] == [4, 2, 1]


def test_where_training_goes_on_keeps_its_state_however_many_were_rejected_since() -> None:
    states = {"v1": PolicyState.LIVE, "v2": PolicyState.UNPROVEN, "v3": PolicyState.UNPROVEN}
    known = versions(**states, **{f"v{number}": PolicyState.REJECTED for number in range(4, 9)})
    folders, kept = retained(known, pinned=(), best=[], newest=2, states=1)
    assert {1, 3} <= kept
    assert {1, 3} <= folders
    assert 2 not in folders


def test_no_context_is_evidence_twice_and_short_rows_give_what_they_have() -> None:
    rows = [build_row(7)] * 5
    assert len(contexts(rows)) == len(set(contexts(rows))) == len(contexts(rows[:1]))
    assert all(rows[0].ids[: len(context)] == context for context in contexts(rows))
    sampled = {place for place, carries in enumerate(rows[0].mask) if carries}
    assert {len(context) for context in contexts(rows)[: len(sampled)]} == sampled
    assert contexts([]) == []
    many = contexts([build_row(seed) for seed in range(12)])
    assert len(many) == 24


class StoreThatIsAway(AdapterStore):
    """An adapter store that does not answer."""

    def next_reference(self, root: str, at_least: int = 1) -> str:
        raise AdapterStoreUnreachable(f"adapter store {root} does not answer")


def test_an_adapter_store_that_is_away_costs_no_round(
    store: Store, make_controller: Callable[..., SteppedController], tmp_path: Path
) -> None:
    agents_work(store, "a", [0.0, 1.0])
    controller = make_controller(groups_per_round=9)
    controller.step(1000.0)
    groups = store.groups.awaiting_round("agent")
    runner = RoundRunner(store, "agent", tmp_path / "checkpoints", adapters=StoreThatIsAway(tmp_path))
    with pytest.raises(AdapterStoreUnreachable):
        runner.run_round(controller.learner, groups, 0)
    assert store.rounds.page("agent") == []
    assert {store.groups.get(group.id).state for group in groups} == {GroupState.JUDGED}


@pytest.mark.slow
def test_an_outage_that_lasts_is_an_alarm(store: Store, make_controller: Callable[..., SteppedController]) -> None:
    def alarms() -> list[str]:
        return [alarm.name for alarm in store.alarms.active()]

    agents_work(store, "a", [0.0, 1.0])
    agents_work(store, "b", [0.0, 1.0])
    controller = make_controller(vllm=(f"http://127.0.0.1:{free_port()}",))
    for now in (1000.0, 1005.0):
        controller.step(now)
        assert "outage:agent" not in alarms()
    controller.step(1020.0)
    assert "outage:agent" in alarms()
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    make_controller().step(1030.0)
    assert store.policies.live()["agent"].version == 1
    assert "outage:agent" not in alarms()


def test_a_learner_may_take_minutes_to_load_before_that_is_an_alarm(store: Store) -> None:
    outage = Outages("agent", store)
    for now, raised in ((0.0, False), (500.0, False), (601.0, True)):
        outage.record(LearnerUnreachable("it is loading"), now)
        assert bool(store.alarms.active()) is raised
    outage.end(602.0)
    assert not store.alarms.active()


def test_the_log_names_an_outage_at_its_begin_once_a_minute_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ratchet.trainer")
    outages = Outages("agent")
    for now in range(1000, 1125, 2):
        outages.record(LearnerUnreachable("it is loading"), float(now), "a round")
    outages.record(LearnerUnreachable("it is loading"), 1125.0, "the start")
    outages.end(1130.0)
    outages.end(1131.0)
    assert [record.getMessage().split(" reason")[0] for record in caplog.records] == [
        *["event=outage alias=agent work='a round'"] * 3,
        "event=outage alias=agent work='the start'",
        "event=outage_ended alias=agent seconds=130",
    ]
