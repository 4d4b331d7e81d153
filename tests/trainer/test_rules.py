"""Rules that are hard to talk into a score, composites whose penalties never bury a success, graders over HTTP."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.store.records import Trajectory, Transcript
from ratchet.store.states import TrajectoryState
from ratchet.trainer.errors import JudgeError
from ratchet.trainer.judges.judgement import Judge
from ratchet.trainer.judges.kinds.answer import contains, exact, last_number, numeric
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import read_spec
from tests.harness.chat_models import ScriptedModel

Message = dict[str, Any]


def member(answer: str, task: str | None = "capital", before: Sequence[Message] = ()) -> Transcript:
    run = Trajectory(
        id=f"run-{answer[:10]}", alias="agent", version=0, state=TrajectoryState.GROUPED, task=task, root_node="r",
        tools_hash="", key_id=None, opened_at=1.0, last_active_at=2.0,
    )  # fmt: skip
    messages = ({"role": "user", "content": "?"}, *before, {"role": "assistant", "content": answer})
    return Transcript(trajectory=run, calls=(), messages=messages, tools=())


def made(environ: dict[str, str] | None = None, **spec: Any) -> Judge:
    return make_judge(read_spec(spec), environ or {})


def answers(folder: Path, text: str) -> str:
    file = folder / "answers.jsonl"
    file.write_text(text)
    return str(file)


def test_contains_requires_whole_words_and_numbers() -> None:
    assert contains("The capital is Oslo.", "oslo", max_chars=100)
    assert contains("It is 4, I think", "4", max_chars=100)
    assert contains("4.", "4", max_chars=100)
    for hostile in ("14", "4.5", "1.4", "40", "-4", "1,4", "four"):
        assert not contains(hostile, "4", max_chars=100), hostile
    assert not contains("Osloer", "Oslo", max_chars=100)


def test_an_answer_that_lists_everything_is_too_long_to_be_one() -> None:
    everything = ", ".join(f"candidate {number}" for number in range(40)) + ", Oslo"
    assert not contains(everything, "Oslo", max_chars=400)


def test_exact_forgives_case_space_and_punctuation_alone() -> None:
    assert exact(' "Oslo". ', "oslo")
    assert not exact("Oslo, I think", "Oslo")
    assert not exact("", "Oslo")


@pytest.mark.parametrize(
    ("text", "number"),
    [("about 1,234.5 m", 1234.5), ("3 then 4", 4.0), ("-2e3", -2000.0), ("none", None), ("", None), (".5", 0.5)],
)  # fmt: skip
def test_the_last_number_is_the_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_numbers_are_compared_as_numbers() -> None:
    assert numeric("So it is 1,000", "1000", tolerance=1e-6)
    assert not numeric("14", "4", tolerance=1e-6)
    assert not numeric("cannot be determined", "4", tolerance=1e-6)


def test_a_task_without_a_right_answer_is_a_failure_not_a_zero(tmp_path: Path) -> None:
    file = answers(tmp_path, '{"task": "capital", "answer": ["Oslo", "Christiania"]}\n')
    judge = made(kind="answer", answers=file)
    verdicts = judge.judge(
        "g", [member("Christiania"), member("Rome"), member("Oslo", task="other"), member("Oslo", None)]
    )
    assert [verdict.score for verdict in verdicts.verdicts] == [1.0, 0.0, None, None]
    assert "x-ratchet-task" in (verdicts.verdicts[2].failure or "")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "has no answers"),
        ("{", "line 1: not JSON"),
        ('{"task": "a", "answer": "b"}\n{"task": "a"}', "line 2: must have"),
        ('{"task": "a", "answer": []}', "not empty"),
        ('{"task": "a", "answer": [" "]}', "not empty"),
    ],
)
def test_a_broken_answers_file_is_named_with_its_line(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(JudgeError, match=wrong):
        made(kind="answer", answers=answers(tmp_path, text))


def composite(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    file = answers(tmp_path, '{"task": "capital", "answer": "Oslo"}')
    right = {"kind": "answer", "answers": file, "match": "contains"}
    tidy = {"kind": "function", "function": "tests.harness.trainer.judge_samples:says_oslo"}
    parts = [{"name": "right", "judge": right, "weight": 1.0}, {"name": "tidy", "judge": tidy, "penalty": 0.25}]
    return {"kind": "composite", "parts": parts} | changes


def test_a_penalized_success_ranks_above_every_failure(tmp_path: Path) -> None:
    verdicts = made(**composite(tmp_path)).judge("g", [member("Oslo"), member("It is Oslo"), member("Rome")]).verdicts
    scores = [verdict.score for verdict in verdicts]
    assert scores == [1.0, 0.75, -0.25]
    assert verdicts[1].components == {"right": 1.0, "tidy": 0.0}


def test_penalties_that_could_turn_a_success_into_a_failure_are_refused(tmp_path: Path) -> None:
    spec = composite(tmp_path)
    spec["parts"][1]["penalty"] = 1.0
    with pytest.raises(ValidationError, match="a success could rank below a failure"):
        made(**spec)


def test_a_failing_part_is_a_failure_of_the_whole(tmp_path: Path) -> None:
    verdict = made(**composite(tmp_path)).judge("g", [member("Oslo", task=None)]).verdicts[0]
    assert verdict.score is None
    assert (verdict.failure or "").startswith("right: no answer for task")


def test_a_changed_rubric_is_another_version(tmp_path: Path) -> None:
    one, other = composite(tmp_path), composite(tmp_path)
    other["parts"][1]["penalty"] = 0.125
    assert made(**one).version == made(**one).version != made(**other).version


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ({"kind": "rulers"}, "ruler"),
        ({"kind": "ruler", "base_url": "host", "model": "m"}, "not an http"),
        ({"kind": "ruler", "base_url": "http://h", "model": "m", "api_key": "sk-1"}, "api_key"),
    ],
)
def test_a_wrong_judge_setting_is_named_without_its_value(spec: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong) as error:
        made(**spec)
    assert "sk-1" not in str(error.value)


def test_a_grader_gets_the_whole_trajectory_signed_once_per_key(tmp_path: Path) -> None:
    with ScriptedModel(path="/grade") as grader:
        grader.answers = [(503, "busy"), (200, {"score": 0.5, "components": {"style": 1}, "explanation": "fine"})]
        judge = made({"RATCHET_GRADER_SECRET": "s3"}, kind="http", url=f"{grader.url}/grade")
        verdict = judge.judge("grp_1", [member("Oslo")]).verdicts[0]
        judge.close()
    assert (verdict.score, verdict.components, verdict.explanation) == (0.5, {"style": 1.0}, "fine")
    assert grader.requests[0]["trajectory_id"] == "run-Oslo"
    assert grader.requests[0]["answer"] == "Oslo"
    assert grader.headers[0]["idempotency-key"] == grader.headers[1]["idempotency-key"]
    signature = dict(part.split("=", 1) for part in grader.headers[1]["x-ratchet-signature"].split(","))
    expected = hmac.new(b"s3", signature["t"].encode() + b"." + grader.raw[1], hashlib.sha256).hexdigest()
    assert signature["v1"] == expected


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ((200, "not json"), "not JSON"),
        ((200, {"score": None}), "no finite score"),
        ((422, "cannot grade this"), "cannot grade this"),
    ],
)
def test_a_grader_that_does_not_grade_is_a_failure_not_a_zero(answer: Any, failure: str) -> None:
    with ScriptedModel(path="/grade") as grader:
        grader.answers = [answer]
        judge = made(kind="http", url=f"{grader.url}/grade")
        verdict = judge.judge("g", [member("Oslo")]).verdicts[0]
        judge.close()
    assert verdict.score is None
    assert failure in (verdict.failure or "")


def test_an_unreachable_grader_is_away() -> None:
    judge = made(kind="http", url="http://127.0.0.1:9/", max_attempts=1)
    judgement = judge.judge("g", [member("Oslo"), member("Rome")])
    judge.close()
    assert "ConnectError" in str(judgement.unavailable)
    assert "see that the endpoint is up and `url` is right" in str(judgement.unavailable)
    assert [verdict.failure for verdict in judgement.verdicts] == [judgement.unavailable] * 2


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "in RATCHET_GRADER_SECRET (`secret_env`"), (429, "`concurrency`"), (503, "`url`")]
)
def test_a_grader_that_takes_no_request_is_away_and_gets_no_further_one(status: int, remedy: str) -> None:
    with ScriptedModel(path="/grade") as grader:
        grader.answers = [(200, 1.0), (status, "no")]
        judge = made(kind="http", url=f"{grader.url}/grade", max_attempts=1)
        judgement = judge.judge("g", [member("Oslo"), member("Rome"), member("Bern")])
        judge.close()
    assert remedy in str(judgement.unavailable)
    assert [verdict.score for verdict in judgement.verdicts] == [1.0, None, None]


@pytest.mark.parametrize("status", [400, 422, 500])
def test_a_grader_that_refuses_one_trajectory_has_failed_on_it(status: int) -> None:
    with ScriptedModel(path="/grade") as grader:
        grader.answers = [(status, "no"), (200, 1.0)]
        judge = made(kind="http", url=f"{grader.url}/grade", max_attempts=1)
        judgement = judge.judge("g", [member("Oslo"), member("Rome")])
        judge.close()
    assert judgement.unavailable is None
    assert [verdict.score for verdict in judgement.verdicts] == [None, 1.0]


def test_a_composite_with_a_part_that_is_away_is_away() -> None:
    part = {"name": "style", "weight": 0.5, "judge": {"kind": "http", "url": "http://127.0.0.1:9/", "max_attempts": 1}}
    ended = {"name": "ended", "weight": 1.0, "judge": {"kind": "feedback", "missing": 1.0}}
    judge = made(kind="composite", parts=[part, ended])
    judgement = judge.judge("g", [member("Oslo")])
    judge.close()
    assert "`url` is right" in str(judgement.unavailable)


def test_an_async_function_judges_its_members_at_once() -> None:
    judge = make_judge(read_spec("tests.harness.trainer.judge_samples:slow"), {})
    verdicts = judge.judge("g", [member("a"), member("bb"), member("ccc")]).verdicts
    judge.close()
    assert [verdict.score for verdict in verdicts] == [1.0, 2.0, 3.0]
    assert judge.name == "tests.harness.trainer.judge_samples:slow"
