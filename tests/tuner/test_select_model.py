"""Model selection on a real proxy: turns, ties, failing judges and prices; what ended is not run again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import TuningError
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.statistics import ComparisonVerdict
from ratchet.trainer.tasks import Task, TaskSet
from ratchet.tuner.reports import read
from ratchet.tuner.rollouts.prices import prices_of
from ratchet.tuner.rollouts.runner import RolloutRunner
from ratchet.tuner.rollouts.scoring import RolloutScorer, RolloutTools
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.selection import (
    ModelSelector,
    Request,
    Selection,
    check_prices,
    jobs_of,
    known_models,
    resolved,
)
from ratchet.tuner.settings import TunerSettings
from tests.harness.chat_models import ScriptedModel, adding_models, entry
from tests.harness.proxy.running_proxy import Proxy, Start

TASKS = 40
PRICED = {"input_cost_per_token": 1e-6, "output_cost_per_token": 1e-6}
DEAR = {"input_cost_per_token": 1e-5, "output_cost_per_token": 1e-5}
PRICES = {"right-95": DEAR, "right-90": PRICED, "right-20": None, "crash": None}


@dataclass
class SelectionSetup:
    """A proxy with other models behind it, and everything that a selection needs."""

    store: Store
    proxy: Proxy
    models: ScriptedModel
    tasks: Sequence[Task]
    listed: list[dict[str, Any]]

    async def select(self, *candidates: str, judge: str = "exact", tasks: int = TASKS, **changes: Any) -> Selection:
        settings = TunerSettings(concurrency=changes.pop("concurrency", 8))
        made = FunctionJudge(f"tests.harness.tuner.judges:{judge}")
        workflow = load_workflow("tests.harness.tuner.workflows:ask")
        runner = RolloutRunner(self.store, self.proxy.url, None, workflow, settings, alias="agent")
        scorer, prices = RolloutScorer(self.store, made), prices_of(self.listed)
        selector = ModelSelector(RolloutTools(store=self.store, runner=runner, scorer=scorer, prices=prices))
        request = Request(
            alias="agent", candidates=candidates, tasks="sums", split="test", workflow="ask", judge=made.name, **changes
        )  # fmt: skip
        tuning = self.store.tunings.begin("select-model", "agent", {})
        return await selector.run(request, self.tasks[:tasks], tuning)


@pytest.fixture
def bench(start: Start, store: Store, tmp_path: Path) -> Iterator[SelectionSetup]:
    rows = [{"question": f"What is {number} + 3?", "answer": str(number + 3)} for number in range(TASKS)]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with adding_models() as models:
        listed = [entry(models.url, name, price) for name, price in PRICES.items()]
        proxy = start(model_list=listed)
        yield SelectionSetup(store, proxy, models, list(TaskSet.open(tmp_path / "test.jsonl").rows("test")), listed)


@pytest.mark.slow
async def test_candidates_take_turns_at_the_same_tasks(bench: SelectionSetup) -> None:
    await bench.select("right-20", "right-95", tasks=10, concurrency=1)
    models = [body["model"] for body in bench.models.requests]
    assert len(models) == 20
    assert all({"right-20", "right-95"} == set(models[place : place + 2]) for place in range(0, 20, 2))
    assert {models[0], models[2]} == {"right-20", "right-95"}  # and at being first
    rollouts = bench.store.rollouts.of_tuning(bench.store.tunings.page()[0].id)
    assert len({(one.task_id, one.scenario["seed"]) for one in rollouts}) == 10
    assert {one.purpose for one in rollouts} == {"eval"}


@pytest.mark.slow
async def test_a_judge_with_negative_scores_ranks_the_crashing_candidate_last(bench: SelectionSetup) -> None:
    found = await bench.select("crash", "right-20", judge="never_content", tasks=12)
    assert [one.candidate for one in found.ranking.scores] == ["right-20", "crash"]
    assert found.ranking.failure_score == -2.0
    assert found.figures[1].commonest_failure is not None
    assert "the GPU fell out" in found.figures[1].commonest_failure


@pytest.mark.slow
async def test_a_tie_is_reported_and_nothing_is_chosen(bench: SelectionSetup) -> None:
    found = await bench.select("right-95", "right-90")
    assert found.chosen is None
    assert "are tied" in found.reason
    result = read(bench.store.tunings.page()[0].result or {})
    assert (result.best, result.promoted) == (None, None)


@pytest.mark.slow
async def test_the_cheapest_within_reach_is_chosen(bench: SelectionSetup) -> None:
    found = await bench.select("right-95", "right-90", policy="cheapest", within=0.3)
    assert found.chosen == "right-90"
    money = {one.candidate: one.cost_per_rollout for one in found.figures}
    assert money == pytest.approx({"right-95": 25e-5, "right-90": 25e-6})


@pytest.mark.slow
async def test_a_judge_that_fails_on_some_names_no_winner_where_that_matters(bench: SelectionSetup) -> None:
    found = await bench.select("right-95", "right-20", judge="fails_on_some")
    assert found.chosen is None
    assert "could change the ranking" in found.reason
    with pytest.raises(KeyError, match=r"right-95 and right-9 .*compared were right-"):
        found.ranking.pair("right-95", "right-9")
    pair = found.ranking.pair("right-95", "right-20")
    assert (pair.verdict, pair.unjudged > 10) == (ComparisonVerdict.INCONCLUSIVE, True)
    failures = [one.judge_failure for one in bench.store.rollouts.of_tuning(bench.store.tunings.page()[0].id)]
    assert "ValueError: cannot count so far" in failures


@pytest.mark.slow
async def test_what_was_spent_is_in_the_result_and_an_unknown_price_makes_it_a_lower_bound(
    bench: SelectionSetup,
) -> None:
    await bench.select("right-20", "right-95", tasks=10)
    result = read(bench.store.tunings.page()[0].result or {})
    spent = result.spent
    assert (spent.rollouts, spent.prompt_tokens, spent.completion_tokens) == (20, 400, 100)
    assert (round(spent.money.amount, 6), spent.money.known) == (0.0025, False)
    assert (result.baseline, result.task_set.tasks, result.wall_seconds > 0) == ("right-20", 10, True)
    assert result.gain is not None
    assert (result.gain.candidate, result.gain.against) == ("right-95", "right-20")


@pytest.mark.slow
async def test_what_ended_is_not_run_again(bench: SelectionSetup) -> None:
    request = Request(
        alias="agent", candidates=("right-95", "right-20"), tasks="sums", split="test", workflow="ask", judge="j"
    )
    workflow = load_workflow("tests.harness.tuner.workflows:ask")
    runner = RolloutRunner(bench.store, bench.proxy.url, None, workflow, TunerSettings(), alias="agent")
    scorer = RolloutScorer(bench.store, FunctionJudge("tests.harness.tuner.judges:exact"))
    tuning = bench.store.tunings.begin("select-model", "agent", {})
    some = jobs_of(request, bench.tasks[:6])[:7]
    await runner.run(some, tuning.id)
    assert len(bench.models.requests) == 7
    tools = RolloutTools(store=bench.store, runner=runner, scorer=scorer)
    await ModelSelector(tools).run(request, bench.tasks[:6], tuning)
    assert len(bench.models.requests) == 12
    rollouts = bench.store.rollouts.of_tuning(tuning.id)
    assert all(one.state is RolloutState.ENDED and one.score is not None for one in rollouts)


@pytest.mark.slow
async def test_an_alias_means_the_version_that_is_live_when_the_run_begins(bench: SelectionSetup) -> None:
    known = known_models(bench.proxy.url, None)
    assert resolved(bench.store, ["agent", "right-20"], known) == ("agent@0", "right-20")
    found = await bench.select("agent@0", "right-95", tasks=6)
    rollouts = bench.store.rollouts.of_tuning(bench.store.tunings.page()[0].id, "agent@0")
    assert {bench.store.trajectories.get(one.id).version for one in rollouts} == {0}
    assert {one.candidate: one.spent.money.known for one in found.figures} == {"agent@0": False, "right-95": True}


def test_what_cannot_be_compared_is_refused_before_anything_runs(bench: SelectionSetup) -> None:
    known = known_models(bench.proxy.url, None)
    with pytest.raises(TuningError, match=r"gpt-9, agent@7: .* serves agent"):
        resolved(bench.store, ["right-20", "gpt-9", "agent@7"], known)
    with pytest.raises(TuningError, match="agent@0 is given twice"):
        resolved(bench.store, ["agent", "agent@0"], known)
    with pytest.raises(TuningError, match="the price of right-20 is unknown"):
        check_prices(["right-95", "right-20"], prices_of(bench.listed), "cheapest")
    with pytest.raises(TuningError, match="does not list its models"):
        known_models("http://127.0.0.1:9", None)
