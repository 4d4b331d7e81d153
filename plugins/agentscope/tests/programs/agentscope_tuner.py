"""Code for AgentScope's tuner, of the form of its tutorial, with `ratchet.agentscope` for `agentscope.tuner`.

`agentscope_tuner.py BASE_URL FOLDER` prints what came of it as JSON. It runs with AgentScope 1.x and 2.x; what differs
between them is the agent. FOLDER holds train.jsonl.
"""

import asyncio
import json
import sys
import warnings
from typing import Any

import agentscope
from agentscope.message import Msg
from agentscope.model import ChatModelBase, OpenAIChatModel

import ratchet
from ratchet.agentscope import DatasetConfig, JudgeOutput, WorkflowOutput

MAJOR = int(agentscope.__version__.split(".")[0])


async def answer_of(model: ChatModelBase, question: str, prompt: str = "You do sums.") -> Msg:
    if MAJOR == 1:
        from agentscope.agent import ReActAgent
        from agentscope.formatter import OpenAIChatFormatter

        agent = ReActAgent(name="sums", sys_prompt=prompt, model=model, formatter=OpenAIChatFormatter())
        agent.set_console_output_enabled(False)
        return await agent.reply(msg=Msg("user", question, role="user"))
    from agentscope.agent import Agent
    from agentscope.message import UserMsg

    return await Agent(name="sums", system_prompt=prompt, model=model).reply(UserMsg("user", question))


async def workflow(task: dict, model: ChatModelBase | None = None) -> WorkflowOutput:
    response = await answer_of(model, task["question"])
    assert isinstance(response, Msg)
    return WorkflowOutput(response=response)


async def prompted(task: dict, model: "ChatModelBase", system_prompt: str | None = None) -> WorkflowOutput:
    return WorkflowOutput(response=await answer_of(model, task["question"], system_prompt))


async def checked(task, model, auxiliary_models, logger) -> WorkflowOutput:
    logger.info("one task")
    first = await answer_of(model, task["question"])
    second = await answer_of(auxiliary_models["checker"], f"Is it right? #say={task['answer']}")
    names = {"primary": type(model).__name__, "auxiliary": list(auxiliary_models), "stream": model.stream}
    return WorkflowOutput(response={"first": first, "second": second, **names}, metrics={"agents": 2})


async def judge(task: dict, response: Any) -> JudgeOutput:
    right = task["answer"] in response.get_text_content()
    return JudgeOutput(reward=1.0 if right else 0.0, metrics={"words": len(response.get_text_content().split())})


async def judge_with_model(task: dict, response: Any, auxiliary_models: dict[str, ChatModelBase]) -> JudgeOutput:
    found = await answer_of(auxiliary_models["checker"], "How good, of 4? #say=3")
    return JudgeOutput(reward=float(found.get_text_content()) / 4)


async def names_no_model(task: dict, response: Any, auxiliary_models: dict[str, ChatModelBase]) -> JudgeOutput:
    return JudgeOutput(reward=await auxiliary_models["chequer"](response))


def own_model(base_url: str) -> ChatModelBase:
    if MAJOR == 1:
        return OpenAIChatModel("agent", api_key="k", client_kwargs={"base_url": base_url})
    from agentscope.credential import OpenAICredential

    return OpenAIChatModel(credential=OpenAICredential(api_key="k", base_url=base_url), model="agent")


async def locally(base_url: str, task: dict) -> list[Any]:
    """Run workflow and judge by hand, with a model of one's own."""
    model = own_model(base_url)
    output = await workflow(task=task, model=model)
    await model.client.close()
    return [(await judge(task, output.response)).reward, output.response.get_text_content()]


def failure_of(base_url: str, task: dict) -> str:
    try:
        ratchet.try_judge(names_no_model, task, "579", base_url=base_url)
    except ratchet.JudgeError as error:
        return str(error)
    return ""


def main(base_url: str, folder: str) -> None:
    task = DatasetConfig(path=folder, split="train").preview(n=2)[0]
    where = {"base_url": base_url, "model": "agent", "api_key": "k"}
    tried = ratchet.try_out(workflow, judge, task, **where)
    with_prompt = ratchet.try_out(prompted, judge, task, system_prompt="Be brief.", **where)
    with_models = ratchet.try_out(checked, judge_with_model, task, **where)
    result = {
        "version": agentscope.__version__,
        "tried": [tried.judgement.score, dict(tried.judgement.components), tried.output.response],
        "prompted": with_prompt.judgement.score,
        "checked": [with_models.judgement.score, with_models.output.response, dict(with_models.output.metrics)],
        "judged": ratchet.try_judge(judge, task, tried.output.response).score,
        "judged_with_model": ratchet.try_judge(judge_with_model, task, "579", base_url=base_url, api_key="k").score,
        "failure": failure_of(base_url, task),
        "locally": asyncio.run(locally(base_url, task)),
    }
    print(f"\nRESULT {json.dumps(result)}")


if __name__ == "__main__":
    warnings.simplefilter("error", ResourceWarning)
    main(*sys.argv[1:])
