"""The commands of the mail agent: their files, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo.email_search.__main__ import main
from ratchet.demo.email_search.tasks import read_tasks
from ratchet.demo.traffic import TaskRollout, means
from tests.harness.chat_models import Reply, ScriptedModel, completion, tool_call

ROOT = Path(__file__).parents[2]
ALWAYS_OSLO = '{"answer": "Oslo"}'


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    with ScriptedModel(lambda _: completion(tool_call("return_final_answer", ALWAYS_OSLO))) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "x")
        yield model


@pytest.mark.slow
def test_test_writes_rows_and_a_summary_of_all_held_out_tasks(
    home: Path, tmp_path: Path, server: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "rows.jsonl"
    arguments = ["test", "--home", str(home), "--model", "m", "--concurrency", "8"]
    assert main([*arguments, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    tasks = read_tasks(home, "test")
    figures = json.loads(capsys.readouterr().out)
    assert {row["question"] for row in rows} == {task.question for task in tasks}
    assert figures["rollouts"] == len(rows) == len(tasks)
    assert figures["success"] == round(sum(task.answer == "Oslo" for task in tasks) / len(tasks), 4)
    assert figures["models"] == ["served@v3"]
    assert figures["ends"] == {"answer": len(tasks)}


def test_train_attempts_each_task_several_times_and_reports_each_round(
    home: Path, tmp_path: Path, server: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", "--home", str(home), "--model", "m", "--out", str(tmp_path / "rows.jsonl")]
    assert main([*arguments, "--tasks-per-round", "3", "--attempts", "4", "--rounds", "2", "--concurrency", "5"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()]
    ids = [row["task_id"] for row in rows]
    assert len(ids) == 24
    assert {ids.count(one) for one in ids} == {4}
    output = capsys.readouterr().err
    assert "round=1 rollouts=12" in output
    assert "round=2 rollouts=12" in output
    assert "train rollouts=24 success=" in output


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [(["test", "--model", "m"], "OPENAI_BASE_URL"), (["train"], "OPENAI_MODEL")],
)
def test_what_is_missing_is_named(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    missing: str,
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_MODEL", raising=False)
    assert main([*arguments, "--home", str(home)]) == 1
    assert missing in capsys.readouterr().err


def test_without_a_mailbox_the_remedy_is_named(
    tmp_path: Path, server: ScriptedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["test", "--home", str(tmp_path), "--model", "m"]) == 1
    assert "build-db" in capsys.readouterr().err


def test_a_server_that_refuses_everything_is_a_failed_run(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal: Reply = (404, {"error": {"message": "the model m does not exist"}})
    with ScriptedModel(lambda _: refusal) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.base_url)
        assert main(["test", "--home", str(home), "--model", "m", "--tasks", "4"]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_each_metric_has_its_own_divisor() -> None:
    ended: dict[str, Any] = {"answer": None, "tool_failures": {}, "prompt_tokens": 9, "seconds": 1.0}
    shared: dict[str, Any] = {"index": 0, "task_id": "t", "question": "q", "correct_answer": "a", "models": []}
    good = TaskRollout(**shared, **ended, success=True, end="answer", turns=3, completion_tokens=30, errors=[])
    lost = TaskRollout(**shared, **ended, success=False, end="api_error", turns=0, completion_tokens=0, errors=["x"])
    assert means([good, lost]) == {
        "success": 0.5,
        "turns": 3.0,
        "tool_failures": 0.0,
        "seconds": 1.0,
        "completion_tokens": 30.0,
    }
