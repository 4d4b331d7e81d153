"""A scripted vLLM whose answers depend on the messages of each call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import Receive, Send

from tests.harness.proxy.scripted_vllm import ScriptedVllm

Script = Mapping[str, str]
Messages = list[dict[str, Any]]


class Player(ScriptedVllm):
    """`play(messages)` returns the scripted vLLM's directives for each call."""

    def __init__(self, play: Callable[[Messages], Script]) -> None:
        super().__init__()
        self.play = play

    async def _answer(self, body: dict[str, Any], script: Script, receive: Receive, send: Send) -> None:
        played = await asyncio.to_thread(self.play, body["messages"])
        await super()._answer(body, {**script, **played}, receive, send)


def says(text: str) -> Script:
    """An answer of text; the script needs dots for spaces."""
    return {"say": text.replace(" ", ".")}


def calls(tool: str, **arguments: Any) -> Script:
    """An answer with one tool call."""
    return {"tool": tool, "args": json.dumps(arguments).replace(" ", ".")}


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message's text, sent as a string or in parts."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
