"""The agent of `ratchet demo --real`: its reviews, its one call, its judge, and its command line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo import reviews
from ratchet.demo.reviews import judge
from tests.harness.chat_models import Reply, ScriptedModel, completion


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    with ScriptedModel(lambda _: completion({"role": "assistant", "content": "Positive."})) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        monkeypatch.setenv("OPENAI_MODEL", "m")
        yield model


def rows(path: Path) -> list[dict[str, Any]]:
    """The rollouts that a run wrote."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_no_adjective_of_a_held_out_review_is_trained() -> None:
    def adjectives(found: list[reviews.ReviewTask]) -> set[str]:
        return {task.id.rpartition("-")[2] for task in found}

    training, held_out = reviews.training_tasks(), reviews.held_out_tasks()
    assert (len(training), len(held_out)) == (160, 60)
    assert not adjectives(training) & adjectives(held_out)
    assert len({task.question for task in training + held_out}) == 220
    assert sum(task.label == reviews.POSITIVE for task in held_out) == 30


def test_a_call_is_one_question_after_two_worked_examples_and_nothing_of_ratchet(
    server: ScriptedModel, tmp_path: Path
) -> None:
    assert (
        reviews.main(["test", "--tasks", "2", "--concurrency", "1", "--temperature", "0", "--out", str(tmp_path / "o")])
        == 0
    )
    headers, body = server.headers[0], server.requests[0]
    assert set(body) == {"model", "messages", "temperature", "max_tokens"}
    assert body["messages"] == reviews.prompt(reviews.held_out_tasks()[0].question)
    assert "ratchet" not in json.dumps([headers, body]).lower()
    first, second = rows(tmp_path / "o")
    assert (first["success"], second["success"]) == (True, False)  # a positive review, then a negative one
    assert first["models"] == ["served@v3"]


@pytest.mark.parametrize("given", ["negative", " Negative.\n", "positive", "negative or positive", "", "A negative"])
def test_the_judge_scores_as_the_agent_counts(given: str) -> None:
    task = reviews.held_out_tasks()[1]
    messages = [*reviews.prompt(task.question), {"role": "assistant", "content": given}]
    assert judge({"messages": messages}, given) == float(reviews.matches(given, task.label))
    assert reviews.matches(given, task.label) == (given.strip(" .\n").lower() == "negative")


def test_a_review_that_is_not_of_the_task_set_is_an_error_and_no_score() -> None:
    with pytest.raises(LookupError, match="not a review"):
        judge({"messages": [{"role": "user", "content": "Review: The sea was wet."}]}, "positive")


def test_training_traffic_ends_at_sigterm_and_keeps_its_rollouts(server: ScriptedModel, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ratchet.demo.reviews", "train", "--seconds", "600", "--attempts", "2"]
    with subprocess.Popen([*command, "--out", str(tmp_path / "o")]) as process:
        while len(server.requests) < 5:
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 0
    assert len(rows(tmp_path / "o")) >= 5


def test_training_traffic_ends_after_its_seconds(server: ScriptedModel, tmp_path: Path) -> None:
    arguments = ["train", "--seconds", "0.5", "--concurrency", "4", "--attempts", "2", "--tasks-per-round", "3"]
    assert reviews.main([*arguments, "--out", str(tmp_path / "o")]) == 0
    found = rows(tmp_path / "o")
    assert len(found) > 8
    assert {sum(row["task_id"] == one["task_id"] for row in found[:8]) for one in found[:2]} == {2}


def test_training_traffic_ends_after_its_rounds(server: ScriptedModel, tmp_path: Path) -> None:
    assert (
        reviews.main(
            ["train", "--rounds", "2", "--tasks-per-round", "3", "--attempts", "2", "--out", str(tmp_path / "o")]
        )
        == 0
    )
    assert len(rows(tmp_path / "o")) == 12


def test_a_server_that_refuses_everything_is_a_failed_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal: Reply = (404, {"error": {"message": "the model m does not exist"}})
    with ScriptedModel(lambda _: refusal) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        monkeypatch.setenv("OPENAI_MODEL", "m")
        assert reviews.main(["test", "--tasks", "4"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    assert reviews.main(["test"]) == 1
    assert "OPENAI_MODEL" in capsys.readouterr().err
