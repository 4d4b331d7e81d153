"""Decisions that a person takes in the console, in Chromium: each is carried out, and shown with its evidence."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from ratchet.store.states import PolicyState
from ratchet.store.store import Store
from tests.harness.proxy.page_steps import click, decide, sees
from tests.harness.proxy.running_proxy import Proxy, Start
from tests.harness.proxy.servers import eventually
from tests.harness.records import commit_round

pytestmark = pytest.mark.browser
KNOWN = {"harm": 31.5, "streams": {"score": 30.0, "finished": 1.5}, "enough": 1000.0, "counted": 7, "ramp_length": 256}
BODY = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def guarded(start: Start, store: Store) -> Proxy:
    """A proxy with version 0 live, version 1 in its ramp with evidence, and version 2 a candidate."""
    store.policies.register_base("agent", "agent")
    for version in (1, 2):
        commit_round(store, "agent", version, checkpoint=f"c{version}", metrics={"reward": 0.5})
    store.policies.start_ramp("agent", 1, 0.45)
    store.releases.record_evidence("agent", 1, KNOWN)
    return start()


def newest_decision(page: Page) -> Locator:
    """Return the newest decision that the page shows, with its evidence opened."""
    found = page.locator(".decision").first
    found.locator("summary").click()
    return found


def begin_on(proxy: Proxy, version: int) -> str:
    """Begin trajectories until one draws this version; return its name."""
    for number in range(200):
        if ask(proxy, f"run-{number}") == f"agent@{version}":
            return f"run-{number}"
    raise AssertionError(f"no trajectory of 200 drew version {version}")


def ask(proxy: Proxy, name: str) -> Any:
    """Send a call of a trajectory; return the policy that answered."""
    return proxy.http.post(f"/t/{name}/v1/chat/completions", json=BODY).headers["x-ratchet-policy"]


def test_a_held_version_waits_for_a_person_and_its_evidence_is_kept(
    guarded: Proxy, store: Store, safe_page: Page
) -> None:
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/1")
    decide(safe_page, "Hold", "until legal has read it")
    sees(safe_page, "agent@1 is held.")
    expect(newest_decision(safe_page)).to_contain_text("Evidence of harm 31.5; at 1,000 it is rolled back.")
    expect(safe_page.locator(".decision").first).to_contain_text('"counted": 7')
    assert store.policies.get("agent", 1).state is PolicyState.RAMP
    safe_page.goto(f"{guarded.url}/ui/")
    sees(safe_page, "@1 awaits approval")
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/1")
    decide(safe_page, "Promote", "legal has read it")
    sees(safe_page, "agent@1 is live.")
    expect(newest_decision(safe_page)).to_contain_text("Shares of new trajectories after it: @0 10%, @1 90%.")
    expect(safe_page.locator(".decision").first).to_contain_text("Evidence of harm 31.5")


def test_a_version_in_its_ramp_is_rejected_and_its_open_trajectories_move_at_once(
    guarded: Proxy, store: Store, safe_page: Page
) -> None:
    eventually(lambda: begin_on(guarded, 1) != "")
    moved = begin_on(guarded, 1)
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/1")
    click(safe_page, "Reject …")
    sees(safe_page, "The live version stays. This rejects @1, @2.")
    click(safe_page, "Cancel")
    decide(safe_page, "Reject", "it deletes mails", now=True)
    sees(safe_page, "agent@1 is rejected.")
    shown = newest_decision(safe_page)
    for text in (
        "Shares of new trajectories after it: @0 100%.",
        "went on with the live one",
        "harm 31.5",
        '"now": true',
    ):
        expect(shown).to_contain_text(text)
    assert [policy.state for policy in store.policies.all("agent")] == ["live", "rejected", "rejected"]
    eventually(lambda: ask(guarded, moved) == "agent@0")
    guarded.settled()
    assert store.trajectories.get(f"{moved}~1").purpose == "moved"
    safe_page.goto(f"{guarded.url}/ui/#/versions")
    sees(safe_page, "it deletes mails")
    titles = safe_page.locator(".timeline g > title").all_text_contents()
    assert any(re.match(r"@0: 100% for ", title) for title in titles), titles


def test_a_rollback_without_now_can_be_followed_by_one_that_moves_what_is_open(
    guarded: Proxy, store: Store, safe_page: Page
) -> None:
    store.policies.promote("agent", 1, {}, holdback=0.1)
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/0")
    decide(safe_page, "Roll back to", "it was worse")
    sees(safe_page, "agent@0 is live.")
    expect(newest_decision(safe_page)).to_contain_text("Shares of new trajectories after it: @0 100%.")
    assert store.policies.get("agent", 1).recalled_at is None
    click(safe_page, "Roll back to …")
    sees(safe_page, "The later versions are rejected already: tick Now")
    safe_page.fill("#reason", "it deletes mails")
    safe_page.check("dialog [name=now]")
    click(safe_page, "Roll back to", within="dialog")
    expect(safe_page.get_by_role("button", name="Roll back to")).to_have_count(0)
    assert store.policies.get("agent", 1).recalled_at is not None
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/1")
    sees(safe_page, "it deletes mails")


def test_while_a_version_is_pinned_nothing_else_can_be_decided(guarded: Proxy, store: Store, safe_page: Page) -> None:
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/0")
    decide(safe_page, "Pin", "the fair is on")
    sees(safe_page, "agent@0 is pinned.")
    expect(newest_decision(safe_page)).to_contain_text("Shares of new trajectories after it: @0 100%.")
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/2")
    sees(safe_page, "candidate")
    expect(safe_page.locator(".actions button")).to_have_count(0)
    safe_page.goto(f"{guarded.url}/ui/#/versions")
    sees(safe_page, "by console: the fair is on")
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/0")
    decide(safe_page, "Unpin", "the fair is over")
    sees(safe_page, "agent@0 is no longer pinned.")
    expect(newest_decision(safe_page)).to_contain_text('"shares"')
    assert store.policies.get("agent", 0).pinned_at is None


def test_a_decision_that_the_store_refuses_is_an_error_on_the_page(
    guarded: Proxy, store: Store, safe_page: Page
) -> None:
    safe_page.goto(f"{guarded.url}/ui/#/versions/agent/2")
    sees(safe_page, "candidate")
    store.policies.reject("agent", 2, {}, by="anna", reason="rude")
    click(safe_page, "Hold …")
    safe_page.fill("#reason", "wait")
    click(safe_page, "Hold", within="dialog")
    sees(safe_page, "agent@2 is rejected, and only a candidate or a version in its ramp can be held")
