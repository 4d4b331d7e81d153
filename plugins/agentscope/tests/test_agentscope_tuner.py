"""Code for AgentScope's tuner, with its real package beside Ratchet: only the import line is another one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.store import open_store
from tests.harness.clients.program import client_python
from tests.harness.packages import ROOT
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ROWS = [
    {"question": "What is 123 plus 456? #say=It.is.579", "answer": "579"},
    {"question": "What is 2 plus 2? #say=It.is.4", "answer": "4"},
]


@dataclass
class TutorialRun:
    """What came of the program.

    result     what it printed at its end
    printed    the other lines of its output
    vllm       the server of the agent
    """

    result: dict[str, Any]
    printed: str
    vllm: ScriptedVllm
    proxy: Proxy


@pytest.fixture(scope="module", params=["agentscope1", "agentscope2"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TutorialRun]:
    """The program, run in the environment of one major version of AgentScope."""
    python, folder = client_python(request.param), tmp_path_factory.mktemp(request.param)
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    vllm, other = ScriptedVllm(), ScriptedVllm("big")
    with ExitStack() as stack:
        store = open_store(str(folder / "store.db"))
        stack.callback(store.close)
        vllm_url, other_url = stack.enter_context(served(vllm)), stack.enter_context(served(other))
        checker = {"model_name": "checker", "litellm_params": {"model": "openai/big", "api_base": other_url}}
        proxy = stack.enter_context(running(vllm_url, store, folder, model_list=[checker]))
        done = subprocess.run(
            [str(python), str(HERE / "programs" / "agentscope_tuner.py"), f"{proxy.url}/v1", str(folder)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        assert "ResourceWarning" not in done.stderr
        printed, _, result = done.stdout.partition("RESULT ")
        yield TutorialRun(json.loads(result), printed, vllm, proxy)


def test_the_tutorials_workflow_and_judge_run_as_they_are_written(outcome: TutorialRun) -> None:
    assert json.loads(outcome.printed) == ROWS
    assert outcome.result["tried"] == [1.0, {"words": 3.0}, "It is 579"]
    assert outcome.result["locally"] == [1.0, "It is 579"]
    assert outcome.result["judged"] == 1.0


def test_its_model_is_an_agentscope_model_of_the_server_and_its_calls_are_recorded(outcome: TutorialRun) -> None:
    outcome.proxy.settled()
    calls = outcome.proxy.store.calls.page(100)
    agents = [call for call in calls if call.alias == "agent"]
    assert len(agents) == len(outcome.vllm.calls) == 4
    assert {call.untrainable for call in agents} == {None}
    assert {call.alias for call in calls} == {"agent", "checker"}


def test_a_prompt_on_trial_reaches_the_agent(outcome: TutorialRun) -> None:
    assert outcome.result["prompted"] == 1.0
    systems = [str(body["messages"][0]["content"]) for body in outcome.vllm.calls]
    assert sum("Be brief." in system for system in systems) == 1


def test_workflow_and_judge_get_the_other_models_by_name(outcome: TutorialRun) -> None:
    score, response, metrics = outcome.result["checked"]
    assert (score, metrics) == (0.75, {"agents": 2.0})
    assert response == {
        "first": "It is 579", "second": "579", "primary": "OpenAIChatModel", "auxiliary": ["checker"], "stream": False,
    }  # fmt: skip
    assert outcome.result["judged_with_model"] == 0.75
    assert "no model 'chequer' at" in outcome.result["failure"]
    assert "it has checker" in outcome.result["failure"]
