"""Own rollouts of scenarios, scored by RULER and trained: `python -m examples.gather_and_train FILE JUDGE_URL`."""

import random
import sys
from collections.abc import Mapping
from typing import Any

import openai

import ratchet

SCENARIOS_PER_STEP = 8


async def rollout(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> str:
    """One attempt: any agent that calls this base URL."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task["question"]}]
        )
    return answer.choices[0].message.content or ""


def main(source: str, judge_url: str, judge_model: str = "big-judge", steps: str = "3") -> None:
    """Train a version in each step, from the rollouts of the version before."""
    ruler = {"kind": "ruler", "base_url": judge_url, "model": judge_model}
    scenarios = list(ratchet.Tasks(source, split="train"))
    with ratchet.services():  # the running project, or one that is started for this block
        for step in range(int(steps)):
            some = random.Random(step).sample(scenarios, min(SCENARIOS_PER_STEP, len(scenarios)))
            groups = ratchet.gather(rollout, some, ruler, attempts=4, step=step)
            trained = ratchet.train(groups)
            print(trained.name, trained.state, trained.left_out)


if __name__ == "__main__":
    main(*sys.argv[1:])
