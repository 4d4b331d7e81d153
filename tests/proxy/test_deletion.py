"""Deletion while proxies run: deleted messages that are sent again are stored again."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ratchet.store.calls.trajectory_filter import TrajectoryFilter
from ratchet.store.store import Store, open_store
from ratchet.store.verify import verify
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.records import message_count

TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}]
TALK: list[dict[str, Any]] = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where?"}]


def _say(http: httpx.Client, path: str = "") -> str:
    answer = http.post(f"{path}/v1/chat/completions", json={"model": "agent", "messages": TALK, "tools": TOOLS})
    assert answer.status_code == 200
    return answer.headers["x-ratchet-trajectory"]


def _is_whole(store: Store, name: str) -> None:
    found = store.trajectories.read(name)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant"]
    assert found.tools == tuple(TOOLS)


@pytest.mark.slow
def test_deleted_messages_that_are_sent_again_are_stored_again(vllm_url: str, tmp_path: Path) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    store = open_store(str(tmp_path / "store.db"))
    try:
        with httpx.Client(base_url=process.url, timeout=60) as http:
            eventually(lambda: http.get("/health/ready").status_code == 200)
            _say(http)
            eventually(lambda: http.get("/health/backlog").json()["unshipped_records"] == 0)
            eventually(lambda: store.trajectories.page())
            done = store.deletions.delete(TrajectoryFilter(inactive_since=4e9), "prune")
            assert (done.trajectory_count, done.unswept_messages, message_count(store)) == (1, 0, 0)
            name = _say(http)
            eventually(lambda: store.calls.page(trajectory=name, state="answered"))
            _is_whole(store, name)
    finally:
        store.close()
        process.stop()
    assert verify(str(tmp_path / "store.db")).sound


@pytest.mark.slow
def test_calls_during_a_deletion_lose_no_message(proxy: Proxy, vllm: ScriptedVllm) -> None:
    names = [_say(proxy.http, f"/t/t{number}") for number in range(5)]
    proxy.settled()
    stop = threading.Event()
    kept: list[str] = []

    def agents() -> None:
        with httpx.Client(base_url=proxy.url, timeout=60) as http:
            while not stop.is_set():
                kept.append(_say(http))

    thread = threading.Thread(target=agents)
    thread.start()
    done = [proxy.store.deletions.delete(TrajectoryFilter(id=name), "asked") for name in names[:2]]
    stop.set()
    thread.join()
    proxy.settled()
    assert [one.unswept_messages for one in done] == [0, 0]
    assert len(kept) > 5
    for name in kept:
        _is_whole(proxy.store, name)


@pytest.mark.slow
def test_an_operator_deletes_a_trajectory_and_reads_which_versions_trained_on_it(proxy: Proxy) -> None:
    _say(proxy.http, "/t/job")
    answer = proxy.http.delete("/api/trajectories/job")
    assert (answer.status_code, answer.json()["trajectory_count"], answer.json()["policies"]) == (200, 1, [])
    assert proxy.http.get("/api/trajectories/job").status_code == 404
    assert proxy.http.delete("/api/trajectories/job").status_code == 404
    assert [one["reason"] for one in proxy.http.get("/api/deletions").json()["data"]] == ["operator"]
    assert message_count(proxy.store) == 0
    assert _say(proxy.http, "/t/job") == "job"
    proxy.settled()
    _is_whole(proxy.store, "job")


@pytest.mark.slow
def test_a_deleted_response_cannot_be_continued_and_others_can(proxy: Proxy) -> None:
    agent = proxy.agent()
    gone, stays = (agent.responses.create(model="agent", input=f"#say={word}") for word in ("gone", "stays"))
    proxy.settled()
    run = proxy.store.calls.read("call_" + gone.id.removeprefix("resp_")).trajectory_id
    assert proxy.http.delete(f"/api/trajectories/{run}").status_code == 200
    eventually(lambda: proxy.http.get("/health/ready").status_code == 200)
    fresh = agent.responses.create(model="agent", input="#say=fresh")
    for known in (stays, fresh):
        assert agent.responses.create(model="agent", input="#say=on", previous_response_id=known.id).output_text == "on"
    with pytest.raises(openai.NotFoundError):
        agent.responses.create(model="agent", input="hi", previous_response_id=gone.id)
