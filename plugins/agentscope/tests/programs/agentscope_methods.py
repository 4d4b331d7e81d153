"""Model selection and prompt tuning by AgentScope's arguments: `agentscope_methods.py select|prompt [REFLECTION_URL]`.

It runs in the folder of a project whose proxy runs, and prints the result as JSON.
"""

import asyncio
import json
import sys
from typing import Any

import agentscope
from agentscope.message import Msg
from agentscope.model import ChatModelBase, OpenAIChatModel

from ratchet.agentscope import DatasetConfig, JudgeOutput, PromptTuneConfig, WorkflowOutput, select_model, tune_prompt

MAJOR = int(agentscope.__version__.split(".")[0])


async def workflow(task: dict, model: ChatModelBase, system_prompt: str | None = None) -> WorkflowOutput:
    prompt = system_prompt or "You do sums."
    if MAJOR == 1:
        from agentscope.agent import ReActAgent
        from agentscope.formatter import OpenAIChatFormatter

        agent = ReActAgent(name="a", sys_prompt=prompt, model=model, formatter=OpenAIChatFormatter())
        agent.set_console_output_enabled(False)
        return WorkflowOutput(response=await agent.reply(msg=Msg("user", task["question"], role="user")))
    from agentscope.agent import Agent
    from agentscope.message import UserMsg

    agent = Agent(name="a", system_prompt=prompt, model=model)
    return WorkflowOutput(response=await agent.reply(UserMsg("user", task["question"])))


async def judge(task: dict, response: Any) -> JudgeOutput:
    return JudgeOutput(reward=float(response.get_text_content() == task["answer"]))


def candidate(name: str) -> ChatModelBase:
    """A model as its user made it: only the name counts here."""
    if MAJOR == 1:
        return OpenAIChatModel(name, api_key="k", client_kwargs={"base_url": "http://127.0.0.1:9/v1"})
    from agentscope.credential import OpenAICredential

    return OpenAIChatModel(credential=OpenAICredential(api_key="k", base_url="http://127.0.0.1:9/v1"), model=name)


def selected() -> Any:
    candidates = [candidate(name) for name in ("right-20", "right-95")]
    found, metrics = asyncio.run(
        select_model(
            workflow_func=workflow,
            judge_func=judge,
            train_dataset=DatasetConfig(path="sums", split="test"),
            candidate_models=candidates,
            max_threads=4,
        )
    )
    return {"best": candidates.index(found), "metrics": metrics}


def tuned(reflection_url: str) -> Any:
    prompt, metrics = tune_prompt(
        workflow=workflow,
        init_system_prompt="You answer with one word.",
        judge_func=judge,
        train_dataset=DatasetConfig(path="world", split="train"),
        eval_dataset=DatasetConfig(path="world", split="test"),
        config=PromptTuneConfig(lm_model_name="scripted-reflection", base_url=reflection_url, eval_num_threads=4),
    )
    return {"prompt": prompt, "metrics": metrics}


if __name__ == "__main__":
    result = selected() if sys.argv[1] == "select" else tuned(sys.argv[2])
    print(f"RESULT {json.dumps(result)}")
