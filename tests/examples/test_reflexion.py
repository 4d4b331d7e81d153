"""The Reflexion wrapper and the LangGraph agent behind a real proxy: one trajectory each."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.math.judge import judge
from examples.reflexion import workflow
from ratchet.trainer.rows.build_rows import build_rows
from tests.harness.clients.program import Program
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, calls, says, text_of

Play = Callable[[Callable[[Messages], Script]], Proxy]
TASK = {"question": "What is 6 times 7?"}


def learner(messages: Messages) -> Script:
    """Answers in words until a lesson asks for digits."""
    prompt = text_of(messages[-1])
    if "say what to do differently" in prompt:
        return says("answer in digits")
    return says("42") if "Lesson: answer in digits" in prompt else says("forty-two")


@pytest.mark.slow
async def test_a_refused_answer_is_reflected_on_and_tried_again_in_one_trajectory(play: Play) -> None:
    proxy = play(learner)
    given: Any = {"base_url": f"{proxy.url}/t/roll_1/v1", "api_key": "x", "model": "agent"}
    output = await workflow(TASK, **given)
    assert output.response == "42"
    assert output.metrics == {"attempts": 2.0, "refused": 0.0}
    proxy.settled()
    calls = proxy.store.trajectories.read("roll_1").calls
    assert len(calls) == 3, "attempt, reflection, attempt"
    rows = build_rows("roll_1", calls, 1.0)
    assert sum(sum(row.mask) for row in rows.rows) == sum(call.completion_tokens for call in calls)
    assert not rows.untrained


@pytest.mark.slow
async def test_the_attempts_are_limited_and_the_last_answer_counts(play: Play) -> None:
    proxy = play(lambda _: says("never a number"))
    output = await workflow(TASK, base_url=f"{proxy.url}/t/roll_1/v1", api_key="x", model="agent")
    assert output.response == "never a number"
    assert output.metrics == {"attempts": 3.0, "refused": 1.0}


ROOT = Path(__file__).parents[2]
MATH_TASK = {"id": "test/0", "question": "What is 14 plus 30?", "answer": "44"}


def mathematician(messages: Messages) -> Script:
    """Uses the calculator, wrongly at first, then passes its result on."""
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    if not results:
        return calls("calculate", expression="14 plus 30")
    if re.fullmatch(r"\d+", results[-1]):
        return says(f"The answer is {results[-1]}")
    return calls("calculate", expression="14 + 30")


@pytest.mark.clients
def test_the_langgraph_agent_is_one_exact_trajectory_and_its_answer_is_judged(play: Play) -> None:
    proxy = play(mathematician)
    python = Program("math", "openai3", "langgraph_agent.py").command()[0]
    given = {"OPENAI_BASE_URL": f"{proxy.url}/t/roll_1/v1", "OPENAI_API_KEY": "x", "OPENAI_MODEL": "agent"}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-m", "examples.langgraph_math.workflow"], cwd=ROOT, env=environ | given, input=json.dumps(MATH_TASK),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "The answer is 44"), done.stderr
    proxy.settled()
    recorded = proxy.store.trajectories.read("roll_1")
    assert [call.context for call in recorded.calls] == ["root", "exact", "exact"]
    assert [one.result for one in recorded.tool_calls] == ["error", "ok"]
    assert judge(MATH_TASK, done.stdout)["score"] == 1.0
