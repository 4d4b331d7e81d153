"""A scripted vLLM whose answer quality depends on the system prompt, and a judge of its answers."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Receive, Send

from tests.harness.proxy.scripted_vllm import Json, ScriptedVllm


class PromptSensitiveVllm(ScriptedVllm):
    """Answers `good` if the system prompt contains `better`, `awful` if it contains `worse`, else `fair`."""

    async def _answer(self, body: Json, script: Mapping[str, str], receive: Receive, send: Send) -> None:
        result = next((str(m["content"]) for m in body["messages"] if m["role"] in ("system", "developer")), "")
        text = "good" if "better" in result else "awful" if "worse" in result else "fair"
        await super()._answer(body, {**script, "say": text}, receive, send)


_SCORES = {"good": 1.0, "fair": 0.5, "awful": 0.0}


def judged(response: str) -> float:
    """Score such an answer."""
    return _SCORES[response]
