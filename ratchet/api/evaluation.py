"""The result of an evaluation: each attempt, each model's mean with its interval, and every pair of models."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.store.operation_records import Rollout
from ratchet.trainer.errors import TuningError
from ratchet.trainer.statistics import CandidateScore, Compared
from ratchet.tuner.selection.choice import Selection, commonest


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a model at a task.

    score     the judge's, or the workflow's reward; None: it failed, or could not be judged
    response  what the workflow returned
    failure   the exception of the workflow or the judge
    """

    model: str
    task: Mapping[str, Any]
    attempt: int
    score: float | None
    response: Any
    failure: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of `ratchet.evaluate`. Printing it, or ending a notebook's cell with it, shows a table.

    run       the run's id; None if the models were called at a base_url, where nothing is stored
    scores    one for each model, best first: candidate, tasks, mean, low and high (95% interval), failed, unjudged
    attempts  each attempt, for a table of your own: `pandas.DataFrame(evaluation.attempts)`
    chosen    the model that is shown to be better than every other; None: no difference is shown
    reason    why
    """

    run: str | None
    scores: tuple[CandidateScore, ...]
    attempts: tuple[Attempt, ...]
    chosen: str | None
    reason: str
    selection: Selection

    def score(self, model: str | None = None) -> CandidateScore:
        """Return the score of a model; None: of the only model. Raises KeyError."""
        found = [one for one in self.scores if model in (None, one.candidate)]
        if len(found) != 1:
            raise KeyError(f"{model}: evaluated were {', '.join(one.candidate for one in self.scores)}")
        return found[0]

    def compared(self, model: str, against: str) -> Compared:
        """Return the mean difference over tasks of two models with its interval, and `verdict`. Raises KeyError."""
        return self.selection.ranking.pair(model, against)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table at the end of a notebook's cell."""
        printer.text(str(self))

    def __str__(self) -> str:
        from ratchet.tuning.reports import show_selection

        text = io.StringIO()
        show_selection(self.selection, with_choice=len(self.scores) > 1, file=text)
        return text.getvalue()


def evaluation_of(
    run: str | None, selection: Selection, rollouts: Sequence[Rollout], rows: Mapping[str, Mapping[str, Any]]
) -> Evaluation:
    """Return the result. `rows`: the task's row by its id. Raises TuningError if no rollout could be scored."""
    if not selection.measured:
        raise TuningError(f"no rollout could be scored: {_commonest_failure(rollouts)}")
    attempts = tuple(_attempt(one, rows[one.task_id]) for one in rollouts if one.counts)
    return Evaluation(run, selection.ranking.scores, attempts, selection.chosen, selection.reason, selection)


def _commonest_failure(rollouts: Iterable[Rollout]) -> str:
    return commonest(one.failure or one.judge_failure for one in rollouts) or "none finished"


def _attempt(one: Rollout, row: Mapping[str, Any]) -> Attempt:
    response = None if one.response is None else json.loads(one.response)
    seconds = None if one.started_at is None or one.ended_at is None else one.ended_at - one.started_at
    return Attempt(one.candidate, row, one.attempt, one.score, response, one.failure or one.judge_failure, seconds)
