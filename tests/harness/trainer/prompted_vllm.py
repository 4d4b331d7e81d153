"""A scripted vLLM whose answers are as good as its system prompt: `good` where that holds the word, else `bad`."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Send

from tests.harness.proxy.scripted_vllm import Json, ScriptedVllm


class PromptSensitiveVllm(ScriptedVllm):
    """Says `good` under a system prompt that holds `better`, `awful` under one that holds `worse`, else `fair`."""

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        result = next((str(m["content"]) for m in body["messages"] if m["role"] in ("system", "developer")), "")
        text = "good" if "better" in result else "awful" if "worse" in result else "fair"
        await super()._answer(body, {**script, "say": text}, receive, send)


_SCORES = {"good": 1.0, "fair": 0.5, "awful": 0.0}


def judged(response: str) -> float:
    """The judge of such answers."""
    return _SCORES[response]
