"""`ratchet.evaluate` and the Python API: what functions are given and give back."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ratchet
from examples import try_out as example
from ratchet.errors import InvalidArgument
from ratchet.store.states import RolloutState
from tests.harness.cli.project import Project
from tests.harness.json_server import IncomingRequest, JsonServer
from tests.harness.proxy.servers import eventually
from tests.harness.tuner.judges import exact
from tests.harness.tuner.model_project import TASKS, ModelProject, model_project
from tests.harness.tuner.workflows import ask


@pytest.fixture
def circle(project: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelProject]:
    monkeypatch.chdir(project.folder)
    with model_project(project) as made:
        yield made


@pytest.mark.slow
def test_models_are_compared_with_functions_of_the_caller(circle: ModelProject) -> None:
    judged: list[str] = []

    def judge(task: dict[str, Any], response: str) -> ratchet.Judgement:
        judged.append(response)
        return ratchet.Judgement(float(response == task["answer"]))

    async def workflow(task: dict[str, Any], base_url: str, api_key: str, model: str) -> ratchet.WorkflowOutput:
        return ratchet.WorkflowOutput(await ask(task, base_url=base_url, api_key=api_key, model=model))

    tasks = ratchet.Tasks("sums", split="test")
    found = ratchet.evaluate(workflow, judge, tasks, models=["right-20", "right-95"], attempts=2)
    assert len(judged) == len(found.attempts) == 2 * 2 * TASKS
    assert found.compared("right-95", "right-20").verdict == "better"
    score = found.score("right-95")
    assert (score.tasks, score.failed, score.unjudged) == (TASKS, 0, 0)
    assert score.mean is not None
    assert score.low < score.mean <= score.high
    right = [one for one in found.attempts if one.model == "right-95" and one.score == 1.0]
    assert right
    assert all(one.response == one.task["answer"] for one in right)
    assert "chosen: right-95" in str(found)
    (run,) = circle.store.tunings.page()
    assert (run.id, run.kind, run.state) == (found.run, "eval", "done")
    assert run.config["workflow"].endswith(":test_models_are_compared_with_functions_of_the_caller.<locals>.workflow")


@pytest.mark.slow
async def test_one_model_at_any_server_is_evaluated_in_a_running_event_loop(circle: ModelProject) -> None:
    given: Any = {"base_url": f"{circle.models.url}/v1", "limit": 6}
    found = await ratchet.evaluate_async(ask, exact, "sums", models="right-95", **given)
    assert found.run is None
    assert [one.score for one in found.attempts] == [
        float(one.response == one.task["answer"]) for one in found.attempts
    ]
    assert found.score().tasks == 6
    assert str(found).count("unknown") == 2, "no call is recorded here, so tokens and money are not known"
    assert circle.store.tunings.page() == []
    both = await ratchet.evaluate_async(ask, exact, "sums", models=["right-95", "crash"], **given)
    assert both.score("crash").failed == 6
    with pytest.raises(ratchet.TuningError, match=r"no rollout could be scored: InternalServerError"):
        await ratchet.evaluate_async(ask, exact, "sums", models="crash", **given)


@pytest.mark.slow
async def test_the_proxy_of_the_project_is_recognized_by_its_url(circle: ModelProject) -> None:
    found = await ratchet.evaluate_async(ask, exact, "sums", base_url=f"{circle.proxy_url}/v1", limit=2)
    assert found.scores[0].candidate == "policy@0"
    assert [one.purpose for one in circle.store.rollouts.of_tuning(str(found.run))] == ["eval", "eval"]  # never trained


@pytest.mark.slow
def test_a_run_that_selects_a_model_has_a_handle(circle: ModelProject) -> None:
    with ratchet.select_model(ask, exact, "sums", models=["right-20", "right-95"]) as run:
        assert run.wait(60).best == "right-95"
    assert run.status == ratchet.RunStatus("done", 2 * TASKS, 0, None)
    assert run.result.spent.rollouts == 2 * TASKS
    assert run.curve() == []
    assert "chosen: right-95" in run.report()
    with pytest.raises(ratchet.InvalidArgument, match="right-95 is no version"):
        run.promote()
    again = ratchet.select_model(resume=run.id)  # as after a restart of the notebook
    assert again.wait().best == "right-95"
    with pytest.raises(ratchet.InvalidArgument, match="that run is a select-model run"):
        ratchet.evaluate(resume=run.id)


@pytest.mark.slow
def test_a_cancelled_run_is_resumed_by_its_id_and_keeps_what_is_finished(circle: ModelProject) -> None:
    hanging = [True]

    async def workflow(task: dict[str, Any], base_url: str, api_key: str, model: str) -> str:
        if hanging[0] and task["question"] == "What is 9 + 3?":
            await asyncio.Event().wait()
        return await ask(task, base_url=base_url, api_key=api_key, model=model)

    run = ratchet.select_model(workflow, exact, "sums", models=["right-20", "right-95"], limit=12, concurrency=2)
    try:
        eventually(lambda: run.status.rollouts >= 2, 60)
        with pytest.raises(TimeoutError, match="it goes on"):
            run.wait(0.01)
        with pytest.raises(ratchet.InvalidArgument, match="is running"):
            _ = run.best
    finally:
        run.cancel()
    with pytest.raises(ratchet.RunCancelled, match=f"resume='{run.id}' continues it"):
        run.wait()
    assert run.status.state == "stopped"
    finished = {one.id for one in circle.store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}
    hanging[0] = False
    with pytest.raises(ratchet.InvalidArgument, match="uses the candidates of that run, right-20, right-95: leave"):
        ratchet.select_model(workflow, exact, "sums", models=["right-20", "crash"], resume=run.id)
    again = ratchet.select_model(workflow, exact, "sums", models=["right-20", "right-95"], resume=run.id).wait()
    assert again.id == run.id
    assert again.status.rollouts == 24
    assert finished < {one.id for one in circle.store.rollouts.of_tuning(run.id) if one.state is RolloutState.ENDED}


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"models": ["right-95", "gpt-9"]}, ratchet.TuningError, "gpt-9: unknown to the proxy"),
        ({"models": ["right-95"]}, ratchet.InvalidArgument, "at least two candidates"),
        ({"models": ["right-95", "crash"], "tasks": 3}, ratchet.InvalidArgument, "give a folder, a file, a hub name"),
        ({"models": ["right-95", "crash"], "tasks": "nowhere"}, ratchet.TaskSetError, "nowhere"),
        ({"models": ["right-95", "crash"], "workflow": 3}, ratchet.WorkflowError, "workflow 3 is no function"),
        ({"models": ["right-95", "crash"], "judge": "none:judge"}, ratchet.JudgeError, "none:judge"),
        ({"models": ["right-95", "crash"], "split": "train"}, ratchet.TaskSetError, "no split 'train'"),
        ({"resume": "tun_0"}, ratchet.RatchetError, "tun_0"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_an_error_that_names_the_remedy_and_leaves_no_run(
    circle: ModelProject, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"workflow": ask, "judge": exact, "tasks": "sums"} | given
    with pytest.raises(error, match=message):
        ratchet.select_model(**arguments)
    assert circle.store.tunings.page() == []


@pytest.mark.slow
def test_without_a_project_it_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATCHET_PROXY__PORT", "9")  # where nothing listens
    with pytest.raises(ratchet.InvalidArgument, match=r"does not run in .*: start it with `ratchet up`"):
        ratchet.evaluate(ask, exact, "sums", models="policy")


TASK = {"question": "Capital of Norway?", "answer": "Oslo"}
NOWHERE = "http://127.0.0.1:9/v1"  # no server listens here


@pytest.fixture
def models() -> list[str]:
    """The models that the server lists."""
    return ["small"]


@pytest.fixture
def server(models: list[str]) -> Iterator[str]:
    """An OpenAI-compatible server that answers `Oslo`; its base URL."""

    def respond(request: IncomingRequest) -> tuple[int, Any]:
        if request.path == "/v1/models":
            return 200, {"data": [{"id": name} for name in models]}
        message = {"role": "assistant", "content": "Oslo"}
        named = json.loads(request.body)["model"]
        if named not in models:
            return 404, {"error": {"message": f"no model {named}"}}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return 200, {"id": "1", "object": "chat.completion", "created": 1, "model": named, "choices": [choice]}

    running = JsonServer(respond)
    yield f"{running.url}/v1"
    running.close()


def answers(task: dict[str, Any]) -> ratchet.WorkflowOutput:
    return ratchet.WorkflowOutput({"text": task["answer"]}, reward=0.5, metrics={"turns": 2})


async def judges(task: dict[str, Any], response: dict[str, str]) -> ratchet.Judgement:
    right = float(response["text"] == task["answer"])
    return ratchet.Judgement(score=right, components={"right": right}, explanation="compared")


def forgets(response: str) -> None:
    len(response)


def divides(task: dict[str, Any]) -> float:
    return len(task) / 0


def reads_calls(trajectory: dict[str, Any]) -> float:
    return float(len(trajectory["messages"]))


def test_the_import_loads_no_library_and_each_name_when_it_is_used() -> None:
    named = "ratchet.try_out; ratchet.Tasks; ratchet.select_model; ratchet.evaluate"
    program = f"import sys, ratchet; print(*sys.modules); {named}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    bare, used = (set(line.split()) for line in done.stdout.splitlines())
    assert [name for name in bare if name.startswith("ratchet")] == ["ratchet"]
    assert not {"torch", "click", "pydantic", "httpx", "sqlalchemy", "msgspec"} & bare
    assert not {"torch", "transformers", "datasets", "scipy", "ratchet.options"} & used


def test_the_types_of_the_package_name_what_it_has() -> None:
    stub = ast.parse(Path(ratchet.__file__).with_suffix(".pyi").read_text())
    typed = {
        name.asname: getattr(ratchet, name.name).__module__
        for line in stub.body
        if isinstance(line, ast.ImportFrom)
        for name in line.names
    }
    assert typed == ratchet._MODULES
    assert {name for name in dir(ratchet) if not name.startswith("__")} == set(typed)
    with pytest.raises(AttributeError, match=r"no attribute 'tyr_out'; it has .*try_out"):
        _ = ratchet.tyr_out  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in dir(ratchet) if name.endswith("_async")])
def test_a_synchronous_function_has_the_signature_and_the_text_of_the_asynchronous_one(name: str) -> None:
    waits, at_once = getattr(ratchet, name), getattr(ratchet, name.removesuffix("_async"))
    assert inspect.signature(at_once) == inspect.signature(waits)
    assert inspect.iscoroutinefunction(waits) > inspect.iscoroutinefunction(at_once)
    assert (at_once.__name__, at_once.__doc__) == (name.removesuffix("_async"), waits.__doc__)
    with pytest.raises(TypeError, match=rf"^{at_once.__name__}\(\): "):
        at_once(*[None] * 3, colour="red")


def test_a_workflow_and_a_judge_are_tried_on_one_task() -> None:
    tried = ratchet.try_out(answers, judges, TASK, base_url=NOWHERE)
    assert tried.output == ratchet.WorkflowOutput({"text": "Oslo"}, 0.5, {"turns": 2.0})
    assert tried.judgement == ratchet.Judgement(1.0, {"right": 1.0}, "compared")
    assert ratchet.try_out(answers, None, TASK, base_url=NOWHERE).judgement.score == 0.5


def test_an_error_has_no_other_error_as_its_context() -> None:
    with pytest.raises(InvalidArgument) as raised:
        ratchet.evaluate(answers, judges, 5)  # type: ignore[arg-type]
    assert raised.value.__context__ is None


async def test_it_runs_where_an_event_loop_runs_already() -> None:
    here = asyncio.get_running_loop()

    async def asks(task: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"text": task["answer"] if asyncio.get_running_loop() is here else "elsewhere"}

    assert (await ratchet.try_out_async(asks, judges, TASK, base_url=NOWHERE)).judgement.score == 1.0
    assert ratchet.try_out(answers, judges, TASK, base_url=NOWHERE).judgement.score == 1.0
    assert ratchet.try_judge(judges, TASK, {"text": "Rome"}).score == 0.0


def test_the_example_of_the_page_runs(
    server: str, models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models += ["small@0", "small@1"]  # as Ratchet's proxy lists an agent and its versions
    rows = [TASK, {"question": "Of Italy?", "answer": "Rome"}, {"question": "Of France?", "answer": "Paris"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    example.main(str(tmp_path), server)
    assert capsys.readouterr().out.splitlines() == [
        "1.0  Oslo  the right answer is Oslo",
        "0.0  Oslo  the right answer is Rome",
    ]


def test_of_several_models_one_must_be_named(server: str, models: list[str]) -> None:
    models.append("large")
    with pytest.raises(ratchet.WorkflowError, match=r"names 2 models: give model=NAME \(small, large\)"):
        ratchet.try_out(example.workflow, example.judge, TASK, base_url=server)
    tried = ratchet.try_out(example.workflow, example.judge, TASK, base_url=server, model="large")
    assert (tried.output.response, tried.output.metrics) == ("Oslo", {"characters": 4.0})
    with pytest.raises(ratchet.WorkflowError, match=r"failed with NotFoundError: .*no model huge") as failure:
        ratchet.try_out(example.workflow, example.judge, TASK, base_url=server, model="huge")
    assert type(failure.value.__cause__).__name__ == "NotFoundError"
    with pytest.raises(ratchet.WorkflowError, match=r"names no model .*correct base_url"):
        ratchet.try_out(example.workflow, example.judge, TASK, base_url=NOWHERE)


@pytest.mark.parametrize(
    ("workflow", "judge", "task", "error", "message"),
    [
        (3, judges, TASK, ratchet.WorkflowError, "workflow 3 is no function: give a function"),
        ("no_module:run", judges, TASK, ratchet.WorkflowError, "ModuleNotFoundError"),
        (divides, judges, TASK, ratchet.WorkflowError, r"ZeroDivisionError: .*test_python_evaluate.py:\d+"),
        (answers, 3, TASK, ratchet.JudgeError, "judge 3 is no function"),
        (answers, forgets, TASK, ratchet.JudgeError, "forgets returns nothing: end it with a score"),
        (answers, divides, TASK, ratchet.JudgeError, "divides: ZeroDivisionError"),
        (answers, {"kind": "unheard"}, TASK, ratchet.JudgeError, "unknown kind 'unheard': built in are"),
        (answers, reads_calls, TASK, ratchet.JudgeError, r"no call is recorded here: use `ratchet.try_judge"),
        (len, None, TASK, ratchet.WorkflowError, "requires the parameter 'obj'"),
        (lambda task: "text", None, TASK, ratchet.JudgeError, "the workflow returned no reward"),
        (answers, judges, "a task", ratchet.TaskSetError, "give a task's row"),
    ],
)
def test_a_mistake_is_one_error_that_names_the_remedy(
    workflow: Any, judge: Any, task: Any, error: type[Exception], message: str
) -> None:
    assert issubclass(error, ratchet.RatchetError)
    with pytest.raises(error, match=message):
        ratchet.try_out(workflow, judge, task, base_url=NOWHERE)


def test_one_response_is_judged_by_functions_and_by_kinds() -> None:
    assert ratchet.try_judge({"kind": "answer", "column": "answer", "match": "exact"}, TASK, "Oslo").score == 1.0
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Oslo"}]
    assert ratchet.try_judge(reads_calls, TASK, "Oslo", messages=messages).score == 2.0
    assert ratchet.try_judge(lambda task: task == "key", "key", "Oslo").score == 1.0


def test_a_task_set_is_read_row_by_row(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"number": number % 6}) + "\n" for number in range(12)))
    tasks = ratchet.Tasks(file)
    assert (tasks.name, tasks.splits, tasks.preview(2)) == ("questions", ("train",), [{"number": 0}, {"number": 1}])
    assert len(list(tasks)) == 6
    shares = [list(ratchet.Tasks(tmp_path, split=split, test_size=0.5)) for split in ("train", "test")]
    assert sorted(row["number"] for share in shares for row in share) == list(range(6))
    with pytest.raises(ratchet.TaskSetError, match="no split 'test'; it has train"):
        ratchet.Tasks(file, split="test")
    with pytest.raises(ratchet.TaskSetError, match=r"nothing.jsonl"):
        ratchet.Tasks(tmp_path / "nothing.jsonl")
