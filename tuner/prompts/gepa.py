"""GEPA, from the package `gepa`: prompts evolve by reflection on their rollouts, along a Pareto front over the tasks.

GEPA chooses which prompt to improve, on which training tasks, and what to keep; our rollouts score, and our reflection
model proposes. It is given no model of its own, no folder and no tracker.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, GEPAAdapter

from ratchet.trainer.errors import Unanswered
from ratchet.tuner.prompts.optimizer import Evaluate, Example, Reflection, Search, carried_out, taken_up

log = logging.getLogger(__name__)

_PART = "system_prompt"  # the one component of a candidate
_PERFECT = 1.0  # of judges whose scores end there: nothing is to be learnt from such rollouts
_IDLE = 10  # iterations without a new prompt, after which none will come


class Gepa:
    """Runs `gepa.optimize` over our trials."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search; see PromptOptimizer."""
        known = evaluate.scores(seed_prompt, search.validation)
        unit = max(known) <= _PERFECT  # else nobody knows what a perfect score is
        adapter = _Adapter(evaluate, reflection, seed_prompt)
        with taken_up():
            optimize(
                seed_candidate={_PART: seed_prompt},
                trainset=list(search.train),
                valset=list(search.validation),
                adapter=adapter,
                reflection_minibatch_size=min(search.reflection_minibatch_size, len(search.train)),
                skip_perfect_score=unit,
                perfect_score=_PERFECT,
                stop_callbacks=_Idle(adapter, max(_IDLE, 2 * len(search.train) // search.reflection_minibatch_size)),
                logger=_Quiet(),
                track_best_outputs=False,
                seed=search.seed,
                raise_on_exception=False,  # a prompt that is set aside; everything else is carried out
            )


class _Adapter(GEPAAdapter[str, str, None]):
    """GEPA's seam: a data instance and a trajectory are both the id of a task."""

    def __init__(self, evaluate: Evaluate, reflection: Reflection, seed_prompt: str) -> None:
        self._evaluate = evaluate
        self._reflection = reflection
        self.proposed = {seed_prompt}
        self.propose_new_texts = self._propose

    def evaluate(
        self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[str, None]:
        with carried_out():
            scores = self._evaluate.scores(candidate[_PART], batch)
        return EvaluationBatch(outputs=[None] * len(batch), scores=scores, trajectories=list(batch))

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: EvaluationBatch[str, None],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        with carried_out():
            shown = [self._evaluate.example(candidate[_PART], task) for task in eval_batch.trajectories or ()]
        return {_PART: [{"example": example} for example in shown]}

    def _propose(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        examples: list[Example] = [row["example"] for row in reflective_dataset[_PART]]
        try:
            with carried_out():
                prompt = self._reflection.propose(candidate[_PART], examples)
        except Unanswered:
            return {}  # no proposal: an Exception would be asked again
        if prompt in self.proposed:
            return {}
        self.proposed.add(prompt)
        return {_PART: prompt}


class _Idle:
    """Ends a search that goes round in circles: nothing is left to improve, or nothing new is proposed."""

    def __init__(self, adapter: _Adapter, most: int) -> None:
        self._adapter = adapter
        self._most = most
        self._proposed = 0
        self._rounds = 0

    def __call__(self, gepa_state: Any) -> bool:
        proposed = len(self._adapter.proposed)
        self._rounds = 0 if proposed != self._proposed else self._rounds + 1
        self._proposed = proposed
        return self._rounds >= self._most


class _Quiet:
    """GEPA's words for the log, one line each."""

    def log(self, message: str) -> None:
        log.debug("event=gepa message=%s", " ".join(str(message).split())[:500])
