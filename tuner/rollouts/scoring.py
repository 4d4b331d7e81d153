"""Scores of rollouts: the judge's, by task; where there is no judge, the reward that the workflow itself returned.

Promises: a rollout is judged on all that it did (every proxy has shipped it, or that is said); a judge failure is kept
as a failure and never a number; a failed rollout is not judged, what counts for it is the comparison's to say. A judge
that ranks sees all attempts at a task side by side.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ratchet.store.coordination.proxies import PROXY_TIMEOUT_SECONDS
from ratchet.store.errors import RecordNotFound
from ratchet.store.records import Transcript, Verdict
from ratchet.store.records.tuning import Rollout
from ratchet.store.states import CallState, RolloutState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges import Judge, Judgement
from ratchet.trainer.controller.judges.both_orders import judge_in_both_orders
from ratchet.trainer.observability.progress import Progress, Work
from ratchet.tuner.rollouts.prices import RolloutCost, judging_cost

SCORES = "scores"  # the work that progress is told of
WORKFLOW = "workflow"  # who gave the score where that is the workflow itself
_LOOK_EVERY = 0.05  # seconds

NO_CALL = (
    "no call of this rollout reached the proxy: the workflow must use the base_url, and ask for the model, that it is "
    "given"
)
NO_JUDGE = "there is no judge, and the workflow returned no reward: give --judge, or return {response, reward}"


class Scorer:
    """Scores rollouts with one judge; without one, by their own rewards."""

    def __init__(
        self,
        store: Store,
        judge: Judge | None,
        *,
        alias: str = "policy",
        patience: float = 60.0,
        progress: Progress | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._judge = judge
        self._alias = alias
        self._patience = patience
        self._progress = progress or Progress()
        self._clock = clock
        self.spent = RolloutCost()  # on questions of the judge to language models

    @property
    def name(self) -> str:
        """Who gives the scores, with the version: scores of different ones are not comparable."""
        return f"{self._judge.name} ({self._judge.version})" if self._judge is not None else WORKFLOW

    def count_abandoned_tokens(self, tuning_id: str) -> None:
        """Count the tokens of what was under way when a run was killed, once every proxy has shipped it."""
        cut_off = [one for one in self._store.rollouts.of_tuning(tuning_id) if one.state is RolloutState.ABANDONED]
        if cut_off:
            self._wait(max(one.ended_at or 0.0 for one in cut_off))
            self._store.rollouts.count_tokens([one.id for one in cut_off])

    def score(
        self, rollouts: Sequence[Rollout], on_verdict: Callable[[Verdict], object] = lambda verdict: None
    ) -> list[Rollout]:
        """Return the rollouts in their order, each that ended with a score or a judge failure; tokens are counted.

        `on_verdict` sees what the judge said in full.
        """
        over = [one for one in rollouts if not one.planned]
        shipped = self._wait(max((one.ended_at or 0.0 for one in over), default=0.0))
        self._store.rollouts.count_tokens([one.id for one in over])
        ended = [one for one in over if one.state is RolloutState.ENDED]
        work = self._progress.begin(SCORES, len(ended))
        if self._judge is None:
            for one in ended:
                self._write(one.id, one.reward, WORKFLOW, None if one.reward is not None else NO_JUDGE, work)
        else:
            with contextlib.redirect_stdout(sys.stderr):  # what a judge prints
                self._judged(self._judge, self._whole(ended, shipped, work), work, on_verdict)
        work.end()
        return [self._store.rollouts.get(one.id) for one in rollouts]

    def _wait(self, moment: float) -> float:
        """Wait until every proxy has shipped what it recorded before this moment, at most as long as allowed.

        Returns the moment up to which they have.
        """
        until = self._clock() + self._patience
        while True:
            now = self._clock()
            shipped = self._store.proxy_instances.shipped_until(self._alias, now, since=now - PROXY_TIMEOUT_SECONDS)
            if shipped > moment or now >= until:
                return shipped
            time.sleep(_LOOK_EVERY)

    def _whole(self, ended: Iterable[Rollout], shipped: float, work: Work) -> list[Rollout]:
        """Return the rollouts of which every call is in the store; the others stay unjudged, and that is said."""
        whole = []
        for one in ended:
            if (one.ended_at or 0.0) < shipped:
                whole.append(one)
            else:
                self._write(one.id, None, self.name, self._late(), work)
        return whole

    def _late(self) -> str:
        return f"its calls are not all in the store after {self._patience:g} s (tuner.judge_wait_seconds)"

    def _judged(
        self, judge: Judge, ended: Sequence[Rollout], work: Work, on_verdict: Callable[[Verdict], object]
    ) -> None:
        with ThreadPoolExecutor(judge.concurrency, "judge") as threads:
            asked: deque[Future[Judgement]] = deque()  # few at a time: transcripts are long
            for group in _by_task(ended):
                if members := self._transcripts(judge, group, work):
                    compared = len({one.candidate for one in group}) > 1  # else no decision rests on their order
                    ask = partial(judge_in_both_orders, judge) if compared else partial(judge.judge, None)
                    asked.append(threads.submit(ask, members))
                while len(asked) > 2 * judge.concurrency:
                    self._heard(asked.popleft().result(), work, on_verdict)
            while asked:
                self._heard(asked.popleft().result(), work, on_verdict)

    def _heard(self, judgement: Judgement, work: Work, on_verdict: Callable[[Verdict], object]) -> None:
        self.spent += judging_cost(judgement.judge_requests)
        for verdict in judgement.verdicts:
            self._take(verdict, work)
            on_verdict(verdict)

    def _transcripts(self, judge: Judge, group: Iterable[Rollout], work: Work) -> list[Transcript]:
        found = []
        for one in group:
            try:
                transcript = self._store.trajectories.read(one.id)
            except RecordNotFound:
                self._write(one.id, None, judge.name, NO_CALL, work)
                continue
            if any(call.state is CallState.BEGUN for call in transcript.calls):
                self._write(one.id, None, judge.name, self._late(), work)
                continue
            found.append(transcript)
        return found

    def _take(self, verdict: Verdict, work: Work) -> None:
        self._write(verdict.trajectory_id, verdict.score, verdict.judge, verdict.failure, work)

    def _write(self, name: str, score: float | None, judge: str, failure: str | None, work: Work) -> None:
        self._store.rollouts.score(name, score, judge, failure)
        work.add(failed=float(score is None), **({} if score is None else {"score": score}))


def _by_task(rollouts: Iterable[Rollout]) -> list[list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for one in rollouts:
        groups.setdefault(one.task_id, []).append(one)
    return list(groups.values())
