"""`ratchet tune prompt` end to end: a real proxy, an agent that is left as it is, the command as a process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import ratchet
from ratchet.api.runs import create_candidate
from ratchet.errors import InvalidArgument
from ratchet.store.states import PolicyState
from ratchet.store.store import Store, open_store
from ratchet.tuner.reports import read
from tests.harness.cli.project import Project
from tests.harness.proxy.servers import eventually
from tests.harness.tuner import prompt_world, world_agent
from tests.harness.tuner.prompt_project import AGENT, PromptProject, prompt_project

ROOT = Path(__file__).parents[2]


@pytest.fixture
def circle(project: Project) -> Iterator[PromptProject]:
    with prompt_project(project) as made:
        yield made


@pytest.mark.slow
def test_an_agent_that_is_left_as_it_is_gets_a_better_prompt_which_serves_once_it_is_promoted(
    circle: PromptProject,
) -> None:
    done = circle.tune("agent", "--promote", out="best.txt")
    assert done.returncode == 0, done.stdout
    (run,) = circle.store.tunings.page()
    result = read(run.result or {})
    assert result.details["verdict"] == "better"
    assert result.details["seed_prompt"] == prompt_world.SEED
    assert result.gain is not None
    assert (result.gain.against_mean, result.gain.mean, result.gain.tasks) == (0.0, 1.0, 12)
    assert result.spent.rollouts == len(circle.vllm.prompts) <= 200
    assert result.spent.prompt_tokens > 0
    assert {one.purpose for one in circle.store.rollouts.of_tuning(run.id)} == {"eval"}  # never trained
    assert '"feedback":"The word was ' in circle.reflection.requests[0]["messages"][1]["content"]
    report = circle.project.run("tune", "report").stdout
    assert "GEPA" in report
    assert "+1.000" in report
    best = (circle.project.folder / "best.txt").read_text()
    assert all(f"a {thing} is a {word}" in best for thing, word in prompt_world.WORDS.items())
    candidate = circle.store.policies.get("policy", 1)
    assert (candidate.state, candidate.prompt_id) == (PolicyState.CANDIDATE, result.best)

    assert ask(circle) == "unsure"  # a candidate serves nobody
    done = circle.project.run("policies", "promote", "policy", "1", "--reason", "better on held-out tasks")
    assert done.returncode == 0, done.stdout
    eventually(lambda: ask(circle) == "tree")
    circle.project.run("policies", "rollback", "policy", "--reason", "a test")
    eventually(lambda: ask(circle) == "unsure")


def ask(circle: PromptProject) -> str:
    """Ask as any user of the agent does, in a trajectory of its own."""
    system = {"role": "system", "content": prompt_world.SEED}
    question = {"role": "user", "content": f"What is a blim? ({len(circle.vllm.prompts)})"}
    answer = circle.proxy.http.post("/v1/chat/completions", json={"model": "policy", "messages": [system, question]})
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.slow
def test_a_system_prompt_that_differs_from_task_to_task_is_kept_and_appended_to(circle: PromptProject) -> None:
    done = circle.tune("dated")
    assert "a text that is appended to it is tuned" in done.stdout
    assert ": better" in done.stdout
    assert all(prompt.startswith(f"{prompt_world.SEED} This is about: ") for prompt in circle.swapped())


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_by_its_id_alone_and_pays_for_nothing_twice(circle: PromptProject) -> None:
    circle.vllm.seconds = 0.05
    process = circle.project.start("tune", "prompt", *circle.arguments(concurrency=2))
    eventually(lambda: len(circle.reflection.requests) >= 2, 60)
    process.kill()
    process.wait(60)
    (run,) = circle.store.tunings.page()
    assert run.state == "running"
    before = {(one.candidate, one.task_id) for one in circle.store.rollouts.of_tuning(run.id) if one.state == "ended"}
    assert before
    count = len(circle.reflection.requests)
    circle.vllm.seconds = 0.0
    done = circle.project.run("tune", "prompt", "--resume", run.id, seconds=180)
    assert done.returncode == 0, done.stdout
    assert ": better" in done.stdout
    details = read(circle.store.tunings.get(run.id).result or {}).details
    assert details["budget"]["rollouts_begun"] == len(circle.vllm.prompts)  # what the kill cut off is paid for, too
    ended = [(one.candidate, one.task_id) for one in circle.store.rollouts.of_tuning(run.id) if one.state == "ended"]
    assert before <= set(ended)
    assert len(ended) == len(set(ended))
    # What was answered before the kill was not count again, but for the question that was on its way.
    first, again = circle.reflection.requests[: count - 1], circle.reflection.requests[count:]
    assert not [one for one in first if one in again]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reflection-url": "http://127.0.0.1:1"}, "--reflection-url needs --reflection-model"),
        ({}, "tuner.reflection"),
        (
            {"reflection-url": "http://127.0.0.1:1", "reflection-model": "x", "proxy": "http://127.0.0.1:9"},
            "the proxy at http://127.0.0.1:9 does not list its models",
        ),
    ],
)
def test_what_is_missing_is_named(circle: PromptProject, given: dict[str, str], message: str) -> None:
    words = [word for pair in given.items() for word in (f"--{pair[0]}", pair[1])]
    done = circle.project.run("tune", "prompt", "--tasks", "world", "--workflow", f"{AGENT}:agent", *words)
    assert done.returncode in (1, 2)
    assert message in done.stdout
    assert circle.vllm.prompts == []
    assert circle.store.tunings.page() == []  # what cannot begin leaves no run


@pytest.mark.slow
def test_the_light_environment_of_the_command_has_no_torch() -> None:
    program = "import sys, ratchet.api.tune_prompt, ratchet.tuner.prompts.prompt_tuning; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def store(store_file: Path) -> Iterator[Store]:
    opened = open_store(str(store_file))
    opened.policies.register_base("agent", "base")
    yield opened
    opened.close()


def ended(store: Store, verdict: str, prompt: str | None = "Be good.", state: str = "done") -> str:
    """A run of prompt tuning that ended so; returns its id."""
    found = None if prompt is None else store.prompts.register(prompt).id
    details = {"verdict": verdict, "why": "so it was measured", "prompt_id": found}
    run = store.tunings.begin("prompt", "agent", {})
    store.tunings.end(run.id, state, {"details": details, "gain": {"low": 0.1}}, error="a test")
    return run.id


def test_a_better_prompt_becomes_a_candidate_with_its_evidence(store: Store) -> None:
    run = ended(store, "better")
    assert create_candidate(store, run) == "agent@1"
    policy = store.policies.get("agent", 1)
    assert policy.state is PolicyState.CANDIDATE
    assert store.prompts.get(policy.prompt_id or "").text == "Be good."
    assert policy.evidence == {"tuning": run, "verdict": "better", "gain": {"low": 0.1}}


@pytest.mark.parametrize("verdict", ["worse", "no better", "inconclusive"])
def test_a_prompt_that_is_not_shown_to_be_better_is_promoted_by_force_alone(store: Store, verdict: str) -> None:
    run = ended(store, verdict)
    with pytest.raises(InvalidArgument, match=f"{verdict}, so it was measured; promote it anyway with --force"):
        create_candidate(store, run)
    assert [one.version for one in store.policies.all("agent")] == [0]
    assert create_candidate(store, run, force=True) == "agent@1"


@pytest.mark.parametrize(
    ("prompt", "state", "message"),
    [(None, "done", "found no better prompt"), ("Be good.", "failed", "no prompt to promote")],
)
def test_a_run_without_a_prompt_is_refused(store: Store, prompt: str | None, state: str, message: str) -> None:
    run = ended(store, "better", prompt, state)
    with pytest.raises(InvalidArgument, match=message):
        create_candidate(store, run, force=True)


@pytest.mark.slow
async def test_a_better_prompt_is_found_for_an_agent_of_the_caller_and_promoted(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    answered: list[str] = []
    hangs = [True]

    async def agent(task: Mapping[str, Any], base_url: str, model: str) -> str:
        if hangs[0] and len(answered) >= 4:
            await asyncio.Event().wait()
        answered.append(await world_agent.agent(task, base_url, model))
        return answered[-1]

    def judge(task: dict[str, Any], response: str) -> Any:
        return world_agent.judge(response, task)

    with prompt_project(project) as made:
        named: dict[str, Any] = {"reflection_url": made.reflection.base_url, "reflection_model": "scripted-reflection"}
        with pytest.raises(ratchet.InvalidArgument, match="needs --reflection-model"):
            await ratchet.tune_prompt_async(agent, judge, "world", reflection_url=made.reflection.base_url)
        with pytest.raises(ratchet.RatchetError, match="no reflection model is set"):
            await ratchet.tune_prompt_async(agent, judge, "world")
        assert made.store.tunings.page() == []
        run = await ratchet.tune_prompt_async(agent, judge, "world", seed=1, max_rollouts=200, **named)
        while run.status.rollouts < 4:
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(ratchet.RunCancelled):
            await run
        assert run.status.state == "stopped"
        hangs[0] = False
        with pytest.raises(ratchet.InvalidArgument, match="use the same judge"):
            await ratchet.tune_prompt_async(agent, world_agent.judge, resume=run.id)
        again = await (await ratchet.tune_prompt_async(agent, judge, resume=run.id))
        assert again.best is not None
        assert all(f"a {thing} is a {word}" in again.best for thing, word in prompt_world.WORDS.items())
        assert "better" in again.report()
        assert again.promote() == "policy@1"
        assert made.store.policies.get("policy", 1).state is PolicyState.CANDIDATE
        assert again.rollback(0) == "policy@0"
