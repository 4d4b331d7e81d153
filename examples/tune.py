"""Weights are tuned on a task set, if that is shown to help they serve: `python -m examples.tune TASKS BASE_MODEL`."""

import sys
from collections.abc import Mapping
from typing import Any

import openai

import ratchet


async def workflow(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> str:
    """Ask the model."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task["question"]}]
        )
    return answer.choices[0].message.content or ""


def judge(task: Mapping[str, Any], response: str) -> ratchet.Judgement:
    """Compare the answer."""
    return ratchet.Judgement(float(response.strip() == task["answer"]))


def main(tasks: str, base_model: str, rounds: str = "20") -> None:
    """Tune, print the report, and keep the version only if it is not worse than the first one."""
    with ratchet.tune(workflow, judge, tasks, base_model=base_model, rounds=int(rounds)) as run:
        run.wait()
    for point in run.curve():
        print(point["round"], point["version"], point["mean"], point["low"], point["high"])
    print(run.report())
    gain = run.result.gain
    if gain is not None and gain.verdict == "worse":
        print("rolled back to", run.rollback())


if __name__ == "__main__":
    main(*sys.argv[1:])
