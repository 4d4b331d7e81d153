"""Workflows: functions get what they name, programs get it by the environment, and what they leave behind ends."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ratchet.trainer.errors import WorkflowError, WorkflowFailed
from ratchet.tuner.rollouts.workflow import WorkflowInput, WorkflowOutput, load_workflow, outcome_of
from tests.harness.proxy.servers import eventually

HERE = "tests.harness.tuner.workflows"
TASK = {"question": "2 + 2?", "answer": "4"}
GIVEN = WorkflowInput(TASK, "", "", "")


def run(spec: str, task: dict[str, Any] = TASK, **given: Any) -> WorkflowOutput:
    return asyncio.run(load_workflow(spec).run(WorkflowInput(task, "http://x/t/roll_1/v1", "key", "agent", **given)))


def test_a_function_gets_the_parameters_that_it_names() -> None:
    assert run(f"{HERE}:only_the_task").response == TASK
    assert run(f"{HERE}:by_place").response == "2 + 2? agent 3"
    assert run(f"{HERE}:an_object").response == "called with 2 + 2?"
    everything = run(f"{HERE}:everything", system_prompt="Be brief.", seed=7).response
    assert everything == {
        "task": TASK, "base_url": "http://x/t/roll_1/v1", "api_key": "key", "model": "agent",
        "system_prompt": "Be brief.", "seed": 7,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{HERE}:needs_browser", "requires the parameter 'browser'; it can use task, base_url"),
        (f"{HERE}:not_there", "AttributeError.*importable from"),
        (f"{HERE}:not_a_function", "not callable"),
        ("no_such_module:run", "ModuleNotFoundError"),
        ("no-such-program --x", "no such program: 'no-such-program'"),
        ("", "no such program"),
        ("python 'unended", "No closing quotation"),
        (f"{HERE}:yields", "is a generator function"),
        (f"{HERE}:Unmakeable", "cannot be instantiated without arguments .TypeError"),
        (f"{HERE}:Uncallable", "its instances are not callable"),
        ("my_agent.run", "did you mean my_agent:run?"),
        ("my_agent.py", "did you mean my_agent.py:FUNCTION?"),
        ("nowhere/agent.py:run", "there is no file nowhere/agent.py"),
    ],
)
def test_an_unusable_workflow_is_reported_when_it_is_loaded(spec: str, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        load_workflow(spec)


def test_a_class_is_made_once_for_all_rollouts_and_a_dotted_name_leads_into_it() -> None:
    workflow = load_workflow(f"{HERE}:Counting")
    runs = [workflow.run(GIVEN) for _ in range(2)]
    assert [asyncio.run(one).response for one in runs] == [1, 2]
    assert run(f"{HERE}:Counting.fixed").response == "4"


def test_a_function_in_a_file_is_found_with_its_neighbours_and_takes_no_modules_place(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("from beside_it import NUMBER\ndef run(task):\n    return NUMBER\n")
    (tmp_path / "beside_it.py").write_text("print('loading')\nNUMBER = 7\n")
    spec = f"{tmp_path}/json.py:run"
    try:
        assert run(spec).response == 7
        assert load_workflow(spec)._function is load_workflow(spec)._function  # type: ignore[attr-defined]
        assert json.loads("1") == 1 == sys.modules["json"].loads("1")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["beside_it"], sys.modules[f"{tmp_path}/json.py"]


def test_functions_that_are_not_async_run_beside_each_other() -> None:
    workflow = load_workflow(f"{HERE}:waits_for_four_others")

    async def five() -> list[WorkflowOutput]:
        return await asyncio.gather(*(workflow.run(GIVEN) for _ in range(5)))

    assert [outcome.response for outcome in asyncio.run(five())] == ["workflow"] * 5


def test_the_agents_own_exception_comes_through() -> None:
    with pytest.raises(ValueError, match="no tool named search"):
        run(f"{HERE}:crashes")


def test_an_agent_that_raises_what_ctrl_c_raises_has_failed_and_stops_nobody() -> None:
    with pytest.raises(WorkflowFailed, match="KeyboardInterrupt"):
        run(f"{HERE}:is_interrupted")


def test_a_thread_that_hangs_holds_nobody_up() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(0.1):
            await load_workflow(f"{HERE}:hangs_in_a_thread").run(GIVEN)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())


class Message:
    """A message as agents' frameworks make them."""

    def __init__(self, text: str) -> None:
        self._text = text

    def get_text_content(self) -> str:
        return self._text


@dataclass
class ForeignOutput:
    """The result object of another framework."""

    response: Any
    reward: float | None = None
    metrics: dict[str, float] | None = None


def test_anything_may_be_returned() -> None:
    assert outcome_of("4") == WorkflowOutput("4")
    assert outcome_of(None) == WorkflowOutput()
    assert outcome_of({"answer": "4"}) == WorkflowOutput({"answer": "4"})
    assert outcome_of({"response": "4", "sources": []}) == WorkflowOutput({"response": "4", "sources": []})
    assert outcome_of({"response": "4", "reward": True, "metrics": {"turns": 2}}) == WorkflowOutput(
        "4", 1.0, {"turns": 2.0}
    )
    assert outcome_of(ForeignOutput(Message("four"), 0.5)) == WorkflowOutput("four", 0.5)
    assert outcome_of(object()) == WorkflowOutput()
    assert outcome_of((1, float("nan"))) == WorkflowOutput([1, "nan"])
    assert outcome_of("4").text == '"4"'
    assert WorkflowOutput().text is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"reward": float("nan")}, "the reward is nan"),
        ({"reward": "good"}, "the reward is 'good'"),
        ({"reward": 1e300}, r"the reward is 1e\+300; return a finite number from -1e\+09 to 1e\+09"),
        ({"response": "x", "metrics": {"turns": 1e300}}, "for turns"),
        ({"response": "x", "metrics": 3}, "metrics is int"),
        ({"response": "x", "metrics": {"turns": None}}, "no finite number .* for turns"),
        ("x" * 5_000_000, "longer than"),
    ],
)
def test_a_reward_that_is_none_is_a_failure_and_no_zero(answer: Any, message: str) -> None:
    with pytest.raises(WorkflowFailed, match=message):
        outcome_of(answer)


def test_a_response_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(WorkflowFailed, match="nested deeper"):
        outcome_of(loop)


def program(tmp_path: Path, text: str) -> str:
    (tmp_path / "agent.py").write_text(text)
    return f"{sys.executable} {tmp_path / 'agent.py'}"


def test_a_program_gets_the_task_and_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_API_KEYS", "the operator's secret")
    spec = program(tmp_path, "import json, os, sys; print(json.dumps([json.load(sys.stdin), dict(os.environ)]))")
    task, seen = json.loads(run(spec, system_prompt="Be brief.", seed=7).response)
    assert task == TASK
    assert {name: seen[name] for name in seen if name.startswith(("OPENAI_", "RATCHET_"))} == {
        "OPENAI_BASE_URL": "http://x/t/roll_1/v1", "OPENAI_API_KEY": "key", "OPENAI_MODEL": "agent",
        "RATCHET_SYSTEM_PROMPT": "Be brief.", "RATCHET_SEED": "7",
    }  # fmt: skip
    assert not {"RATCHET_SYSTEM_PROMPT", "RATCHET_SEED"} & set(json.loads(run(spec).response)[1])


def test_a_programs_json_object_is_taken_apart(tmp_path: Path) -> None:
    spec = program(tmp_path, """print('{"response": {"answer": 4}, "reward": 1, "metrics": {"turns": 2}}')""")
    assert run(spec) == WorkflowOutput({"answer": 4}, 1.0, {"turns": 2.0})
    assert run(program(tmp_path, "print('just text')")).response == "just text"
    assert run(program(tmp_path, """print('{"answer": 4}')""")).response == '{"answer": 4}'


def test_a_failed_program_is_reported_with_the_end_of_its_stderr(tmp_path: Path) -> None:
    with pytest.raises(WorkflowFailed, match=r"exit code 3: .*the last words"):
        run(program(tmp_path, "import sys; print('x' * 100000 + ' the last words', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(WorkflowFailed, match=r"exit code 1: (?s:.*)ZeroDivisionError"):
        run(program(tmp_path, "1 / 0"))


def test_a_program_ends_with_all_that_it_started_when_its_time_is_over(tmp_path: Path) -> None:
    spec = program(
        tmp_path,
        f"import os, subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}'); time.sleep(600)",
    )

    async def impatient() -> None:
        task = asyncio.create_task(load_workflow(spec).run(GIVEN))
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(impatient())
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    eventually(lambda: not any(map(_runs, pids)))


def test_a_program_that_cannot_be_started_leaves_no_file_open(tmp_path: Path) -> None:
    spec = program(tmp_path, "print('never')")
    # In a process of its own: here, the servers of other tests take connections at any time.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        before, after = pool.submit(open_files_between_failures, spec).result()
    assert after <= before


def open_files_between_failures(spec: str) -> tuple[int, int]:
    """How many files are open after some starts that failed, and after some more."""
    workflow = load_workflow(spec)
    longer_than_a_variable_may_be = "x" * 200_000

    async def count() -> int:
        for _ in range(3):
            with pytest.raises(OSError, match="Argument list too long"):
                await workflow.run(WorkflowInput(TASK, "", "", "", longer_than_a_variable_may_be))
        await asyncio.sleep(0)
        gc.collect()  # what importing left open is closed now
        return len(os.listdir("/proc/self/fd"))

    asyncio.run(count())  # whatever is opened once
    return asyncio.run(count()), asyncio.run(count())


def test_what_a_program_leaves_running_holds_nobody_up(tmp_path: Path) -> None:
    spec = program(tmp_path, "import subprocess; subprocess.Popen(['sleep', '600']); print('done')")
    began = time.monotonic()
    assert run(spec).response == "done"
    assert time.monotonic() - began < 30


def test_a_program_that_never_stops_writing_is_stopped(tmp_path: Path) -> None:
    with pytest.raises(WorkflowFailed, match="more than"):
        run(program(tmp_path, "while True: print('x' * 65536)"))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}/stat")
