"""One scripted vLLM, one proxy and one run of every client for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from ratchet.store.records import Call, Transcript
from ratchet.store.store import open_store
from tests.harness.clients.table import CLIENTS, Client
from tests.harness.clients.witness import SeenRequest, Witness
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served


@dataclass
class ClientRuns:
    """A proxy, its scripted vLLM, the requests seen, and the results of every client."""

    proxy: Proxy
    vllm: ScriptedVllm
    witness: Witness
    results: dict[str, Future[list[dict[str, Any]]]] = field(default_factory=dict)

    def result(self, client: Client, streamed: bool) -> dict[str, Any]:
        """What the client's program printed for this question."""
        return self.results[client.name].result()[client.modes.index(streamed)]

    def calls(self, client: Client, streamed: bool) -> list[Call]:
        """The calls of this question in the store, oldest first, whatever trajectories they are in."""
        self.result(client, streamed)
        self.proxy.settled()
        found: list[Call] = []
        for run in self.proxy.store.trajectories.page(1000):
            transcript = self.proxy.store.trajectories.read(run.id)
            if client.marker(streamed) in str(transcript.messages):
                found += transcript.calls
        return sorted(found, key=lambda call: call.started_at)

    def transcript(self, call: Call) -> Transcript:
        """The trajectory of a call, with its content."""
        return self.proxy.store.trajectories.read(call.trajectory_id)

    def upstream(self, client: Client, streamed: bool) -> list[dict[str, Any]]:
        """The bodies of this question that reached the engine."""
        self.result(client, streamed)
        return [body for body in self.vllm.calls if client.marker(streamed) in str(body.get("messages"))]

    def sent(self, client: Client, streamed: bool) -> list[SeenRequest]:
        """The requests of this question that came to the proxy."""
        self.result(client, streamed)
        return [seen for seen in self.witness.seen if client.marker(streamed).encode() in seen.body]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientRuns]:
    """Every client that a chosen test needs, run once, two at a time."""
    folder, vllm, witness = tmp_path_factory.mktemp("clients"), ScriptedVllm(), Witness()
    store = open_store(str(folder / "store.db"))
    with (
        served(vllm) as vllm_url,
        running(vllm_url, store, folder, around=witness.around) as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        made = ClientRuns(proxy, vllm, witness)
        for client in CLIENTS:
            if client in _wanted(request.session):
                questions = [client.scenario.question(client.marker(streamed), streamed) for streamed in client.modes]
                made.results[client.name] = pool.submit(client.program.run, proxy.url, questions)
        yield made
    store.close()


def _wanted(session: pytest.Session) -> list[Client]:
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    return [given["client"] for given in params if "client" in given]
