"""Takes docs/images/console.png: the overview, and the time line of versions, of one agent.

    python -m tests.harness.proxy.console_picture FILE [--store STORE --alias ALIAS]

Without --store, five days of simulated traffic go through the real release controller (`simulated_releases.py`).
"""

from __future__ import annotations

import argparse
import base64
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, Page

from ratchet.store.store import Store, open_store
from tests.harness.proxy.browser import chromium, find_chromium
from tests.harness.proxy.page_steps import sees
from tests.harness.proxy.running_proxy import running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served
from tests.harness.proxy.simulated_releases import ALIAS, fill

_WIDTH = 1180  # CSS pixels
_STACKED = (
    "<body style='margin:0;padding:14px;background:#f6f7f9;display:grid;gap:14px'>{}</body>",
    "<img style='width:100%;display:block' src='data:image/png;base64,{}'>",
)


def take(browser: Browser, store: Store, alias: str, file: Path) -> None:
    """Take the picture from a store."""
    with (
        tempfile.TemporaryDirectory() as folder,
        served(ScriptedVllm()) as vllm,
        running(vllm, store, Path(folder), ready=False, model=alias) as proxy,
    ):
        page = browser.new_page(viewport={"width": _WIDTH, "height": 900}, color_scheme="light")
        parts = [_overview(page, proxy.url), _versions(page, proxy.url)]
        outer, image = _STACKED
        whole = browser.new_page(viewport={"width": _WIDTH, "height": 900})
        whole.set_content(outer.format("".join(image.format(base64.b64encode(part).decode()) for part in parts)))
        whole.locator("body").screenshot(path=file)


def _overview(page: Page, url: str) -> bytes:
    page.goto(f"{url}/ui/")
    sees(page, "click to list them")
    # Only what tells whether it learns: the rest of the card is tiles, tables, progress and decisions.
    page.evaluate("document.querySelectorAll('.alias > :not(header, figure)').forEach(one => one.remove())")
    return page.locator(".alias").first.screenshot()


def _versions(page: Page, url: str) -> bytes:
    page.goto(f"{url}/ui/#/versions")
    sees(page, "a dot for each decision")
    page.evaluate("document.querySelectorAll('.card .scroll').forEach(one => one.remove())")
    return page.locator("main .card").first.screenshot()


def main() -> None:
    """Parse the command line and take the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--store", help="store of a run; without it, one is simulated")
    parser.add_argument("--alias", default=ALIAS, help="agent that is shown")
    chosen = parser.parse_args()
    path, missing = find_chromium()
    if path is None:
        raise SystemExit(missing)
    with tempfile.TemporaryDirectory() as folder, chromium(path) as browser:
        url = chosen.store or str(Path(folder) / "store.db")
        store = open_store(url, create=not chosen.store)
        if not chosen.store:
            fill(store, url, until=time.time() - 60.0)
        take(browser, store, chosen.alias, chosen.file)
        store.close()


if __name__ == "__main__":
    main()
