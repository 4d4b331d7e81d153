"""Claims about the order in which a judge that compares is shown two versions: neither has the better place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ratchet.store.records import Transcript
from ratchet.trainer.controller.judges.kinds.combined import CompositeJudge, Part, compares, judge_in_both_orders
from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.kinds.ruler import RulerJudge
from ratchet.trainer.controller.judges.language_model import LanguageModel
from ratchet.trainer.release.evaluation import compare_with_judge, judge_pairs
from ratchet.trainer.settings.judge_specs import RulerSpec
from tests.harness.chat_models import ScriptedModel, says
from tests.trainer.test_ruler import member, shown

TASKS = 50
WORTH = {"candidate": 0.5, "live": 0.5}
FAVOUR = 0.2  # what stands first gets more


@pytest.fixture
def model() -> Iterator[ScriptedModel]:
    with ScriptedModel() as running:
        yield running


@pytest.fixture
def ruler(model: ScriptedModel) -> Iterator[RulerJudge]:
    spec = RulerSpec(
        kind="ruler",
        base_url=model.url,
        model="big",
        input_cost_per_million=1.0,
        output_cost_per_million=1.0,
        max_attempts=1,
    )
    made = RulerJudge(spec, LanguageModel(spec, None))
    yield made
    made.close()


def answer_of(attempt: dict[str, Any]) -> str:
    return "candidate" if "candidate" in json.dumps(attempt["messages"]) else "live"


def favours_the_first(request: dict[str, Any]) -> Any:
    attempts = shown(request)["attempts"]
    return says(
        {
            "scores": [
                {
                    "trajectory_id": one["trajectory_id"],
                    "explanation": "e",
                    "score": WORTH[answer_of(one)] + FAVOUR * (place == 0),
                }
                for place, one in enumerate(attempts)
            ]
        }
    )


def pair(task: int) -> list[Transcript]:
    """The candidate's answer and the live version's, in the order that every comparison lists them in."""
    root = {"role": "user", "content": f"task {task}"}
    return [
        member(f"evaluation:t{task}:{version}:0", [root, {"role": "assistant", "content": name}])
        for version, name in ((7, "candidate"), (6, "live"))
    ]


def first_shown(model: ScriptedModel) -> list[str]:
    return [answer_of(shown(request)["attempts"][0]) for request in model.requests]


def test_over_many_tasks_each_version_is_shown_first_about_half_the_time(
    model: ScriptedModel, ruler: RulerJudge
) -> None:
    model.answers = [favours_the_first] * TASKS
    for task in range(TASKS):
        ruler.judge(None, pair(task))
    assert 15 <= first_shown(model).count("candidate") <= 35


@pytest.mark.slow
def test_a_judge_that_favours_a_place_decides_nothing_about_a_version(model: ScriptedModel, ruler: RulerJudge) -> None:
    model.answers = [favours_the_first] * (4 * TASKS)
    members = {run.trajectory.id: run for task in range(TASKS) for run in pair(task)}
    pairs = [(pair(task)[0].trajectory.id, pair(task)[1].trajectory.id) for task in range(TASKS)]
    opinion = judge_pairs(ruler, pairs, members.__getitem__)
    assert (opinion.pairs, opinion.failures) == (TASKS, 0)
    assert (opinion.mean, opinion.low, opinion.high) == pytest.approx((0.0, 0.0, 0.0))
    found = compare_with_judge(ruler, [([pair(task)[0]], [pair(task)[1]]) for task in range(TASKS)])
    assert found is not None
    assert (found.difference, found.candidate) == pytest.approx((0.0, 0.6))
    assert first_shown(model).count("candidate") == 2 * TASKS  # of twice both orders


def test_both_orders_are_paid_for_and_kept_and_a_failure_in_one_is_a_failure(
    model: ScriptedModel, ruler: RulerJudge
) -> None:
    model.answers = [favours_the_first, favours_the_first]
    one, whole = pair(1), judge_in_both_orders(ruler, pair(1))
    assert [verdict.trajectory_id for verdict in whole.verdicts] == [run.trajectory.id for run in one]
    assert len(whole.judge_requests) == 2
    assert sum(verdict.cost or 0.0 for verdict in whole.verdicts) == pytest.approx(
        sum(exchange.cost or 0.0 for exchange in whole.judge_requests)
    )
    model.answers = [favours_the_first, says("nothing")]
    assert [verdict.score for verdict in judge_in_both_orders(ruler, pair(2)).verdicts] == [None, None]


def test_judges_that_score_each_member_alone_judge_once(ruler: RulerJudge) -> None:
    alone = FunctionJudge("tests.harness.trainer.judge_samples:scripted")
    assert not compares(alone)
    assert not compares(CompositeJudge([Part("a", alone, 1.0)]))
    assert compares(CompositeJudge([Part("a", alone, 0.5), Part("b", ruler, 0.5)]))
