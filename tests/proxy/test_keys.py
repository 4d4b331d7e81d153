"""API keys: authentication, scopes, and the isolation of each key's trajectories."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.proxy.errors import ProxyError
from ratchet.proxy.server import serve
from ratchet.proxy.settings import ProxySettings
from ratchet.store.db.engine import connect
from ratchet.store.operation_records import Key
from ratchet.store.states import KeyScope
from ratchet.store.store import Store
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import eventually

USER: Any = {"role": "user", "content": "hi"}
BODY: Any = {"model": "agent", "messages": [USER]}


def made(store: Store, scope: KeyScope = KeyScope.AGENT, **limits: Any) -> tuple[str, Key]:
    """A new key of the store, and its row."""
    key = new_key()
    return key, store.keys.create("test", hash_key(key.encode()), scope, **limits)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def status(proxy: Proxy, key: str, path: str = "/v1/models") -> int:
    return proxy.http.get(path, headers=bearer(key)).status_code


def ask(proxy: Proxy, key: str, messages: list[Any] | None = None, path: str = "/v1") -> Any:
    body = {**BODY, "messages": messages or [USER]}
    answer = proxy.http.post(f"{path}/chat/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return answer


def test_a_new_key_has_its_prefix_and_is_long_enough() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"rk-[\w-]{43}", key) for key in keys)


@pytest.mark.slow
def test_keys_of_the_store_allow_only_their_scope(start: Start, store: Store) -> None:
    (agent, row), (boss, _) = made(store), made(store, KeyScope.OPERATOR)
    proxy = start()
    assert (status(proxy, agent), status(proxy, boss), status(proxy, "rk-unknown")) == (200, 403, 401)
    assert "send an agent's key" in proxy.http.get("/v1/models", headers=bearer(boss)).json()["error"]["message"]
    assert (status(proxy, agent, "/api/calls"), status(proxy, boss, "/api/calls")) == (403, 200)
    assert proxy.http.get("/api/calls").status_code == 401
    ask(proxy, agent)
    proxy.settled()
    assert store.trajectories.page()[0].key_id == row.id


@pytest.mark.slow
def test_a_key_created_or_revoked_at_run_time_takes_effect_within_seconds(start: Start, store: Store) -> None:
    proxy = start()
    assert status(proxy, "anything") == 200
    agent, row = made(store)
    eventually(lambda: status(proxy, "anything") == 401)
    assert status(proxy, agent) == 200
    second, _ = made(store)
    assert status(proxy, second) == 200, "a key that was just made is looked for"
    store.keys.revoke(row.id)
    eventually(lambda: status(proxy, agent) == 401)
    eventually(lambda: store.keys.all()[1].last_used_at is not None)  # the first use is recorded at once
    assert status(proxy, "anything") == 401, "revoking the last key must not allow everyone"


@pytest.mark.slow
def test_a_store_outage_rejects_no_key(start: Start, store: Store, tmp_path: Path) -> None:
    agent, _ = made(store)
    proxy = start()
    engine = connect(str(tmp_path / "store.db"))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE keys RENAME TO gone"))
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert status(proxy, agent) == 200
        time.sleep(0.2)
    assert status(proxy, "rk-unknown") == 401
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE gone RENAME TO keys"))
    engine.dispose()


@pytest.mark.slow
def test_a_proxy_that_may_need_keys_rejects_calls_without_one(start: Start, store: Store, tmp_path: Path) -> None:
    agent, _ = made(store)
    engine = connect(str(tmp_path / "store.db"))
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE keys RENAME TO gone"))
    proxy = start(ready=False)
    refused = proxy.http.get("/v1/models", headers=bearer("anything"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert proxy.http.get("/health/live").status_code == 200
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE gone RENAME TO keys"))
    engine.dispose()
    eventually(lambda: status(proxy, agent) == 200)
    assert status(proxy, "anything") == 401


@pytest.fixture
def reachable(tmp_path: Path) -> ProxySettings:
    """Settings of a proxy that other machines can reach."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values: Any = {"upstreams": ("http://127.0.0.1:1",), "model": "agent", "host": "0.0.0.0", "port": port}
    return ProxySettings(**values, store=str(tmp_path / "store.db"), journal=tmp_path / "journal")


def test_a_reachable_host_without_any_key_is_refused(reachable: ProxySettings) -> None:
    with pytest.raises(ProxyError, match="ratchet keys create") as refused:
        serve(reachable)
    assert "RATCHET_API_KEYS" in str(refused.value)


def test_an_operators_key_alone_is_not_enough_for_a_reachable_host(reachable: ProxySettings, store: Store) -> None:
    made(store, KeyScope.OPERATOR)
    with pytest.raises(ProxyError, match="there is no API key"):
        serve(reachable)


@pytest.mark.slow
def test_a_key_of_the_store_is_enough_for_a_reachable_host(start: Start, store: Store) -> None:
    agent, row = made(store)
    proxy = start(host="0.0.0.0")  # as configured; this server listens on loopback nevertheless
    assert (status(proxy, agent), status(proxy, "x")) == (200, 401)
    store.keys.revoke(row.id)
    eventually(lambda: status(proxy, agent) == 401)


def test_a_suffix_of_the_key_names_the_trajectory(start: Start, store: Store) -> None:
    agent, _ = made(store)
    proxy = start()
    for _ in range(2):
        assert ask(proxy, f"{agent}:run-7").headers["x-ratchet-trajectory"] == "run-7"
    assert ask(proxy, f"{agent}:run-7", path="/t/other/v1").headers["x-ratchet-trajectory"] == "other"
    assert ask(proxy, agent).headers["x-ratchet-trajectory"].startswith("traj_")
    assert status(proxy, "rk-unknown:run-7") == 401
    wrong = proxy.http.post("/v1/chat/completions", json=BODY, headers=bearer(f"{agent}:a/b"))
    assert wrong.status_code == 400
    proxy.settled()
    assert [call.linked_by for call in store.calls.page(trajectory="run-7")] == ["key", "key"]


def test_without_keys_a_suffix_is_read_only_from_keys_of_our_format(proxy: Proxy) -> None:
    assert ask(proxy, "rk-local:run-1").headers["x-ratchet-trajectory"] == "run-1"
    assert ask(proxy, "fal-id:secret").headers["x-ratchet-trajectory"].startswith("traj_")


def test_no_key_writes_into_anothers_trajectory(start: Start, store: Store) -> None:
    (one, first), (two, second) = made(store), made(store)
    proxy = start()
    for _ in range(2):
        assert ask(proxy, one, path="/t/job/v1").headers["x-ratchet-trajectory"] == "job"
    others = {ask(proxy, two, path="/t/job/v1").headers["x-ratchet-trajectory"] for _ in range(2)}
    assert len(others) == 1
    assert others != {"job"}
    answer = ask(proxy, one, [{"role": "user", "content": "#say=sesame"}])
    echoed = [{"role": "user", "content": "#say=sesame"}, {"role": "assistant", "content": "sesame"}, USER]
    assert ask(proxy, two, echoed).headers["x-ratchet-trajectory"] != answer.headers["x-ratchet-trajectory"]
    assert ask(proxy, one, echoed).headers["x-ratchet-trajectory"] == answer.headers["x-ratchet-trajectory"]
    proxy.settled()
    owners = {run.id: run.key_id for run in store.trajectories.page()}
    assert owners["job"] == first.id
    assert owners[others.pop()] == second.id
    assert all(first.id == owners[call.trajectory_id] for call in store.calls.page(trajectory="job"))


def test_no_key_continues_a_response_of_another_key(start: Start, store: Store, vllm: ScriptedVllm) -> None:
    (one, _), (two, _) = made(store), made(store)
    proxy = start()
    request = {"model": "agent", "input": "my secret"}
    response = proxy.http.post("/v1/responses", json=request, headers=bearer(one)).json()
    more = {**request, "input": "what did I say?", "previous_response_id": response["id"]}
    assert proxy.http.post("/v1/responses", json=more, headers=bearer(two)).status_code == 404
    assert proxy.http.post("/v1/responses", json=more, headers=bearer(one)).status_code == 200


def test_the_last_use_of_a_key_is_recorded(start: Start, store: Store, vllm_url: str, tmp_path: Path) -> None:
    agent, _ = made(store)
    with running(vllm_url, store, tmp_path / "apart") as proxy:
        assert status(proxy, agent) == 200
    assert store.keys.all()[0].last_used_at == pytest.approx(time.time(), abs=30)


def test_a_key_in_a_url_is_neither_read_nor_passed_to_the_upstream(
    start: Start, store: Store, vllm: ScriptedVllm
) -> None:
    key, _ = made(store)
    proxy = start()
    path = f"/v1/score?key={key}&a=1&API%5FKEY={key}&token={key}&b=2&access_token"
    assert proxy.http.post(path, json={"model": "agent"}).status_code == 401
    assert proxy.http.post(path, json={"model": "agent"}, headers=bearer(key)).status_code == 200
    assert vllm.queries[-1] == b"a=1&b=2"


PAGE = "https://app.example.com"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-lang",
}


def test_a_page_of_an_allowed_origin_may_call_with_a_key_and_read_the_answer(start: Start, store: Store) -> None:
    key, _ = made(store)
    proxy = start(allowed_origins=(PAGE,))
    preflight = proxy.http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-stainless-lang" in preflight.headers["access-control-allow-headers"]
    for body in (BODY, {**BODY, "stream": True}):
        answer = proxy.http.post("/v1/chat/completions", json=body, headers={"origin": PAGE, **bearer(key)})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
    keyless = proxy.http.post("/v1/chat/completions", json=BODY, headers={"origin": PAGE})
    assert (keyless.status_code, keyless.headers["access-control-allow-origin"]) == (401, PAGE)
    foreign = proxy.http.options("/v1/chat/completions", headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in foreign.headers


def test_pages_of_other_origins_are_refused(start: Start) -> None:
    silent = start().http.options("/v1/chat/completions", headers=PREFLIGHT)
    assert not [name for name in silent.headers if name.startswith("access-control")]


def test_without_keys_a_page_of_an_allowed_origin_is_refused(start: Start) -> None:
    proxy = start(allowed_origins=("*",))
    assert proxy.http.post("/v1/chat/completions", json=BODY, headers={"origin": PAGE}).status_code == 403


@pytest.mark.parametrize("origin", ["app.example.com", "https://app.example.com/", "https://a.example/page", ""])
def test_an_invalid_origin_is_refused_by_name(tmp_path: Path, origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        ProxySettings(upstreams=("http://a",), model="m", store="-", journal=tmp_path, allowed_origins=(origin,))
