"""Release evaluation with a workflow: candidate and live version run the same held-out tasks.

The rollouts go through a running proxy with the purpose `eval` and are never trained. The comparison is that of
`ratchet eval`, and the run is listed by `ratchet tune runs`. An interrupted run is resumed. Failed rollouts count as
failures of their version; if all of one version fail, nothing was measured and the evaluation has failed.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.operation_records import Rollout, Tuning
from ratchet.store.records import Policy, Transcript
from ratchet.store.states import RELEASE_EVALUATION, RolloutState, TuningState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.judgement import Judge
from ratchet.trainer.errors import TuningError
from ratchet.trainer.release.candidates import version_name
from ratchet.trainer.release.evaluation import EvaluationResult, PairedEvaluation, Sides, compare_with_judge
from ratchet.trainer.settings.trainer_sections import ReleaseSettings
from ratchet.trainer.statistics import Compared
from ratchet.trainer.tasks import Task, TaskSet
from ratchet.tuner.rollouts.prices import Prices
from ratchet.tuner.rollouts.runner import RolloutRunner, final_rollouts, first_api_key
from ratchet.tuner.rollouts.scoring import RolloutScorer
from ratchet.tuner.rollouts.workflow import load_workflow
from ratchet.tuner.selection.model_selection import ModelSelector, Request
from ratchet.tuner.settings import TunerSettings

_NEWEST = 50  # newest runs searched for one to resume


class WorkflowEvaluator:
    """Runs a workflow on held-out tasks with both versions of an alias."""

    def __init__(
        self, store: Store, alias: str, settings: ReleaseSettings, judge: Judge, second: Judge | None = None
    ) -> None:
        """Raises WorkflowError, TaskSetError."""
        self._store = store
        self._alias = alias
        self._settings = settings
        self._judge = judge
        self._second = second
        self._workflow = load_workflow(settings.workflow or "")
        self._tasks = _tasks(settings)
        self._scorer = RolloutScorer(store, judge)

    def close(self) -> None:
        """Close the judges."""
        self._judge.close()
        if self._second is not None:
            self._second.close()

    def evaluate(self, candidate: Policy, live: Policy, check: Callable[[], None]) -> EvaluationResult:
        """Return the paired comparison. Raises TuningError if nothing could be measured."""
        request = self._request(candidate, live)
        run = self._run_of(request)
        runner = RolloutRunner(
            self._store,
            self._proxy_url(),
            first_api_key(),
            self._workflow,
            self._tuner(),
            alias=self._alias,
            check=check,
        )
        selector = ModelSelector(self._store, runner, self._scorer, Prices({}))
        try:
            found = asyncio.run(selector.run(request, self._tasks, run))
        except TuningError as error:
            self._store.tunings.end(run.id, TuningState.FAILED, error=str(error))
            raise
        made = final_rollouts(self._store.rollouts.of_tuning(run.id))
        self._check_measured(request, made)
        first = _evaluation(found.ranking.pair(request.candidates[1], request.candidates[0]))
        if first is None or self._second is None:
            return EvaluationResult(first, run=run.id)
        second = compare_with_judge(self._second, self._sides(request, made), "tasks")
        return EvaluationResult(first, second, self._second.name, run.id)

    def _request(self, candidate: Policy, live: Policy) -> Request:
        settings = self._settings
        return Request(
            kind="eval", alias=self._alias, candidates=(version_name(live), version_name(candidate)),
            tasks=str(settings.tasks),
            split=settings.split, workflow=str(settings.workflow), judge=self._scorer.name,
            limit=settings.evaluation_prompts, attempts=settings.evaluation_samples,
        )  # fmt: skip

    def _run_of(self, request: Request) -> Tuning:
        """Resume the interrupted run of this evaluation, or start one."""
        config = json.loads(msgspec.json.encode(request)) | {RELEASE_EVALUATION: True}  # as the store returns it
        for one in self._store.tunings.page("eval", limit=_NEWEST, state=TuningState.RUNNING):
            if one.alias == self._alias and dict(one.config) == config:
                return self._store.tunings.resume(one.id)
        return self._store.tunings.begin("eval", self._alias, config)

    def _proxy_url(self) -> str:
        if self._settings.proxy_url is not None:
            return self._settings.proxy_url
        instances = self._store.proxy_instances.running(self._alias, time.time() - PROXY_TIMEOUT_SECONDS)
        if not instances:
            raise TuningError(f"no proxy serves {self._alias}: the workflow has no endpoint; start `ratchet proxy`")
        return max(instances, key=lambda instance: instance.heartbeat_at).url

    def _tuner(self) -> TunerSettings:
        settings = self._settings
        return TunerSettings(
            concurrency=settings.evaluation_concurrency, timeout_seconds=settings.evaluation_timeout_seconds
        )

    def _check_measured(self, request: Request, made: Sequence[Rollout]) -> None:
        for name in request.candidates:
            own = [one for one in made if one.candidate == name]
            failed = [one for one in own if one.state is RolloutState.FAILED]
            if own and len(failed) == len(own):
                raise TuningError(f"all {len(own)} rollouts failed of {name}, e.g. {failed[0].failure}")

    def _sides(self, request: Request, made: Sequence[Rollout]) -> list[Sides]:
        """Return the finished trajectories of candidate and live version, by task."""
        live, candidate = request.candidates
        sides: dict[str, Mapping[str, list[Transcript]]] = {}
        for one in made:
            if one.state is RolloutState.ENDED:
                sides.setdefault(one.task_id, {live: [], candidate: []})[one.candidate].append(
                    self._store.trajectories.read(one.id)
                )
        return [(side[candidate], side[live]) for side in sides.values() if side[candidate] and side[live]]


def _evaluation(pair: Compared) -> PairedEvaluation | None:
    if pair.mean is None or pair.against_mean is None or pair.difference is None:
        return None
    return PairedEvaluation(
        pair.tasks, pair.unjudged, pair.mean, pair.against_mean, pair.difference, pair.low, pair.high, what="tasks"
    )


def _tasks(settings: ReleaseSettings) -> list[Task]:
    return list(TaskSet.open(settings.tasks or "").rows(settings.split, settings.evaluation_prompts))
