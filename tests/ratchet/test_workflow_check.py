"""`ratchet doctor --workflow`: every reason why nothing would be learnt is named, and nothing is left to be trained."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.checks.check_result import CheckResult
from ratchet.checks.workflow_check import run_checks, task_of
from ratchet.settings import load_settings
from ratchet.store.states import TrajectoryState
from ratchet.store.store import open_store
from tests.harness.cli.project import Project
from tests.harness.proxy.running_proxy import Proxy, running
from tests.harness.proxy.scripted_vllm import ScriptedVllm
from tests.harness.proxy.servers import served

HERE = "tests.harness.tuner.workflows"
TASK = {"question": "What is 2 + 2? #say=4", "answer": "4"}

Examine = Callable[..., dict[str, list[CheckResult]]]


@pytest.fixture(scope="module")
def vllm_url() -> Iterator[str]:
    with served(ScriptedVllm()) as url:
        yield url


@pytest.fixture
def proxy(vllm_url: str, store_file: Path, tmp_path: Path) -> Iterator[Proxy]:
    store = open_store(str(store_file))
    other = {"model_name": "teacher", "litellm_params": {"model": "hosted_vllm/tiny-base", "api_base": vllm_url}}
    with running(vllm_url, store, tmp_path, model_list=(other,)) as started:
        yield started
    store.close()


@pytest.fixture
def found(proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Examine:
    """Examine a workflow and return the findings by step; `changes` are settings by their dotted name."""
    monkeypatch.chdir(tmp_path)

    def examined(workflow: str = "ask", judge: str | None = "right", task: Any = TASK, **changes: Any) -> Any:
        named = workflow if " " in workflow else f"{HERE}:{workflow}"
        values = {
            "store": str(tmp_path / "store.db"), "model": "agent", "tuner.workflow": named,
            "tuner.proxy_url": proxy.url, "tuner.attempts": 2, "trainer.judge": judge and f"{HERE}:{judge}",
        } | {name.replace("__", "."): value for name, value in changes.items()}  # fmt: skip
        settings = load_settings.load(
            options={tuple(name.split(".")): (name, value) for name, value in values.items()}, environ={}
        )
        by_step: dict[str, list[CheckResult]] = {}
        for finding in run_checks(settings, task_of(json.dumps(task), settings)):
            by_step.setdefault(finding.name, []).append(finding)
        return by_step

    return examined


def failed(found: dict[str, list[CheckResult]]) -> dict[str, str]:
    return {step: "; ".join(one.seen for one in results) for step, results in found.items() if not results[0].passed}


@pytest.mark.slow
def test_a_sound_workflow_passes_every_step_and_leaves_nothing_to_train(found: Examine, proxy: Proxy) -> None:
    steps = found(judge="by_length")
    assert steps["rollouts"][0].seen.startswith("2 attempts ended, the slowest in ")
    assert set(failed(steps)) == {"attempts"}  # the scripted model says the same each time
    runs = proxy.store.trajectories.page()
    assert [(run.state, run.drop_reason) for run in runs] == [(TrajectoryState.DROPPED, "doctor")] * 2
    assert [run.state for run in proxy.store.tunings.page("doctor")] == ["done"]
    assert proxy.store.tunings.page() == []  # it is no run of a method


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "judge", "changes", "step", "message"),
    [
        ("crashes", "right", {}, "rollouts", "2 of 2 failed: ValueError: no tool named search"),
        ("hangs", "right", {"tuner__timeout_seconds": 0.2}, "rollouts", "the rollout exceeded 0.2 s"),
        ("asks_elsewhere", "right", {}, "calls", "no call of this rollout reached the proxy"),
        ("asks_greedily", "right", {}, "tokens", "tokens greedy (sampled at temperature 0"),
        ("ask", "right", {}, "attempts", "all 2 attempts sampled the same tokens"),
        ("ask", "right", {}, "scores", "all 2 attempts scored 1: a group with equal scores has no learning signal"),
        ("ask", "indifferent", {}, "judge", "gave 0.5 to the answer, to an empty answer and to every value"),
        ("ask", "picky", {}, "judge", "it failed on 2 of 2 attempts: KeyError"),
        ("ask", None, {}, "judge", "no judge is set"),
        ("ask", "right", {"trainer__group_wait_seconds": 1e-6, "tuner__concurrency": 1}, "groups", "1 at a time"),
        ("ask", "right", {"trainer__roles": ("planner",)}, "tokens", "tokens other_role"),
    ],
)
def test_every_reason_is_named(
    found: Examine, workflow: str, judge: str | None, changes: dict[str, Any], step: str, message: str
) -> None:
    wrong = failed(found(workflow, judge, **changes))
    assert message in wrong[step]


@pytest.mark.slow
def test_the_error_of_a_program_is_its_own_last_line(found: Examine) -> None:
    (result,) = found(f"{sys.executable} nowhere.py")["rollouts"]
    assert "exit code 2" in result.seen
    assert result.seen.endswith("No such file or directory")


@pytest.mark.slow
def test_a_step_without_data_does_not_pass(found: Examine) -> None:
    assert not {"tokens", "attempts", "judge", "scores"} & set(found("asks_elsewhere"))
    assert "scores" not in found("ask", "picky")
    assert "attempts" not in found("asks_greedily")


@pytest.mark.slow
def test_an_agent_that_asks_for_another_model_is_named(found: Examine) -> None:
    wrong = failed(found("asks_greedily", task=TASK | {"model": "gpt-unknown"}))
    assert "2 of 2 failed: NotFoundError: " in wrong["rollouts"]
    assert "gpt-unknown" in wrong["rollouts"]


@pytest.mark.slow
def test_calls_to_a_model_that_is_not_trained_are_named(found: Examine) -> None:
    wrong = failed(found("asks_greedily", task=TASK | {"model": "teacher"}))
    assert "use the given base_url and model" in wrong["calls"]


@pytest.mark.slow
def test_calls_without_token_ids_are_named(found: Examine) -> None:
    wrong = failed(found(task=TASK | {"question": "Hello #noids"}))
    assert "no sampled token could be trained: " in wrong["tokens"]


def test_a_proxy_that_is_not_there_is_named(found: Examine) -> None:
    wrong = failed(found(tuner__proxy_url="http://127.0.0.1:9"))
    assert list(wrong) == ["proxy"]


def test_another_store_than_the_proxys_is_named(found: Examine, tmp_path: Path) -> None:
    wrong = failed(found(store=str(tmp_path / "other.db"), tuner__judge_wait_seconds=0.1))
    assert "no call of this rollout reached the proxy" in wrong["calls"]


def test_the_task_may_be_a_file_a_task_set_or_json(tmp_path: Path) -> None:
    settings = load_settings.load(options={("state_dir",): ("state_dir", str(tmp_path / "state"))}, environ={})
    (tmp_path / "task.json").write_text(json.dumps(TASK, indent=2))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(TASK) + "\n")
    given = (json.dumps(TASK), str(tmp_path / "task.json"), str(tmp_path / "tasks.jsonl"))
    assert len({task_of(text, settings).id for text in given}) == 1


@pytest.mark.slow
def test_the_command_prints_the_reasons_and_fails(project: Project, proxy: Proxy, store_path: str) -> None:
    with contextlib.suppress(OSError):
        (project.folder / "agent.py").write_text("def run(task):\n    return task['answer']\n")
    done = project.run(
        "doctor", "--workflow", "agent:run", "--task", json.dumps(TASK), "--proxy", proxy.url, "--store", store_path,
        "--model", "agent", "--attempts", "1",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert re.search(r"FAIL  calls     no call ", done.stdout)
    assert "FAIL  judge     no judge is set" in done.stdout
    assert "remedy: " in done.stdout


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    return str(tmp_path / "store.db")
