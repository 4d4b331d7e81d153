"""The lint of judges: what fools them, makes them crash, or was never asked; and how the rule `answer` reads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.records import Transcript
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.answer import contains, numeric
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.judges.quality import (
    LintMark,
    LintOutcome,
    LintReport,
    Place,
    lint,
    recorded,
    synthetic,
)
from ratchet.trainer.settings.judge_specs import read_spec
from tests.trainer.test_rules import answers, made, member

CODE = """
import json

def raises(response):
    raise ValueError("no such table")

def brittle(response):
    return float(response.split()[-1] == "Oslo")

def forgets(response):
    if response == "Oslo":
        return 1.0

def forgets_all(response):
    len(response)

def by_tool(trajectory):
    for message in reversed(trajectory["messages"]):
        for call in message.get("tool_calls") or []:
            if call["function"]["name"] == "finish":
                return float(json.loads(call["function"]["arguments"])["answer"] == "Oslo")
    return 0.0

def worked(trajectory, response):
    return float(response == "Oslo" and any(one["tool"] == "search" for one in trajectory["tool_outcomes"]))

def below_zero(response):
    return 0.0 if response == "Oslo" else -1.0

def everything(response):
    return float(response is not None)
"""


@pytest.fixture
def judge(tmp_path: Path) -> Any:
    """Makes a judge of the file by its name."""
    file = tmp_path / "linted.py"
    file.write_text(CODE)
    return lambda name: make_judge(read_spec(f"{file}:{name}"), {})


def examined(
    judge: Judge, tool: str | None = None, right: str = "Oslo", wrong: tuple[str, ...] = ("Rome",)
) -> LintReport:
    return lint(judge, synthetic("capital", "?", right, Place.read(tool)), wrong)


def test_a_judge_that_crashes_is_a_crash_and_not_fooled(judge: Any) -> None:
    report = examined(judge("raises"))
    assert report.outcome is LintOutcome.CRASHES
    assert "right answer: ValueError: no such table" in report.reason
    assert [one.mark for one in report.findings] == [LintMark.CRASHED]


def test_a_judge_that_crashes_on_wrong_answers_is_not_sound(judge: Any) -> None:
    report = examined(judge("brittle"))
    assert {one.trick for one in report.findings if one.mark is LintMark.CRASHED} == {"empty", "blank"}
    assert report.outcome is LintOutcome.FOOLED
    assert re.search(r"fooled by 1 of 12 .*crashes on 2 of 12", report.reason)


def test_a_missing_return_is_named_as_one(judge: Any) -> None:
    report = examined(judge("forgets"))
    assert report.outcome is LintOutcome.NO_RETURN
    assert "12 of 12 answers: a return is missing" in report.reason
    with pytest.raises(JudgeError, match="returns nothing: end it with a score"):
        judge("forgets_all")


def test_a_judge_of_tool_calls_is_not_fooled_but_not_examined_until_the_tool_is_named(judge: Any) -> None:
    report = examined(judge("by_tool"))
    assert report.outcome is LintOutcome.NOT_EXAMINED
    assert "--tool NAME.ARGUMENT" in report.reason
    assert examined(judge("by_tool"), tool="finish").outcome is LintOutcome.SOUND
    assert examined(judge("by_tool"), tool="other.answer").outcome is LintOutcome.NOT_EXAMINED


def test_a_scale_that_ends_at_zero_and_a_judge_that_likes_all_are_what_they_are(judge: Any) -> None:
    assert examined(judge("below_zero")).outcome is LintOutcome.SOUND
    assert "is fooled by 12 of 12" in examined(judge("everything")).reason


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def run(*messages: dict[str, Any]) -> Transcript:
    import msgspec

    return msgspec.structs.replace(member("-"), messages=({"role": "user", "content": "?"}, *messages))


def test_a_recorded_trajectory_gives_its_own_answer_where_it_stands(judge: Any) -> None:
    searched, found = called("search", query="capital"), {"role": "tool", "tool_call_id": "c", "content": "Oslo"}
    finished = called("finish", answer="Oslo", sure="yes")
    by_tool = run(searched, found, finished)
    stage = recorded(by_tool, "Oslo", Place())
    assert (stage.place, stage.right) == (Place("finish", "answer"), "Oslo")
    assert lint(judge("by_tool"), stage, ["Rome"]).outcome is LintOutcome.SOUND
    assert recorded(by_tool, None, Place.read("finish.answer")).right == "Oslo"
    in_words = run(searched, found, {"role": "assistant", "content": "Oslo"})
    assert recorded(in_words, None, Place()).place == Place()
    assert stage.answered("Rome", 1).messages[1:3] == (searched, found)


def test_what_the_tools_came_to_stays_with_the_recorded_trajectory(judge: Any, store: Any) -> None:
    from ratchet.store.states import ToolResult
    from tests.harness.records import answered_trajectory, tool_called

    answered_trajectory(store, "t1", "Oslo")
    tool_called(store, "t1", ToolResult.OK, times=1)
    assert examined(judge("worked")).outcome is LintOutcome.NOT_EXAMINED
    stage = recorded(store.trajectories.read("t1"), None, Place())
    assert lint(judge("worked"), stage, ["Rome"]).outcome is LintOutcome.SOUND


def test_a_trajectory_without_an_answer_in_words_asks_for_the_tool() -> None:
    with pytest.raises(JudgeError, match=r"--tool NAME\.ARGUMENT"):
        recorded(run(called("finish", answer="Oslo", sure="yes")), None, Place())
    with pytest.raises(JudgeError, match="the argument 'x' of the tool 'finish'"):
        recorded(run(called("finish", answer="Oslo")), None, Place("finish", "x"))


@pytest.mark.parametrize(
    ("match", "right", "wrong"),
    [("exact", "Oslo", ("Rome", "Paris")), ("contains", "Oslo", ("Rome", "Paris")), ("contains", "Oslo", ()),
     ("contains", "4", ("5", "3")), ("numeric", "4", ("5", "3")), ("numeric", "4", ()),
     ("contains", "New York", ("Rome",))],
)  # fmt: skip
def test_the_rule_answer_passes_its_own_lint_and_says_what_it_cannot_see(
    tmp_path: Path, match: str, right: str, wrong: tuple[str, ...]
) -> None:
    file = answers(tmp_path, json.dumps({"task": "capital", "answer": right}) + "\n")
    report = examined(made(kind="answer", answers=file, match=match), right=right, wrong=wrong)
    assert [one.trick for one in report.findings if not one.sound] == []
    assert (report.limits is None) is (match == "exact")


STATED = (
    "Oslo", "Oslo.", "The capital is Oslo.", "It is Oslo, of course.", "It is Oslo, not Rome.", "No, it is Oslo.",
    "Not Rome but Oslo.", "There is no doubt that it is Oslo.", "So, the answer is Oslo", "Oslo, I think", "**Oslo**",
    "The capital of Norway is Oslo, which lies in the south.", "I looked at Rome. It is Oslo.", "Answer: Oslo",
    "After some thought, Oslo.", "It can only be Oslo", "Oslo is the capital and the largest city of Norway.",
    "The answer is:\n\nOslo", "Thought:\nIt is a city.\nOslo",
)  # fmt: skip
HEDGED = (
    "Rome, Paris, Oslo", "Rome, Oslo", "Oslo, Rome", "It is certainly not Oslo.", "It isn't Oslo.",
    "It isn\u2019t Oslo", "Rome or Oslo", "Either Oslo or Rome", "It is Rome, Paris, or Oslo.", "Oslo/Rome",
    "Rome\nParis\nOslo",
    "- Rome\n- Oslo\n- Paris", "1. Rome\n2. Oslo", "Oslo is wrong.", "Oslo is not it", "Anything but Oslo",
    "It cannot be Oslo", "Rome and Oslo", "It is Oslo, Rome or Paris", "The capital can't be Oslo", "(Rome, Oslo)",
    "The capital city is Rome, Oslo", "1, 2, 3, yes, no, none of them, Oslo",
)  # fmt: skip


@pytest.mark.parametrize("text", STATED)
def test_what_states_the_answer_contains_it(text: str) -> None:
    assert contains(text, "Oslo", max_chars=400)


@pytest.mark.parametrize("text", HEDGED)
def test_what_lists_or_denies_the_answer_does_not_contain_it(text: str) -> None:
    assert not contains(text, "Oslo", max_chars=400)


@pytest.mark.parametrize(
    "text", ["So it is 4", "2 + 2 = 4", "x = 3, y = 4", "Therefore, 4", "3 and 1 make 4", "First 3. 4."]
)
def test_the_last_number_that_is_stated_counts(text: str) -> None:
    assert numeric(text, "4", tolerance=1e-6)


@pytest.mark.parametrize("text", ["3, 4", "It is certainly not 4.", "3 or 4", "1/2/4", "between 3 and 4", "It isn't 4"])
def test_a_number_that_is_denied_or_one_of_a_list_does_not_count(text: str) -> None:
    assert not numeric(text, "4", tolerance=1e-6)
