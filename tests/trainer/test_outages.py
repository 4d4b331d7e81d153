"""What does not answer delays the work, costs nothing, and is an alarm if it lasts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.store.states import GroupState, PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.controller.rounds.round_runner import RoundRunner
from ratchet.trainer.controller_service.outages import OutageAlarm, OutageLog
from ratchet.trainer.errors import AdapterStoreUnreachable, LearnerUnreachable
from tests.harness.ports import free_port
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController


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
    outage = OutageAlarm(store, "agent")
    for now, raised in ((0.0, False), (500.0, False), (601.0, True)):
        outage.record(LearnerUnreachable("it is loading"), now)
        assert bool(store.alarms.active()) is raised
    outage.end()
    assert not store.alarms.active()


def test_the_log_names_an_outage_at_its_begin_once_a_minute_and_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ratchet.trainer")
    outages = OutageLog("agent")
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
