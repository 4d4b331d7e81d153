"""Judges that only rank: their scores are never used for more, and no place is better."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ratchet.proxy.coordinator.operator_api.overview import Overview
from ratchet.store.records import Transcript, Verdict
from ratchet.store.reports.learning_report import (
    RELATIVE_SCORES_NOTE,
    is_relative,
    read_learning_report,
    record_judge_scale,
)
from ratchet.store.store import Store
from ratchet.trainer.judges.judgement import compares
from ratchet.trainer.judges.kinds.combined import CompositeJudge, Part, judge_in_both_orders
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.kinds.ruler import RulerJudge
from ratchet.trainer.judges.language_model import LanguageModel
from ratchet.trainer.release.evaluation import compare_pairs, compare_with_judge
from ratchet.trainer.settings.judge_specs import RulerSpec, gives_only_ranks, read_spec
from tests.harness.chat_models import ScriptedModel, says
from tests.harness.records import answered_trajectory, judged_group
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
from tests.trainer.test_ruler import member, shown
from tests.trainer.test_warm_start import search

RULER = {"kind": "ruler", "base_url": "http://127.0.0.1:9/v1", "model": "big"}
RULE = "tests.harness.trainer.judge_samples:scripted"


def part(judge: Any, **role: float) -> dict[str, Any]:
    return {"name": f"p{id(judge)}", "judge": judge, **role}


@pytest.mark.parametrize(
    ("judge", "relative"),
    [
        (RULER, True),
        (RULE, False),
        ({"kind": "composite", "parts": [part(RULER, weight=1.0)]}, True),
        ({"kind": "composite", "parts": [part(RULER, weight=1.0), part(RULE, weight=1.0)]}, False),
    ],
)
def test_a_judge_that_only_ranks_is_known_by_its_settings(judge: Any, relative: bool) -> None:
    assert gives_only_ranks(read_spec(judge)) is relative


def two_versions(store: Store) -> None:
    """Forty scores of each of two versions by the judge whose version is "1"; the second is far better."""
    for number in range(20):
        judged_group(store, [f"a{number}", f"b{number}"], [0.0, 0.1], task=f"t{number}", versions=[0, 0])
        judged_group(store, [f"c{number}", f"d{number}"], [0.9, 1.0], task=f"t{number}", versions=[1, 1])


@pytest.mark.slow
def test_the_learning_report_and_the_console_say_relative_and_give_no_mean(store: Store) -> None:
    two_versions(store)
    store.policies.register_base("agent", "agent@0")
    assert read_learning_report(store, "agent").families[0].gain.verdict == "better"
    record_judge_scale(store, "agent", "1", relative=True)
    report = read_learning_report(store, "agent")
    assert (report.families, report.versions, report.missing) == ((), (), RELATIVE_SCORES_NOTE)
    assert "relative" in RELATIVE_SCORES_NOTE
    (alias,) = Overview(store).read()["aliases"]
    assert (alias["relative"], list(alias["learning"]["versions"])) == (True, [])
    assert alias["learning"]["missing"] == RELATIVE_SCORES_NOTE


def test_the_trainer_notes_what_its_judge_is(store: Store, make_controller: Callable[..., SteppedController]) -> None:
    controller = make_controller(judge=RULER, ungrouped="drop")
    version = controller._judge.version
    assert is_relative(store, "agent", version)
    record_judge_scale(store, "agent", version, relative=True)
    assert len(store.observations.newest("agent", "judge", 10)) == 1, "once"
    assert not is_relative(store, "agent", "another")


@pytest.mark.parametrize(("judge", "best"), [(RULER, []), (RULE, [1])])
def test_no_version_is_kept_for_its_relative_mean(
    store: Store, make_controller: Callable[..., SteppedController], judge: Any, best: list[int]
) -> None:
    controller = make_controller(judge=judge, ungrouped="drop")
    names = [f"r{number}" for number in range(20)]
    for name in names:
        answered_trajectory(store, name, task="t", version=1)
    store.trajectories.seal_idle_trajectories("agent", now=100.0, idle_seconds=1.0)
    group = store.groups.create("task:t", "agent", names, now=101.0)
    fields: dict[str, Any] = {"group_id": group.id, "judge": "j", "judge_version": controller._judge.version}
    store.groups.record_verdicts(group.id, [Verdict(trajectory_id=n, score=float(n == "r0"), **fields) for n in names])
    assert controller._best_versions() == best


def test_a_warm_start_takes_the_best_of_each_group_whatever_the_relative_score(
    store: Store, make_controller: Callable[..., SteppedController]
) -> None:
    agents_work(store, "a", [0.125, 0.375])
    agents_work(store, "b", [0.9, 0.6])
    make_controller(groups_per_round=100).step(1000.0)
    assert set(search(store, sources=("policy",)).scores) == {"b-0", "b-1"}
    found = search(store, relative=True, sources=("policy",))
    assert set(found.scores) == {"a-1", "b-0"}
    assert found.skipped == {"not above its group (the judge only ranks)": 2}


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
    opinion = compare_pairs(ruler, pairs, members.__getitem__)
    assert opinion is not None
    assert (opinion.prompts, opinion.unjudged) == (TASKS, 0)
    assert opinion.difference == pytest.approx(0.0)
    assert opinion.low < 0 < opinion.high
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
