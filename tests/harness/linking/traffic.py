"""Agents of the linking campaign: they call a proxy as SDKs do and record the true parent of each call.

A call carries its label in `x-ratchet-role`, which linking ignores; the label identifies the stored call.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ratchet.store.content.messages import link_keys
from tests.harness.linking.score import TrueCall

Json = dict[str, Any]
Message = dict[str, Any]

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("search", "delegate")
]


@dataclass
class LinkingTraffic:
    """The URLs of the proxies, which take turns and which a restart changes, and the calls made so far."""

    urls: Sequence[str]
    session: aiohttp.ClientSession
    rng: random.Random
    truths: list[TrueCall] = field(default_factory=list)
    sent: int = 0
    in_flight: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)  # cleared while the proxy restarts

    def run(self, kind: str, name: object, key: str = "k") -> AgentRun:
        """Return an agent."""
        return AgentRun(self, kind, str(name), key)


@dataclass
class Reply:
    """An answer: its call's label, the messages of its choices, and the body."""

    label: str
    messages: list[Message]
    body: Json

    @property
    def message(self) -> Message:
        """The first choice."""
        return self.messages[0]


@dataclass
class AgentRun:
    """One agent with its sub-agents: the calls that belong in one trajectory."""

    traffic: LinkingTraffic
    kind: str
    name: str
    key: str
    turns: int = 0

    async def chat(self, messages: Sequence[Message], before: str | None = None, **more: Any) -> Reply:
        """Call Chat Completions, sometimes streamed; retry 503, as the SDKs do."""
        request: Json = {"model": "agent", "messages": copy.deepcopy(list(messages)), "tools": TOOLS, **more}
        if self.traffic.rng.random() < 0.3 and "n" not in more:
            request["stream"] = True
        return await self.call("/v1/chat/completions", request, before)

    async def call(
        self, path: str, body: Json, before: str | None = None, choice: int = 0, retry: int = 0, timeout: float = 30.0
    ) -> Reply:
        """Make a call with the SDK's retries; `before` is the label of the call whose answer it continues."""
        for again in range(retry, retry + 8):
            label = self.record(body, before, choice)
            headers = self.headers(label) | {"x-stainless-retry-count": str(again)}
            answer = await self._once(path, body, headers, timeout)
            if answer is not None:
                return Reply(label, messages_of(answer), answer)
            await asyncio.sleep(0.02)
        raise RuntimeError(f"{self.kind}: no answer after 8 attempts")

    async def abandon(self, path: str, body: Json, before: str | None = None, after: float = 0.3) -> str:
        """Make a call and disconnect before the answer; return its label."""
        label = self.record(body, before, 0, abandoned=True)
        with contextlib.suppress(TimeoutError):
            await self._once(path, body, self.headers(label), after)
        return label

    def record(self, body: Json, before: str | None, choice: int, *, abandoned: bool = False) -> str:
        """Record the true parent of a call; return its label."""
        label = f"call {len(self.traffic.truths)}"
        alike = f"{self.key} {link_keys(body.get('messages', ()))[-1:]}"
        self.traffic.truths.append(TrueCall(label, self.kind, self.name, before, choice, alike, self.turns, abandoned))
        self.turns += 1
        return label

    def headers(self, label: str) -> dict[str, str]:
        """Return the headers of a call."""
        return {"x-ratchet-role": label, "authorization": f"Bearer {self.key}"}

    async def _once(self, path: str, body: Json, headers: dict[str, str], timeout: float) -> Json | None:
        await self.traffic.open.wait()  # a restart may take longer than the timeout
        self.traffic.in_flight += 1
        try:
            return await asyncio.wait_for(self._sent(path, body, headers), timeout)
        finally:
            self.traffic.in_flight -= 1

    async def _sent(self, path: str, body: Json, headers: dict[str, str]) -> Json | None:
        self.traffic.sent += 1
        url = self.traffic.urls[self.traffic.sent % len(self.traffic.urls)]
        async with self.traffic.session.post(url + path, json=body, headers=headers) as answer:
            if answer.status == 503:
                return None
            assert answer.status == 200, await answer.text()
            if body.get("stream"):
                return merged((await answer.read()).decode())
            body_json: Json = await answer.json()
            return body_json


def messages_of(answer: Json) -> list[Message]:
    """Return the messages of a chat answer; empty for other dialects."""
    return [choice["message"] for choice in answer.get("choices", ()) if "message" in choice]


def merged(stream: str) -> Json:
    """Merge a stream of chunks as the SDKs do."""
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, Json] = {}
    for line in stream.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            message["content"] = (message["content"] or "") + (delta.get("content") or "") or None
            for part in delta.get("tool_calls") or ():
                empty: Json = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part["index"], empty)
                call["id"] = part.get("id") or call["id"]
                call["function"]["name"] += part["function"].get("name") or ""
                call["function"]["arguments"] += part["function"].get("arguments") or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {"choices": [{"message": message}]}


def user(text: str) -> Message:
    """A user's message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def results(message: Message, text: str = "nothing found") -> list[Message]:
    """A result for each tool call of a message; `text` may hold a directive for the scripted model."""
    calls = message.get("tool_calls") or ()
    return [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]


def say(words: str) -> str:
    """The directive that makes the scripted model say this; no full stops, hashes or line breaks."""
    return "#say=" + words.replace(" ", ".")


def echoed(message: Message, rng: random.Random) -> Message:
    """Return the message as some framework sends it back."""
    back: Message = {name: value for name, value in message.items() if value is not None}
    text = back.get("content")
    if isinstance(text, str):
        styles: list[Any] = [text, text + "\n", text.strip(), [{"type": "text", "text": text}]]
        back["content"] = rng.choice(styles)
    else:
        empty: list[Any] = [None, "", []]
        back["content"] = rng.choice(empty)
        if rng.random() < 0.5:
            del back["content"]
    if rng.random() < 0.5:
        back["refusal"] = None
    if rng.random() < 0.5:
        back.pop("reasoning", None)
    if rng.random() < 0.3:
        back |= {"name": "agent", "provider_specific_fields": {"refusal": None}, "annotations": []}
    if calls := back.get("tool_calls"):
        back["tool_calls"] = [_respaced(call, rng) for call in calls]
    elif rng.random() < 0.3:
        back["tool_calls"] = None
    return back


def _respaced(call: Json, rng: random.Random) -> Json:
    arguments = json.loads(call["function"]["arguments"])
    names = rng.sample(sorted(arguments), len(arguments))
    separators = rng.choice([(",", ":"), (", ", ": "), (" , ", " : ")])
    text = json.dumps({name: arguments[name] for name in names}, separators=separators)
    return {**call, "index": 0, "function": {**call["function"], "arguments": text}}
