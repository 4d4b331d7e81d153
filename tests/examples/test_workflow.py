"""The agent as a workflow: what it is given, what it gives back, and when it fails."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ratchet.demo.email_search.agent import NoAnswerError, workflow
from ratchet.demo.email_search.judge import judge
from ratchet.demo.email_search.tasks import MailTask
from tests.harness.chat_models import Reply, ScriptedModel, completion, tool_call


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(home))


async def run(task: MailTask, model: ScriptedModel) -> str | None:
    return await workflow(asdict(task), base_url=model.base_url, api_key="sk-test", model="m")


def answering(text: str) -> Reply:
    return completion(tool_call("return_final_answer", json.dumps({"answer": text})))


def test_it_takes_a_task_a_url_a_key_and_a_model_and_nothing_else() -> None:
    assert list(inspect.signature(workflow).parameters) == ["task", "base_url", "api_key", "model"]


async def test_the_answer_that_the_agent_gave_is_the_response(task: MailTask) -> None:
    with ScriptedModel(lambda _: answering("Oslo")) as model:
        assert await run(task, model) == "Oslo"
    (headers,), (body,) = model.headers, model.requests
    assert (headers["authorization"], body["model"]) == ("Bearer sk-test", "m")
    assert body["messages"][-1]["content"] == task.question


async def test_a_text_is_no_answer(task: MailTask) -> None:
    with ScriptedModel(lambda _: completion({"role": "assistant", "content": "Oslo"})) as model:
        assert await run(task, model) is None


async def test_an_error_of_the_server_is_an_exception_and_never_an_empty_answer(task: MailTask) -> None:
    refusal: Reply = (400, {"error": {"message": "no such model"}})
    with ScriptedModel(lambda _: refusal) as model, pytest.raises(NoAnswerError, match="no such model"):
        await run(task, model)


async def test_without_a_mailbox_the_remedy_is_named(
    task: MailTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    with ScriptedModel(lambda _: answering("x")) as model, pytest.raises(FileNotFoundError, match="build-db"):
        await run(task, model)


@pytest.mark.parametrize("right", [True, False])
def test_the_judge_goes_by_the_tasks_row_where_it_is_given(task: MailTask, right: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a question that is in no task set"}]
    messages.append(tool_call("return_final_answer", json.dumps({"answer": task.answer if right else "Atlantis"})))
    assert judge({"messages": messages}, asdict(task))["score"] == float(right)
