"""The console in a real browser: it shows what the store holds, runs nothing that was written there, and asks first."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.proxy.coordinator.console.pages import _FOLDER
from ratchet.store.store import Store, open_store
from tests.harness.proxy import console_world
from tests.harness.proxy.browser import Browser, BrowserFailed, Page, program
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.proxy.conftest import Proxy, Start, running


@pytest.fixture(scope="module")
def console(
    scripted: tuple[ScriptedVllm, str], migrated: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """A proxy whose store holds something for every page."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "store.db").write_bytes(migrated.read_bytes())
    store = open_store(str(folder / "store.db"))
    console_world.fill(store)
    with running(scripted[1], store, folder) as proxy:
        yield proxy
    store.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests here."""
    chromium, missing = program()
    if chromium is None:
        pytest.skip(missing)
    try:
        found = Browser(chromium, tmp_path_factory.mktemp("browser"))
    except BrowserFailed as failed:
        pytest.skip(f"Chromium does not start here: {failed}")
    yield found
    found.end()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh tab, which must not have done anything that it should not."""
    made = browser.page()
    yield made
    assert made.heard == []


# --- without a browser ------------------------------------------------------------------------------------------------


def test_every_page_forbids_what_is_not_its_own(start: Start) -> None:
    proxy = start()
    for name in ("", *(path.name for path in _FOLDER.iterdir())):
        answer = proxy.http.get(f"/ui/{name}")
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        told = {name: answer.headers[name] for name in ("x-frame-options", "x-content-type-options", "referrer-policy")}
        assert told == {
            "x-frame-options": "DENY",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
        }
        tag = answer.headers["etag"]
        assert proxy.http.get(f"/ui/{name}", headers={"if-none-match": tag}).status_code == 304
    assert proxy.http.get("/ui/../store.db").status_code == 404
    assert proxy.http.post("/ui/").status_code == 405


def test_no_page_can_turn_a_text_into_markup_or_ask_anybody_else() -> None:
    for path in _FOLDER.iterdir():
        text = path.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc"):
            assert forbidden not in text, f"{path.name}: {forbidden}"
        if path.suffix in (".html", ".css", ".js"):
            assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in text


def test_the_front_door_leads_browsers_to_the_console_and_nobody_else(start: Start) -> None:
    proxy = start()
    led = proxy.http.get("/", headers={"accept": "text/html,*/*"})
    assert (led.status_code, led.headers["location"]) == (307, "ui/")
    assert proxy.http.get("/").status_code == 404
    assert proxy.http.get("/ui").headers["location"] == "ui/"


def test_the_console_can_be_turned_off(start: Start) -> None:
    proxy = start(console=False)
    assert [proxy.http.get(path, headers={"accept": "text/html"}).status_code for path in ("/", "/ui/")] == [404, 404]


def test_pages_are_open_with_keys_too_but_nothing_that_they_show(start: Start, store: Store) -> None:
    key = new_key()
    proxy = start(key_hashes=frozenset({hash_key(b"rk-agent")}), operator_hashes=frozenset({hash_key(key.encode())}))
    assert proxy.http.get("/ui/app.js").status_code == 200
    assert proxy.http.get("/api/overview").status_code == 401
    assert proxy.http.get("/api/overview", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "http://127.0.0.1:1", "http://localhost:3000", "null"])
def test_no_other_page_can_promote_delete_or_read(proxy: Proxy, origin: str) -> None:
    """Nor one of another server on this machine; a browser names the page that asks."""
    store = proxy.store
    store.policies.register_base("mail", "mail")
    told = store.rounds.start("mail", 0)
    store.rounds.commit(told.id, version=1, checkpoint="c", groups=[], metrics={})
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


def test_a_name_of_somebody_elses_that_leads_here_reads_nothing(proxy: Proxy) -> None:
    answer = proxy.http.get("/api/overview", headers={"host": "rebound.evil.example"})
    assert (answer.status_code, "127.0.0.1 or localhost" in answer.text) == (403, True)


def test_the_overview_tells_what_status_tells(console: Proxy) -> None:
    told = console.http.get("/api/overview").json()
    (alias,) = told["aliases"]
    whole = alias["learning"]["families"][0]
    assert (alias["live"]["version"], alias["canary"]["version"], whole["gain"]["verdict"]) == (4, 5, "better")
    assert "before: @0 alone, the oldest, has the 30 scores that a side needs" in alias["learning"]["notes"]
    (work,) = alias["works"]
    assert (work["done"], work["total"], work["seconds_per_item"], work["eta_seconds"]) == (3, 8, 4.0, 20.0)
    assert work["means"] == {"tokens": 42.67, "reward": 0.5}
    assert sum(told["trajectories"].values()) == 202
    assert [one["to_version"] for one in told["rounds"]] == [5, 4, 3, 2, 1]
    assert told["rounds"][0]["moved"] == "0.004 nats a token (k3) at rate 0.002: healthy"
    assert told["alarms"][0]["name"] == "no_signal"


# --- in a browser -----------------------------------------------------------------------------------------------------


def test_the_first_page_shows_whether_it_learns(console: Proxy, page: Page) -> None:
    page.open(f"{console.url}/ui/")
    for said in (
        "Yes, it is learning",
        "live @4",
        "canary @5",
        "3 / 8",
        "4.0 s each · 20 s left",
        "42.67",
        "take harder",
    ):
        page.sees(said)
    page.sees("agent@5")
    assert page.js("document.querySelectorAll('svg.curve .dot').length") == 5
    assert page.js("document.documentElement.scrollWidth <= innerWidth")
    assert {httpx.URL(url).netloc for url in page.requests} == {httpx.URL(console.url).netloc}


def test_nothing_is_shown_without_a_key_and_a_wrong_one_is_told(start: Start, store: Store, page: Page) -> None:
    key = new_key()
    proxy = start(key_hashes=frozenset({hash_key(b"rk-agent")}), operator_hashes=frozenset({hash_key(key.encode())}))
    page.open(f"{proxy.url}/ui/")
    page.sees("An operator's key, please")
    for wrong, said in (("rk-nobody", "not known here"), ("rk-agent", "an agent's key does not open")):
        page.fill("#key", wrong)
        page.click("Open")
        page.sees(said)
    page.fill("#key", key)
    page.click("Open")
    page.sees("This proxy")
    assert (
        page.js("JSON.stringify([sessionStorage.length, document.cookie, location.href.includes('rk-')])")
        == '[1,"",false]'
    )
    page.click("Forget key")
    page.sees("An operator's key, please")


def test_it_says_so_when_the_proxy_is_gone(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, page: Page
) -> None:
    with running(scripted[1], store, tmp_path) as proxy:
        page.open(f"{proxy.url}/ui/")
        page.sees("This proxy")
    page.js("dispatchEvent(new Event('hashchange'))")
    page.sees("The proxy cannot be reached.")
    page.sees("unreachable for")


def test_a_hostile_trajectory_is_text_and_nothing_else(console: Proxy, page: Page) -> None:
    page.open(f"{console.url}/ui/#/trajectories/hostile")
    for said in (
        "<script>",
        "<img src=x onerror",
        "Oslo",
        "Where is",
        "graph+tool_ids",
        "0.250",
        "image_url, not loaded",
    ):
        page.sees(said)
    for code in ("U+202E", "U+200B", "U+2066", "U+E0041", "U+001B"):  # what hides is shown
        page.sees(code)
    page.js("document.querySelectorAll('details').forEach(one => { one.open = true })")
    page.until("document.querySelectorAll('.tokens span').length === 4")
    assert page.js("document.querySelectorAll('main :is(script, iframe, img, svg, object, embed)').length") == 0
    assert page.js("[...document.querySelectorAll('a[href]')].every(one => one.getAttribute('href').startsWith('#'))")
    assert page.js("document.querySelectorAll('main [onload], main [onerror], main [onclick]').length") == 0
    assert page.js("window.ranHostile") is None
    assert {httpx.URL(url).netloc for url in page.requests} == {httpx.URL(console.url).netloc}


def test_the_browser_itself_runs_nothing_that_slips_onto_a_page(console: Proxy, browser: Browser) -> None:
    """The policy holds where the pages' own care would fail."""
    page = browser.page()
    page.open(f"{console.url}/ui/")
    page.sees("Yes, it is learning")
    page.js("document.body.append(Object.assign(document.createElement('img'), {src: 'https://evil.example/x'}))")
    attempts = (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.setAttribute('onclick', 'window.ranHostile = 1')",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ranHostile = 1'}))",
    )
    for one in attempts:
        assert (
            page.js(f"(() => {{ try {{ {one}; return 'taken' }} catch (error) {{ return 'refused' }} }})()")
            == "refused"
        )
    assert page.js("window.ranHostile") is None
    page.until("performance.getEntriesByType('resource').length > 0")
    assert any("evil.example" in heard and "violates" in heard for heard in page.heard)


def test_filters_and_pages_are_in_the_address(console: Proxy, page: Page) -> None:
    page.open(f"{console.url}/ui/#/trajectories")
    page.sees("50 shown")
    page.click("Older")
    page.until("location.hash.includes('before=') && document.body.innerText.includes('Newest')")
    page.fill("#f-task", "mail/3")
    page.fill("#f-policy", "agent@2")
    page.click("Show")
    page.sees("5 shown")
    assert page.js("[...document.querySelectorAll('td.task')].every(one => one.innerText === 'mail/3')")
    page.fill("#f-state", "open")
    page.sees("No trajectory fits.")


def test_feedback_is_given_from_the_page(console: Proxy, page: Page) -> None:
    page.open(f"{console.url}/ui/#/trajectories/run-1-03")
    page.click("↑ Good")
    page.fill("#comment", "just what I wanted")
    page.click("Say so")
    page.sees("Taken.")
    page.sees("just what I wanted")
    (said,) = console.http.get("/api/feedback", params={"trajectory": "run-1-03"}).json()["data"]
    assert (said["value"], said["comment"]) == (1.0, "just what I wanted")


def test_a_hundred_thousand_trajectories_page_as_fast_as_a_hundred(
    scripted: tuple[ScriptedVllm, str], store_file: Path, tmp_path: Path, page: Page
) -> None:
    with contextlib.closing(sqlite3.connect(store_file)) as database:
        kept = ("ix_trajectories_opened_at_id", "ix_trajectories_state_opened_at")  # which these lists walk
        indexes = "SELECT name FROM sqlite_master WHERE type = 'index' AND tbl_name = 'trajectories' AND sql <> ''"
        for name in {row[0] for row in database.execute(indexes)} - set(kept):
            database.execute(f"DROP INDEX {name}")
        database.execute(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 99999) INSERT INTO trajectories "
            "(id, alias, version, state, purpose, root_node, tools_hash, opened_at, last_active_at, successors) "
            "SELECT printf('t%06d', i), 'agent', 0, 'open', 'live', x'', x'', i, i, 0 FROM n"
        )
        database.commit()
    store = open_store(str(store_file))
    with running(scripted[1], store, tmp_path) as proxy:
        page.open(f"{proxy.url}/ui/#/trajectories?state=open&before=t050000")
        page.sees("t049999")
        page.click("Older")
        page.sees("t049949")
        took = page.js(
            "performance.getEntriesByType('resource').filter(one => one.name.includes('/api/')).at(-1).duration"
        )
        assert took < 5000  # milliseconds, on a machine that does much else
    store.close()


def test_a_group_shows_its_members_side_by_side_with_the_judges_exchange(console: Proxy, page: Page) -> None:
    name = console.http.get("/api/trajectories/hostile").json()["group_id"]
    page.open(f"{console.url}/ui/#/groups")
    page.click(name)
    page.sees("advantage +0.707")
    page.sees("advantage \N{MINUS SIGN}0.707")
    page.click("exg_")
    page.sees("http://judge.example/v1")
    assert page.js("document.querySelectorAll('.members section').length") == 2
    assert page.js("window.ranHostile") is None


def test_promotion_asks_first_and_then_does_it(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, page: Page
) -> None:
    store.policies.register_base("agent", "agent")
    told = store.rounds.start("agent", 0)
    store.rounds.commit(told.id, version=1, checkpoint="c", groups=[], metrics={"reward": 0.5})
    with running(scripted[1], store, tmp_path) as proxy:
        page.open(f"{proxy.url}/ui/#/versions")
        page.click("@1")
        page.click("Promote")
        page.sees("Promote agent@1?")
        page.click("Cancel")
        page.until("document.querySelector('dialog') === null")
        assert store.policies.live()["agent"].version == 0
        page.click("Promote")
        page.click("Promote", within="dialog")  # without a reason nothing is done
        assert page.js("document.querySelector('dialog') !== null")
        page.fill("#reason", "I looked at it")
        page.click("Promote", within="dialog")
        page.sees("agent@1 is live.")
        page.sees("I looked at it")
        (decision,) = store.decisions.of("agent", 1)
        assert (store.policies.live()["agent"].version, decision.by) == (1, "console")
        page.open(f"{proxy.url}/ui/#/versions/agent/0")
        page.click("Go back to it")
        page.fill("#reason", "it was worse")
        page.click("Go back to", within="dialog")
        page.sees("agent@0 is live.")
    assert store.policies.live()["agent"].version == 0


def test_rounds_and_alarms_have_pages(console: Proxy, page: Page) -> None:
    page.open(f"{console.url}/ui/#/rounds")
    page.sees("agent@4 → @5")
    page.open(f"{console.url}/ui/#/alarms")
    page.sees("take harder tasks")
