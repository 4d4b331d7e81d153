"""No version becomes live that a replica does not serve as the trainer made it; none is unloaded while it is needed."""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from ratchet.store.operation_records import ProxyInstance
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import VllmLoad, VllmServer, load_of
from ratchet.trainer.errors import AdapterNotServable, AdapterRefused, EngineUnreachable
from ratchet.trainer.release.release import PublishResult, Release
from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.records import judged_group
from tests.harness.trainer.releases import make_release
from tests.harness.trainer.scripted_engine import ScriptedEngine

PROBES = [(1, 2, last) for last in range(16)]


def honest(name: str, ids: Sequence[int]) -> float:
    """Every version has logprobs of its own; the base has -1.0 everywhere."""
    return -1.0 - 0.1 * int(name.partition("@")[2] or 0)


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    made = [ScriptedEngine(honest), ScriptedEngine(honest)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def release(store: Store, engines: list[ScriptedEngine]) -> Iterator[Release]:
    replicas = [VllmServer(engine.url) for engine in engines]
    yield make_release(store, replicas)
    for replica in replicas:
        replica.close()


def candidate(store: Store, version: int) -> Policy:
    group = judged_group(store, [f"a{version}", f"b{version}"], [0.0, 1.0], task=f"task{version}")
    held = store.rounds.start("agent", version - 1)
    return store.rounds.commit(held.id, version=version, checkpoint=f"/c/{version}", groups=[group.id], metrics={})


@dataclass
class Trainer:
    """Computes what the versions are: `honest`, by their served name or their folder."""

    name: str
    logprob: Callable[[str, Sequence[int]], float] = honest

    def score(self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True) -> list[tuple[float, ...]]:
        named = {True: self.name, False: "base"}
        name = named[adapter] if isinstance(adapter, bool) else f"agent@{adapter.rpartition('/')[2]}"
        return [(0.0, self.logprob(name, row.ids if isinstance(row, TokenRow) else row)) for row in rows]


def publish(release: Release, policy: Policy, logprob: Callable[[str, Sequence[int]], float] = honest) -> bool:
    result = release.publish(policy, PROBES, Trainer(policy.served_name, logprob))
    return result is PublishResult.RELEASED


def steps_of(size: float, rounding: float = 0.0) -> Callable[[str, Sequence[int]], float]:
    """Versions that each change every token by about `size` nats, served with an error of about `rounding`."""

    def logprob(name: str, ids: Sequence[int]) -> float:
        version = int(name.partition("@")[2] or 0)
        own = [random.Random(f"{step} {tuple(ids)}").gauss(0.0, size) for step in range(1, version + 1)]
        return -1.0 + sum(own) + random.Random(f"{name} {tuple(ids)}").gauss(0.0, rounding)

    return logprob


def beat(store: Store, live: int, **pins: int) -> None:
    named = {f"agent@{name[1:]}": count for name, count in pins.items()}
    store.proxy_instances.heartbeat(
        ProxyInstance(
            id="d",
            url="u",
            live_versions={"agent": live},
            pinned_trajectories=named,
            shipped_until=1.0,
            heartbeat_at=time.time(),
        )
    )


def test_a_proven_candidate_is_loaded_everywhere_before_it_is_live(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    assert publish(release, candidate(store, 1))
    assert [list(engine.loaded) for engine in engines] == [["agent@1"], ["agent@1"]]
    live = store.policies.live()["agent"]
    assert live.version == 1
    assert set(live.evidence["proof"]) == {engine.url for engine in engines}


def test_an_adapter_that_one_replica_ignores_is_never_live(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[1].scorer = lambda name, ids: honest("base", ids)
    policy = candidate(store, 1)
    assert not publish(release, policy)
    assert store.policies.live()["agent"].version == 0
    rejected = store.policies.get("agent", 1)
    assert rejected.state is PolicyState.REJECTED
    assert engines[1].url in rejected.evidence["reason"]
    assert store.alarms.active()[0].name == "swap_refused:agent"
    assert [engine.loaded for engine in engines] == [{}, {}]


def test_a_refused_adapter_keeps_the_engines_own_words(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[0].refuse = "rank 99 is too large"
    assert not publish(release, candidate(store, 1))
    assert "rank 99 is too large" in store.policies.get("agent", 1).evidence["reason"]


def test_a_rank_above_the_servers_limit_loses_no_version(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[0].refuse = "LoRA rank 16 is greater than max_lora_rank 8."
    policy = candidate(store, 1)
    with pytest.raises(AdapterNotServable, match=r"max_lora_rank 8\..*start it with --max-lora-rank"):
        publish(release, policy)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    engines[0].refuse = None
    assert publish(release, policy)


def test_a_version_whose_loading_fails_stays_a_candidate_until_it_is_loaded(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[0].refuse, engines[0].refusal_status = "CUDA out of memory", 500
    policy = candidate(store, 1)
    with pytest.raises(EngineUnreachable, match=r"must \(adapters\.quorum\).*CUDA out of memory.*policies rollback"):
        publish(release, policy)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    engines[0].refuse = None
    assert publish(release, policy)


def test_an_engine_that_is_away_leaves_the_candidate_for_later(store: Store) -> None:
    replica = VllmServer("http://127.0.0.1:1")
    release = make_release(store, [replica])
    policy = candidate(store, 1)
    with pytest.raises(EngineUnreachable, match="does not answer"):
        publish(release, policy)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    replica.close()


def test_an_old_version_is_unloaded_only_when_no_proxy_instance_needs_it(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    for version in (1, 2):
        publish(release, candidate(store, version))
    beat(store, live=1)  # the proxy has not seen the flip yet
    assert release.drain(time.time()) == []
    beat(store, live=2, v1=3)  # three trajectories still run on version 1
    assert release.drain(time.time()) == []
    beat(store, live=2, v1=0)
    assert release.drain(time.time()) == ["agent@1", "agent@1"]
    assert [list(engine.loaded) for engine in engines] == [["agent@2"], ["agent@2"]]


def test_the_newest_old_versions_stay_loaded(store: Store, engines: list[ScriptedEngine]) -> None:
    replica = VllmServer(engines[0].url)
    release = make_release(store, [replica], keep_loaded_adapters=2)
    for version, left in ((1, []), (2, []), (3, []), (4, ["agent@1"])):
        publish(release, candidate(store, version))
        beat(store, live=version)
        assert release.drain(time.time()) == left
    replica.close()


def test_vllm_receives_its_key_and_its_refusal_is_reported(store: Store, engines: list[ScriptedEngine]) -> None:
    engines[0].key = "secret"
    with pytest.raises(AdapterRefused, match="401"):
        VllmServer(engines[0].url).models()
    replica = VllmServer(engines[0].url, key="secret")
    assert replica.models() == ("base",)
    replica.close()


def test_a_password_in_a_replicas_url_goes_to_it_and_is_shown_nowhere(engines: list[ScriptedEngine]) -> None:
    engine, whole = engines[0], engines[0].url.replace("//", "//alice:s3%2Fcret@")
    pair = base64.b64encode(b"alice:s3/cret").decode()
    engine.authorization = f"Basic {pair}"
    replica = VllmServer(whole)
    assert (replica.models(), load_of([whole], None)) == (("base",), VllmLoad(0, 0))
    engine.authorization, engine.load = "another", None
    with pytest.raises(AdapterRefused) as refused:
        replica.models()
    replica.close()
    gone = VllmServer("http://alice:s3%2Fcret@127.0.0.1:1")
    with pytest.raises(EngineUnreachable) as unreachable:
        gone.models()
    gone.close()
    for text in (str(refused.value), str(unreachable.value), load_of([whole], None).unknown or "", replica.url):
        assert "alice" not in text
        assert "127.0.0.1" in text


def test_a_restarted_replica_gets_the_live_version_back_for_the_comparison(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    publish(release, candidate(store, 1))
    engines[0].loaded.clear()
    assert publish(release, candidate(store, 2))
    assert set(engines[0].loaded) == {"agent@1", "agent@2"}


@pytest.mark.parametrize("step", [1e-4, 0.005, 0.05])
@pytest.mark.parametrize("answers_as", ["agent@1", "base", "agent@7"], ids=["never applied", "base", "another"])
def test_a_small_step_that_is_not_served_is_rejected_however_near_its_logprobs_are(
    store: Store, release: Release, engines: list[ScriptedEngine], step: float, answers_as: str
) -> None:
    honest_engine = steps_of(step, 1e-6)
    for engine in engines:
        engine.scorer = honest_engine
    assert publish(release, candidate(store, 1), steps_of(step))
    engines[1].scorer = lambda name, ids: honest_engine(answers_as if name == "agent@2" else name, ids)
    assert not publish(release, candidate(store, 2), steps_of(step))
    assert store.policies.get("agent", 2).state is PolicyState.REJECTED
    assert store.policies.live()["agent"].version == 1
    found = store.policies.get("agent", 2).evidence["proof"]
    assert (found[engines[0].url]["outcome"], found[engines[1].url]["outcome"]) == ("proven", "wrong")


@pytest.mark.slow
def test_a_change_below_rounding_is_unproven_until_the_distance_to_the_live_version_is_provable(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    """Where no amplified copy can be loaded."""
    for engine in engines:
        engine.scorer = steps_of(0.01, 0.006)
    served = [publish(release, candidate(store, version), steps_of(0.01)) for version in range(1, 9)]
    first = served.index(True) + 1
    assert first > 2
    states = [policy.state for policy in store.policies.all("agent")[1:first]]
    assert states == [PolicyState.UNPROVEN] * (first - 1)
    raised = next(alarm for alarm in store.alarms.all() if alarm.name == "swap_unproven:agent")
    assert raised.count >= first - 1
    assert "rounding" in raised.reason.partition(" unproven: ")[2]
    assert "vllm.dtype, learner.dtype" in raised.reason
    unproven = store.policies.get("agent", 1)
    assert "rounding" in unproven.evidence["reason"]
    assert not any("agent@1" in engine.loaded for engine in engines)
    (found, _) = store.policies.get("agent", first).evidence["proof"].values()
    assert (found["outcome"], found["correlation"] >= 0.9) == ("proven", True)


def test_the_alarm_goes_with_the_versions_that_it_was_about(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    for engine in engines:
        engine.scorer = steps_of(0.001, 0.01)
    assert not publish(release, candidate(store, 1), steps_of(0.001))
    assert [alarm.name for alarm in store.alarms.active()] == ["swap_unproven:agent"]
    release.drain(time.time())
    assert store.alarms.active()
    store.policies.roll_back_manually("agent", 0, by="anna", reason="it goes nowhere")
    release.drain(time.time())
    assert not store.alarms.active()
