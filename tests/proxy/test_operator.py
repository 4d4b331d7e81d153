"""The operator API."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ratchet.store.records import Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.records import answered_trajectory, commit_round, judged_group

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
    assert len(call["choices"][0]["token_ids"]) == len(call["choices"][0]["logprobs"]) > 0
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


def test_unknown_names_are_404_in_the_same_shape(proxy: Proxy) -> None:
    for path in ("/api/calls/x", "/api/trajectories/x", "/api/groups/x", "/api/nothing"):
        answer = proxy.http.get(path)
        assert answer.status_code == 404
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for path in ("/api/policies", "/api/training", "/api/alarms", "/api/groups", "/api/openapi.json"):
        assert proxy.http.get(path).status_code == 200


def test_a_misspelled_filter_is_refused(proxy: Proxy) -> None:
    answer = proxy.http.get("/api/trajectories?model=agent&limit=3")
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert re.search("'model'.* /api/trajectories has: alias, before", message)
    assert proxy.http.get("/api/trajectories?alias=agent&limit=3").status_code == 200
    assert proxy.http.get("/api/policies/1/decisions?alais=agent").status_code in (400, 422)


def test_a_parameter_with_a_wrong_value_is_named_with_all_values_that_it_takes(proxy: Proxy) -> None:
    def refusal(path: str) -> tuple[str, str]:
        answer = proxy.http.get(f"/api{path}")
        assert answer.status_code == 422, answer.text
        error = answer.json()["error"]
        return error["param"], error["message"]

    assert refusal("/calls?state=bogus")[0] == "state"
    name, message = refusal("/trajectories?outcome=zzz")
    assert name == "outcome"
    for value in (*ToolOutcome, *ToolResult):
        assert f"'{value}'" in message
    assert message.startswith("outcome: Input should be 'valid', ")
    name, message = refusal("/usage?by=day&by=model")
    assert (name, message.startswith("by: Input should be 'day', 'key_id'")) == ("by", True)
    assert refusal("/trajectories?version=x")[0] == "version"
    assert proxy.http.get("/api/calls?state=failed").json()["data"] == []


def test_a_page_after_an_unknown_call_is_a_404(proxy: Proxy) -> None:
    answered_trajectory(proxy.store, "t1")
    assert proxy.http.get("/api/calls?before=zzz").status_code == 404
    assert proxy.http.get("/api/calls?before=call_t1").json()["data"] == []


def test_usage_takes_the_names_of_the_command_as_well(proxy: Proxy) -> None:
    answered_trajectory(proxy.store, "t1")
    usage = [proxy.http.get(f"/api/usage?days=400&{by}") for by in ("by=key&by=agent", "by=key_id&by=alias")]
    assert [answer.status_code for answer in usage] == [200, 200]
    assert usage[0].json() == usage[1].json()


@pytest.mark.parametrize("path", ["/api/calls/", "/api/feedback/", "/api/"])
def test_a_path_with_a_slash_at_its_end_is_unknown(proxy: Proxy, path: str) -> None:
    answer = proxy.http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")


@pytest.mark.slow
def test_the_operator_api_serves_no_html_documentation(proxy: Proxy) -> None:
    for path in ("/api/docs", "/api/redoc"):
        answer = proxy.http.get(path)
        assert (answer.status_code, "html" in answer.headers["content-type"]) == (404, False)


def test_the_journals_metrics_count_shipped_records(proxy: Proxy) -> None:
    proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]})
    proxy.http.post("/v1/chat/completions", json={"model": "agent", "messages": [USER]})
    proxy.settled()
    text = proxy.http.get("/metrics").text
    assert "ratchet_journal_unshipped_records 0.0" in text
    assert "ratchet_shipped_records_total 4.0" in text


def test_versions_are_promoted_and_rolled_back_by_hand_with_a_reason(proxy: Proxy) -> None:
    for version in (1, 2):
        commit_round(proxy.store, "agent", version)
    where: dict[str, str] = {"alias": "agent"}
    assert proxy.http.post("/api/policies/1/promote", params=where, json={}).status_code == 422
    why = {"reason": "looked at it", "by": "anna"}
    assert proxy.http.post("/api/policies/1/promote", params=where, json=why).json()["state"] == "live"
    assert proxy.http.post("/api/policies/1/promote", params=where, json=why).status_code == 409
    assert proxy.http.post("/api/policies/9/promote", params=where, json=why).status_code == 404
    rejected = proxy.http.post("/api/policies/0/rollback", params=where, json={"reason": "rude"}).json()["data"]
    assert [policy["version"] for policy in rejected] == [1, 2]
    first = next(p for p in proxy.http.get("/api/policies").json()["data"] if p["version"] == 1)
    assert (first["state"], first["decision"]["action"], first["decision"]["reason"]) == (
        "rejected",
        "rollback",
        "rude",
    )
    decisions = proxy.http.get("/api/policies/1/decisions", params=where).json()["data"]
    assert [(one["action"], one["decided_by"]) for one in decisions] == [("rollback", "operator"), ("promote", "anna")]
    refused = proxy.http.post("/api/policies/1/promote", params=where, json=why)
    assert refused.status_code == 409
    assert "agent@1 was rejected by operator (rude)" in refused.text
    meant = why | {"rejected": True}
    assert proxy.http.post("/api/policies/1/promote", params=where, json=meant).json()["state"] == "live"


def test_versions_are_held_pinned_and_rolled_back_at_once_over_http(proxy: Proxy) -> None:
    for version in (1, 2):
        commit_round(proxy.store, "agent", version)
    proxy.store.policies.promote("agent", 1, {}, holdback=0.1)
    proxy.store.policies.start_ramp("agent", 2, 0.45)
    (served,) = proxy.http.get("/api/releases", params={"alias": "agent"}).json()["data"]
    assert [(one["version"], one["role"], one["share"]) for one in served["serving"]] == [
        (0, "holdback", 0.1), (1, "live", 0.45), (2, "ramp", 0.45),
    ]  # fmt: skip
    assert (served["anchor"], served["pinned"], served["figures"]) == (0, None, None)

    def decide(verb: str, version: int, **more: Any) -> Any:
        order = {"reason": "a fair", "by": "anna", **more}
        return proxy.http.post(f"/api/policies/{version}/{verb}", params={"alias": "agent"}, json=order)

    assert decide("hold", 2).json()["state"] == "ramp"
    assert decide("pin", 2).status_code == 409
    assert decide("pin", 1).json()["pinned_at"] is not None
    (served,) = proxy.http.get("/api/releases").json()["data"]
    assert (served["pinned"]["by"], served["pinned"]["reason"]) == ("anna", "a fair")
    assert "agent@1 is pinned" in decide("rollback", 0).text
    assert decide("unpin", 2).status_code == 409
    assert decide("unpin", 1).json()["pinned_at"] is None
    moved = decide("rollback", 0, now=True).json()["data"]
    assert [(one["version"], one["recalled_at"] is not None) for one in moved] == [(1, True), (2, True)]
    decisions = proxy.http.get("/api/policies/1/decisions", params={"alias": "agent"}).json()["data"]
    assert [one["action"] for one in decisions] == ["rollback", "unpin", "pin", "promote"]


def test_a_trajectory_is_read_with_verdicts_and_on_request_without_tokens(proxy: Proxy) -> None:
    group = judged_group(proxy.store, ["a", "b"], [0.25, 1.0])
    again = Verdict(trajectory_id="a", group_id=group.id, judge="rule", judge_version="2", failure="it was away")
    proxy.store.groups.replace_verdicts([again])
    answered_trajectory(proxy.store, "c")
    listed = {row["id"]: row["score"] for row in proxy.http.get("/api/trajectories").json()["data"]}
    assert listed == {"a": 0.25, "b": 1.0, "c": None}
    whole = proxy.http.get("/api/trajectories/a").json()
    bare = proxy.http.get("/api/trajectories/a?tokens=false").json()
    assert [(one["score"], one["failure"]) for one in bare["verdicts"]] == [(0.25, None), (None, "it was away")]
    assert (whole["calls"][0]["prompt_ids"], whole["calls"][0]["choices"][0]["token_ids"]) == ([1, 2, 3], [4, 5])
    assert (bare["calls"][0]["prompt_ids"], bare["calls"][0]["choices"][0]["token_ids"]) == (None, None)


def test_rounds_page_by_key_and_a_judges_requests_are_read_verbatim(proxy: Proxy) -> None:
    store = proxy.store
    store.policies.register_base("agent", "agent")
    for version in range(3):
        commit_round(store, "agent", version + 1, checkpoint="c")
    first = proxy.http.get("/api/training", params={"limit": 2}).json()
    second = proxy.http.get("/api/training", params={"limit": 2, "before": first["next"]}).json()
    assert [one["to_version"] for page in (first, second) for one in page["rounds"]] == [3, 2, 1]
    assert second["next"] is None
    group = judged_group(store, ["a", "b"], [0.0, 1.0])
    assert proxy.http.get(f"/api/groups/{group.id}/judge-requests").json()["data"] == []
    assert proxy.http.get("/api/groups/none/judge-requests").status_code == 404
