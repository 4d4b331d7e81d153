"""Two real vLLM replicas without a common folder load versions from an S3 server by name; one hangs, one restarts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ratchet.settings.project_settings import Settings
from ratchet.store.records import Policy
from ratchet.store.states import PolicyState
from ratchet.store.store import Store, open_store
from ratchet.supervisor.vllm_command import served_name
from ratchet.trainer.adapters.adapter_store import AdapterStore
from ratchet.trainer.adapters.vllm_api import ReplicaFleet, VllmServer
from ratchet.trainer.errors import AdapterNotFound, EngineUnreachable
from ratchet.trainer.release.release import PublishResult, Release
from ratchet.trainer.rows.token_row import TokenRow
from tests.harness.s3 import BUCKET, S3Server
from tests.harness.swaps.real_versions import POLICY, DrawnRowsLearner
from tests.harness.trainer.releases import make_release
from tests.harness.vllm.engine import VllmServerProcess

STORE = f"s3://{BUCKET}/team"
ROOT = f"{STORE}/agent/checkpoints"
PROBES = [tuple(range(260 + 3 * start, 272 + 3 * start)) for start in range(24)]


class StoredVersions:
    """Makes versions with a real learner, and scores those of references."""

    def __init__(self, store: Store, adapters: AdapterStore) -> None:
        self._store = store
        self._adapters = adapters
        self._learner = DrawnRowsLearner()

    def make(self) -> Policy:
        """Train one step and commit it, as a round does."""
        number = self._store.rounds.next_version("agent")
        self._learner.learn([f"trajectory-{number}"])
        reference = self._adapters.next_reference(ROOT, number)
        self._adapters.write(reference, self._learner.save)
        started = self._store.rounds.start("agent", number - 1)
        return self._store.rounds.commit(started.id, version=number, checkpoint=reference, groups=[], metrics={})

    def score(self, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | str = True) -> list[tuple[float, ...]]:
        used = adapter if isinstance(adapter, bool) else self._adapters.fetch(adapter, state=False)
        return self._learner.score(rows, adapter=used)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    server = S3Server(tmp_path)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()


@pytest.fixture
def replicas(s3: S3Server, tmp_path: Path) -> Iterator[list[VllmServerProcess]]:
    settings = Settings.of(
        {
            "base_model": str(POLICY),
            "adapters": {"store": STORE},
            "vllm": {"max_model_len": 512, "dtype": "float32"},
        }
    )
    made = []
    for number in range(2):  # each with a cache of its own, as on two machines
        cache = {"RATCHET_ADAPTER_CACHE": str(tmp_path / f"cache-{number}")}
        made.append(VllmServerProcess(settings, tmp_path / f"vllm-{number}.log", cache))
    for server in made:
        server.wait()
        _warm_up(server)
    yield made
    for server in made:
        server.kill()


@pytest.mark.e2e
def test_two_replicas_without_a_common_folder_serve_what_was_trained(
    s3: S3Server, replicas: list[VllmServerProcess], tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store.db"))
    store.policies.register_base("agent", served_name(Settings.of({})))
    versions = StoredVersions(store, AdapterStore(tmp_path / "trainer-cache"))
    first, second = replicas
    fleet = ReplicaFleet([first.url, second.url])
    release = make_release(store, fleet, keep_loaded_adapters=2, adapters={"quorum": 1})

    second.suspend()  # it hangs during the publication, as far as a client can see
    began = time.monotonic()
    assert release.publish(versions.make(), PROBES, versions) is PublishResult.RELEASED
    print(f"published beside a hung replica in {time.monotonic() - began:.1f} s")
    assert list(store.policies.live()["agent"].replicas) == [first.url]
    assert [alarm.name for alarm in store.alarms.active()] == ["replica_missing:agent"]
    second.resume()
    assert _caught_up(release, versions) == {second.url}

    first.kill()  # its memory is gone, its cache is not
    first.start()
    first.wait()
    _warm_up(first)
    assert "agent@1" not in fleet[0].models()
    assert _caught_up(release, versions) == {first.url}
    assert set(store.policies.live()["agent"].replicas) == {first.url, second.url}
    one, other = (replica.next_logprobs("agent@1", PROBES[:4], 20) for replica in fleet)
    base = fleet[0].next_logprobs(served_name(Settings.of({})), PROBES[:4], 20)
    assert _distance(one, other) < 1e-3 < _distance(one, base)

    damaged = versions.make()
    s3.put("team/agent/checkpoints/0002/adapter_model.safetensors", b"not what the manifest says")
    strict = make_release(store, fleet, keep_loaded_adapters=2)
    with pytest.raises(EngineUnreachable, match="does not find agent@2"):
        strict.publish(damaged, PROBES, versions)
    assert store.policies.get("agent", 2).state is PolicyState.CANDIDATE  # nothing is lost
    for number in range(2):
        assert "Adapter agent@2 is refused" in (tmp_path / f"vllm-{number}.log").read_text()
    with pytest.raises(AdapterNotFound, match="ratchet_lora_resolver"):
        fleet[0].load("agent@77", f"{ROOT}/0077")
    fleet.close()
    store.close()


def _distance(some: Sequence[dict[int, float]], others: Sequence[dict[int, float]]) -> float:
    """Return the largest difference in nats between the tokens that both name."""
    pairs = [(a[token], b[token]) for a, b in zip(some, others, strict=True) for token in a.keys() & b.keys()]
    assert pairs
    return max(abs(a - b) for a, b in pairs)


def _warm_up(server: VllmServerProcess) -> None:
    """Wait for the first answer, which is slow."""
    with contextlib.closing(VllmServer(server.url, timeout=240.0)) as replica:
        replica.next_logprobs(served_name(Settings.of({})), PROBES[:2], 5)


def _caught_up(release: Release, versions: StoredVersions) -> set[str]:
    """Wait until the release has proven a replica."""
    deadline, now = time.monotonic() + 180, 0.0
    while time.monotonic() < deadline:
        now += 100.0
        if found := release.proofs.catch_up(now, lambda policy: PROBES, versions):
            return set(found)
        time.sleep(0.5)
    return set()
