"""One Chromium, and one proxy whose store has content for every page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import playwright.sync_api
import pytest
from playwright.sync_api import Browser, Page, expect

from ratchet.store.store import open_store
from tests.harness.proxy import console_world
from tests.harness.proxy.browser import PageLog, chromium, find_chromium, watch
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm

_TIMEOUT = 20_000  # milliseconds


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of this folder."""
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
