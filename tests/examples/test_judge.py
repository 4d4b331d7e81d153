"""The judge finds the right answer by the question and never guesses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo.email_search.agent import opening
from ratchet.demo.email_search.judge import UnknownQuestionError, judge
from ratchet.demo.email_search.tasks import MailTask, read_tasks
from tests.harness.chat_models import tool_call


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(home))


def trajectory(task: MailTask, *messages: dict[str, Any]) -> dict[str, Any]:
    return {"id": "t1", "messages": [*opening(task.question), *messages], "tools": [], "task": None}


def answer(text: str) -> dict[str, Any]:
    return tool_call("return_final_answer", json.dumps({"answer": text}))


def test_the_right_answer_scores_one_and_says_what_was_done(task: MailTask) -> None:
    verdict = judge(trajectory(task, tool_call("search_inbox", '{"keywords": ["a"]}'), answer(task.answer)))
    assert verdict["score"] == 1.0
    assert verdict["components"] == {"answered": 1.0, "correct": 1.0, "searched": 1.0, "read": 0.0}
    assert task.answer in verdict["explanation"]


def test_a_wrong_answer_a_text_and_silence_score_nothing(task: MailTask) -> None:
    text_answer = {"role": "assistant", "content": f"It is {task.answer}."}
    for messages in ([answer("Atlantis")], [text_answer], []):
        assert judge(trajectory(task, *messages))["score"] == 0.0


def test_naming_every_city_and_month_scores_nothing(home: Path, task: MailTask) -> None:
    everything = " ".join(sorted({other.answer for other in read_tasks(home, "train")}))
    assert judge(trajectory(task, answer(everything)))["score"] == 0.0


def test_an_answer_outside_the_schema_does_not_count(task: MailTask) -> None:
    extra = tool_call("return_final_answer", json.dumps({"answer": task.answer, "sure": True}))
    assert judge(trajectory(task, extra))["score"] == 0.0


def test_the_first_answer_counts_not_the_last(task: MailTask) -> None:
    assert judge(trajectory(task, answer("Atlantis"), answer(task.answer)))["score"] == 0.0


def test_content_in_parts_and_parsed_arguments_are_understood(task: MailTask) -> None:
    call = {"type": "function", "function": {"name": "return_final_answer", "arguments": {"answer": task.answer}}}
    user = {"role": "user", "content": [{"type": "text", "text": task.question}]}
    messages = [user, {"role": "assistant", "tool_calls": [call]}]
    assert judge({"id": "t", "messages": messages, "tools": [], "task": None})["score"] == 1.0


def test_an_unknown_question_is_an_error_that_names_the_remedy() -> None:
    with pytest.raises(UnknownQuestionError, match="EMAIL_SEARCH_HOME"):
        judge({"id": "t", "messages": opening("Who am I?"), "tools": [], "task": None})


def test_a_missing_task_set_is_an_error_that_names_the_remedy(
    tmp_path: Path, task: MailTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="build-db"):
        judge(trajectory(task))


def test_a_rebuilt_task_set_is_read_again(tmp_path: Path, task: MailTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    for number, right in enumerate(("Oslo", "Reykjavik")):
        for name in ("train.jsonl", "test.jsonl"):
            row = json.dumps({"question": task.question, "answer": right}) + "\n"
            (tmp_path / name).write_text(row, "utf-8")
            os.utime(tmp_path / name, ns=(number + 1, number + 1))
        assert judge(trajectory(task, answer("Oslo")))["score"] == float(right == "Oslo")
