"""The result of one check of `ratchet doctor`, with a remedy if it failed, and what several checks share.

The state of what runs is that of `up`, empty if no project is up. With --proxy and no project it has `base_url` alone:
the services were started separately, and checks that need more of them are skipped.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from ratchet.settings.project_settings import Settings

PATIENCE = 600.0  # seconds for one answer of vLLM: a CPU that decodes a real model with several adapters takes minutes
NO_PROJECT = "start the project with `ratchet up --detach`, then run `ratchet doctor` again"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One result: the observation, or the reason of the failure and the remedy; skipped: why it was not checked."""

    name: str
    passed: bool
    seen: str
    remedy: str = ""
    skipped: bool = False

    @property
    def failed(self) -> bool:
        """Whether it was checked and did not pass."""
        return not (self.passed or self.skipped)

    def line(self) -> str:
        verdict = "FAIL" if self.failed else "skip" if self.skipped else "pass"
        return f"{verdict}  {self.name:<9} {self.seen}" + (f"\n      remedy: {self.remedy}" if self.remedy else "")


def no_project(name: str, running: Mapping[str, Any]) -> CheckResult:
    """Return the result of a check that needs a project, which is not up; skipped if services run without one."""
    if running:
        return CheckResult(name, False, "not checked: needs a project started by `ratchet up`", skipped=True)
    return CheckResult(name, False, "not checked: no project is up", NO_PROJECT)


def see_log(settings: Settings, service: str) -> str:
    return f"look at {settings.state.log(service)}"


def call_proxy(method: str, url: str, seconds: float, **request: Any) -> httpx.Response:
    """Send one request with this machine's certificates, past any HTTP_PROXY."""
    return httpx.request(method, url, timeout=seconds, trust_env=False, verify=ssl.create_default_context(), **request)
