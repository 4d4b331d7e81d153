"""The operator API."""

from __future__ import annotations

from typing import Any

from tests.proxy.conftest import Proxy

USER: Any = {"role": "user", "content": "hi"}


def test_calls_and_trajectories_are_read_back_page_by_page(proxy: Proxy) -> None:
    for _ in range(5):
        proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]})
    proxy.settled()
    for what in ("calls", "trajectories"):
        seen: list[str] = []
        while page := proxy.http.get(
            f"/api/{what}", params={"limit": 2, **({"before": seen[-1]} if seen else {})}
        ).json()["data"]:
            seen += [row["id"] for row in page]
        assert len(seen) == len(set(seen)) == 5
    call = proxy.http.get(f"/api/calls/{proxy.http.get('/api/calls').json()['data'][0]['id']}").json()
    assert len(call["choices"][0]["ids"]) == len(call["choices"][0]["logprobs"]) > 0
    found = proxy.http.get(f"/api/trajectories/{call['trajectory_id']}").json()
    assert [message["role"] for message in found["messages"]] == ["user", "assistant"]
    assert found["calls"][0]["id"] == call["id"]


def test_trajectories_are_filtered_and_the_next_page_is_named(proxy: Proxy) -> None:
    for number in range(4):
        headers = {"x-ratchet-task": f"find/{number % 2}", "x-ratchet-tags": "nightly,big"}
        proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]}, headers=headers)
    proxy.settled()
    chosen: dict[str, str | int] = {"task": "find/1", "alias": "agent", "state": "open", "tag": "nightly", "limit": 1}
    first = proxy.http.get("/api/trajectories", params=chosen).json()
    second = proxy.http.get("/api/trajectories", params=chosen | {"before": first["next"]}).json()
    third = proxy.http.get("/api/trajectories", params=chosen | {"before": second["next"]}).json()
    assert [len(page["data"]) for page in (first, second, third)] == [1, 1, 0]
    assert {page["data"][0]["task"] for page in (first, second)} == {"find/1"}
    assert third["next"] is None
    name = first["data"][0]["id"]
    assert [run["id"] for run in proxy.http.get("/api/trajectories", params={"search": name}).json()["data"]] == [name]
    assert proxy.http.get("/api/trajectories", params={"before": "gone"}).status_code == 404


def test_finishing_a_trajectory_seals_it_with_all_its_calls(proxy: Proxy) -> None:
    body = {"model": "agent", "messages": [USER]}
    for _ in range(3):
        proxy.http.post("/t/job/v1/chat/completions", json=body)
    finished = proxy.http.post("/api/trajectories/job/finish").json()
    assert (finished["state"], finished["calls"]) == ("sealed", 3)
    proxy.http.post("/t/job/v1/chat/completions", json=body)
    proxy.settled()
    assert {t.id: t.calls for t in proxy.store.trajectories.page(9)} == {"job": 3, "job~1": 1}


def test_what_does_not_exist_is_404_in_the_same_shape(proxy: Proxy) -> None:
    for path in ("/api/calls/x", "/api/trajectories/x", "/api/groups/x"):
        answer = proxy.http.get(path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for path in ("/api/policies", "/api/training", "/api/alarms", "/api/groups", "/api/openapi.json"):
        assert proxy.http.get(path).status_code == 200


def test_the_journals_metrics_say_what_is_shipped(proxy: Proxy) -> None:
    proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]})
    proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]})
    proxy.settled()
    text = proxy.http.get("/metrics").text
    assert "ratchet_journal_unshipped_records 0.0" in text
    assert "ratchet_shipped_records_total 4.0" in text
