"""The picture of the console in the documents: its simulated releases, and how it is taken."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from ratchet.store.states import PolicyAction
from ratchet.store.store import Store
from tests.harness.proxy.console_picture import take
from tests.harness.proxy.simulated_releases import ALIAS, fill

pytestmark = [pytest.mark.browser, pytest.mark.slow]


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
