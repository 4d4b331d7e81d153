"""Agents that go on through failures as SDKs do: they send a call again until it is answered."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from tests.harness.linking.traffic import AgentRun, Json, LinkingTraffic, Reply, merged, messages_of

_PATIENCE_SECONDS = 240.0  # with one call: longer than any fault
_MAX_WAIT = 2.0


class CallRefused(Exception):
    """The proxy refused a call that is right."""


@dataclass
class FailureTraffic(LinkingTraffic):
    """The calls made so far, those that were answered whole by label, and the errors that clients saw, by kind."""

    answered: dict[str, str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0

    def run(self, kind: str, name: object, key: str = "k") -> AgentRun:
        """Return an agent."""
        return PersistentRun(self, kind, str(name), key)


@dataclass
class PersistentRun(AgentRun):
    """An agent that repeats a call until it is answered."""

    traffic: FailureTraffic

    async def call(
        self, path: str, body: Json, before: str | None = None, choice: int = 0, retry: int = 0, timeout: float = 30.0
    ) -> Reply:
        """Make a call; repeat it with the SDKs' header. Raises CallRefused."""
        until, wait, again = time.monotonic() + _PATIENCE_SECONDS, 0.05, retry
        while time.monotonic() < until:
            label = self.record(body, before, choice)
            headers = self.headers(label) | {"x-stainless-retry-count": str(again)}
            try:
                answer = await self._once(path, body, headers, timeout)
            except TimeoutError:
                self.traffic.errors["time-out"] += 1
                answer = None
            if answer is not None:
                return Reply(label, messages_of(answer), answer)
            await asyncio.sleep(wait)
            wait, again = min(2 * wait, _MAX_WAIT), again + 1
        self.traffic.refused.append(f"{self.kind}: a call was not answered in {_PATIENCE_SECONDS:g} s")
        raise CallRefused

    async def _sent(self, path: str, body: Json, headers: dict[str, str]) -> Json | None:
        traffic, started = self.traffic, time.monotonic()
        traffic.sent += 1
        url = traffic.urls[traffic.sent % len(traffic.urls)]
        try:
            async with traffic.session.post(url + path, json=body, headers=headers) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            if not isinstance(error, TimeoutError):
                traffic.errors[type(error).__name__] += 1
                return None
            raise
        if answer.status != 200:
            traffic.errors[str(answer.status)] += 1
            if answer.status < 500:
                traffic.refused.append(f"{self.kind}: {answer.status} {text[:200]}")
                raise CallRefused
            return None
        if body.get("stream") and (not text.endswith("data: [DONE]\n\n") or '"error"' in text):
            traffic.errors["broken stream"] += 1
            return None
        traffic.answered[headers["x-ratchet-role"]] = answer.headers["x-ratchet-call"]
        traffic.slowest_seconds = max(traffic.slowest_seconds, time.monotonic() - started)
        whole: Json = merged(text) if body.get("stream") else json.loads(text)
        return whole
