"""A scripted vLLM with the policy of the small world: its answers depend on the system prompt alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Send

from tests.harness.proxy.scripted_vllm import Json, ScriptedVllm
from tests.harness.proxy.scripts import text_of
from tests.harness.tuner import prompt_world


class PromptedVllm(ScriptedVllm):
    """Answers questions of the small world by the rules in the system prompt, after `seconds`."""

    def __init__(self, seconds: float = 0.0, **given: Any) -> None:
        super().__init__(**given)
        self.seconds = seconds
        self.prompts: list[str] = []  # the system prompt of each call, "" where there was none

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        await asyncio.sleep(self.seconds)
        messages: list[dict[str, Any]] = body["messages"]
        prompt = text_of(messages[0]) if messages[0]["role"] == "system" else ""
        self.prompts.append(prompt)
        reply = prompt_world.answer(prompt, text_of(*(messages[1:] or messages)))
        await super()._answer(body, {**script, "say": reply}, receive, send)
