"""Judge functions: how they are named and called, that their end is nobody else's, what they hear of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from pydantic import ValidationError

from ratchet.store.records import ToolCall, ToolCallResult, Transcript, WorkflowResult
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import NO_RETURN, Judge
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from tests.harness.chat_models import ScriptedModel
from tests.harness.records import answered_trajectory
from tests.trainer.test_rules import made, member

CODE = """
import argparse, asyncio, functools, sys

def plain(response):
    return float(response == "Oslo")

def bound(response, right, *, weight=1.0):
    return weight * (response == right)

for_oslo = functools.partial(bound, right="Oslo")
kept = functools.partial(plain, response="Oslo")

def anything(**given):
    return float(given["response"] == "Oslo" and set(given) >= {"trajectory", "task", "tool_outcomes"})

def by_place(response, /, task=None, style="any"):
    return float(response == "Oslo" and task == "capital")

class Strict:
    def __call__(self, response):
        return float(response == "Oslo")

async def later(response):
    return float(response == "Oslo")

def missing_more(response, right):
    return 0.0

class Output:
    def __init__(self, reward):
        self.reward = reward

def rewarding(response):
    return Output(0.5) if response == "Oslo" else {"reward": 0.25}

def forgetful(response):
    if response == "Oslo":
        return 1.0

def leaves(response):
    if response == "Rome":
        sys.exit("bye")
    return 1.0

def parses(response):
    argparse.ArgumentParser().parse_args([response] if response == "Rome" else [])
    return 1.0

async def child_leaves(response):
    async def child():
        sys.exit(3)
    if response == "Rome":
        await asyncio.gather(child())
    return 1.0

def interrupts(response):
    raise KeyboardInterrupt

def outcomes(tool_outcomes, trajectory):
    assert tool_outcomes == trajectory["tool_outcomes"]
    return {"score": 1, "explanation": " ".join(f"{o['tool']}:{o['outcome']}:{o['result']}" for o in tool_outcomes)}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with judges of all kinds."""
    monkeypatch.chdir(tmp_path)
    found = tmp_path / "many_judges.py"
    found.write_text(CODE)
    return found


def judge_of(entry_point: str) -> Judge:
    return make_judge(read_spec(entry_point), {})


def verdicts_of(entry_point: str, members: Sequence[Transcript]) -> list[float | str | None]:
    """What a judge says of each member: the score, or the failure."""
    judge = judge_of(entry_point)
    verdicts = judge.judge("g", members).verdicts
    judge.close()
    return [verdict.failure or verdict.score for verdict in verdicts]


@pytest.mark.parametrize("name", ["plain", "later"])
def test_a_trajectory_that_cannot_be_read_is_a_failed_verdict(file: Path, name: str) -> None:
    broken = msgspec.structs.replace(member("Oslo"), returned=WorkflowResult(response="not JSON"))
    failure, score = verdicts_of(f"{file}:{name}", [broken, member("Oslo")])
    assert (str(failure).partition(":")[0], score) == ("JSONDecodeError", 1.0)


def test_a_judge_is_named_by_a_file_as_a_workflow_is(file: Path) -> None:
    for name in ("./many_judges.py:plain", "many_judges.py:plain", f"{file}:plain"):
        assert verdicts_of(name, [member("Oslo"), member("Rome")]) == [1.0, 0.0], name
    with pytest.raises(JudgeError, match=r"there is no file nowhere/judge\.py"):
        judge_of("nowhere/judge.py:judge")
    with pytest.raises(ValidationError, match=r"module:function or path/file\.py:function"):
        read_spec("my judge")


@pytest.mark.parametrize("name", ["for_oslo", "anything", "by_place", "Strict", "later"])
def test_what_can_be_called_with_what_is_offered_can_judge(file: Path, name: str) -> None:
    assert verdicts_of(f"{file}:{name}", [member("Oslo"), member("Rome")]) == [1.0, 0.0]


def test_what_a_partial_has_bound_stays_bound_and_is_refused_where_nothing_is_left(file: Path) -> None:
    with pytest.raises(JudgeError, match="takes no parameter of a trajectory"):
        judge_of(f"{file}:kept")


def test_a_parameter_that_nobody_gives_is_named(file: Path) -> None:
    with pytest.raises(JudgeError, match="parameter 'right'; it can use trajectory, response"):
        judge_of(f"{file}:missing_more")


def test_a_reward_is_a_score_as_key_and_as_attribute(file: Path) -> None:
    assert verdicts_of(f"{file}:rewarding", [member("Oslo"), member("Rome")]) == [0.5, 0.25]


def test_a_missing_return_is_named(file: Path) -> None:
    score, failure = verdicts_of(f"{file}:forgetful", [member("Oslo"), member("Rome")])
    assert score == 1.0
    assert str(failure).startswith(NO_RETURN)
    assert "return 0.0" in str(failure)


@pytest.mark.parametrize("name", ["leaves", "parses", "child_leaves"])
def test_a_judge_that_exits_has_failed_and_ends_nobody(file: Path, name: str) -> None:
    before, failure, after = verdicts_of(f"{file}:{name}", [member("Oslo"), member("Rome"), member("Oslo")])
    assert (before, after) == (1.0, 1.0)
    assert "it called sys.exit(" in str(failure)


def test_a_judge_goes_on_after_it_exited_once(file: Path) -> None:
    judge = judge_of(f"{file}:child_leaves")
    scores = [judge.judge("g", [member(answer)]).verdicts[0].score for answer in ("Rome", "Oslo", "Rome", "Oslo")]
    judge.close()
    assert scores == [None, 1.0, None, 1.0]


def test_control_c_is_not_swallowed(file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        verdicts_of(f"{file}:interrupts", [member("Oslo")])


def test_a_script_that_exits_while_it_is_imported_is_refused_with_that(file: Path) -> None:
    file.with_name("script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['x'])\n")
    with pytest.raises(JudgeError, match=r"while it is imported it called sys.exit\(2\)"):
        judge_of("script.py:judge")


def with_tools(store: Store, name: str, *made: tuple[ToolOutcome, ToolResult | None]) -> Transcript:
    """A trajectory of one call that called a tool once per pair of outcome and result."""
    answered_trajectory(store, name)
    called = [
        ToolCall(
            call_id=f"call_{name}", choice=0, place=place, alias="agent", version=0, tool=f"tool{place}",
            tool_call_id=f"i{place}", outcome=outcome,
        )
        for place, (outcome, _) in enumerate(made)
    ]  # fmt: skip
    answered = [
        ToolCallResult(call_id=f"call_{name}", choice=0, tool_call_id=f"i{place}", result=result)
        for place, (_, result) in enumerate(made)
        if result is not None
    ]
    store.tools.record_tool_calls(called, answered)
    return store.trajectories.read(name)


GOOD = (ToolOutcome.VALID, ToolResult.OK)
BROKEN = (ToolOutcome.INVALID_JSON, ToolResult.ERROR)
SLOW = (ToolOutcome.VALID, ToolResult.TIMEOUT)
LAST = (ToolOutcome.VALID, None)


def test_a_judge_function_is_given_what_became_of_each_tool_call(store: Store, file: Path) -> None:
    judge = judge_of(f"{file}:outcomes")
    (verdict,) = judge.judge("g", [with_tools(store, "t1", GOOD, BROKEN, LAST)]).verdicts
    assert verdict.explanation == "tool0:valid:ok tool1:invalid_json:error tool2:valid:None"


def test_a_grader_is_sent_what_became_of_each_tool_call(store: Store) -> None:
    with ScriptedModel(path="/grade") as grader:
        grader.answers = [(200, 1.0)]
        judge = made(kind="http", url=f"{grader.url}/grade")
        judge.judge("g", [with_tools(store, "t1", BROKEN)])
        judge.close()
    assert grader.requests[0]["tool_outcomes"] == [
        {"tool": "tool0", "tool_call_id": "i0", "outcome": "invalid_json", "detail": None, "result": "error"}
    ]


def test_an_answer_that_was_not_taken_has_no_say(store: Store, file: Path) -> None:
    run = with_tools(store, "t1", GOOD)
    (call,), (one,) = run.calls, run.tool_calls
    followed = msgspec.structs.replace(call, id="later", parent_call=call.id, parent_choice=0)
    unused = msgspec.structs.replace(one, choice=1, outcome=ToolOutcome.UNKNOWN_TOOL)
    both = msgspec.structs.replace(run, calls=(call, followed), tool_calls=(one, unused))
    (verdict,) = judge_of(f"{file}:outcomes").judge("g", [both]).verdicts
    assert verdict.explanation == "tool0:valid:ok"
