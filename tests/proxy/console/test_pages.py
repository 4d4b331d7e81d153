"""The console in Chromium: it shows the store's content, runs none of it, and asks before it acts."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.store.states import PolicyAction
from ratchet.store.store import Store, open_store
from tests.harness.proxy.browser import PageLog, watch
from tests.harness.proxy.console_picture import take
from tests.harness.proxy.page_steps import click, sees
from tests.harness.proxy.running_proxy import Proxy, Start, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.simulated_releases import ALIAS, fill
from tests.harness.records import commit_round

HOSTILE_AGENT = "<svg>;window.ranHostile=true"


@pytest.mark.browser
def test_the_first_page_shows_whether_it_learns(console: Proxy, safe_page: Page, page_log: PageLog) -> None:
    safe_page.goto(f"{console.url}/ui/")
    for text in (
        "Yes, it is learning",
        "live @4",
        "ramp @5",
        "3 / 8",
        "4.0 s each · 20 s left",
        "42.67",
        "take harder",
    ):
        sees(safe_page, text)
    sees(safe_page, "agent@5")
    assert safe_page.evaluate("document.querySelectorAll('.alias svg.curve .dot').length") == 5
    assert safe_page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {httpx.URL(url).netloc for url in page_log.requests} == {httpx.URL(console.url).netloc}


@pytest.mark.browser
def test_without_a_key_nothing_is_shown_and_a_wrong_key_is_an_error(
    start: Start, store: Store, safe_page: Page
) -> None:
    key = new_key()
    proxy = start(key_hashes=frozenset({hash_key(b"rk-agent")}), operator_hashes=frozenset({hash_key(key.encode())}))
    safe_page.goto(f"{proxy.url}/ui/")
    sees(safe_page, "Operator key required")
    for wrong, text in (("rk-nobody", "missing or unknown"), ("rk-agent", "an agent's key does not open")):
        safe_page.fill("#key", wrong)
        click(safe_page, "Open")
        sees(safe_page, text)
    safe_page.fill("#key", key)
    click(safe_page, "Open")
    sees(safe_page, "This proxy")
    assert (
        safe_page.evaluate("JSON.stringify([sessionStorage.length, document.cookie, location.href.includes('rk-')])")
        == '[1,"",false]'
    )
    click(safe_page, "Forget key")
    sees(safe_page, "Operator key required")


@pytest.mark.browser
def test_the_console_reports_an_unreachable_proxy(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, safe_page: Page
) -> None:
    with running(scripted[1], store, tmp_path) as proxy:
        safe_page.goto(f"{proxy.url}/ui/")
        sees(safe_page, "This proxy")
    safe_page.evaluate("dispatchEvent(new Event('hashchange'))")
    sees(safe_page, "The proxy cannot be reached.")
    sees(safe_page, "unreachable for")


@pytest.mark.browser
def test_a_hostile_trajectory_is_text_and_nothing_else(console: Proxy, safe_page: Page, page_log: PageLog) -> None:
    safe_page.goto(f"{console.url}/ui/#/trajectories/hostile")
    for text in (
        "<script>",
        "<img src=x onerror",
        "Oslo",
        "Where is",
        "graph+tool_ids",
        "0.250",
        "image_url, not loaded",
    ):
        sees(safe_page, text)
    for code in ("U+202E", "U+200B", "U+2066", "U+E0041", "U+001B"):  # invisible characters are shown
        sees(safe_page, code)
    safe_page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    expect(safe_page.locator(".tokens span")).to_have_count(4)
    expect(safe_page.locator("main :is(script, iframe, img, svg, object, embed)")).to_have_count(0)
    assert safe_page.evaluate(
        "[...document.querySelectorAll('a[href]')].every(one => one.getAttribute('href').startsWith('#'))"
    )
    assert safe_page.evaluate("document.querySelectorAll('main [onload], main [onerror], main [onclick]').length") == 0
    assert safe_page.evaluate("window.ranHostile") is None
    assert {httpx.URL(url).netloc for url in page_log.requests} == {httpx.URL(console.url).netloc}


@pytest.mark.browser
def test_the_browser_runs_no_markup_that_is_inserted_into_a_page(console: Proxy, page: Page) -> None:
    """The content security policy is a second line of defence behind the console's own escaping."""
    log = watch(page)
    page.goto(f"{console.url}/ui/")
    sees(page, "Yes, it is learning")
    with page.expect_console_message(lambda message: "evil.example" in message.text and "violates" in message.text):
        page.evaluate(
            "void document.body.append(Object.assign(document.createElement('img'), {src: 'https://evil.example/x'}))"
        )
    for attempt in (
        "document.body.innerHTML = '<b>x</b>'",
        "document.body.setAttribute('onclick', 'window.ranHostile = 1')",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ranHostile = 1'}))",
    ):
        attempted = f"(() => {{ try {{ {attempt}; return 'accepted' }} catch (error) {{ return 'refused' }} }})()"
        assert page.evaluate(attempted) == "refused"
    assert page.evaluate("window.ranHostile") is None
    assert log.problems


@pytest.mark.browser
def test_feedback_is_given_from_the_page(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/trajectories/run-1-03")
    click(safe_page, "↑ Good")
    safe_page.fill("#comment", "just what I wanted")
    click(safe_page, "Send")
    sees(safe_page, "Recorded.")
    sees(safe_page, "just what I wanted")
    (feedback,) = console.http.get("/api/feedback", params={"trajectory": "run-1-03"}).json()["data"]
    assert (feedback["value"], feedback["comment"]) == (1.0, "just what I wanted")


@pytest.mark.browser
def test_a_hundred_thousand_trajectories_page_as_fast_as_a_hundred(
    scripted: tuple[ScriptedVllm, str], store_file: Path, tmp_path: Path, safe_page: Page
) -> None:
    with contextlib.closing(sqlite3.connect(store_file)) as database:
        kept = ("ix_trajectories_opened_at_id", "ix_trajectories_state_opened_at")  # these lists use them
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
        safe_page.goto(f"{proxy.url}/ui/#/trajectories?state=open&before=t050000")
        sees(safe_page, "t049999")
        click(safe_page, "Older")
        sees(safe_page, "t049949")
        took = safe_page.evaluate(
            "performance.getEntriesByType('resource').filter(one => one.name.includes('/api/')).at(-1).duration"
        )
        assert took < 5000  # milliseconds, on a busy machine
    store.close()


@pytest.mark.browser
def test_a_group_shows_its_members_side_by_side_with_the_judges_exchange(console: Proxy, safe_page: Page) -> None:
    name = console.http.get("/api/trajectories/hostile").json()["group_id"]
    safe_page.goto(f"{console.url}/ui/#/groups")
    click(safe_page, name)
    sees(safe_page, "advantage +0.707")
    sees(safe_page, "advantage \N{MINUS SIGN}0.707")
    click(safe_page, "exg_")
    sees(safe_page, "http://judge.example/v1")
    assert safe_page.evaluate("document.querySelectorAll('.members section').length") == 2
    assert safe_page.evaluate("window.ranHostile") is None


@pytest.mark.browser
def test_promotion_asks_for_confirmation_first(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, safe_page: Page
) -> None:
    store.policies.register_base("agent", "agent")
    commit_round(store, "agent", 1, checkpoint="c", metrics={"reward": 0.5})
    with running(scripted[1], store, tmp_path) as proxy:
        safe_page.goto(f"{proxy.url}/ui/#/versions")
        click(safe_page, "@1")
        click(safe_page, "Promote")
        sees(safe_page, "Promote agent@1?")
        click(safe_page, "Cancel")
        expect(safe_page.locator("dialog")).to_have_count(0)
        assert store.policies.live()["agent"].version == 0
        click(safe_page, "Promote")
        click(safe_page, "Promote", within="dialog")  # without a reason nothing is done
        assert safe_page.evaluate("document.querySelector('dialog') !== null")
        safe_page.fill("#reason", "I looked at it")
        click(safe_page, "Promote", within="dialog")
        sees(safe_page, "agent@1 is live.")
        sees(safe_page, "I looked at it")
        decision = store.decisions.decisions_of("agent", 1)[0]
        assert (store.policies.live()["agent"].version, decision.decided_by) == (1, "console")
        for verb, done in (("Pin", "agent@1 is pinned."), ("Unpin", "agent@1 is no longer pinned.")):
            click(safe_page, f"{verb} …")
            safe_page.fill("#reason", f"{verb} for a while")
            click(safe_page, verb, within="dialog")
            sees(safe_page, done)
            sees(safe_page, f"{verb} for a while")
        safe_page.goto(f"{proxy.url}/ui/#/versions/agent/0")
        click(safe_page, "Roll back to …")
        safe_page.fill("#reason", "it was worse")
        click(safe_page, "Roll back to", within="dialog")
        sees(safe_page, "agent@0 is live.")
    assert store.policies.live()["agent"].version == 0


@pytest.mark.browser
def test_rounds_and_alarms_have_pages(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/rounds")
    sees(safe_page, "agent@4 → @5")
    safe_page.goto(f"{console.url}/ui/#/alarms")
    sees(safe_page, "take harder tasks")


@pytest.mark.browser
def test_usage_has_a_page(console: Proxy, safe_page: Page) -> None:
    body = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}
    assert console.http.post("/v1/chat/completions", json=body).status_code == 200
    console.settled()
    safe_page.goto(f"{console.url}/ui/#/usage?days=1")
    sees(safe_page, "Completion tokens")
    sees(safe_page, "no key")
    click(safe_page, "a year")
    sees(safe_page, "Completion tokens")
    assert safe_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.browser
def test_every_page_shows_the_chosen_agent_only(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, safe_page: Page
) -> None:
    with running(scripted[1], store, tmp_path, model="", agents=("mail", "support", HOSTILE_AGENT)) as proxy:
        for agent in ("mail", "support"):
            body = {"model": agent, "messages": [{"role": "user", "content": "hi"}]}
            assert proxy.http.post(f"/t/job-of-{agent}/v1/chat/completions", json=body).status_code == 200
        proxy.settled()
        for agent in ("mail", "support"):
            store.alarms.raise_(f"no_signal:{agent}", f"no variance of {agent}")
            store.trajectories.seal(f"job-of-{agent}", 1e10)
            store.groups.create(f"task of {agent}", agent, [f"job-of-{agent}"], now=1e10)
            round_ = store.rounds.start(agent, 0)
            store.rounds.abandon(round_.id, f"a reason of {agent}")
        safe_page.goto(f"{proxy.url}/ui/")
        chooser = safe_page.locator("#agent")
        expect(chooser.locator("option")).to_have_count(4)
        pages = {"": "no variance of ", "trajectories": "job-of-", "groups": "task of ", "versions": "",
                 "rounds": "a reason of ", "usage": "", "alarms": "no variance of "}  # fmt: skip
        for chosen, other in (("mail", "support"), ("support", "mail")):
            chooser.select_option(chosen)
            for name, text in pages.items():
                safe_page.goto(f"{proxy.url}/ui/#/{name}")
                expect(safe_page.locator("#main")).to_contain_text(text + chosen)
                expect(safe_page.locator("#main")).not_to_contain_text(other)
        safe_page.goto(f"{proxy.url}/ui/#/trajectories?agent=mail")  # a link names its agent
        sees(safe_page, "job-of-mail")
        expect(chooser).to_have_value("mail")
        chooser.select_option("")
        safe_page.goto(f"{proxy.url}/ui/#/trajectories")
        sees(safe_page, "job-of-mail")
        sees(safe_page, "job-of-support")
        chooser.select_option(HOSTILE_AGENT)
        sees(safe_page, "No trajectory matches.")
        assert safe_page.evaluate("window.ranHostile") is None
        safe_page.reload()
        expect(chooser).to_have_value(HOSTILE_AGENT)


@pytest.mark.browser
def test_with_a_single_agent_there_is_nothing_to_choose(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/")
    sees(safe_page, "Yes, it is learning")
    expect(safe_page.locator("#agent")).to_be_hidden()


@pytest.mark.browser
@pytest.mark.slow
def test_the_picture_shows_a_rollback_an_anchor_and_a_ramp(
    browser: Browser, store: Store, store_file: Path, tmp_path: Path
) -> None:
    fill(store, str(store_file), until=time.time() - 60.0)
    assert {policy.version: policy.state for policy in store.policies.all(ALIAS)} == {
        0: "retired", 1: "retired", 2: "holdback", 3: "rejected", 4: "live", 5: "ramp",
    }  # fmt: skip
    (rollback,) = (one for one in store.decisions.decisions_of(ALIAS) if one.action is PolicyAction.ROLLBACK)
    assert (rollback.version, rollback.evidence["shares"]) == (3, {"2": 1.0})
    take(browser, store, ALIAS, tmp_path / "console.png")
    assert 20_000 < (tmp_path / "console.png").stat().st_size < 400_000
