"""The math example: its task set, its judge, and its AgentScope agent behind a real proxy with only a URL changed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.math.calculator import SCHEMA, calculate
from examples.math.judge import NoTaskError, judge
from examples.math.problems import SIZES, is_held_out, task_set
from ratchet.trainer.settings.learner_settings import LearnerSettings
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from ratchet.trainer.tasks import TaskSet
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.settings import TunerSettings
from tests.harness.clients.program import Program
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, calls, says, text_of
from tests.harness.proxy.servers import eventually
from tests.harness.trainer.scripted_engine import Faithful, ScriptedEngine
from tests.harness.trainer.stepped_controller import SteppedController
from tests.harness.trainer.tiny import build_tiny_model

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "math"
TASK = {"id": "test/0", "question": "What is 14 plus 30?", "answer": "44"}
Play = Callable[[Callable[[Messages], Script]], Proxy]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model that reads the scripted vLLM's ids."""
    import torch

    torch.set_num_threads(1)
    return build_tiny_model(tmp_path_factory.mktemp("tiny_model"))


def solve(proxy: Proxy, trajectory: str) -> subprocess.CompletedProcess[str]:
    """The workflow as a program, in AgentScope's own environment."""
    python = Program("math", "openai3", "agentscope_react.py").command()[0]
    given = {"OPENAI_BASE_URL": f"{proxy.url}/t/{trajectory}/v1", "OPENAI_API_KEY": "x", "OPENAI_MODEL": "agent"}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-m", "examples.math.workflow"]
    return subprocess.run(
        command, cwd=ROOT, env=environ | given, input=json.dumps(TASK), capture_output=True, text=True, timeout=120
    )


def mathematician(messages: Messages) -> Script:
    """Uses the calculator, then passes its result on."""
    if messages[-1]["role"] == "tool":
        return says(f"The answer is {text_of(messages[-1])}")
    left, right = re.findall(r"\d+", text_of(messages[1]))
    return calls("calculate", expression=f"{left} + {right}")


@pytest.mark.clients
def test_an_agentscope_agent_is_one_exact_trajectory_and_its_answer_is_judged(play: Play) -> None:
    proxy = play(mathematician)
    done = solve(proxy, "roll_1")
    assert (done.returncode, done.stdout.strip()) == (0, "The answer is 44"), done.stderr
    proxy.settled()
    recorded = proxy.store.trajectories.read("roll_1")
    assert [call.context for call in recorded.calls] == ["root", "exact"]
    assert [message["role"] for message in recorded.messages] == [
        "system", "user", "user", "assistant", "tool", "assistant"
    ]  # fmt: skip
    assert judge(TASK, done.stdout)["score"] == 1.0


@pytest.mark.clients
def test_the_tool_that_the_agent_offers_is_the_one_that_the_tiny_policy_knows(play: Play) -> None:
    proxy = play(mathematician)
    assert solve(proxy, "roll_1").returncode == 0
    proxy.settled()
    assert list(proxy.store.trajectories.read("roll_1").tools) == [SCHEMA]


@pytest.mark.clients
def test_a_failing_server_is_a_failing_program_and_never_an_answer(play: Play) -> None:
    proxy = play(lambda _: {"cut": "0", "delay": "0.001"})
    done = solve(proxy, "roll_1")
    assert done.returncode != 0
    assert done.stdout == ""


def test_the_task_set_on_disk_is_what_the_script_makes_and_its_splits_share_no_pair() -> None:
    made = task_set()
    for split, rows in made.items():
        lines = (FOLDER / "tasks" / f"{split}.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
        assert len({row["question"] for row in rows}) == SIZES[split]
        for row in rows:
            first, second = (int(number) for number in re.findall(r"\d+", row["question"]))
            held_out = is_held_out(second, first) if row["question"].startswith("Take") else is_held_out(first, second)
            assert held_out is (split == "test"), row


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("The answer is 44.", 1.0),
        ("14 + 30 = 44", 1.0),
        ("44", 1.0),
        ("The answer is 44.0", 1.0),
        ("The answer is 4.", 0.0),
        ("The answer is 144.", 0.0),
        ("44 or 45, perhaps 44", 0.0),
        (" ".join(map(str, range(100))) + " 44", 0.0),
        ("The answer is 44. No, 45.", 0.0),
        ("I am not sure.", 0.0),
        ("", 0.0),
        (None, 0.0),
        (":", 0.0),
    ],
)
def test_only_the_one_right_number_scores(response: str | None, score: float) -> None:
    assert judge(TASK, response)["score"] == score


@pytest.mark.parametrize("task", [None, "math/17"])
def test_without_a_row_nothing_is_scored(task: Any) -> None:
    with pytest.raises(NoTaskError, match="tasks import"):
        judge(task, "44")


async def test_the_calculator_reads_one_expression_and_refuses_the_rest() -> None:
    assert [await calculate(text) for text in ("2 + 3", "7*6", " 9 - 12 ")] == ["5", "42", "-3"]
    for text in ("2 plus 3", "__import__('os')", "2 ** 99", "9999999 + 1", ""):
        with pytest.raises(ValueError, match="not an expression"):
            await calculate(text)


@pytest.mark.clients
async def test_what_agentscope_did_in_rollouts_is_judged_and_trained_into_a_version(
    play: Play, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = itertools.count()

    def sometimes_right(messages: Messages) -> Script:
        if messages[-1]["role"] != "tool":
            return mathematician(messages)
        return says(f"The answer is {44 + next(attempts) % 2}")

    proxy, engine = play(sometimes_right), ScriptedEngine(lambda name, ids: 0.0)
    monkeypatch.chdir(ROOT)
    python = Program("math", "openai3", "agentscope_react.py").command()[0]
    workflow = load_workflow(f"{python} -m examples.math.workflow")
    runner = RolloutRunner(proxy.store, proxy.url, None, workflow, TunerSettings(concurrency=2), alias="agent")
    task = next(iter(TaskSet.open(FOLDER / "tasks").rows("test")))
    task = dataclasses.replace(task, row=TASK)
    tuning = proxy.store.tunings.begin("weights", "agent", {})
    jobs = [RolloutJob(task, attempt=attempt, purpose="live") for attempt in range(2)]
    rollouts = await runner.run(jobs, tuning.id)
    assert [one.failure for one in rollouts] == [None, None]
    proxy.settled()
    settings = TrainerSettings(
        store="-",
        model="agent",
        base_model=str(tiny_model),
        vllm=(engine.url,),
        checkpoints=tmp_path / "checkpoints",
        judge="examples.math.judge:judge",
        num_generations=2,
        groups_per_round=1,
        # The scripted vLLM's logprobs are not this model's: its rows would rightly be rejected.
        learner=LearnerSettings(learning_rate=1e-2, sequence_mask_threshold=None),
    )
    controller = SteppedController(settings, proxy.store)
    engine.scorer = Faithful(engine, lambda: controller.learner)
    try:
        eventually(lambda: controller.step(time.time() + 60.0) and proxy.store.rounds.newest_committed("agent"))
    finally:
        controller.close()
        engine.close()
    (held,) = proxy.store.rounds.page("agent")
    assert (held.metrics["trajectories"], held.metrics["reward"]) == (2, 0.5)
    assert held.metrics["rows"] == 2, "each of AgentScope's courses is one exact sequence"
    assert held.metrics["untrained_tokens"] == {}
