"""Keys that are limited to agents: no other agent exists for them, in any dialect and on no side way."""

from __future__ import annotations

import pytest

from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Start
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.proxy.test_agents import BODIES, call, several
from tests.proxy.test_keys import bearer, made
from tests.proxy.test_other_models import KEY, PlainServer, entry


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_a_limited_key_calls_its_agents_only(start: Start, store: Store, path: str, stream: bool) -> None:
    key, row = made(store, agents=("mail", "code"))
    proxy = start(**several())
    for agent, status in (("mail", 200), ("code@0", 200), ("support", 404), ("support@0", 404), ("Support", 404)):
        answer = call(proxy, agent, path, key, stream=stream)
        assert answer.status_code == status, answer.text
        if status == 404:
            error = answer.json()["error"]
            assert "or this key has no access to it" in error["message"]
            assert "support" not in error["message"].replace(repr(agent), "")
            expected = "not_found_error" if path == "/v1/messages" else "invalid_request_error"
            assert error["type"] == expected
    assert call(proxy, "support", path, f"{key}:job", stream=stream).status_code == 404, "the suffix changes nothing"
    proxy.settled()
    assert {run.alias for run in store.trajectories.page()} == {"mail", "code"}
    assert {run.key_id for run in store.trajectories.page()} == {row.id}


def test_a_limited_key_sees_its_agents_only(start: Start, store: Store) -> None:
    key, _ = made(store, agents=("mail",))
    full, _ = made(store)
    with served(PlainServer()) as url:
        proxy = start(**several(model_list=(entry(url),), model_keys={"K": KEY}))
        listed = proxy.http.get("/v1/models", headers=bearer(key)).json()["data"]
        assert [card["id"] for card in listed] == ["mail", "mail@0", "judge"]
        assert len(proxy.http.get("/v1/models", headers=bearer(full)).json()["data"]) == 7
        for name, status in (("mail", 200), ("support", 404), ("support@0", 404), ("judge", 200)):
            assert proxy.http.get(f"/v1/models/{name}", headers=bearer(key)).status_code == status
        claude = {**bearer(key), "anthropic-version": "2023-06-01"}
        refused = proxy.http.get("/v1/models/support", headers=claude)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        assert call(proxy, "judge", key=key).status_code == 200, "other models are open to every key"


def test_a_limited_key_reaches_no_other_agent_by_a_side_way(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    limited, _ = made(store, agents=("mail",))
    full, _ = made(store)
    proxy = start(**several())
    count = {**BODIES["/v1/messages"], "model": "support"}
    assert proxy.http.post("/v1/messages/count_tokens", json=count, headers=bearer(limited)).status_code == 404
    embed = {"model": "support", "input": "hi"}
    assert proxy.http.post("/v1/embeddings", json=embed, headers=bearer(limited)).status_code == 404
    assert (
        proxy.http.post("/v1/embeddings", json={**embed, "model": "mail"}, headers=bearer(limited)).status_code == 200
    )
    raw = b'{"model": "support", "input": "hi"}'
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
        refused = proxy.http.post("/v1/embeddings", content=raw, headers={**bearer(limited), "content-type": kind})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        passed = proxy.http.post("/v1/score", content=raw, headers={**bearer(full), "content-type": kind})
        assert passed.status_code == 200
    nameless = proxy.http.post("/v1/embeddings", json={"input": "hi"}, headers=bearer(limited))
    assert nameless.status_code == 403
    assert all(body["model"] == vllm.base for body in vllm.calls)


def test_a_limited_key_neither_reads_nor_judges_nor_joins_what_another_agent_did(start: Start, store: Store) -> None:
    limited, _ = made(store, agents=("mail",))
    full, _ = made(store)
    proxy = start(**several())
    secret = proxy.http.post(
        "/t/job/v1/responses", json={"model": "support", "input": "my secret"}, headers=bearer(full)
    )
    name, mine = secret.json()["id"], bearer(limited)
    assert proxy.http.get(f"/v1/responses/{name}", headers=mine).status_code == 404
    assert proxy.http.get(f"/v1/responses/{name}/input_items", headers=mine).status_code == 404
    follow = {"model": "mail", "input": "what was it?", "previous_response_id": name}
    assert proxy.http.post("/v1/responses", json=follow, headers=mine).status_code == 404
    for target in ({"response_id": name}, {"trajectory_id": "job"}, {"call_id": secret.headers["x-ratchet-call"]}):
        assert proxy.http.post("/api/feedback", json={**target, "value": 0}, headers=mine).status_code == 404
    joined = proxy.http.post("/t/job/v1/responses", json={"model": "mail", "input": "hi"}, headers=mine)
    assert joined.headers["x-ratchet-trajectory"] != "job"
    assert proxy.http.get("/api/trajectories/job", headers=mine).status_code == 403
