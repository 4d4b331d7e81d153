"""Scores that only rank the members of a group are never shown or used as if they said more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ratchet.proxy.coordinator.operator_api.overview import Overview
from ratchet.store.records import Verdict
from ratchet.store.reports.learning_report import (
    RELATIVE_SCORES_NOTE,
    is_relative,
    read_learning_report,
    record_judge_scale,
)
from ratchet.store.store import Store
from ratchet.trainer.settings.judge_specs import gives_only_ranks, read_spec
from tests.harness.records import answered_trajectory, judged_group
from tests.harness.trainer.agents import agents_work
from tests.harness.trainer.stepped_controller import SteppedController
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
    version = controller._judging.judge.version
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
    fields: dict[str, Any] = {"group_id": group.id, "judge": "j", "judge_version": controller._judging.judge.version}
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
