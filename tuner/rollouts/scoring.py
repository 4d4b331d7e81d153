"""Scores of rollouts: by the judge, task by task, or, without a judge, the reward that the workflow returned.

Guarantees: a rollout is judged only when every proxy has shipped all of its calls, otherwise it is unjudged with that
reason; a judge failure is stored as a failure, never as a number; a failed rollout is not judged (its score is up to
the comparison). A judge that ranks sees all attempts at a task together.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from ratchet.store.coordination import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import RecordNotFound
from ratchet.store.operation_records import Rollout
from ratchet.store.records import Transcript, Verdict
from ratchet.store.states import CallState, RolloutState
from ratchet.store.store import Store
from ratchet.trainer.judges.judgement import GroupJudgement, Judge
from ratchet.trainer.judges.kinds.combined import judge_in_both_orders
from ratchet.trainer.observability.progress import Phase, Progress
from ratchet.tuner.rollouts.prices import Prices, RolloutCost, judging_cost, rollout_cost
from ratchet.tuner.rollouts.runner import RolloutRunner

SCORES = "scores"  # name of the progress bar
WORKFLOW = "workflow"  # judge name of scores that the workflow returned
_POLL_SECONDS = 0.05  # seconds

NO_CALL = "no call of this rollout reached the proxy: the workflow must use the given base_url and model"
NO_JUDGE = "no judge is set and the workflow returned no reward: give --judge, or return {response, reward}"


@dataclass
class RolloutScorer:
    """Scores rollouts with a judge, or with their own rewards if there is none.

    `check` is called before each group and raises if no further one may be judged. `keep_stdout` is that of the runner.
    """

    store: Store
    judge: Judge | None
    _: KW_ONLY
    max_wait_seconds: float = 60.0
    progress: Progress = field(default_factory=Progress)
    clock: Callable[[], float] = time.time
    check: Callable[[], None] = lambda: None
    keep_stdout: bool = True

    def __post_init__(self) -> None:
        self.spent = RolloutCost()  # cost of the judge's language-model calls

    @property
    def name(self) -> str:
        """Name and version of the judge: scores of different judges are not comparable."""
        return f"{self.judge.name} ({self.judge.version})" if self.judge is not None else WORKFLOW

    def count_abandoned_tokens(self, tuning_id: str) -> None:
        """Count the tokens of rollouts that a killed run left in progress, once every proxy has shipped them."""
        cut_off = [one for one in self.store.rollouts.of_tuning(tuning_id) if one.state is RolloutState.ABANDONED]
        if cut_off:
            self._wait(max(one.ended_at or 0.0 for one in cut_off))
            self.store.rollouts.count_tokens([one.id for one in cut_off])

    def score(
        self, rollouts: Sequence[Rollout], on_verdict: Callable[[Verdict], object] = lambda verdict: None
    ) -> list[Rollout]:
        """Return the rollouts in order, the ended ones with a score or a judge failure, and with their tokens.

        `on_verdict` is called with each full verdict.
        """
        over = [one for one in rollouts if not one.planned]
        shipped = self._wait(max((one.ended_at or 0.0 for one in over), default=0.0))
        self.store.rollouts.count_tokens([one.id for one in over])
        ended = [one for one in over if one.state is RolloutState.ENDED]
        work = self.progress.begin(SCORES, len(ended))
        if self.judge is None:
            for one in ended:
                self._write(one.id, one.reward, WORKFLOW, None if one.reward is not None else NO_JUDGE, work)
        else:
            with contextlib.redirect_stdout(sys.stderr) if self.keep_stdout else contextlib.nullcontext():
                self._judge_groups(self.judge, self._complete(ended, shipped, work), work, on_verdict)
        work.end()
        return [self.store.rollouts.get(one.id) for one in rollouts]

    def _wait(self, moment: float) -> float:
        """Wait, up to the limit, until every proxy has shipped its records from before this time (Unix seconds).

        Returns the time up to which all have shipped.
        """
        until = self.clock() + self.max_wait_seconds
        while True:
            now = self.clock()
            shipped = self.store.proxy_instances.shipped_until(None, now, since=now - PROXY_TIMEOUT_SECONDS)
            if shipped > moment or now >= until:
                return shipped
            time.sleep(_POLL_SECONDS)

    def _complete(self, ended: Iterable[Rollout], shipped: float, work: Phase) -> list[Rollout]:
        """Return the rollouts whose calls are all in the store; mark the others as unjudged."""
        complete = []
        for one in ended:
            if (one.ended_at or 0.0) < shipped:
                complete.append(one)
            else:
                self._write(one.id, None, self.name, self._missing_calls(), work)
        return complete

    def _missing_calls(self) -> str:
        return f"its calls are not all in the store after {self.max_wait_seconds:g} s (tuner.judge_wait_seconds)"

    def _judge_groups(
        self, judge: Judge, ended: Sequence[Rollout], work: Phase, on_verdict: Callable[[Verdict], object]
    ) -> None:
        threads = ThreadPoolExecutor(judge.concurrency, "judge")
        pending: deque[Future[GroupJudgement]] = deque()  # bounded, because transcripts are long
        try:
            for group in _by_task(ended):
                self.check()
                if members := self._transcripts(judge, group, work):
                    compared = len({one.candidate for one in group}) > 1  # else the order of members decides nothing
                    ask = partial(judge_in_both_orders, judge) if compared else partial(judge.judge, None)
                    pending.append(threads.submit(ask, members))
                while len(pending) > 2 * judge.concurrency:
                    self._record_judgement(self._result(pending.popleft()), work, on_verdict)
            while pending:
                self._record_judgement(self._result(pending.popleft()), work, on_verdict)
        finally:  # groups that wait are not judged; the judgement in progress cannot be ended, and does not count
            threads.shutdown(wait=False, cancel_futures=True)

    def _result(self, judgement: Future[GroupJudgement]) -> GroupJudgement:
        """Return the judgement once it is there; raise if the run was cancelled meanwhile."""
        while not judgement.done():
            self.check()
            wait([judgement], _POLL_SECONDS)
        return judgement.result()

    def _record_judgement(
        self, judgement: GroupJudgement, work: Phase, on_verdict: Callable[[Verdict], object]
    ) -> None:
        self.spent += judging_cost(judgement.judge_requests)
        for verdict in judgement.verdicts:
            self._write(verdict.trajectory_id, verdict.score, verdict.judge, verdict.failure, work)
            on_verdict(verdict)

    def _transcripts(self, judge: Judge, group: Iterable[Rollout], work: Phase) -> list[Transcript]:
        found = []
        for one in group:
            try:
                transcript = self.store.trajectories.read(one.id)
            except RecordNotFound:
                self._write(one.id, None, judge.name, NO_CALL, work)
                continue
            if any(call.state is CallState.STARTED for call in transcript.calls):
                self._write(one.id, None, judge.name, self._missing_calls(), work)
                continue
            found.append(transcript)
        return found

    def _write(self, name: str, score: float | None, judge: str, failure: str | None, work: Phase) -> None:
        self.store.rollouts.score(name, score, judge, failure)
        work.add(failed=float(score is None), **({} if score is None else {"score": score}))


@dataclass(frozen=True, kw_only=True)
class RolloutTools:
    """What every method runs, scores and prices its rollouts with."""

    store: Store
    runner: RolloutRunner
    scorer: RolloutScorer
    prices: Prices = field(default_factory=lambda: Prices({}))
    progress: Progress = field(default_factory=Progress)

    def spent(self, rollouts: Iterable[Rollout]) -> RolloutCost:
        """Return the cost of those that ran, and of what the judge asked in this process."""
        ran = (one for one in rollouts if one.counts or one.prompt_tokens)
        return sum((rollout_cost(one, self.prices) for one in ran), self.scorer.spent)


def _by_task(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(one.task_id, []).append(one)
    return list(groups.values())
