"""Evaluation, model selection and prompt tuning on models of `model_list` alone: no base model, no vLLM."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import ratchet
from ratchet.store.store import open_store
from ratchet.tuner.reports import read
from tests.harness.chat_models import entry
from tests.harness.cli.project import INTERRUPTED, Project
from tests.harness.proxy.servers import eventually
from tests.harness.tuner import prompt_world, world_agent
from tests.harness.tuner.hosted_project import TASKS, WORLD_AGENT, HostedProject, hosted_project
from tests.harness.tuner.judges import exact
from tests.harness.tuner.workflows import ask

pytestmark = pytest.mark.slow

SUMS = (
    "--tasks", "sums", "--workflow", "tests.harness.tuner.workflows:ask", "--judge", "tests.harness.tuner.judges:exact",
)  # fmt: skip
PROMPT = (
    "tune", "prompt", "--model", "follows-rules", "--tasks", "world", "--workflow", f"{WORLD_AGENT}:agent", "--judge",
    f"{WORLD_AGENT}:judge", "--seed", "1", "--max-rollouts", "200", "--reflection-model", "reflection",
)  # fmt: skip


@pytest.fixture
def hosted(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostedProject]:
    monkeypatch.chdir(project.folder)
    with hosted_project(project) as made:
        yield made


def test_the_commands_compare_listed_models_with_a_proxy_that_lives_for_the_run(hosted: HostedProject) -> None:
    done = hosted.project.run(
        "tune", "select-model", "--candidate", "right-20", "--candidate", "right-95", *SUMS, seconds=180
    )
    assert done.returncode == 0, done.stdout
    assert "serves follows-rules, right-95, right-20" in done.stdout
    assert "chosen: right-95" in done.stdout
    assert hosted.is_at_rest
    found = hosted.project.json("eval", "--model", "right-95", *SUMS, seconds=180)
    assert [one["candidate"] for one in found["ranking"]["scores"]] == ["right-95"]
    assert found["figures"][0]["spent"]["completion_tokens"] == 5 * TASKS  # every call was recorded before judging
    assert hosted.is_at_rest


def test_a_real_optimizer_finds_a_better_prompt_for_a_listed_model_that_follows_rules(hosted: HostedProject) -> None:
    done = hosted.project.run(*PROMPT, "--out", "best.txt", seconds=240)
    assert done.returncode == 0, done.stdout
    assert ": better" in done.stdout
    assert hosted.is_at_rest
    best = (hosted.project.folder / "best.txt").read_text()
    assert all(f"a {thing} is a {word}" in best for thing, word in prompt_world.WORDS.items())
    store = open_store(str(hosted.project.state / "store.db"))
    try:
        (run,) = store.tunings.page()
        made = [store.trajectories.read(one.id) for one in store.rollouts.of_tuning(run.id)]
    finally:
        store.close()
    gain = read(run.result or {}).gain
    assert gain is not None
    assert (run.alias, gain.against_mean, gain.mean, gain.tasks) == ("follows-rules", 0.0, 1.0, 12)
    assert {one.trajectory.alias for one in made} == {"follows-rules"}
    refused = hosted.project.run("tune", "promote", run.id)
    assert refused.returncode == 2
    assert "has no versions" in " ".join(refused.stdout.split())


async def test_python_does_the_same_and_resumes_without_vllm(hosted: HostedProject) -> None:
    given: dict[str, Any] = {"model": "follows-rules", "reflection_model": "reflection", "seed": 1}
    run = await ratchet.tune_prompt_async(world_agent.agent, world_agent.judge, "world", max_rollouts=200, **given)
    run.cancel()
    with pytest.raises(ratchet.RunCancelled):
        await run
    assert hosted.is_at_rest
    again = await (await ratchet.tune_prompt_async(world_agent.agent, world_agent.judge, resume=run.id))
    assert again.best is not None
    assert all(f"a {thing} is a {word}" in again.best for thing, word in prompt_world.WORDS.items())
    assert hosted.is_at_rest
    found = await ratchet.evaluate_async(ask, exact, "sums", models=["right-20", "right-95"], limit=12)
    assert found.compared("right-95", "right-20").verdict == "better"
    assert hosted.is_at_rest


def test_ctrl_c_ends_the_proxy_and_the_run_is_resumed(hosted: HostedProject) -> None:
    process = hosted.project.start(
        "tune", "select-model", "--candidate", "hangs", "--candidate", "right-95", "--limit", "3", *SUMS
    )
    try:
        eventually(lambda: "right-95" in [one["model"] for one in hosted.sums.requests], 120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in INTERRUPTED, output
    assert "--resume tun_" in output
    eventually(lambda: hosted.is_at_rest, 60)


def test_ctrl_c_ends_an_evaluation_whose_judge_hangs(hosted: HostedProject) -> None:
    arguments = [*SUMS[:-1], "tests.harness.tuner.judges:hangs"]
    process = hosted.project.start("eval", "--model", "right-95", "--limit", "3", *arguments)
    try:
        eventually(lambda: (hosted.project.folder / "judging").exists(), 120)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in INTERRUPTED, output
    assert "--resume tun_" in output
    assert hosted.is_at_rest


def test_a_run_that_fails_leaves_no_proxy(hosted: HostedProject) -> None:
    hosted.project.write(model_list=[*hosted.project.content["model_list"], entry(hosted.sums.url, "crash")])
    done = hosted.project.run("eval", "--model", "crash", *SUMS, seconds=180)
    assert done.returncode == 1
    assert "all of the first 16 rollouts failed" in done.stdout
    assert hosted.is_at_rest


def test_what_is_missing_is_refused_by_name_before_anything_starts(hosted: HostedProject) -> None:
    def refusal(*arguments: str, **environ: str) -> str:
        done = hosted.project.call(*arguments, **environ)
        assert done.returncode in (1, 2), done.stdout
        return " ".join(done.stdout.split())

    assert "project default does not run in" in refusal("eval", "--model", "right-9", *SUMS)
    assert "model_list need neither: follows-rules, right-95" in refusal("eval", "--model", "right-9", *SUMS)
    wrong = [word if word != "reflection" else "big" for word in PROMPT]
    assert re.search(r"tuner.reflection.model: .*'big' .* model_list, which has follows-rules", refusal(*wrong))
    assert "no split 'train'" in refusal("eval", "--model", "right-95", *SUMS, "--split", "train")
    few = refusal(*(word if word != "200" else "10" for word in PROMPT))
    assert "--max-rollouts 10 is too small: these tasks need at least" in few
    assert "--resume" not in few
    *others, reflection = hosted.project.content["model_list"]
    params = reflection["litellm_params"] | {"api_key": "os.environ/REFLECTION_KEY"}
    hosted.project.write(model_list=[*others, reflection | {"litellm_params": params}])
    assert "the variable REFLECTION_KEY, which is not set" in refusal(*PROMPT)
    assert "api_key from the variable REFLECTION_KEY" in refusal("eval", "--model", "hangs", *SUMS)
    assert hosted.is_at_rest
    assert hosted.sums.requests == []


def test_a_project_with_a_base_model_starts_vllm_for_its_versions_only(project: Project) -> None:
    with hosted_project(project, has_base_model=True) as hosted:
        few = ("--limit", "10")
        done = project.run("eval", "--model", "right-95", "--against", "right-20", *SUMS, *few, seconds=180)
        assert done.returncode == 0, done.stdout
        assert "no vLLM is needed" in done.stdout
        assert hosted.is_at_rest
        done = project.run("eval", "--model", "right-95", *SUMS, *few, seconds=180)  # against the live version
        assert done.returncode == 0, done.stdout
        assert "vllm: ready" in done.stdout
        assert "right-95 against policy@0: better" in done.stdout
        assert hosted.is_at_rest
