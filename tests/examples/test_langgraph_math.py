"""The tutorial's LangGraph agent behind a real proxy: one exact trajectory, which the tutorial's judge scores."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.math.judge import judge
from tests.harness.clients.program import Program
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, calls, says, text_of

ROOT = Path(__file__).parents[2]
TASK = {"id": "test/0", "question": "What is 14 plus 30?", "answer": "44"}
Play = Callable[[Callable[[Messages], Script]], Proxy]


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
        [python, "-m", "examples.langgraph_math.workflow"], cwd=ROOT, env=environ | given, input=json.dumps(TASK),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "The answer is 44"), done.stderr
    proxy.settled()
    recorded = proxy.store.trajectories.read("roll_1")
    assert [call.context for call in recorded.calls] == ["root", "exact", "exact"]
    assert [one.result for one in recorded.tool_calls] == ["error", "ok"]
    assert judge(TASK, done.stdout)["score"] == 1.0
