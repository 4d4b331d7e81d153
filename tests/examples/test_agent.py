"""The mail agent: its rollouts, its workflow, its commands and what they refuse."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import ratchet.demo
from ratchet.demo.email_search.__main__ import main
from ratchet.demo.email_search.agent import TOOLS, NoAnswerError, workflow
from ratchet.demo.email_search.mailbox import DATABASE, TODAY, USER_EMAIL, Mail, Mailbox
from ratchet.demo.email_search.tasks import MailTask, judge, read_tasks
from ratchet.demo.traffic import TaskRollout, means, shuffled
from tests.harness.chat_models import Reply, ScriptedModel, completion, tool_call
from tests.harness.examples.mail_rollouts import run_tasks

PACKAGE = Path(ratchet.demo.__file__).parent
SDK_HEADERS = {"accept", "accept-encoding", "authorization", "connection", "content-length", "content-type", "host"}


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    return names


async def run(box: Mailbox, task: MailTask, model: ScriptedModel, **more: Any) -> list[TaskRollout]:
    options: dict[str, Any] = {"attempts": 1, "concurrency": 1, "max_turns": 3, **more}
    return await run_tasks([task], base_url=model.base_url, api_key="sk-test", model="m", box=box, **options)


def test_the_agent_and_all_that_it_imports_need_only_the_sdk_and_rich() -> None:
    seen, open_files = set(), ["email_search.agent"]
    while open_files:
        name = open_files.pop()
        seen.add(name)
        for module in imports(PACKAGE / f"{name.replace('.', '/')}.py"):
            if module.startswith("ratchet.demo."):
                open_files += {module.removeprefix("ratchet.demo.")} - seen
            else:  # rich draws the progress
                assert module.split(".")[0] in sys.stdlib_module_names | {"openai", "rich"}, module
    assert seen == {"email_search.agent", "email_search.mailbox", "email_search.tasks", "traffic"}


async def test_a_request_holds_nothing_that_is_not_the_sdks_or_the_apis(box: Mailbox, task: MailTask) -> None:
    with ScriptedModel(lambda _: completion(tool_call("return_final_answer", '{"answer": "x"}'))) as model:
        await run(box, task, model)
    (headers,), (body,) = model.headers, model.requests
    own = {key for key in headers if not key.startswith("x-stainless-")} - SDK_HEADERS
    assert own == {"user-agent"}
    assert headers["authorization"] == "Bearer sk-test"
    assert headers["user-agent"].startswith("AsyncOpenAI/")
    assert set(body) == {"model", "messages", "tools", "temperature", "max_tokens"}
    assert body["tools"] == list(TOOLS)
    assert "ratchet" not in json.dumps([headers, body]).lower()


async def test_the_prompt_carries_turns_date_and_address(box: Mailbox, task: MailTask) -> None:
    with ScriptedModel(lambda _: completion({"role": "assistant", "content": "no"})) as model:
        await run(box, task, model, max_turns=7)
    system, user = model.requests[0]["messages"]
    assert "7 turns" in system["content"]
    assert TODAY in system["content"]
    assert USER_EMAIL in system["content"]
    assert user == {"role": "user", "content": task.question}


async def test_a_task_with_user_and_day_runs_as_that_user_on_that_day() -> None:
    mails = [
        Mail("mine", "ann@corp.example", "lease", "The lease is in Oslo.", "1999-11-01", ("joe@corp.example",)),
        Mail("later", "ann@corp.example", "lease moved", "Now in Rome.", "2000-02-01", ("Joe@corp.example",)),
        Mail("others", "ann@corp.example", "lease of Eve", "In Lima.", "1999-10-01", ("eve@corp.example",)),
    ]
    box = Mailbox.build(":memory:", mails)
    mail_task = MailTask("t", "Where is the lease?", "Oslo", "", "", "", "", "joe@corp.example", "1999-12-11")

    def reply(body: dict[str, Any]) -> Reply:
        messages = body["messages"]
        if len(messages) == 2:
            return completion(tool_call("search_inbox", '{"keywords": ["lease"]}'))
        if len(messages) == 4:
            return completion(tool_call("read_email", '{"message_id": "others"}'))
        return completion(tool_call("return_final_answer", '{"answer": "Oslo"}'))

    with ScriptedModel(reply) as model:
        await run(box, mail_task, model)
    messages = model.requests[-1]["messages"]
    assert "joe@corp.example" in messages[0]["content"]
    assert "1999-12-11" in messages[0]["content"]
    assert [hit["message_id"] for hit in json.loads(messages[3]["content"])] == ["mine"]
    assert "no such message" in messages[5]["content"]
    box.close()


def perfect(task: MailTask) -> Any:
    """Searches, reads and answers."""

    def reply(body: dict[str, Any]) -> Reply:
        messages = body["messages"]
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn == 0:
            return completion(tool_call("search_inbox", json.dumps({"keywords": [task.person, task.topic]})))
        if turn == 1:
            found = json.loads(messages[-1]["content"])[0]["message_id"]
            return completion(tool_call("read_email", json.dumps({"message_id": found})))
        return completion(tool_call("return_final_answer", json.dumps({"answer": task.answer})))

    return reply


async def test_a_right_answer_is_a_success_with_its_figures(box: Mailbox, task: MailTask) -> None:
    with ScriptedModel(perfect(task)) as model:
        (rollout,) = await run(box, task, model)
    assert rollout.success
    assert (rollout.end, rollout.turns, len(rollout.tools), rollout.tool_failures) == ("answer", 3, 3, {})
    assert (rollout.prompt_tokens, rollout.completion_tokens) == (15, 6)
    assert rollout.models == ["served@v3"]
    assert rollout.answer == rollout.correct_answer == task.answer


async def test_running_out_of_turns_is_recorded(box: Mailbox, task: MailTask) -> None:
    with ScriptedModel(lambda _: completion(tool_call("search_inbox", '{"keywords": ["nothing"]}'))) as model:
        (rollout,) = await run(box, task, model)
    assert (rollout.end, rollout.turns, rollout.tool_failures) == ("ran_out_of_turns", 3, {"no_hits": 3})
    assert not rollout.success


@pytest.mark.parametrize(("text", "failures"), [("It is Oslo.", {}), ("<tool_call>\n{", {"malformed_json": 1})])
async def test_a_text_ends_the_rollout(box: Mailbox, task: MailTask, text: str, failures: dict[str, int]) -> None:
    with ScriptedModel(lambda _: completion({"role": "assistant", "content": text})) as model:
        (rollout,) = await run(box, task, model)
    assert (rollout.end, rollout.answer, rollout.tool_failures) == ("text", None, failures)


async def test_an_api_error_ends_one_rollout_and_not_the_run(box: Mailbox, task: MailTask) -> None:
    error: Reply = (400, {"error": {"message": "no such model", "type": "invalid_request_error"}})
    with ScriptedModel(lambda _: error) as model:
        rollouts = await run(box, task, model, attempts=3)
    assert [rollout.end for rollout in rollouts] == ["api_error"] * 3
    assert "no such model" in rollouts[0].errors[0]


async def test_the_model_sees_that_its_arguments_are_not_json(box: Mailbox, task: MailTask) -> None:
    with ScriptedModel(lambda _: completion(tool_call("read_email", '{"message_id": '))) as model:
        (rollout,) = await run(box, task, model)
    assert rollout.tool_failures == {"malformed_json": 3}
    assert model.requests[-1]["messages"][-1]["content"] == '{"error": "arguments are not JSON"}'


async def test_an_endless_run_stops_on_request_and_finishes_running_rollouts(home: Path, task: MailTask) -> None:
    stop, box = asyncio.Event(), Mailbox(home / DATABASE)
    seen: list[int] = []

    def on_result(rollout: TaskRollout) -> None:
        seen.append(rollout.index)
        if len(seen) == 10:
            stop.set()

    with ScriptedModel(perfect(task)) as model:
        rollouts = await run_tasks(
            shuffled(read_tasks(home, "train"), 0),
            base_url=model.base_url,
            api_key="x",
            model="m",
            box=box,
            attempts=2,
            concurrency=4,
            on_result=on_result,
            stop=stop,
        )
    box.close()
    assert 10 <= len(rollouts) <= 14
    assert sorted(seen) == sorted(rollout.index for rollout in rollouts)
    assert all(rollout.end == "answer" for rollout in rollouts)


def test_the_order_of_tasks_follows_from_the_seed(home: Path) -> None:
    tasks = read_tasks(home, "train")
    first = [task.id for task, _ in zip(shuffled(tasks, 3), range(900), strict=False)]
    assert first == [task.id for task, _ in zip(shuffled(tasks, 3), range(900), strict=False)]
    assert first[:400] != first[400:]
    assert set(first[:400]) == set(first[400:]) == {task.id for task in tasks}


@pytest.fixture(autouse=True)
def _home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(home))


async def run_workflow(task: MailTask, model: ScriptedModel) -> str | None:
    return await workflow(asdict(task), base_url=model.base_url, api_key="sk-test", model="m")


def answering(text: str) -> Reply:
    return completion(tool_call("return_final_answer", json.dumps({"answer": text})))


def test_it_takes_a_task_a_url_a_key_and_a_model_and_nothing_else() -> None:
    assert list(inspect.signature(workflow).parameters) == ["task", "base_url", "api_key", "model"]


async def test_the_answer_that_the_agent_gave_is_the_response(task: MailTask) -> None:
    with ScriptedModel(lambda _: answering("Oslo")) as model:
        assert await run_workflow(task, model) == "Oslo"
    (headers,), (body,) = model.headers, model.requests
    assert (headers["authorization"], body["model"]) == ("Bearer sk-test", "m")
    assert body["messages"][-1]["content"] == task.question


async def test_a_text_is_no_answer(task: MailTask) -> None:
    with ScriptedModel(lambda _: completion({"role": "assistant", "content": "Oslo"})) as model:
        assert await run_workflow(task, model) is None


async def test_an_error_of_the_server_is_an_exception_and_never_an_empty_answer(task: MailTask) -> None:
    refusal: Reply = (400, {"error": {"message": "no such model"}})
    with ScriptedModel(lambda _: refusal) as model, pytest.raises(NoAnswerError, match="no such model"):
        await run_workflow(task, model)


async def test_without_a_mailbox_the_remedy_is_named(
    task: MailTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EMAIL_SEARCH_HOME", str(tmp_path))
    with ScriptedModel(lambda _: answering("x")) as model, pytest.raises(FileNotFoundError, match="build-db"):
        await run_workflow(task, model)


@pytest.mark.parametrize("right", [True, False])
def test_the_judge_goes_by_the_tasks_row_where_it_is_given(task: MailTask, right: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a question that is in no task set"}]
    messages.append(tool_call("return_final_answer", json.dumps({"answer": task.answer if right else "Atlantis"})))
    assert judge({"messages": messages}, asdict(task))["score"] == float(right)


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


def test_without_a_mailbox_the_command_names_the_remedy(
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
