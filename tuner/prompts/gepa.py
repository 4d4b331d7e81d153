"""GEPA, from the package `gepa`: prompts evolve by reflection on rollouts, along a Pareto front over the tasks.

GEPA selects the prompt to improve, the training tasks and the survivors; our rollouts score, and our reflection model
proposes. GEPA gets no model, folder or tracker of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gepa.api import optimize
from gepa.core.adapter import EvaluationBatch, GEPAAdapter

from ratchet.trainer.errors import Unanswered
from ratchet.tuner.prompts.optimizer import (
    REFLECTION_MINIBATCH_SIZE,
    Evaluate,
    Example,
    Reflection,
    Search,
    unwrap_errors,
    wrap_errors,
)

log = logging.getLogger(__name__)

_PART = "system_prompt"  # the one component of a candidate
_PERFECT = 1.0  # maximum score of judges with the range 0 to 1; such rollouts are not reflected on
_IDLE = 10  # iterations without a new prompt after which the search stops


class Gepa:
    """Runs `gepa.optimize` over our trials."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search; see PromptOptimizer."""
        known = evaluate.scores(seed_prompt, search.validation)
        unit = max(known) <= _PERFECT  # otherwise the maximum score is unknown
        adapter = _Adapter(evaluate, reflection, seed_prompt)
        with unwrap_errors():
            optimize(
                seed_candidate={_PART: seed_prompt},
                trainset=list(search.train),
                valset=list(search.validation),
                adapter=adapter,
                reflection_minibatch_size=min(REFLECTION_MINIBATCH_SIZE, len(search.train)),
                skip_perfect_score=unit,
                perfect_score=_PERFECT,
                stop_callbacks=_StopWhenIdle(adapter, max(_IDLE, 2 * len(search.train) // REFLECTION_MINIBATCH_SIZE)),
                logger=_Quiet(),
                track_best_outputs=False,
                seed=search.seed,
                raise_on_exception=False,  # only a skipped prompt; other errors are wrapped
            )


class _Adapter(GEPAAdapter[str, str, None]):
    """Adapter for GEPA: data instances and trajectories are task ids."""

    def __init__(self, evaluate: Evaluate, reflection: Reflection, seed_prompt: str) -> None:
        self._evaluate = evaluate
        self._reflection = reflection
        self.proposed = {seed_prompt}
        self.propose_new_texts = self._propose

    def evaluate(
        self, batch: list[str], candidate: dict[str, str], capture_traces: bool = False
    ) -> EvaluationBatch[str, None]:
        with wrap_errors():
            scores = self._evaluate.scores(candidate[_PART], batch)
        return EvaluationBatch(outputs=[None] * len(batch), scores=scores, trajectories=list(batch))

    def make_reflective_dataset(
        self,
        candidate: dict[str, str],
        eval_batch: EvaluationBatch[str, None],
        components_to_update: list[str],
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        with wrap_errors():
            examples = [self._evaluate.example(candidate[_PART], task) for task in eval_batch.trajectories or ()]
        return {_PART: [{"example": example} for example in examples]}

    def _propose(
        self,
        candidate: dict[str, str],
        reflective_dataset: Mapping[str, Sequence[Mapping[str, Any]]],
        components_to_update: list[str],
    ) -> dict[str, str]:
        examples: list[Example] = [row["example"] for row in reflective_dataset[_PART]]
        try:
            with wrap_errors():
                prompt = self._reflection.propose(candidate[_PART], examples)
        except Unanswered:
            return {}  # no proposal; GEPA would retry after an exception
        if prompt in self.proposed:
            return {}
        self.proposed.add(prompt)
        return {_PART: prompt}


class _StopWhenIdle:
    """Stops a search that has nothing left to improve or proposes nothing new."""

    def __init__(self, adapter: _Adapter, max_idle: int) -> None:
        self._adapter = adapter
        self._max_idle = max_idle
        self._proposed = 0
        self._rounds = 0

    def __call__(self, gepa_state: Any) -> bool:
        proposed = len(self._adapter.proposed)
        self._rounds = 0 if proposed != self._proposed else self._rounds + 1
        self._proposed = proposed
        return self._rounds >= self._max_idle


class _Quiet:
    """Writes GEPA's messages to the debug log."""

    def log(self, message: str) -> None:
        log.debug("event=gepa message=%s", " ".join(str(message).split())[:500])
