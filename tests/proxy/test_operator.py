"""The operator API, its audit log and the console over HTTP: who may read and change what, and what is kept of it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.proxy.coordinator.console.pages import _FOLDER
from ratchet.store.operation_records import AuditEntry
from ratchet.store.records import Verdict
from ratchet.store.states import KeyScope, ToolOutcome, ToolResult
from ratchet.store.store import Store
from tests.harness.proxy import console_world
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import eventually
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


OLD = 1000.0  # Unix seconds
CALL: Any = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def made(store: Store, scope: KeyScope, name: str) -> tuple[dict[str, str], str]:
    """The header and the id of a new key."""
    key = new_key()
    return {"authorization": f"Bearer {key}"}, store.keys.create(name, hash_key(key.encode()), scope).id


def entries(store: Store, count: int) -> list[AuditEntry]:
    """The new entries, oldest first, once there are so many and every outcome is known."""

    def settled() -> list[AuditEntry]:
        found = store.audit.page(since=OLD + 1)
        return found if len(found) >= count and all(one.status is not None for one in found) else []

    found: list[AuditEntry] = eventually(settled)
    return sorted(found, key=lambda one: (one.at, one.id))


@pytest.mark.slow
def test_reads_and_changes_are_recorded_with_key_target_address_and_outcome(
    start: Start, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    agent, _ = made(store, KeyScope.AGENT, "crawler")
    ann, ann_id = made(store, KeyScope.OPERATOR, "ann")
    bob, bob_id = made(store, KeyScope.OPERATOR, "bob")
    old: Any = {"id": "audit_000", "at": OLD, "last_at": OLD, "count": 1, "actor": "eve", "status": 200}
    store.audit.record([AuditEntry(**old, method="GET", route="/keys", target={})])
    proxy = start(trusted_proxies=["127.0.0.1"], audit_days=1)
    answer = proxy.http.post("/v1/chat/completions", json=CALL, headers=agent)
    name = answer.headers["x-ratchet-trajectory"]
    proxy.settled()
    at = {"x-forwarded-for": "203.0.113.9"}
    for _ in range(3):
        assert proxy.http.get(f"/api/trajectories/{name}", headers=ann | at).status_code == 200
    chosen = {"alias": "agent", "task": "ann@x"}
    assert proxy.http.get("/api/trajectories", params=chosen, headers=ann).status_code == 200
    assert proxy.http.get("/api/calls/call_none", headers=bob).status_code == 404
    assert proxy.http.post(f"/api/trajectories/{name}/finish", headers=bob | at).status_code == 200
    order = {"reason": "it is a secret"}
    assert proxy.http.post("/api/policies/9/pin", params={"alias": "agent"}, json=order, headers=bob).status_code == 404
    refused = proxy.http.get("/api/calls", headers={**agent, "x-request-id": "mine-7"})
    assert refused.status_code == 403  # not an operator's
    line = "event=operator_refused status=403 client=127.0.0.1 path='/api/calls' request_id='mine-7'"
    assert line in caplog.text
    found = entries(store, 5)
    fields = ("key_id", "actor", "client", "method", "route", "target", "status", "count")
    seen = [tuple(getattr(one, field) for field in fields) for one in found]
    named, near, far = {"trajectory_id": name}, "127.0.0.1", "203.0.113.9"
    assert seen == [
        (ann_id, "ann", far, "GET", "/trajectories/{trajectory_id}", named, 200, 3),
        (ann_id, "ann", near, "GET", "/trajectories", {"alias": "agent"}, 200, 1),
        (bob_id, "bob", near, "GET", "/calls/{call_id}", {"call_id": "call_none"}, 404, 1),
        (bob_id, "bob", far, "POST", "/trajectories/{trajectory_id}/finish", named, 200, 1),
        (bob_id, "bob", near, "POST", "/policies/{version}/pin", {"alias": "agent", "version": "9"}, 404, 1),
    ]
    text = repr(found)
    for secret in ("secret", "ann@x", agent["authorization"][7:], ann["authorization"][7:], bob["authorization"][7:]):
        assert secret not in text
    listed = proxy.http.get("/api/audit", params={"key": bob_id, "changes": True}, headers=ann).json()["data"]
    eventually(lambda: "eve" not in {one.actor for one in store.audit.page()})
    assert [one["route"] for one in listed] == ["/policies/{version}/pin", "/trajectories/{trajectory_id}/finish"]


@pytest.mark.slow
def test_without_keys_and_with_keys_of_the_environment_it_says_so(start: Start, store: Store, tmp_path: Path) -> None:
    start().http.get("/api/agents")
    (first,) = entries(store, 1)
    assert (first.key_id, first.actor) == (None, "without a key")
    hashed = hash_key(b"k-operator")
    proxy = start(journal=tmp_path / "other", operator_hashes=[hashed], key_hashes=[hash_key(b"k-agent")])
    assert proxy.http.get("/api/keys", headers={"x-api-key": "k-operator"}).status_code == 200
    second = entries(store, 2)[-1]
    assert (second.key_id, second.actor, second.route) == (hashed[:16], "RATCHET_OPERATOR_KEYS", "/keys")


@pytest.mark.slow
def test_what_an_agent_gives_feedback_on_is_not_an_operators_change(start: Start, store: Store) -> None:
    agent, _ = made(store, KeyScope.AGENT, "crawler")
    ann, _ = made(store, KeyScope.OPERATOR, "ann")
    proxy = start()
    name = proxy.http.post("/v1/chat/completions", json=CALL, headers=agent).headers["x-ratchet-trajectory"]
    for key in (agent, ann):
        answer = proxy.http.post("/api/feedback", json={"trajectory_id": name, "value": 1}, headers=key)
        assert answer.status_code in (201, 202), answer.text
    (only,) = entries(store, 1)
    assert (only.actor, only.method, only.route, only.target) == ("ann", "POST", "/feedback", {})


def test_a_change_that_cannot_be_recorded_does_not_happen(proxy: Proxy, store: Store, store_file: Path) -> None:
    name = proxy.http.post("/v1/chat/completions", json=CALL).headers["x-ratchet-trajectory"]
    proxy.settled()
    with contextlib.closing(sqlite3.connect(store_file)) as database:
        database.execute("ALTER TABLE audit_entries RENAME TO elsewhere")
        assert proxy.http.post(f"/api/trajectories/{name}/finish").status_code == 503
        assert store.trajectories.get(name).state == "open"
        database.execute("ALTER TABLE elsewhere RENAME TO audit_entries")
    assert proxy.http.post(f"/api/trajectories/{name}/finish").status_code == 200
    assert [one.route for one in entries(store, 1)] == ["/trajectories/{trajectory_id}/finish"]


def test_every_page_forbids_foreign_content(start: Start) -> None:
    proxy = start()
    for name in ("", *(path.name for path in _FOLDER.iterdir())):
        answer = proxy.http.get(f"/ui/{name}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        security_headers = {
            name: answer.headers[name] for name in ("x-frame-options", "x-content-type-options", "referrer-policy")
        }
        assert security_headers == {
            "x-frame-options": "DENY",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        tag = answer.headers["etag"]
        assert proxy.http.get(f"/ui/{name}", headers={"if-none-match": tag}).status_code == 304
    assert proxy.http.get("/ui/../store.db").status_code == 404
    assert proxy.http.post("/ui/").status_code == 405


def test_no_script_turns_text_into_markup_or_calls_another_server() -> None:
    for path in _FOLDER.iterdir():
        text = path.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc"):
            assert forbidden not in text, f"{path.name}: {forbidden}"
        if path.suffix in (".html", ".css", ".js"):
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text


def test_the_root_url_redirects_only_browsers_to_the_console(start: Start) -> None:
    proxy = start()
    led = proxy.http.get("/", headers={"accept": "text/html,*/*"})
    assert (led.status_code, led.headers["location"]) == (307, "ui/")
    assert proxy.http.get("/").status_code == 404
    assert proxy.http.get("/ui").headers["location"] == "ui/"


def test_the_console_can_be_turned_off(start: Start) -> None:
    proxy = start(console=False)
    assert [proxy.http.get(path, headers={"accept": "text/html"}).status_code for path in ("/", "/ui/")] == [404, 404]


def test_with_keys_pages_are_public_but_not_their_data(start: Start, store: Store) -> None:
    key = new_key()
    proxy = start(key_hashes=frozenset({hash_key(b"rk-agent")}), operator_hashes=frozenset({hash_key(key.encode())}))
    assert proxy.http.get("/ui/app.js").status_code == 200
    assert proxy.http.get("/api/overview").status_code == 401
    assert proxy.http.get("/api/overview", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "http://localhost:3000", "null"])
def test_no_other_page_can_promote_delete_or_read(proxy: Proxy, origin: str) -> None:
    """This includes pages of other servers on this machine; browsers send the page's origin."""
    store = proxy.store
    store.policies.register_base("mail", "mail")
    commit_round(store, "mail", 1, checkpoint="c")
    order, headers = {"reason": "because"}, {"origin": origin}
    path = "/api/policies/1/promote?alias=mail"
    assert proxy.http.post(path, json=order, headers=headers).status_code == 403
    assert proxy.http.delete("/api/trajectories/x", headers=headers).status_code == 403
    assert proxy.http.get("/api/overview", headers=headers).status_code == 403
    form = {"content-type": "text/plain"}
    assert proxy.http.post(path, content='{"reason": "x"}', headers=form).status_code == 422
    assert store.policies.live()["mail"].version == 0
    own = {"origin": str(proxy.http.base_url).rstrip("/")}
    assert proxy.http.post(path, json=order, headers=own).status_code == 200
    assert store.policies.live()["mail"].version == 1


def test_a_foreign_host_name_that_resolves_here_reads_nothing(proxy: Proxy) -> None:
    answer = proxy.http.get("/api/overview", headers={"host": "rebound.evil.example"})
    assert (answer.status_code, "127.0.0.1 or localhost" in answer.text) == (403, True)


def test_the_overview_reports_what_status_reports(start: Start, store: Store) -> None:
    console_world.fill(store)
    overview = start().http.get("/api/overview").json()
    (alias,) = overview["aliases"]
    whole = alias["learning"]["families"][0]
    assert (alias["live"]["version"], alias["ramp"]["version"], whole["gain"]["verdict"]) == (4, 5, "better")
    assert any(re.search("before: @0 .* 30 scores", text) for text in alias["learning"]["notes"])
    (work,) = alias["progress"]
    assert (work["done"], work["total"], work["seconds_per_item"], work["eta_seconds"]) == (3, 8, 4.0, 20.0)
    assert work["means"] == {"tokens": 42.67, "reward": 0.5}
    assert sum(overview["trajectories"].values()) == 202
    assert [one["to_version"] for one in overview["rounds"]] == [5, 4, 3, 2, 1]
    newest = overview["rounds"][0]["metrics"]
    assert (newest["rows"], newest["rows_rejected"]) == (8, 1)
    assert re.search("0.004 nats .* rate 0.002: healthy", overview["rounds"][0]["policy_movement"])
    assert overview["alarms"][0]["name"] == "no_signal"
