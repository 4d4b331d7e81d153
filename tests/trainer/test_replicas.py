"""Publication over replicas that are late, away, restarted, new or wrong: no unproven one serves a version."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.store.access.replicas import ReplicaList, check_entry
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from ratchet.trainer.adapters.vllm_api import ReplicaFleet, quorum_of
from ratchet.trainer.errors import EngineUnreachable
from ratchet.trainer.release.release import PublishResult, Release
from tests.harness.trainer.releases import make_release
from tests.harness.trainer.scripted_engine import ScriptedEngine
from tests.trainer.test_publishing import PROBES, Trainer, candidate, honest

Publish = Callable[..., PublishResult]


@pytest.fixture
def engines() -> Iterator[list[ScriptedEngine]]:
    made = [ScriptedEngine(honest) for _ in range(3)]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture
def replicas_file(engines: list[ScriptedEngine], tmp_path: Path) -> Path:
    file = tmp_path / "replicas.txt"
    file.write_text("\n".join(engine.url for engine in engines))
    return file


@pytest.fixture
def fleet(replicas_file: Path) -> Iterator[ReplicaFleet]:
    made = ReplicaFleet([f"file:{replicas_file}"])
    yield made
    made.close()


@pytest.fixture
def release(store: Store, fleet: ReplicaFleet) -> Release:
    return make_release(store, fleet)


def publish(release: Release, policy: Policy) -> PublishResult:
    return release.publish(policy, PROBES, Trainer(policy.served_name))


def catch_up(release: Release, now: float = 100.0) -> list[str]:
    return release.proofs.catch_up(now, lambda policy: PROBES, Trainer("agent@1"))


def proven(store: Store, version: int = 1) -> set[str]:
    return set(store.policies.get("agent", version).replicas)


def test_a_hung_replica_of_three_delays_nobody_and_is_proven_when_it_answers(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[1].answering.clear()
    began = time.monotonic()
    assert publish(release, candidate(store, 1)) is PublishResult.RELEASED
    assert time.monotonic() - began < 30  # its time-out is 60 s
    assert proven(store) == {engines[0].url, engines[2].url}
    assert engines[1].url in store.policies.live()["agent"].evidence["missing_replicas"]
    (alarm,) = store.alarms.active()
    assert alarm.name == "replica_missing:agent"
    assert engines[1].url in alarm.reason
    assert catch_up(release) == []
    engines[1].answering.set()
    assert catch_up(release, now=200.0) == [engines[1].url]
    assert proven(store) == {engine.url for engine in engines}
    assert store.alarms.active() == []


def test_a_replica_that_is_away_stops_a_publication_if_the_quorum_is_missed(
    store: Store, engines: list[ScriptedEngine]
) -> None:
    policy = candidate(store, 1)
    one, two = engines[0].url, engines[1].url
    away = "http://127.0.0.1:9"
    for urls, quorum in (([one, away], None), ([one, two, away], 3)):
        fleet = ReplicaFleet(urls)
        release = make_release(store, fleet, adapters={"quorum": quorum})
        with pytest.raises(EngineUnreachable, match=r"replicas serve agent@1, and \d must \(adapters\.quorum\)"):
            publish(release, policy)
        assert store.policies.get("agent", 1).state is PolicyState.CANDIDATE
        assert proven(store) == set()
        fleet.close()


def test_one_replica_that_refuses_refuses_for_all(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[2].refuse = "rank 99 is too large"
    assert publish(release, candidate(store, 1)) is PublishResult.REJECTED
    assert [engine.loaded for engine in engines] == [{}, {}, {}]
    assert store.policies.live()["agent"].version == 0


def test_a_replica_without_memory_for_a_version_is_reported_until_it_loads_it(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    engines[2].refuse, engines[2].refusal_status = "CUDA out of memory", 500
    assert publish(release, candidate(store, 1)) is PublishResult.RELEASED
    assert proven(store) == {engines[0].url, engines[1].url}
    assert catch_up(release) == []
    (alarm,) = store.alarms.active()
    assert alarm.name == "replica_missing:agent"
    assert "CUDA out of memory" in alarm.reason
    engines[2].refuse = None
    assert catch_up(release, now=200.0) == [engines[2].url]
    assert store.alarms.active() == []


def test_a_load_that_finds_no_files_yet_is_repeated(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    for engine in engines:
        engine.missing = 2
    assert publish(release, candidate(store, 1)) is PublishResult.RELEASED
    assert proven(store) == {engine.url for engine in engines}


def test_a_new_replica_gets_no_version_before_it_is_proven(
    store: Store, release: Release, engines: list[ScriptedEngine], fleet: ReplicaFleet, replicas_file: Path
) -> None:
    replicas_file.write_text(f"{engines[0].url}  # the first\n\n")
    fleet.refresh(1000.0)
    assert publish(release, candidate(store, 1)) is PublishResult.RELEASED
    assert proven(store) == {engines[0].url}
    replicas_file.write_text("\n".join(engine.url for engine in engines))
    fleet.refresh(1001.0)
    assert len(fleet) == 1  # it is not read at every step
    fleet.refresh(2000.0)
    assert set(catch_up(release)) == {engines[1].url, engines[2].url}
    assert proven(store) == {engine.url for engine in engines}
    replicas_file.unlink()
    fleet.refresh(3000.0)
    assert len(fleet) == 3  # a list that cannot be read changes nothing


def test_a_restarted_replica_is_loaded_and_proven_again(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    publish(release, candidate(store, 1))
    assert catch_up(release) == []
    engines[0].loaded.clear()
    assert catch_up(release, now=200.0) == [engines[0].url]
    assert list(engines[0].loaded) == ["agent@1"]


def test_a_replica_that_serves_something_else_after_a_restart_is_taken_out(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    publish(release, candidate(store, 1))
    engines[0].loaded.clear()
    engines[0].scorer = lambda name, ids: honest("base", ids)
    assert catch_up(release) == []
    assert proven(store) == {engines[1].url, engines[2].url}
    (alarm,) = store.alarms.active()
    assert alarm.name == "replica_wrong:agent"
    assert engines[0].url in alarm.reason


def test_a_hung_replica_does_not_stop_the_unloading_of_old_versions(
    store: Store, release: Release, engines: list[ScriptedEngine]
) -> None:
    for version in (1, 2):
        publish(release, candidate(store, version))
    engines[2].answering.clear()
    assert release.drain(time.time()) == ["agent@1", "agent@1"]


def test_a_quorum_is_all_of_two_and_all_but_one_of_more() -> None:
    assert [quorum_of(count, None) for count in (1, 2, 3, 8)] == [1, 2, 2, 7]
    assert [quorum_of(count, 2) for count in (1, 2, 8)] == [1, 2, 2]


def test_a_name_stands_for_all_its_addresses() -> None:
    addresses = ["10.0.0.1", "fd00::2"]
    replicas = ReplicaList(
        ["dns+http://user:pw@vllm:8000/v1", "http://10.0.0.1:8000", "https://a.example"], lambda host, port: addresses
    )
    assert replicas.resolve() == (
        "http://user:pw@10.0.0.1:8000", "http://user:pw@[fd00::2]:8000", "http://10.0.0.1:8000", "https://a.example",
    )  # fmt: skip
    addresses.clear()
    assert len(replicas.resolve()) == 4  # a name server that knows nothing changes nothing
    assert replicas.problem == "dns+http://vllm:8000 names no replica"


@pytest.mark.parametrize("entry", ["", "vllm:8000", "dns+vllm:8000", "file:", "ftp://x"])
def test_an_entry_that_is_no_replica_says_how_to_write_it(entry: str) -> None:
    with pytest.raises(ValueError, match=r"write it like (http://|file:)"):
        check_entry(entry)
