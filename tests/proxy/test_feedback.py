"""Feedback: accepted for any id that a client has, durable before the 201, limited to the key's own trajectories."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from jsonschema import Draft202012Validator

from ratchet.store.operation_records import ProxyInstance
from ratchet.store.states import KeyScope
from ratchet.store.store import Store, open_store
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.proxy.test_keys import ask, bearer, made

USER: Any = {"role": "user", "content": "hi"}
BODY: Any = {"model": "agent", "messages": [USER]}


def post_feedback(proxy: Proxy, status: int = 201, key: str | None = None, **body: Any) -> dict[str, Any]:
    if status == 201:  # on a busy machine a call may take longer to reach the store than feedback waits for it
        proxy.settled()
    answer = proxy.http.post("/api/feedback", json=body, headers=bearer(key) if key else {})
    assert answer.status_code == status, answer.text
    result: dict[str, Any] = answer.json()
    return result


def list_feedback(proxy: Proxy, **filters: Any) -> list[dict[str, Any]]:
    proxy.settled()
    rows: list[dict[str, Any]] = proxy.http.get("/api/feedback", params=filters).json()["data"]
    return rows


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", ["chat", "completions", "responses", "messages"])
def test_the_id_of_an_answer_names_it_in_every_dialect(proxy: Proxy, dialect: str, streamed: bool) -> None:
    name = answered_id(proxy, dialect, streamed)
    feedback = post_feedback(proxy, response_id=name, value="up")
    (row,) = list_feedback(proxy)
    call = proxy.http.get(f"/api/calls/{feedback['call_id']}").json()
    assert (call["dialect"], call["trajectory_id"]) == (dialect, feedback["trajectory_id"])
    assert (row["value"], row["target"], row["call_id"]) == (1.0, name, call["id"])


def answered_id(proxy: Proxy, dialect: str, streamed: bool) -> str:
    client = proxy.agent(strict=dialect != "completions")
    answer: Any
    if dialect == "messages":
        with anthropic.Anthropic(base_url=proxy.url, api_key="k") as other:
            if streamed:
                with other.messages.stream(model="agent", max_tokens=9, messages=[USER]) as stream:
                    return stream.get_final_message().id
            return other.messages.create(model="agent", max_tokens=9, messages=[USER]).id
    if dialect == "chat":
        answer = client.chat.completions.create(**BODY, stream=streamed)
    elif dialect == "completions":
        answer = client.completions.create(model="agent", prompt="hi", stream=streamed)
    else:
        answer = client.responses.create(model="agent", input="hi", stream=streamed)
        done = [event.response for event in answer if event.type == "response.completed"] if streamed else [answer]
        return str(done.pop().id)
    return [str(chunk.id) for chunk in answer].pop() if streamed else str(answer.id)


@pytest.mark.slow
def test_every_field_is_stored(proxy: Proxy) -> None:
    answer = proxy.http.post("/v1/chat/completions", json=BODY)
    names = {"call_id": answer.headers["x-ratchet-call"], "trajectory_id": answer.headers["x-ratchet-trajectory"]}
    for value, number in ((True, 1.0), (False, 0.0), ("down", 0.0), (4, 4.0), (-0.5, -0.5)):
        feedback = post_feedback(proxy, call_id=names["call_id"], value=value, end_user="ann", comment="well\0")
        assert feedback["state"] == "placed"
        (row,) = [row for row in list_feedback(proxy) if row["id"] == feedback["id"]]
        assert (row["value"], row["source"], row["comment"]) == (number, "user:ann", "well\N{REPLACEMENT CHARACTER}")
    feedback = post_feedback(proxy, trajectory_id=names["trajectory_id"], demonstration="Oslo.")
    assert feedback["call_id"] is None
    found = proxy.http.get(f"/api/trajectories/{names['trajectory_id']}")
    proxy.settled()
    found = proxy.http.get(f"/api/trajectories/{names['trajectory_id']}")
    assert [row["demonstration"] for row in found.json()["feedback"]] == [None] * 5 + ["Oslo."]
    assert found.json()["trained"] == []
    assert 'ratchet_feedback_total{state="placed"} 6.0' in proxy.http.get("/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"value": 1}, "trajectory_id"),
        ({"call_id": "a", "trajectory_id": "b", "value": 1}, "one of"),
        ({"call_id": "a"}, "give a value"),
        ({"call_id": "a", "value": "maybe"}, '"up" or "down"'),
        ({"call_id": "a", "value": "1"}, "value"),
        ({"call_id": "a", "value": 1e300}, "value"),
        ({"call_id": "a", "value": 10**400}, "value"),
        ({"call_id": "a", "value": [1]}, "value"),
        ({"call_id": "a", "value": 1, "score": 2}, "score"),
        ({"call_id": 3, "value": 1}, "call_id"),
        ({"call_id": "a", "comment": "x" * 10_001}, "comment"),
        ({"call_id": "a" * 99, "value": 1}, "call_id"),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(proxy: Proxy, body: Any, word: str) -> None:
    assert word in post_feedback(proxy, 400, **body)["error"]["message"]
    assert list_feedback(proxy) == []


def test_a_body_that_is_not_json_or_too_large_is_refused(proxy: Proxy) -> None:
    assert proxy.http.post("/api/feedback", content=b'{"value": NaN, "call_id": "a"}').status_code == 400
    assert proxy.http.post("/api/feedback", content=b"[1]").status_code == 400
    assert proxy.http.post("/api/feedback", content=b" " * (2**20 + 1)).status_code == 413


def test_an_unknown_id_is_a_404_that_lists_the_kinds_of_id(proxy: Proxy) -> None:
    for name in ("call_id", "response_id", "trajectory_id"):
        body: dict[str, Any] = {name: "nobody's", "value": 1}
        error = post_feedback(proxy, 404, **body)["error"]
        assert (error["param"], error["code"]) == (name, "unknown_target")
        assert "x-ratchet-call" in error["message"]


def test_the_description_of_a_body_requires_what_the_server_does(proxy: Proxy) -> None:
    operation = proxy.http.get("/api/openapi.json").json()["paths"]["/feedback"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    bodies: list[dict[str, Any]] = [
        {"value": 1}, {"call_id": "", "value": 1}, {"call_id": None, "value": 1}, {"call_id": "c"},
        {"call_id": "c", "response_id": "r", "value": 1}, {"call_id": "c", "comment": ""},
    ]  # fmt: skip
    for body in bodies:
        assert not Draft202012Validator(schema).is_valid(body), body
        post_feedback(proxy, 400, **body)
    for content in ({"value": "up"}, {"value": False}, {"comment": "c"}, {"demonstration": "d"}):
        body = {"call_id": "c", "response_id": None, **content}
        assert Draft202012Validator(schema).is_valid(body), body
        post_feedback(proxy, 404, **body)


def test_hostile_bodies_and_pages_get_errors_of_the_same_shape(proxy: Proxy) -> None:
    for content in (b'{"call_id": "\\ud800", "value": 1}', b'{"value": ' + b"[" * 5000, b"\xff\xfe", b"null", b""):
        answer = proxy.http.post("/api/feedback", content=content)
        assert (answer.status_code, set(answer.json()["error"])) == (400, {"message", "type", "param", "code"})
    assert proxy.http.get("/api/feedback", params={"before": "gone"}).status_code == 404
    assert proxy.http.get("/api/feedback", params={"trajectory": "gone\0"}).json()["data"] == []


def test_the_same_idempotency_key_is_one_feedback(proxy: Proxy) -> None:
    name = proxy.http.post("/v1/chat/completions", json=BODY).json()["id"]
    first = post_feedback(proxy, response_id=name, value=1, idempotency_key="a")
    again = post_feedback(proxy, response_id=name, value=0, idempotency_key="a")
    header = proxy.http.post(
        "/api/feedback", json={"response_id": name, "value": 0}, headers={"idempotency-key": "a"}
    ).json()
    assert first["id"] == again["id"] == header["id"]
    assert [row["value"] for row in list_feedback(proxy)] == [1.0]


def test_an_agents_key_rates_only_its_own_trajectories_and_reads_nothing(start: Start, store: Store) -> None:
    (ann, _), (bob, _), (boss, _) = made(store), made(store), made(store, KeyScope.OPERATOR)
    proxy = start()
    name = ask(proxy, ann).json()["id"]
    post_feedback(proxy, 201, ann, response_id=name, value="up")
    post_feedback(proxy, 404, bob, response_id=name, value="down")
    post_feedback(proxy, 401, "rk-unknown", response_id=name, value="down")
    post_feedback(proxy, 401, response_id=name, value="down")
    post_feedback(proxy, 201, boss, response_id=name, value=0.5)
    proxy.settled()
    for key, status in ((ann, 403), (bob, 403), (boss, 200)):
        assert proxy.http.get("/api/feedback", headers=bearer(key)).status_code == status
    rows = proxy.http.get("/api/feedback", headers=bearer(boss)).json()["data"]
    assert [(row["value"], row["trusted"]) for row in rows] == [(0.5, True), (1.0, False)]


def test_feedback_counts_as_a_request_of_its_key(start: Start, store: Store) -> None:
    (ann, _), (boss, _) = made(store, requests_per_minute=2), made(store, KeyScope.OPERATOR)
    proxy = start()
    name = ask(proxy, ann).json()["id"]
    post_feedback(proxy, 201, ann, response_id=name, value="up")
    post_feedback(proxy, 429, ann, response_id=name, value="down")
    post_feedback(proxy, 201, boss, response_id=name, value="down")


@pytest.mark.slow
def test_feedback_on_an_unshipped_call_waits_and_is_placed_later(proxy: Proxy, tmp_path: Path) -> None:
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    name = proxy.agent().chat.completions.create(**BODY).id
    feedback = post_feedback(proxy, 202, response_id=name, value="up")
    assert (feedback["state"], feedback["trajectory_id"]) == ("waiting", None)
    blocker.rollback()
    blocker.close()
    (row,) = list_feedback(proxy)
    assert row["id"] == feedback["id"]
    assert row["trajectory_id"] is not None


@pytest.mark.slow
def test_an_id_unknown_to_both_proxies_is_a_404(start: Start, tmp_path: Path) -> None:
    one, other = start(), start(journal=tmp_path / "other")
    eventually(lambda: len(one.store.proxy_instances.running(None, 0.0)) == 2)
    post_feedback(one, 404, response_id="chatcmpl-nobody", value="up")
    name = other.agent().chat.completions.create(**BODY).id
    other.settled()
    assert post_feedback(one, 201, response_id=name, value="up")["state"] == "placed"


@pytest.mark.slow
def test_an_id_is_not_known_yet_while_another_proxy_has_not_shipped(proxy: Proxy) -> None:
    proxy.store.proxy_instances.heartbeat(
        ProxyInstance(
            id="d",
            url="u",
            live_versions={"another": 0},
            pinned_trajectories={},
            shipped_until=0.0,
            heartbeat_at=time.time(),
        )
    )
    feedback = post_feedback(proxy, 202, response_id="chatcmpl-elsewhere", value="up")
    assert feedback["state"] == "waiting"
    assert "has not shipped its journal" in feedback["detail"]


@pytest.mark.slow
def test_feedback_survives_a_kill_while_the_store_is_away(vllm_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], store=str(folder / "store.db"))
    eventually(lambda: httpx.get(process.url + "/health/ready", timeout=60).status_code == 200)
    folder.rename(tmp_path / "away")
    with httpx.Client(base_url=process.url, timeout=60) as client:
        name = client.post("/v1/chat/completions", json=BODY).json()["id"]
        answer = client.post("/api/feedback", json={"response_id": name, "value": "down"})
        assert answer.status_code == 202, answer.text
    process.kill()
    (tmp_path / "away").rename(folder)
    again = ProxyProcess(tmp_path, upstreams=[vllm_url], store=str(folder / "store.db"))
    assert again.stop() == 0
    store = open_store(str(folder / "store.db"))
    (row,) = store.feedback.page()
    assert (row.id, row.value) == (answer.json()["id"], 0.0)
    assert row.trajectory_id is not None
    store.close()


@pytest.mark.slow
def test_without_a_durable_journal_feedback_is_refused(vllm_url: str, tmp_path: Path) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url])
    eventually(lambda: httpx.get(process.url + "/health/ready", timeout=60).status_code == 200)
    with httpx.Client(base_url=process.url, timeout=60) as client:
        name = client.post("/v1/chat/completions", json=BODY).headers["x-ratchet-call"]
        eventually(lambda: client.get("/health/backlog").json()["unshipped_records"] == 0)
        for segment in (tmp_path / "journal").glob("*.journal"):
            segment.unlink()
        (tmp_path / "journal").rename(tmp_path / "gone")
        (tmp_path / "journal").write_text("in the way")
        answer = client.post("/api/feedback", json={"call_id": name, "value": "up"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    process.stop()


def test_redaction_applies_to_feedback(start: Start) -> None:
    proxy = start(redact=["email"])
    name = proxy.http.post("/v1/chat/completions", json=BODY).json()["id"]
    for user in ("ann@example.com", "bob@example.com"):
        post_feedback(
            proxy, response_id=name, value=1, end_user=user, comment=f"ask {user}", demonstration=f"To {user}"
        )
    rows = list_feedback(proxy)
    assert "@example" not in str(rows)
    assert len({row["source"] for row in rows}) == 2
