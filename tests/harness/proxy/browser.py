"""A real Chromium for tests, driven over a pipe (the DevTools protocol); it notes everything that a page should not do.

`deploy/browser.sh` sets one up; CHROMIUM=/path names another one. No package is needed to drive it.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HOME = Path(sys.prefix) / "clients" / "browser" / "unpacked"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-zygote", "--disable-dev-shm-usage", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-pipe", "--hide-scrollbars",
)  # fmt: skip
_PATIENCE = 20.0


def program() -> tuple[Path | None, str]:
    """Return where Chromium is, or None and what is missing."""
    named = os.environ.get("CHROMIUM")
    found = Path(named) if named else _HOME / "chromium"
    if found.exists():
        return found, ""
    if named:
        return None, f"CHROMIUM names {named}, which is not there"
    return None, "no Chromium: `sh deploy/browser.sh .venv` sets one up with npm (Linux x86_64), CHROMIUM names another"


class BrowserFailed(Exception):
    """Chromium ended, or did not answer."""


class Page:
    """One tab. `heard` is what it should never do: dialogs, policy violations, errors in its console."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self.session = session
        self.target = target
        self.heard: list[str] = []
        self.requests: list[str] = []

    def send(self, method: str, **parameters: Any) -> Any:
        """Ask the tab for something of the protocol; return its answer."""
        return self._browser.send(method, self.session, **parameters)

    def js(self, expression: str) -> Any:
        """Return what an expression (or a promise of it) comes to in the page."""
        told = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(told["exceptionDetails"].get("exception", {}).get("description", told))
        return told["result"].get("value")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.send("Page.navigate", url=url)

    def until(self, expression: str) -> Any:
        """Return the expression's first true value; fail with what the page shows where there is none in time."""
        until = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(AssertionError):  # the page may be on its way to another
                if value := self.js(expression):
                    return value
            if time.monotonic() > until:
                raise AssertionError(f"never true: {expression}\n{self.text()}\n{self.heard}")
            self._browser.listen(0.02)

    def sees(self, text: str) -> None:
        """Wait until the page shows a text."""
        self.until(f"document.body && document.body.innerText.includes({json.dumps(text)})")

    def text(self) -> str:
        """What the page shows."""
        return str(self.js("document.body ? document.body.innerText : ''"))

    def click(self, label: str, within: str = "body") -> None:
        """Click the button, link or summary whose words begin so."""
        said = f"[...document.querySelectorAll({json.dumps(within)} + ' :is(button,a,summary)')]"
        found = f"{said}.find(one => one.innerText.trim().startsWith({json.dumps(label)}))"
        self.until(found + " !== undefined")
        self.js(f"{found}.click()")

    def fill(self, selector: str, value: str) -> None:
        """Write into a field, as if typed."""
        self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        self.js(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f" field.value = {json.dumps(value)};"
            " field.dispatchEvent(new Event('input', {bubbles: true}));"
            " field.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def size(self, width: int, height: int, dark: bool = False) -> None:
        """Be a window of this size, light or dark."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what the page looks like as PNG."""
        told = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def note(self, method: str, said: dict[str, Any]) -> None:
        """Hear of an event."""
        if method == "Page.javascriptDialogOpening":
            self.heard.append(f"dialog: {said['message']}")
            self._browser.post("Page.handleJavaScriptDialog", self.session, accept=True)
        elif method == "Runtime.exceptionThrown":
            self.heard.append(f"exception: {said['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.heard.append(f"console: {said['args']}")
        elif method == "Log.entryAdded" and said["entry"]["source"] != "network":
            self.heard.append(f"log: {said['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])


class Browser:
    """A running Chromium."""

    def __init__(self, chromium: Path, folder: Path) -> None:
        mine, theirs = os.pipe(), os.pipe()
        log = (folder / "chromium.log").open("wb")
        # Chromium reads what it is asked from 3 and answers on 4; another program may hold those here.
        reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (mine[0], theirs[1]))
        os.close(mine[0])
        os.close(theirs[1])
        start = f"import os, sys; os.dup2({reading}, 3); os.dup2({writing}, 4); os.execv(sys.argv[1], sys.argv[1:])"
        arguments = [str(chromium), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        command = [sys.executable, "-S", "-c", start, *arguments]
        self._process = subprocess.Popen(
            command, pass_fds=(reading, writing), stdout=log, stderr=log, env=_environment(chromium)
        )
        log.close()
        os.close(reading)
        os.close(writing)
        self._out, self._in = mine[1], theirs[0]
        self._rest = b""
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}
        try:
            self.send("Browser.getVersion")
        except BrowserFailed as failed:
            self.end()
            raise BrowserFailed(f"{failed}: {(folder / 'chromium.log').read_text(errors='replace')[-2000:]}") from None

    def page(self) -> Page:
        """A fresh tab of a fresh profile: no key, no cache of an earlier one."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        return page

    def post(self, method: str, session: str | None = None, **parameters: Any) -> int:
        """Ask for something without waiting."""
        name = next(self._ids)
        told = {"id": name, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(told).encode() + b"\0")
        return name

    def send(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """Ask for something; return the answer. Raises BrowserFailed."""
        name = self.post(method, session, **parameters)
        until = time.monotonic() + _PATIENCE
        while name not in self._answers:
            if time.monotonic() > until:
                raise BrowserFailed(f"{method}: no answer")
            self.listen(0.5)
        told = self._answers.pop(name)
        if "error" in told:
            raise BrowserFailed(f"{method}: {told['error']}")
        return told["result"]

    def listen(self, seconds: float) -> None:
        """Take what has come, waiting for so long."""
        if not select.select([self._in], [], [], seconds)[0]:
            return
        read = os.read(self._in, 1 << 20)
        if not read:
            raise BrowserFailed("Chromium has ended")
        *whole, self._rest = (self._rest + read).split(b"\0")
        for text in whole:
            told = json.loads(text)
            if "id" in told:
                self._answers[told["id"]] = told
            elif page := self._pages.get(told.get("sessionId", "")):
                page.note(told["method"], told["params"])

    def end(self) -> None:
        """Close it."""
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        os.close(self._out)
        os.close(self._in)


def _environment(chromium: Path) -> dict[str, str]:
    """The variables of Chromium: where it stands beside libraries of its own, those are found after the machine's."""
    own = chromium.parent / "al2023" / "lib"
    told = subprocess.run(["ldd", str(chromium)], capture_output=True, text=True, check=False).stdout
    more = {"LD_LIBRARY_PATH": str(own)} if "not found" in told and own.exists() else {}
    return {**os.environ, **more}
