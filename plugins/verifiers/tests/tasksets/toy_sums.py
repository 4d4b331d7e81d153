"""A taskset of the package verifiers, whose prompts tell the scripted vLLM what to answer; found as `toy_sums`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

RIGHT, WRONG, REFUSED, UNSCORED, ENDED = "right", "wrong", "refused", "unscored", "ended"
PROMPTS = {
    RIGHT: "What is 2 + 2? #say=4",
    WRONG: "What is 2 + 3? #say=4",
    REFUSED: "What is 3 + 3? #status=500",
    UNSCORED: "What is 3 + 4? #say=7",
    ENDED: "What is 4 + 4? #say=8",
}
ANSWERS = {RIGHT: "4", WRONG: "5", REFUSED: "6", UNSCORED: "7", ENDED: "8"}


class Sum(vf.TaskData):
    """A sum."""

    answer: str


class SumTask(vf.Task[Sum]):
    """Half of the reward for the form, half for the answer."""

    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if self.data.name == UNSCORED:
            raise RuntimeError("the grader is down")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def number(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdigit())

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumTasksetConfig(vf.TasksetConfig):
    """How many tasks there are."""

    endless: bool = False


class SumTaskset(vf.Taskset[SumTask, SumTasksetConfig]):
    """Five sums, or the same ones for ever."""

    def __init__(self, config: SumTasksetConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.endless

    def load(self) -> Iterator[SumTask]:
        print("not part of the answer")
        while True:
            for name, prompt in PROMPTS.items():
                yield SumTask(Sum(name=name, prompt=prompt, answer=ANSWERS[name]), self.config.task)
            if not self.config.endless:
                break


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    """One call for each message of the user, in this process."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> ProgramResult:
        if data.name == ENDED:
            return ProgramResult(3, "", "the program of the harness ended")
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            given = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt
            messages = [message.model_dump(include={"role", "content"}) for message in given]
            await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=8)
        return ProgramResult(0, "", "")


__all__ = ["OneQuestion", "SumTaskset"]
