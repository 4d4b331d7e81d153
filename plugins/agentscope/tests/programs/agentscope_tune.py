"""The program of AgentScope's tuner tutorial, put together for weight tuning; only the import line is another one.

`agentscope_tune.py MODEL_FOLDER` runs in the folder of a project that has `my_dataset`, and prints what came of it.
What differs between AgentScope 1.x and 2.x is the agent.
"""

import json
import sys
from typing import Any

import agentscope
from agentscope.message import Msg
from agentscope.model import ChatModelBase

from ratchet.agentscope import AlgorithmConfig, DatasetConfig, JudgeOutput, TunerModelConfig, WorkflowOutput, tune

if agentscope.__version__.startswith("1."):
    from agentscope.agent import ReActAgent
    from agentscope.formatter import OpenAIChatFormatter
else:
    from agentscope.agent import Agent
    from agentscope.message import UserMsg


async def example_workflow_function(
    task: dict,
    model: ChatModelBase | None = None,
) -> WorkflowOutput:
    """An example workflow function for tuning."""
    agent = ReActAgent(
        name="react_agent",
        sys_prompt="You are a helpful math assistant.",
        model=model,
        formatter=OpenAIChatFormatter(),
    )
    response = await agent.reply(
        msg=Msg(
            "user",
            task["question"],  # extract question from task
            role="user",
        ),
    )
    return WorkflowOutput(  # wrap the response in WorkflowOutput
        response=response,
    )


async def the_same_with_2(task: dict, model: ChatModelBase | None = None) -> WorkflowOutput:
    """The workflow with the agent of AgentScope 2.x."""
    agent = Agent(name="react_agent", system_prompt="You are a helpful math assistant.", model=model)
    return WorkflowOutput(response=await agent.reply(UserMsg("user", task["question"])))


async def example_judge_function(
    task: dict,
    response: Any,
) -> JudgeOutput:
    """A very simple judge function only for demonstration."""
    ground_truth = task["answer"]
    reward = 1.0 if ground_truth in response.get_text_content() else 0.0
    return JudgeOutput(reward=reward)


if __name__ == "__main__":
    run = tune(
        workflow_func=example_workflow_function if agentscope.__version__.startswith("1.") else the_same_with_2,
        judge_func=example_judge_function,
        train_dataset=DatasetConfig(path="my_dataset", split="train", total_steps=1),
        eval_dataset=DatasetConfig(path="my_dataset", split="test"),
        model=TunerModelConfig(model_path=sys.argv[1], max_model_len=4096, max_tokens=32),
        algorithm=AlgorithmConfig(algorithm_type="multi_step_grpo", group_size=8, batch_size=2, eval_interval_steps=1),
    )
    print(f"RESULT {json.dumps({'run': run.id, 'curve': run.curve(), 'report': run.report()})}")
