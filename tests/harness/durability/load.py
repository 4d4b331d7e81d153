"""Clients that call a proxy continuously and record the outcome of each call.

Some stream, some are slow, some disconnect early, some continue a conversation. Every prompt is unique, so a call that
is stored twice is detected.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from typing import Any

import aiohttp


class DurabilityLoad:
    """Clients on an event loop in a thread. Read the results after `stop`."""

    def __init__(self, url: str, clients: int = 6, seed: int = 1) -> None:
        self.answered: dict[str, str] = {}  # call id -> the complete text that the client received
        self.abandoned: set[str] = set()  # ids of calls whose client disconnected on purpose
        self.broken = 0  # calls whose connection broke
        self.refused: list[str] = []  # error responses
        self._url = url
        self._clients = clients
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Start calling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the calls in progress."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the clients did not stop"

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(*(self._client(session) for _ in range(self._clients)))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        messages: list[dict[str, Any]] = []
        while not self._stop.is_set():
            if len(messages) > 12:
                messages = []
            messages.append({"role": "user", "content": f"{uuid.uuid4()} {self._directive()}"})
            try:
                text = await self._call(session, messages)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                self.broken += not isinstance(error, aiohttp.ClientConnectorError)
                text = None
                await asyncio.sleep(0.02)
            messages = [] if text is None else [*messages, {"role": "assistant", "content": text}]

    def _directive(self) -> str:
        slow = self._random.random()
        return "#tokens=20 #delay=0.01" if slow < 0.2 else "#tokens=200 #delay=0.002" if slow < 0.25 else "#tokens=8"

    async def _call(self, session: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> str | None:
        """Make one call; return the text of a complete answer, or None."""
        streamed = self._random.random() < 0.5
        patience = self._random.uniform(0.005, 0.1) if self._random.random() < 0.05 else None
        body = {"model": "agent", "messages": messages, "stream": streamed}
        async with session.post(self._url + "/v1/chat/completions", json=body) as answer:
            call = answer.headers.get("x-ratchet-call", "")
            if answer.status != 200:
                self.refused.append(f"{answer.status} {(await answer.text())[:200]}")
                return None
            if streamed and patience is not None:
                self.abandoned.add(call)
                await asyncio.sleep(patience)
                return None  # exiting the block closes the connection
            text = _streamed_text(await answer.text()) if streamed else _whole_text(await answer.json())
        if text is None:
            self.broken += 1
        else:
            self.answered[call] = text
        return text


def _whole_text(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def _streamed_text(body: str) -> str | None:
    """Return the text of a stream that was received to its end, or None."""
    if not body.endswith("data: [DONE]\n\n"):
        return None
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
    if any("error" in event for event in events):
        return None
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
