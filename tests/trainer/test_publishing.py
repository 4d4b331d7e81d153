"""No version becomes live that a replica does not serve as the trainer made it; none is unloaded while it is needed."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence

import pytest

from store import Store
from store.records import Door, Policy
from store.states import PolicyState
from tests.records import judged_group
from tests.trainer.scripted_engine import ScriptedEngine
from trainer.errors import AdapterRefused, EngineUnreachable
from trainer.publishing.engine import Replica
from trainer.publishing.proof import prove
from trainer.publishing.publisher import Publisher
from trainer.shadowing.idleness import Load, load_of

PROBES = [(1, 2, 3), (4, 5)]


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
def publisher(store: Store, engines: list[ScriptedEngine]) -> Iterator[Publisher]:
    replicas = [Replica(engine.url) for engine in engines]
    yield Publisher(store, replicas, alias="agent", tolerance=0.05, keep_loaded=0)
    for replica in replicas:
        replica.close()


def candidate(store: Store, version: int) -> Policy:
    group = judged_group(store, [f"a{version}", f"b{version}"], [0.0, 1.0], task=f"task{version}")
    held = store.rounds.start("agent", version - 1)
    return store.rounds.commit(held.id, version=version, checkpoint=f"/c/{version}", groups=[group.id], metrics={})


def publish(publisher: Publisher, policy: Policy) -> bool:
    return publisher.publish(policy, PROBES, lambda probes: [(0.0, honest(policy.served_name, ids)) for ids in probes])


def beat(store: Store, live: int, **pins: int) -> None:
    named = {f"agent@{name[1:]}": count for name, count in pins.items()}
    store.doors.beat(Door(id="d", url="u", live={"agent": live}, pins=named, shipped_until=1.0, beat_at=time.time()))


def test_a_proven_candidate_is_loaded_everywhere_before_it_is_live(
    store: Store, publisher: Publisher, engines: list[ScriptedEngine]
) -> None:
    assert publish(publisher, candidate(store, 1))
    assert [list(engine.loaded) for engine in engines] == [["agent@1"], ["agent@1"]]
    live = store.policies.live()["agent"]
    assert live.version == 1
    assert set(live.evidence["proof"]) == {engine.url for engine in engines}


def test_an_adapter_that_one_replica_ignores_is_never_live(
    store: Store, publisher: Publisher, engines: list[ScriptedEngine]
) -> None:
    engines[1].scorer = lambda name, ids: honest("base", ids)
    policy = candidate(store, 1)
    assert not publish(publisher, policy)
    assert store.policies.live()["agent"].version == 0
    rejected = store.policies.get("agent", 1)
    assert rejected.state is PolicyState.REJECTED
    assert engines[1].url in rejected.evidence["reason"]
    assert store.alarms.standing()[0].name == "swap_refused:agent"
    assert [engine.loaded for engine in engines] == [{}, {}]


def test_a_refused_adapter_keeps_the_engines_own_words(
    store: Store, publisher: Publisher, engines: list[ScriptedEngine]
) -> None:
    engines[0].refuse = "rank 99 is too large"
    assert not publish(publisher, candidate(store, 1))
    assert "rank 99 is too large" in store.policies.get("agent", 1).evidence["reason"]


def test_an_engine_that_is_away_leaves_the_candidate_for_later(store: Store) -> None:
    replica = Replica("http://127.0.0.1:1")
    publisher = Publisher(store, [replica], alias="agent", tolerance=0.05, keep_loaded=0)
    policy = candidate(store, 1)
    with pytest.raises(EngineUnreachable, match="does not answer"):
        publish(publisher, policy)
    assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
    replica.close()


def test_an_old_version_is_unloaded_only_when_no_door_needs_it(
    store: Store, publisher: Publisher, engines: list[ScriptedEngine]
) -> None:
    for version in (1, 2):
        publish(publisher, candidate(store, version))
    beat(store, live=1)  # the proxy has not seen the flip yet
    assert publisher.drain(time.time()) == []
    beat(store, live=2, v1=3)  # three trajectories still run on version 1
    assert publisher.drain(time.time()) == []
    beat(store, live=2, v1=0)
    assert publisher.drain(time.time()) == ["agent@1", "agent@1"]
    assert [list(engine.loaded) for engine in engines] == [["agent@2"], ["agent@2"]]


def test_the_newest_old_versions_stay_loaded(store: Store, engines: list[ScriptedEngine]) -> None:
    replica = Replica(engines[0].url)
    publisher = Publisher(store, [replica], alias="agent", tolerance=0.05, keep_loaded=2)
    for version, left in ((1, []), (2, []), (3, []), (4, ["agent@1"])):
        publish(publisher, candidate(store, version))
        beat(store, live=version)
        assert publisher.drain(time.time()) == left
    replica.close()


def test_an_engine_that_wants_a_key_gets_it_and_its_refusal_is_told(
    store: Store, engines: list[ScriptedEngine]
) -> None:
    engines[0].key = "secret"
    with pytest.raises(AdapterRefused, match="401"):
        Replica(engines[0].url).models()
    replica = Replica(engines[0].url, key="secret")
    assert replica.models() == ("base",)
    replica.close()


def test_a_password_in_a_replicas_url_goes_to_it_and_is_shown_nowhere(engines: list[ScriptedEngine]) -> None:
    engine, whole = engines[0], engines[0].url.replace("//", "//alice:s3%2Fcret@")
    pair = base64.b64encode(b"alice:s3/cret").decode()
    engine.authorization = f"Basic {pair}"
    replica = Replica(whole)
    assert (replica.models(), load_of([whole], None)) == (("base",), Load(0, 0))
    engine.authorization, engine.load = "another", None
    with pytest.raises(AdapterRefused) as refused:
        replica.models()
    replica.close()
    gone = Replica("http://alice:s3%2Fcret@127.0.0.1:1")
    with pytest.raises(EngineUnreachable) as unreachable:
        gone.models()
    gone.close()
    for told in (str(refused.value), str(unreachable.value), load_of([whole], None).unknown or "", replica.url):
        assert "alice" not in told
        assert "127.0.0.1" in told


def test_a_restarted_replica_gets_the_live_version_back_for_the_comparison(
    store: Store, publisher: Publisher, engines: list[ScriptedEngine]
) -> None:
    publish(publisher, candidate(store, 1))
    engines[0].loaded.clear()
    assert publish(publisher, candidate(store, 2))
    assert set(engines[0].loaded) == {"agent@1", "agent@2"}


@pytest.mark.parametrize(
    ("new", "old", "says"),
    [
        ([-1.0, -1.0], [-1.3, -1.3], None),
        ([-1.0, -1.001], [-1.0, -1.0], None),
        ([-1.3, -1.3], [-1.3, -1.3], "tolerance"),
        ([-1.01, -1.01], [-1.01, -1.01], "exactly those of the old"),
        ([-1.04, -1.04], [-0.99, -0.99], None),
        ([], [], "no probe"),
    ],
    ids=["moved to the trainer's", "tiny step", "never applied", "same as old", "noise", "nothing to compare"],
)
def test_the_proof_tells_a_swap_from_none(new: list[float], old: list[float], says: str | None) -> None:
    proof = prove([-1.0] * len(new), new, old, tolerance=0.05)
    assert proof.holds is (says is None)
    assert (says or "") in (proof.reason or "")
