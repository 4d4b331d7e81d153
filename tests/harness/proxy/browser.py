"""Chromium for the console's tests, driven by Playwright.

`deploy/browser.sh` sets one up in the environment; CHROMIUM=/path names another one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, Dialog, Page, sync_playwright

_UNPACKED = Path(sys.prefix) / "clients" / "browser" / "unpacked"
_FLAGS = ("--no-sandbox", "--disable-gpu", "--no-zygote", "--disable-dev-shm-usage", "--disable-background-networking")


def find_chromium() -> tuple[Path | None, str]:
    """Return Chromium's path, or None and what is missing."""
    configured = os.environ.get("CHROMIUM")
    path = Path(configured) if configured else _UNPACKED / "chromium"
    if path.exists():
        return path, ""
    if configured:
        return None, f"CHROMIUM is {configured}, which does not exist"
    return None, "no Chromium: `sh deploy/browser.sh .venv` sets one up with npm (Linux x86_64), or set CHROMIUM"


@contextlib.contextmanager
def chromium(path: Path) -> Iterator[Browser]:
    """Run Chromium. Raises playwright's Error if it does not start."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS, env=_environment(path))
        yield browser
        browser.close()


@dataclass
class PageLog:
    """What a page did: `problems` are dialogs, exceptions, console errors, violated policies and missing files."""

    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def watch(page: Page) -> PageLog:
    """Record what a page does from now on."""
    log = PageLog()

    def accept(dialog: Dialog) -> None:
        log.problems.append(f"dialog: {dialog.message}")
        dialog.accept()

    def note_console(kind: str, text: str) -> None:
        if kind in ("error", "assert") and not text.startswith(
            "Failed to load resource"
        ):  # the tests cause 401 and 404
            log.problems.append(f"console: {text}")

    def note_file(url: str, outcome: str) -> None:
        if url.endswith((".js", ".css")) and outcome not in ("200", "304", "net::ERR_ABORTED"):  # left for another page
            log.problems.append(f"file: {url}: {outcome}")

    page.on("dialog", accept)
    page.on("pageerror", lambda error: log.problems.append(f"exception: {error}"))
    page.on("console", lambda message: note_console(message.type, message.text))
    page.on("request", lambda request: log.requests.append(request.url))
    page.on("requestfailed", lambda request: note_file(request.url, str(request.failure)))
    page.on("response", lambda response: note_file(response.url, str(response.status)))
    return log


def _environment(path: Path) -> dict[str, str | float | bool]:
    """Chromium's environment. The unpacked one brings libraries, which are used if the machine lacks some."""
    libraries = path.parent / "al2023" / "lib"
    linked = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
    extra = {"LD_LIBRARY_PATH": str(libraries)} if "not found" in linked and libraries.exists() else {}
    return {**os.environ, **extra}
