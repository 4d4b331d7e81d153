"""Clients that call a proxy until they are told to stop, and remember what each call came to.

Some stream, some do not, some are slow, some leave before the end, some carry a conversation on. Every prompt is
unlike any other, so that a call that is stored twice shows.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from typing import Any

import aiohttp


class Load:
    """Clients in a thread with an event loop of its own. Read the results after `stop`."""

    def __init__(self, url: str, clients: int = 6, seed: int = 1) -> None:
        self.answered: dict[str, str] = {}  # call id -> the words that the client has seen, whole
        self.left: set[str] = set()  # calls that their client did not wait for
        self.broken = 0  # calls that ended with their connection
        self.refused: list[str] = []  # answers that say that the call failed
        self._url = url
        self._clients = clients
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def stop(self) -> None:
        """End; calls under way are waited for."""
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the clients do not end"

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
                words = await self._call(session, messages)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                self.broken += not isinstance(error, aiohttp.ClientConnectorError)
                words = None
                await asyncio.sleep(0.02)
            messages = [] if words is None else [*messages, {"role": "assistant", "content": words}]

    def _directive(self) -> str:
        slow = self._random.random()
        return "#tokens=20 #delay=0.01" if slow < 0.2 else "#tokens=200 #delay=0.002" if slow < 0.25 else "#tokens=8"

    async def _call(self, session: aiohttp.ClientSession, messages: list[dict[str, Any]]) -> str | None:
        """Make one call; return the words of a whole answer."""
        streamed = self._random.random() < 0.5
        patience = self._random.uniform(0.005, 0.1) if self._random.random() < 0.05 else None
        body = {"model": "agent", "messages": messages, "stream": streamed}
        async with session.post(self._url + "/v1/chat/completions", json=body) as answer:
            call = answer.headers.get("x-ratchet-call", "")
            if answer.status != 200:
                self.refused.append(f"{answer.status} {(await answer.text())[:200]}")
                return None
            if streamed and patience is not None:
                self.left.add(call)
                await asyncio.sleep(patience)
                return None  # leaving the block closes the connection
            words = _streamed(await answer.text()) if streamed else _whole(await answer.json())
        if words is None:
            self.broken += 1
        else:
            self.answered[call] = words
        return words


def _whole(answer: Any) -> str:
    words: str = answer["choices"][0]["message"]["content"]
    return words


def _streamed(text: str) -> str | None:
    """Return the words of a stream that came to its end."""
    if not text.endswith("data: [DONE]\n\n"):
        return None
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if any("error" in event for event in events):
        return None
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
