"""A user's own OpenJudge graders: they run in OpenJudge's environment, not in Ratchet's."""

from __future__ import annotations

import asyncio
from typing import Any

from openjudge.graders.base_grader import BaseGrader
from openjudge.graders.schema import GraderError, GraderMode, GraderScore


class Stars(BaseGrader):
    """Counts stars and prints. Some responses make it fail."""

    async def _aevaluate(self, response: str, tool_calls: Any = None, **_: Any) -> Any:
        print("graders may print")
        if response == "raise":
            raise RuntimeError("the grader's own error")
        if response == "error":
            return GraderError(name="stars", error="no model", reason="it did not answer")
        if response == "hang":
            await asyncio.sleep(60)
        return GraderScore(name="stars", score=response.count("*"), reason=f"{len(tool_calls)} tool calls")


class BreaksOff(BaseGrader):
    """Returns the score configured for its own failure."""

    def __init__(self, timeout_score: float = 1.0) -> None:
        super().__init__()
        self.timeout_score = timeout_score

    async def _aevaluate(self, response: str) -> Any:
        return GraderScore(name="breaks off", score=self.timeout_score, reason="Exception occurred")


class Ranks(BaseGrader):
    """Ranks, and gives no scores."""

    def __init__(self) -> None:
        super().__init__(mode=GraderMode.LISTWISE)

    async def _aevaluate(self, **_: Any) -> Any:
        return None
