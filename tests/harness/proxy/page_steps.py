"""Steps on a page: wait for a text, click."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect


def sees(page: Page, text: str) -> None:
    """Wait until the page shows a text."""
    expect(page.locator("body")).to_contain_text(text, use_inner_text=True)


def click(page: Page, label: str, within: str = "body") -> None:
    """Click the first button, link or summary whose text starts with the label."""
    found = page.locator(f"{within} :is(button,a,summary)").filter(has_text=re.compile(rf"^\s*{re.escape(label)}"))
    found.first.click()


def decide(page: Page, verb: str, reason: str, *, now: bool = False) -> None:
    """Take a decision about the version of the page; `now`: tick that open trajectories are moved."""
    click(page, f"{verb} …")
    page.fill("#reason", reason)
    if now:
        page.check("dialog [name=now]")
    click(page, verb, within="dialog")
    sees(page, reason)
