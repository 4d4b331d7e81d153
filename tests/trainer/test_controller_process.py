"""Several agents in one controller process: nothing waits for another agent's round, judge or failure."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Feedback
from ratchet.store.states import GroupState, RoundState, TrajectoryState
from ratchet.store.store import Store, open_store
from ratchet.trainer.controller.process import ControllerProcess
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.exactly_once.processes import RestartableProcess
from tests.harness.proxy.servers import eventually, served
from tests.harness.trainer.agents import agents_work, damage_tokens
from tests.harness.trainer.scripted_learner import ScriptedLearner, read_weights
from tests.harness.trainer.scripted_processes import ScoringVllm
from tests.harness.trainer.stepped_controller import SteppedController

BASE = "tiny-base"
JUDGE = "tests.harness.trainer.judge_samples:scripted"
BY_NUMBER = "tests.harness.trainer.judge_samples:by_last_digit"
POLICY = Path(__file__).parents[2] / "ratchet" / "demo" / "email_search" / "policy"  # a real tokenizer
SECONDS = 60.0  # far more than needed: the machine may be busy

judging = threading.Event()  # `patient_judge` waits for it


def patient_judge(response: str) -> float:
    judging.wait(SECONDS)
    return float(response[-1])


@pytest.fixture
def vllm() -> Iterator[str]:
    with served(ScoringVllm()) as url:
        yield url


@pytest.fixture
def make_settings(store: Store, vllm: str, tmp_path: Path) -> Callable[..., dict[str, TrainerSettings]]:
    def make(*names: str, **changes: Any) -> dict[str, TrainerSettings]:
        made = {}
        for name in names:
            store.policies.register_base(name, BASE)
            values: dict[str, Any] = {
                "store": "unused", "model": name, "base_model": "scripted", "vllm": (vllm,), "judge": JUDGE,
                "checkpoints": tmp_path / name / "checkpoints", "num_generations": 2, "groups_per_round": 1,
                "lease_seconds": 2.0, "poll_interval_seconds": 0.05, "release": {"policy": "immediate"},
            }  # fmt: skip
            made[name] = TrainerSettings(**(values | changes))
        return made

    return make


@contextmanager
def running(process: ControllerProcess) -> Iterator[ControllerProcess]:
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        yield process
    finally:
        process.stop()
        thread.join(SECONDS)
    assert not thread.is_alive()


def work(store: Store, alias: str, task: str) -> list[str]:
    return agents_work(store, f"{alias}_{task}", [0.0, 1.0], alias=alias)


def live(store: Store, alias: str) -> int:
    return store.policies.live()[alias].version


def is_running(process: ControllerProcess, alias: str) -> bool:
    return process.running.get(alias, False)


def round_states(store: Store, alias: str) -> list[RoundState]:
    return [one.state for one in store.rounds.page(alias)]


def state_of(store: Store, name: str) -> tuple[TrajectoryState, str | None]:
    found = store.trajectories.get(name)
    return found.state, found.drop_reason


def alarms(store: Store) -> dict[str, str]:
    return {alarm.name: alarm.reason for alarm in store.alarms.active()}


@pytest.mark.slow
def test_a_long_round_delays_neither_its_agents_judge_nor_another_agent(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    gate = threading.Event()
    with running(
        ControllerProcess(store, make_settings("slow", "quick"), partial(ScriptedLearner, gates={"slow": gate}))
    ):
        first = work(store, "slow", "a")
        eventually(lambda: [one.state for one in store.rounds.page("slow")] == [RoundState.STARTED], SECONDS)
        second = work(store, "slow", "b")
        work(store, "quick", "a")
        eventually(lambda: live(store, "quick") == 1, SECONDS)
        eventually(lambda: len(store.groups.awaiting_round("slow")) == 2, SECONDS)  # the round's, and one more
        assert [one.state for one in store.rounds.page("slow")] == [RoundState.STARTED]
        gate.set()
        eventually(lambda: live(store, "slow") == 2, SECONDS)
    assert sorted(read_weights(Path(store.policies.live()["slow"].adapter or ""))) == sorted(first + second)


@pytest.mark.slow
def test_a_slow_judge_delays_its_own_agent_only(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    judging.clear()
    agents = make_settings("slow", judge=f"{__name__}:patient_judge") | make_settings("quick")
    with running(ControllerProcess(store, agents, ScriptedLearner)):
        work(store, "slow", "a")
        eventually(lambda: len(store.groups.page(state=GroupState.READY)) == 1, SECONDS)
        work(store, "quick", "a")
        eventually(lambda: live(store, "quick") == 1, SECONDS)
        assert live(store, "slow") == 0
        judging.set()
        eventually(lambda: live(store, "slow") == 1, SECONDS)


@pytest.mark.slow
def test_verdicts_alone_refill_the_judges_queue(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    """Without traffic a step comes every 10 s only, and the queue holds fewer groups than wait."""
    settings = make_settings("busy", groups_per_round=1000, round_wait_seconds=1e6)["busy"]
    groups = 90  # 66 fit into the queue of a judge of one thread
    for number in range(groups):
        work(store, "busy", str(number))
    controller = SteppedController(settings, store, ScriptedLearner)
    try:
        controller.step(1000.0)
        for _ in range(groups):
            controller.react(1000.0)
        assert store.groups.awaiting_verdict("busy", float("inf")) == []
    finally:
        controller.close()


@pytest.mark.slow
def test_an_agent_that_cannot_start_is_an_alarm_and_starts_with_better_settings(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    broken = make_settings("broken", judge="tests.harness.trainer.judge_samples:not_a_function")
    process = ControllerProcess(store, broken | make_settings("sound"), ScriptedLearner)
    with running(process):
        work(store, "sound", "a")
        work(store, "broken", "a")
        eventually(lambda: live(store, "sound") == 1 and "agent_failed:broken" in alarms(store), SECONDS)
        assert "not_a_function" in alarms(store)["agent_failed:broken"]
        process.set_agents(make_settings("broken", "sound"))
        eventually(lambda: live(store, "broken") == 1, SECONDS)
        assert "agent_failed:broken" not in alarms(store)


@pytest.mark.slow
def test_a_damaged_trajectory_is_dropped_before_it_is_judged_and_the_others_are_trained(
    store: Store,
    make_settings: Callable[..., dict[str, TrainerSettings]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = agents_work(store, "a", [0.0, 1.0, 0.5], alias="agent")
    damage_tokens(store, names[2])
    settings = make_settings("agent", num_generations=3, min_group_size=2)
    with running(ControllerProcess(store, settings, ScriptedLearner)):
        eventually(lambda: live(store, "agent") == 1, SECONDS)
    assert [state_of(store, name) for name in names] == [
        (TrajectoryState.TRAINED, None), (TrajectoryState.TRAINED, None), (TrajectoryState.DROPPED, "damaged"),
    ]  # fmt: skip
    (line,) = [one.getMessage() for one in caplog.records if "trajectory_dropped" in one.getMessage()]
    assert names[2] in line
    assert "ratchet store verify" in line
    assert alarms(store) == {}


@pytest.mark.slow
def test_a_damaged_trajectory_is_dropped_from_a_round_that_begins_after_the_judge_has_read_it(
    store: Store,
    make_settings: Callable[..., dict[str, TrainerSettings]],
) -> None:
    settings = make_settings("agent", num_generations=3, min_group_size=2, groups_per_round=2, round_wait_seconds=1e6)
    first = agents_work(store, "a", [0.0, 1.0, 0.5], alias="agent")
    with running(ControllerProcess(store, settings, ScriptedLearner)):
        eventually(lambda: len(store.groups.awaiting_round("agent")) == 1, SECONDS)
    damage_tokens(store, first[0])
    agents_work(store, "b", [0.0, 1.0, 0.5], alias="agent")
    with running(ControllerProcess(store, settings, ScriptedLearner)):
        eventually(lambda: live(store, "agent") == 1, SECONDS)
    assert [state_of(store, name) for name in first] == [
        (TrajectoryState.DROPPED, "damaged"), (TrajectoryState.TRAINED, None), (TrajectoryState.TRAINED, None),
    ]  # fmt: skip
    assert alarms(store) == {}


def test_a_process_none_of_whose_agents_can_start_ends_with_the_reason(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    broken = make_settings("one", "other", judge="tests.harness.trainer.judge_samples:not_a_function")
    with pytest.raises(JudgeError, match="not_a_function"):
        ControllerProcess(store, broken, ScriptedLearner).run()
    assert not store.leases.holders("trainer:")


@pytest.mark.slow
def test_agents_come_and_go_without_a_restart_of_the_others(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]], caplog: pytest.LogCaptureFixture
) -> None:
    agents = make_settings("stays", "goes")
    process = ControllerProcess(store, agents, ScriptedLearner)
    with caplog.at_level("INFO"), running(process):
        eventually(lambda: is_running(process, "stays") and is_running(process, "goes"), SECONDS)
        process.set_agents({"stays": agents["stays"]} | make_settings("comes"))
        eventually(lambda: is_running(process, "comes") and "goes" not in process.running, SECONDS)
        assert {holder.name for holder in store.leases.holders("trainer:")} == {"trainer:stays", "trainer:comes"}
        for name in ("stays", "goes", "comes"):
            work(store, name, "a")
        eventually(lambda: live(store, "stays") == live(store, "comes") == 1, SECONDS)
        assert live(store, "goes") == 0
        text = process.metrics.registry
        assert text.get_sample_value("ratchet_training_paused", {"alias": "stays"}) == 0
        assert text.get_sample_value("ratchet_training_paused", {"alias": "goes"}) is None
    started = [one.getMessage() for one in caplog.records if "event=trainer_ready" in one.getMessage()]
    assert sum("alias=stays" in one for one in started) == 1


@pytest.mark.slow
def test_a_lost_lease_stops_that_agent_only(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    process = ControllerProcess(store, make_settings("mail", "chat"), ScriptedLearner)
    with running(process):
        eventually(lambda: is_running(process, "mail") and is_running(process, "chat"), SECONDS)
        (owner,) = {holder.owner for holder in store.leases.holders("trainer:mail")}
        store.leases.release("trainer:mail", owner)  # as if it had stood still for too long
        assert store.leases.acquire("trainer:mail", "thief", 600.0)
        eventually(lambda: not is_running(process, "mail"), SECONDS)
        assert is_running(process, "chat")
        store.leases.release("trainer:mail", "thief")
        eventually(lambda: is_running(process, "mail"), SECONDS)


@pytest.mark.slow
def test_a_second_controller_stands_by_until_the_first_ends(
    store: Store, make_settings: Callable[..., dict[str, TrainerSettings]]
) -> None:
    agents = make_settings("mail", "chat")
    first = ControllerProcess(store, agents, ScriptedLearner)
    second = ControllerProcess(store, agents, ScriptedLearner)
    with running(second):
        with running(first):
            eventually(lambda: len(store.leases.holders("trainer:")) == 2, SECONDS)
            for name in agents:
                work(store, name, "a")
            eventually(lambda: all(live(store, name) == 1 for name in agents), SECONDS)
            for name in agents:
                assert not (is_running(first, name) and is_running(second, name))
        eventually(lambda: all(is_running(second, name) for name in agents), SECONDS)
        for name in agents:
            work(store, name, "b")
        eventually(lambda: all(live(store, name) == 2 for name in agents), SECONDS)
    assert not store.leases.holders("trainer:")


@pytest.mark.slow
def test_the_agents_of_a_killed_controller_are_taken_over_and_train_nothing_twice(
    store_file: Path, make_settings: Callable[..., dict[str, TrainerSettings]], store: Store, tmp_path: Path
) -> None:
    names = ("mail", "chat", "code")
    agents = make_settings(*names, judge=BY_NUMBER, store=str(store_file))
    derived = ("store", "model", "base_model", "vllm", "checkpoints")
    own = [one.model_dump(mode="json", exclude_unset=True) for one in agents.values()]
    given = [{name: getattr(one, name) for name in derived} for one in agents.values()]
    values = json.dumps([one | of for one, of in zip(own, given, strict=True)], default=str)
    processes = [RestartableProcess("trainer", values, tmp_path / "0.log")]
    try:
        eventually(lambda: len(store.leases.holders("trainer:")) == len(names), SECONDS)
        processes.append(RestartableProcess("trainer", values, tmp_path / "1.log"))  # it stands by
        first = {name: work(store, name, "a") for name in names}
        eventually(
            lambda: any(one.state is RoundState.STARTED for name in names for one in store.rounds.page(name)), SECONDS
        )
        processes[0].kill()
        eventually(lambda: all(live(store, name) == 1 for name in names), SECONDS)
        second = {name: work(store, name, "b") for name in names}
        eventually(lambda: all(live(store, name) == 2 for name in names), SECONDS)
    finally:
        for process in processes:
            process.kill()
    for name in names:
        newest = Path(store.policies.live()[name].adapter or "")
        assert sorted(read_weights(newest)) == sorted(first[name] + second[name])


def test_the_controller_imports_no_torch() -> None:
    imported = "ratchet.trainer.controller.process, ratchet.tuner.selection"
    code = f"import sys, json, {imported}; print(json.dumps(list(sys.modules)))"
    modules = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True))
    assert "ratchet.trainer.controller.agent_controller" in modules
    assert not {"torch", "transformers", "peft", "trl", "accelerate", "datasets"} & set(modules)


_WARM_START = """
import json, sys
from ratchet.store.store import open_store
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.harness.trainer.scripted_learner import ScriptedLearner
from tests.harness.trainer.stepped_controller import SteppedController

settings = TrainerSettings(**json.loads(sys.argv[1]))
store = open_store(settings.store)
controller = SteppedController(settings, store, ScriptedLearner)
controller.step(1000.0)
tuning = store.tunings.begin("weights", settings.model, {"warm_start": {"min_trajectories": 2}})
store.tunings.update(tuning.id, {"stage": "warm_start"})
controller.step(2000.0)
controller.close()
store.close()
print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""


@pytest.mark.slow
def test_a_warm_start_imports_no_torch_into_the_controller(vllm: str, tmp_path: Path) -> None:
    """A process of its own renders the conversations with transformers."""
    url = str(tmp_path / "store.db")
    with open_store(url) as store:
        store.policies.register_base("agent", BASE)
        (name, _) = agents_work(store, "a", [0.0, 1.0])
        given: dict[str, Any] = {"kind": "trajectory", "target": name, "source": "user", "given_at": 1.0}
        store.feedback.add([Feedback(id="fb_1", demonstration="It is in Oslo.", **given)])
        settings = {
            "store": url, "model": "agent", "base_model": str(POLICY), "vllm": [vllm], "judge": BY_NUMBER,
            "checkpoints": str(tmp_path / "checkpoints"), "num_generations": 2, "groups_per_round": 1,
            "release": {"policy": "immediate"},
        }  # fmt: skip
        command = [sys.executable, "-c", _WARM_START, json.dumps(settings)]
        assert json.loads(subprocess.check_output(command, text=True)) == []
        warm, _ = store.rounds.page("agent")
        assert warm.state is RoundState.COMMITTED
        assert warm.metrics["warm_start"]["by_source"] == {"policy": 1, "demonstrations": 1}
        assert live(store, "agent") == 2
