"""The console over HTTP: security headers, authentication, and which origins may call the operator API."""

from __future__ import annotations

import re

import pytest

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.proxy.coordinator.console.pages import _FOLDER
from ratchet.store.store import Store
from tests.harness.proxy import console_world
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.records import commit_round


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
