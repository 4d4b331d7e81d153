"""A workflow and a judge, tried on two tasks before anything is started: `python -m examples.try_out TASKS URL`."""

import sys
from collections.abc import Mapping
from typing import Any

import openai

import ratchet


async def workflow(task: Mapping[str, Any], base_url: str, api_key: str, model: str) -> ratchet.WorkflowOutput:
    """Ask the model."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": task["question"]}]
        )
    text = answer.choices[0].message.content or ""
    return ratchet.WorkflowOutput(text, metrics={"characters": len(text)})


def judge(task: Mapping[str, Any], response: str) -> ratchet.Judgement:
    """Compare the answer."""
    right = response.strip() == task["answer"]
    return ratchet.Judgement(float(right), explanation=f"the right answer is {task['answer']}")


def main(source: str, base_url: str) -> None:
    """Print the score of one attempt at each of two tasks."""
    for task in ratchet.Tasks(source, split="train").preview(2):
        tried = ratchet.try_out(workflow, judge, task, base_url=base_url)
        print(tried.judgement.score, tried.output.response, tried.judgement.explanation, sep="  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
