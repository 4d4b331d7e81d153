"""The planner example: two roles behind one URL, distinguished by their prompts; one is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.math.problems import calculated, is_held_out
from examples.planner.judge import judge
from examples.planner.problems import SIZES, task_set
from examples.planner.prompt import PLANNER
from examples.planner.workflow import workflow
from ratchet.settings.load_settings import load
from ratchet.trainer.collect.collector import RoleResolver
from ratchet.trainer.rows.build_rows import build_rows
from ratchet.trainer.rows.token_row import UNTRAINED_ROLE, Roles
from tests.harness.proxy.running_proxy import Proxy
from tests.harness.proxy.scripts import Messages, Script, calls, says, text_of

FOLDER = Path(__file__).parents[2] / "examples" / "planner"
TASK = {"id": "test/0", "question": "What is 20 plus 30, minus 8?", "answer": "42"}
Play = Callable[[Callable[[Messages], Script]], Proxy]


def team(messages: Messages) -> Script:
    """A planner that plans and a worker that calculates."""
    if messages[0]["content"] == PLANNER:
        results = [text_of(message) for message in messages if message["role"] == "tool"]
        steps = ["20 + 30", f"{results[0]} - 8"] if results else ["20 + 30"]
        done = len(results) == 2
        return says(f"The answer is {results[1]}") if done else calls("delegate", step=steps[len(results)])
    if messages[-1]["role"] == "tool":
        return says(text_of(messages[-1]))
    return calls("calculate", expression=text_of(messages[-1]))


async def solve(proxy: Proxy) -> str:
    return await workflow(TASK, base_url=f"{proxy.url}/t/roll_1/v1", api_key="x", model="agent")


@pytest.mark.slow
async def test_both_roles_are_in_one_trajectory_and_only_the_planners_tokens_are_trained(play: Play) -> None:
    proxy = play(team)
    response = await solve(proxy)
    assert response == "The answer is 42"
    proxy.settled()
    settings = load(FOLDER / "ratchet.yaml").trainer
    resolver = RoleResolver(proxy.store, "agent", Roles(settings.roles, settings.role_patterns))
    recorded = proxy.store.trajectories.read("roll_1")
    named = resolver.with_roles(proxy.store.trajectories.context_calls(recorded))
    assert [call.role for call in named] == ["planner", *["worker"] * 2, "planner", *["worker"] * 2, "planner"]
    built = build_rows("roll_1", named, 1.0, resolver.roles)
    trained = [bytes(t for t, mark in zip(row.ids, row.mask, strict=True) if mark and t < 256) for row in built.rows]
    assert b"delegate" in b"".join(trained)
    assert b"calculate" not in b"".join(trained)
    assert set(built.untrained) == {UNTRAINED_ROLE}
    assert len(built.rows) == 1, "the planner's three calls are one exact sequence, whatever the worker did between"


async def test_the_transcript_that_is_judged_is_the_planners(play: Play) -> None:
    proxy = play(team)
    response = await solve(proxy)
    proxy.settled()
    messages = [dict(message) for message in proxy.store.trajectories.read("roll_1").messages]
    assert messages[0]["content"] == PLANNER
    verdict = judge(TASK, response, {"messages": messages})
    assert verdict["components"] == {"answered": 1.0, "correct": 1.0, "planner": 1.0}


async def test_an_error_of_the_server_is_an_exception(play: Play) -> None:
    proxy = play(team)
    with pytest.raises(openai.OpenAIError):
        await workflow(TASK, base_url=f"{proxy.url}/v1", api_key="x", model="no-such-model")


def course(*steps: tuple[str, str]) -> dict[str, Any]:
    """A planner's trajectory: each step with what the worker said."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": PLANNER}]
    for number, (step, result) in enumerate(steps):
        function = {"name": "delegate", "arguments": json.dumps({"step": step})}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    return {"messages": messages}


@pytest.mark.parametrize(
    ("steps", "response", "score", "planner"),
    [
        ((("20 + 30", "50"), ("50 - 8", "42")), "The answer is 42", 1.0, 1.0),
        ((("20 + 30", "51"), ("51 - 8", "43")), "The answer is 43", 0.0, 1.0),  # the worker's slip
        ((("20 + 30", "50"), ("50 + 8", "42")), "The answer is 42", 1.0, 0.0),  # the planner's luck
        ((("20 + 30", "50"),), "The answer is 50", 0.0, 0.0),
        ((("20 plus 30", "no result"),), "I cannot work it out.", 0.0, 0.0),
        ((("20 + 30", "50"), ("50 - 8", "42")), "I am not sure.", 0.0, 0.0),
        ((), "The answer is 42", 1.0, 0.0),  # guessed
    ],
)
def test_the_planner_is_judged_by_its_plan(
    steps: tuple[tuple[str, str], ...], response: str, score: float, planner: float
) -> None:
    verdict = judge(TASK, response, course(*steps))
    assert (verdict["score"], verdict["components"]["planner"]) == (score, planner)


def test_arguments_that_are_no_json_are_no_step() -> None:
    broken = {"id": "c", "function": {"name": "delegate", "arguments": "{"}}
    trajectory = {"messages": [{"role": "assistant", "tool_calls": [broken]}]}
    assert judge(TASK, "42", trajectory)["components"]["planner"] == 0.0


def test_the_task_set_on_disk_is_what_the_script_makes_and_every_answer_is_right() -> None:
    for split, rows in task_set().items():
        lines = (FOLDER / "tasks" / f"{split}.jsonl").read_text("utf-8").splitlines()
        assert [json.loads(line) for line in lines] == rows
        assert len({row["question"] for row in rows}) == SIZES[split]
        for row in rows:
            a, b, c = (int(number) for number in re.findall(r"\d+", row["question"]))
            assert is_held_out(a, b) is (split == "test")
            middles = (calculated(a, sign, b) for sign in "+-*")
            assert int(row["answer"]) in {calculated(middle, sign, c) for middle in middles for sign in "+-"}
