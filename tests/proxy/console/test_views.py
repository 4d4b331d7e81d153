"""What the console shows of versions, behavior and tokens, and how an address leads to it, in Chromium."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.harness.proxy.page_steps import click, sees
from tests.harness.proxy.running_proxy import Proxy

pytestmark = pytest.mark.browser


def test_a_point_of_the_curve_lists_the_trajectories_behind_it(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/")
    sees(safe_page, "+0.600 since @0")
    sees(safe_page, "Who waits")
    curve = safe_page.locator(".alias svg.curve")
    curve.press("ArrowLeft")
    curve.press("Enter")
    expect(safe_page).to_have_url(re.compile(r"policy=agent%403&scored=true"))
    sees(safe_page, "40 shown")
    safe_page.select_option("#f-outcome", "unknown_tool")
    sees(safe_page, "4 shown")
    safe_page.fill("#f-min_score", "2")
    click(safe_page, "Show")
    sees(safe_page, "No trajectory matches.")
    safe_page.goto(f"{console.url}/ui/")
    safe_page.locator(".slot-rounds svg.curve").press("Enter")
    expect(safe_page).to_have_url(re.compile("round=rnd_"))
    sees(safe_page, "40 shown")


def test_an_address_shows_the_same_elsewhere(console: Proxy, safe_page: Page) -> None:
    address = f"{console.url}/ui/#/trajectories?role=planner&min_score=0.2"
    safe_page.goto(address)
    sees(safe_page, "No trajectory matches.")
    safe_page.goto(f"{console.url}/ui/#/trajectories?policy=agent%402&outcome=unknown_tool")
    sees(safe_page, "6 shown")
    click(safe_page, "run-2-05")
    expect(safe_page).to_have_url(re.compile(r"trajectories/run-2-05\?policy=agent%402&outcome=unknown_tool"))
    click(safe_page, "Trajectories", within="main")  # back to the same list
    sees(safe_page, "6 shown")


def test_behavior_shows_what_changed_between_versions(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/behavior")
    for text in ("tool calls per trajectory", "invalid tool calls", "search", "250 ms, p95 250 ms"):
        sees(safe_page, text)
    click(safe_page, "The figures as a table")
    sees(safe_page, "25.0%")  # of the tool calls of version 0
    assert safe_page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_transcript_shows_what_training_did_with_each_token(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/trajectories/run-1-03?policy=agent%401")
    safe_page.select_option("#overlay", "mismatch")
    sees(safe_page, "advantage 0.750 · mean mismatch 0.38 nats")
    expect(safe_page).to_have_url(re.compile("tokens=mismatch"))
    tokens = safe_page.locator(".talk .tokens span")
    expect(tokens).to_have_count(2)
    expect(tokens.first).to_have_attribute("title", re.compile("mismatch 0.2500 · advantage 0.750 · carries loss"))
    assert tokens.evaluate_all("all => all.map(one => one.className)") == ["more", "less"]
    safe_page.reload()  # the address names the overlay
    expect(tokens).to_have_count(2)
    safe_page.goto(f"{console.url}/ui/#/trajectories/hostile?tokens=mask")
    sees(safe_page, "not in a round yet")
    assert safe_page.evaluate("window.ranHostile") is None


def test_versions_show_shares_evidence_and_the_loss_that_can_be_found(console: Proxy, safe_page: Page) -> None:
    safe_page.goto(f"{console.url}/ui/#/versions")
    for text in (
        "20% of new trajectories",
        "Evidence of harm 31.5; at 1,000 it is rolled back.",
        "120 of 256 trajectories of the ramp are counted.",
        "0.41 in a day, 0.15 in a week, 0.075 in a month",
        "A full round has 128 trajectories; about 1,024 would suit this traffic: raise trainer.groups_per_round.",
        "<script>",  # the status is text
    ):
        sees(safe_page, text)
    assert safe_page.locator(".timeline rect").count() >= 3
    assert safe_page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    click(safe_page, "@5", within=".served")
    sees(safe_page, "Evidence of harm 31.5")
    assert safe_page.evaluate("window.ranHostile") is None


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
