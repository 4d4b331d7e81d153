"""The judge by_family: each task family is scored by its own judge, and what has none is not scored."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.trainer.collect.collector import feedback_wait_of
from ratchet.trainer.judges.judgement import Judge, compares
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import gives_only_ranks, read_spec
from ratchet.trainer.settings.trainer_settings import TrainerSettings
from tests.trainer.test_rules import member

OSLO, ROME = (f"tests.harness.trainer.judge_samples:says_{city}" for city in ("oslo", "rome"))
RULER = {"kind": "ruler", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
FEEDBACK = {"kind": "feedback", "within_seconds": 7}


def made(**spec: Any) -> Judge:
    return make_judge(read_spec({"kind": "by_family"} | spec), {})


def test_each_family_is_scored_by_its_own_judge_in_the_order_of_the_members() -> None:
    judge = made(judges={"north": OSLO, "south/warm": ROME}, other={"kind": "workflow"})
    members = [member("Rome", "north/1"), member("Oslo", "north/2"), member("Rome.", "south/warm/1")]
    found = judge.judge("g", members).verdicts
    assert [(one.trajectory_id, one.score) for one in found] == [
        ("run-Rome", 0.0), ("run-Oslo", 1.0), ("run-Rome.", 0.0),
    ]  # fmt: skip
    assert {(one.judge, one.judge_version, one.group_id) for one in found} == {(judge.name, judge.version, "g")}
    assert judge.version != made(judges={"north": OSLO, "south/warm": ROME}).version


def test_a_family_without_a_judge_is_a_judge_failure_that_names_the_families() -> None:
    found = made(judges={"north": OSLO}).judge(None, [member("Oslo", "south/1"), member("Bergen", None)]).verdicts
    assert [one.score for one in found] == [None, None]
    assert "'south': it has north; " in str(found[0].failure)
    assert "trajectories without a task" in str(found[1].failure)


def test_what_one_judge_needs_holds_for_the_whole() -> None:
    assert gives_only_ranks(read_spec({"kind": "by_family", "judges": {"a": OSLO, "b": RULER}}))
    assert compares(made(judges={"a": OSLO}, other=RULER))
    assert not compares(made(judges={"a": OSLO}))
    wait = feedback_wait_of(read_spec({"kind": "by_family", "judges": {"a": OSLO, "b": FEEDBACK}}))
    assert wait is not None
    assert wait.within_seconds == 7


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"judges": {}}, "at least 1"),
        ({"judges": {"a": {"kind": "teacher", "base_url": "http://127.0.0.1:9/v1", "model": "m"}}}, "every family"),
    ],
)
def test_judges_that_cannot_work_are_refused_at_the_start(spec: dict[str, Any], words: str) -> None:
    fields = {"vllm": ["http://x"], "model": "agent", "base_model": "b", "store": "x", "checkpoints": "c"}
    with pytest.raises(ValidationError, match=words):
        TrainerSettings.model_validate(fields | {"judge": {"kind": "by_family"} | spec})
