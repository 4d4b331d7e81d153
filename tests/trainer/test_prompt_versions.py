"""A version that differs by its prompt goes the way of any: proven served, evaluated, ramp, evidence, back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.errors import InvalidTransition
from ratchet.store.records import Policy
from ratchet.store.states import PolicyAction, PolicyState
from ratchet.store.store import Store, open_store
from ratchet.trainer.adapters.vllm_api import VllmServer
from ratchet.trainer.release.release import Release, next_candidate
from ratchet.trainer.rounds.backlog import oldest_fresh
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.tasks import is_held_out
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually, served
from tests.harness.records import commit_round, judged_group
from tests.harness.trainer.prompted_vllm import by_prompt
from tests.harness.trainer.releases import make_release
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.harness.trainer.scripted_learner import ScriptedLearner
from tests.harness.trainer.stepped_controller import SteppedController
from tests.store.conftest import migrated_postgres as migrated_postgres
from tests.store.conftest import postgres as postgres
from tests.store.conftest import store_url as store_url
from tests.trainer.test_publishing import beat, candidate, honest, publish

GUARDED: dict[str, Any] = {"policy": "guarded", "invariant_prompts": 0, "ramp": 16, "max_gain": None}
MESSAGES = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "hi"}]


@pytest.fixture
def vllm() -> Iterator[tuple[ScriptedVllm, str]]:
    app = ScriptedVllm(play=by_prompt)
    with served(app) as url:
        yield app, url


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    opened = open_store(store_url)
    yield opened
    opened.close()


@pytest.fixture
def proxy(vllm: tuple[ScriptedVllm, str], store: Store, tmp_path: Path) -> Iterator[Proxy]:
    with running(vllm[1], store, tmp_path) as started:
        yield started


@pytest.fixture
def make(
    vllm: tuple[ScriptedVllm, str], store: Store, store_url: str, tmp_path: Path
) -> Iterator[Callable[..., SteppedController]]:
    made: list[SteppedController] = []

    def make(**gate: Any) -> SteppedController:
        settings = TrainerSettings(
            store=store_url, model="agent", base_model=str(tmp_path), vllm=(vllm[1],), checkpoints=tmp_path / "c",
            judge="tests.harness.trainer.prompted_vllm:judged", seal_after_idle_seconds=0.01, group_wait_seconds=120,
            round_wait_seconds=1e9, groups_per_round=1000, num_generations=2, release=gate,
        )  # fmt: skip
        made.append(SteppedController(settings, store, learner_factory=ScriptedLearner))
        return made[-1]

    yield make
    for controller in made:
        controller.close()


def work(proxy: Proxy, tasks: list[str]) -> None:
    """An agent works on tasks, one call each."""
    for task in tasks:
        body = {"model": "agent", "messages": MESSAGES}
        answer = proxy.http.post("/v1/chat/completions", json=body, headers={"x-ratchet-task": task})
        assert answer.status_code == 200
    proxy.settled()


def until(controller: SteppedController, proxy: Proxy, store: Store, version: int, past: PolicyState) -> Policy:
    """Let agents work and the controller turn until a version is in another state."""
    for turn in range(60):
        policy = store.policies.get("agent", version)
        if policy.state is not past:
            return policy
        work(proxy, [f"task/{version}-{turn}-{number // 2}" for number in range(8)])
        time.sleep(0.3)
        controller.step(time.time())
    raise AssertionError(f"agent@{version} is {past} still")


@pytest.mark.slow
def test_a_better_prompt_is_promoted_by_live_traffic_and_a_worse_one_goes_back(
    proxy: Proxy, store: Store, make: Callable[..., SteppedController]
) -> None:
    controller = make(**GUARDED)
    better = store.policies.register_prompt_version("agent", store.prompts.register("Be better.").id, {"gain": 0.5})
    controller.step(time.time())
    ramp = store.policies.get("agent", better.version)
    assert ramp.state is PolicyState.RAMP
    assert ramp.share == pytest.approx(0.45)
    assert "is served already" in store.decisions.decisions_of("agent", 1)[0].reason
    promoted = until(controller, proxy, store, 1, PolicyState.RAMP)
    assert promoted.state is PolicyState.LIVE
    assert promoted.evidence["gain"] == 0.5
    assert promoted.evidence["harm"][str(promoted.version)] <= 1
    worse = store.policies.register_prompt_version("agent", store.prompts.register("Be worse.").id, {})
    controller.step(time.time())
    rejected = until(controller, proxy, store, worse.version, PolicyState.RAMP)
    assert rejected.state is PolicyState.REJECTED
    assert store.decisions.decisions_of("agent", worse.version)[0].action is PolicyAction.ROLLBACK
    assert store.policies.live()["agent"].version == 1


def _is(store: Store, version: int, state: PolicyState) -> bool:
    return store.policies.get("agent", version).state is state


@pytest.mark.slow
def test_a_worse_prompt_is_rejected_on_held_out_prompts_before_it_serves(
    proxy: Proxy, store: Store, make: Callable[..., SteppedController], vllm: tuple[ScriptedVllm, str]
) -> None:
    controller = make(policy="guarded", held_out_share=0.3, evaluation_samples=1)
    names = [f"task/{number}" for number in range(200)]
    work(proxy, [name for name in names if is_held_out(f"task:{name}", 0.3)][:6])
    eventually(lambda: bool(controller.step(time.time())) or store.trajectories.drop_counts().get("held_out") == 6)
    vllm[0].calls.clear()
    made = store.policies.register_prompt_version("agent", store.prompts.register("Be worse.", "append").id, {})
    eventually(lambda: bool(controller.step(time.time())) and _is(store, made.version, PolicyState.REJECTED))
    decision = store.decisions.decisions_of("agent", made.version)[0]
    assert (decision.decided_by, decision.evidence["evaluation"]["candidate"]) == ("evaluation", 0.0)
    system_prompts = [call["messages"][0]["content"] for call in vllm[0].calls]
    assert sorted(set(system_prompts)) == ["Be nice.", "Be nice.\n\nBe worse."]
    assert vllm[0].loads == []


# --- the release over a scripted control plane ------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(str(tmp_path / "local.db"))
    opened.policies.register_base("agent", "base")
    yield opened
    opened.close()


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    made = ScriptedEngine(honest)
    yield made
    made.close()


@pytest.fixture
def release(local: Store, engine: ScriptedEngine) -> Iterator[Release]:
    replica = VllmServer(engine.url)
    yield make_release(local, [replica])
    replica.close()


def prompted(store: Store, text: str) -> Policy:
    return store.policies.register_prompt_version("agent", store.prompts.register(text).id, {})


def test_an_adapter_that_is_served_is_neither_loaded_nor_proven_again_and_comes_back_after_a_restart(
    local: Store, release: Release, engine: ScriptedEngine
) -> None:
    publish(release, candidate(local, 1))
    before = list(engine.log)
    assert publish(release, prompted(local, "Be brief."))
    assert engine.log == before
    engine.loaded.clear()  # vLLM was restarted
    assert publish(release, prompted(local, "Be long."))
    assert list(engine.loaded) == ["agent@1"]
    assert local.policies.live()["agent"].version == 3


def test_an_adapter_stays_loaded_while_any_version_that_shares_it_is_needed(
    local: Store, release: Release, engine: ScriptedEngine
) -> None:
    publish(release, candidate(local, 1))
    publish(release, prompted(local, "Be brief."))
    beat(local, live=2)
    assert release.drain(time.time()) == []  # version 1 is retired, version 2 serves its adapter
    group = judged_group(local, ["x", "y"], [0.0, 1.0], task="later")
    held = local.rounds.start("agent", 1)
    third = local.rounds.commit(held.id, version=3, checkpoint="/c/3", groups=[group.id], metrics={})
    assert third.prompt_id == local.policies.get("agent", 2).prompt_id
    publish(release, third)
    beat(local, live=3, v2=1)
    assert release.drain(time.time()) == []  # a trajectory is on version 2 still
    beat(local, live=3)
    assert release.drain(time.time()) == ["agent@1"]


def test_a_prompt_that_is_rejected_leaves_its_adapter_loaded(
    local: Store, release: Release, engine: ScriptedEngine
) -> None:
    publish(release, candidate(local, 1))
    made = prompted(local, "Be brief.")
    engine.loaded.clear()
    engine.refuse = "no capacity"
    assert not publish(release, made)
    assert "no capacity" in local.policies.get("agent", made.version).evidence["reason"]
    assert "unload agent@1" not in engine.log


def test_what_was_learnt_comes_before_prompts_and_a_prompt_follows_on_the_new_adapter(local: Store) -> None:
    assert next_candidate(local, "agent") is None
    older, newer = prompted(local, "First."), prompted(local, "Second.")
    group = judged_group(local, ["a", "b"], [0.0, 1.0])
    commit_round(local, "agent", 3, base=0, groups=[group.id])
    learnt = next_candidate(local, "agent")
    assert learnt is not None
    assert learnt.version == 3
    local.policies.promote("agent", 3, {})
    rebased = next_candidate(local, "agent")
    assert rebased is not None
    assert (rebased.version, rebased.served_name, rebased.prompt_id) == (4, "agent@3", newer.prompt_id)
    states = [local.policies.get("agent", one.version).state for one in (older, newer)]
    assert states == [PolicyState.REJECTED, PolicyState.REJECTED]
    assert "recreated as agent@4" in local.decisions.decisions_of("agent", newer.version)[0].reason


def test_what_was_learnt_takes_the_prompt_that_became_live_meanwhile(local: Store) -> None:
    made = prompted(local, "First.")
    group = judged_group(local, ["a", "b"], [0.0, 1.0])
    commit_round(local, "agent", 2, base=0, groups=[group.id])
    local.policies.promote("agent", 1, {}, by="me", reason="by hand")
    found = next_candidate(local, "agent")
    assert found is not None
    assert (found.version, found.prompt_id, found.adapter) == (2, made.prompt_id, "/c/2")


def test_a_candidate_that_is_older_than_what_a_person_made_live_is_put_aside_and_blocks_nothing(local: Store) -> None:
    overtaken, by_hand = prompted(local, "First."), prompted(local, "Second.")
    local.policies.promote("agent", by_hand.version, {}, by="me", reason="by hand")
    with pytest.raises(InvalidTransition, match="older than 2, the live version"):
        local.policies.start_ramp("agent", overtaken.version, 0.5)
    assert next_candidate(local, "agent") is None
    group = judged_group(local, ["a", "b"], [0.0, 1.0])
    commit_round(local, "agent", 3, base=0, groups=[group.id])
    local.policies.promote("agent", prompted(local, "Third.").version, {}, by="me", reason="by hand")
    assert next_candidate(local, "agent") is None
    lost = "; it serves base, and the training of agent@3 is lost"
    for version, live, more in ((1, 2, ""), (3, 4, lost)):
        assert local.policies.get("agent", version).state is PolicyState.REJECTED
        reason = local.decisions.decisions_of("agent", version)[0].reason
        assert reason == f"agent@{live}, which is newer, became live first{more}"
    assert prompted(local, "Fourth.") == next_candidate(local, "agent")


def test_a_prompt_makes_no_sample_older(local: Store) -> None:
    for text in ("One.", "Two.", "Three."):
        local.policies.promote("agent", prompted(local, text).version, {})
    assert oldest_fresh(local.policies.all("agent"), 0) == 0
    group = judged_group(local, ["a", "b"], [0.0, 1.0])
    commit_round(local, "agent", 4, base=0, groups=[group.id])
    local.policies.promote("agent", 4, {})
    assert [oldest_fresh(local.policies.all("agent"), most) for most in (0, 1, 2)] == [4, 0, 0]
    local.policies.promote("agent", prompted(local, "Four.").version, {})
    assert [oldest_fresh(local.policies.all("agent"), most) for most in (0, 1)] == [4, 0]
