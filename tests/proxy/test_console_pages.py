"""The console in Chromium: it shows the store's content, runs none of it, and asks before it acts."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import httpx
import playwright.sync_api
import pytest
from playwright.sync_api import Browser, Page, expect

from ratchet.proxy.api_keys import hash_key, new_key
from ratchet.store.store import Store, open_store
from tests.harness.proxy import console_world
from tests.harness.proxy.browser import PageLog, chromium, find_chromium, watch
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.proxy.conftest import Proxy, Start, running

pytestmark = pytest.mark.browser
_TIMEOUT = 20_000  # milliseconds


@pytest.fixture(scope="module")
def console(
    scripted: tuple[ScriptedVllm, str], migrated: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """A proxy whose store has content for every page."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "store.db").write_bytes(migrated.read_bytes())
    store = open_store(str(folder / "store.db"))
    console_world.fill(store)
    with running(scripted[1], store, folder) as proxy:
        yield proxy
    store.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this file."""
    path, missing = find_chromium()
    if path is None:
        pytest.skip(missing)
    expect.set_options(timeout=_TIMEOUT)
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(chromium(path))
        except playwright.sync_api.Error as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield started


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A tab with a profile of its own."""
    context = browser.new_context()
    context.set_default_timeout(_TIMEOUT)
    yield context.new_page()
    context.close()


@pytest.fixture
def page_log(page: Page) -> PageLog:
    """What the page does."""
    return watch(page)


@pytest.fixture
def safe_page(page: Page, page_log: PageLog) -> Iterator[Page]:
    """A page that must cause no problem."""
    yield page
    assert page_log.problems == []


def sees(page: Page, text: str) -> None:
    """Wait until the page shows a text."""
    expect(page.locator("body")).to_contain_text(text, use_inner_text=True)


def click(page: Page, label: str, within: str = "body") -> None:
    """Click the first button, link or summary whose text starts with the label."""
    found = page.locator(f"{within} :is(button,a,summary)").filter(has_text=re.compile(rf"^\s*{re.escape(label)}"))
    found.first.click()


def test_the_first_page_shows_whether_it_learns(console: Proxy, safe_page: Page, page_log: PageLog) -> None:
    safe_page.goto(f"{console.url}/ui/")
    for text in (
        "Yes, it is learning",
        "live @4",
        "canary @5",
        "3 / 8",
        "4.0 s each · 20 s left",
        "42.67",
        "take harder",
    ):
        sees(safe_page, text)
    sees(safe_page, "agent@5")
    assert safe_page.evaluate("document.querySelectorAll('svg.curve .dot').length") == 5
    assert safe_page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert {httpx.URL(url).netloc for url in page_log.requests} == {httpx.URL(console.url).netloc}


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


def test_the_console_reports_an_unreachable_proxy(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, safe_page: Page
) -> None:
    with running(scripted[1], store, tmp_path) as proxy:
        safe_page.goto(f"{proxy.url}/ui/")
        sees(safe_page, "This proxy")
    safe_page.evaluate("dispatchEvent(new Event('hashchange'))")
    sees(safe_page, "The proxy cannot be reached.")
    sees(safe_page, "unreachable for")


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


def test_filters_and_pages_are_in_the_address(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/trajectories")
    sees(safe_page, "50 shown")
    click(safe_page, "Older")
    expect(safe_page).to_have_url(re.compile("before="))
    sees(safe_page, "Newest")
    safe_page.fill("#f-task", "mail/3")
    safe_page.fill("#f-policy", "agent@2")
    click(safe_page, "Show")
    sees(safe_page, "5 shown")
    assert safe_page.evaluate("[...document.querySelectorAll('td.task')].every(one => one.innerText === 'mail/3')")
    safe_page.select_option("#f-state", "open")
    sees(safe_page, "No trajectory matches.")


def test_feedback_is_given_from_the_page(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/trajectories/run-1-03")
    click(safe_page, "↑ Good")
    safe_page.fill("#comment", "just what I wanted")
    click(safe_page, "Send")
    sees(safe_page, "Recorded.")
    sees(safe_page, "just what I wanted")
    (feedback,) = console.http.get("/api/feedback", params={"trajectory": "run-1-03"}).json()["data"]
    assert (feedback["value"], feedback["comment"]) == (1.0, "just what I wanted")


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


def test_promotion_asks_for_confirmation_first(
    scripted: tuple[ScriptedVllm, str], store: Store, tmp_path: Path, safe_page: Page
) -> None:
    store.policies.register_base("agent", "agent")
    round_ = store.rounds.start("agent", 0)
    store.rounds.commit(round_.id, version=1, checkpoint="c", groups=[], metrics={"reward": 0.5})
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
        (decision,) = store.decisions.decisions_of("agent", 1)
        assert (store.policies.live()["agent"].version, decision.decided_by) == (1, "console")
        safe_page.goto(f"{proxy.url}/ui/#/versions/agent/0")
        click(safe_page, "Roll back …")
        safe_page.fill("#reason", "it was worse")
        click(safe_page, "Roll back to", within="dialog")
        sees(safe_page, "agent@0 is live.")
    assert store.policies.live()["agent"].version == 0


def test_rounds_and_alarms_have_pages(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/rounds")
    sees(safe_page, "agent@4 → @5")
    safe_page.goto(f"{console.url}/ui/#/alarms")
    sees(safe_page, "take harder tasks")
