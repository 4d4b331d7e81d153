"""One run of prompt tuning: determine the seed prompt, search until the budget ends, compare on held-out tasks.

    seed        the agent's own system prompt, observed in two rollouts, or the user's
    search      an optimizer proposes prompts; training and validation tasks score them; the best on validation is kept
    held out    seed and best prompt on tasks that the search never saw: a paired comparison, which decides alone

Guarantees: the search never sees a held-out task; an interrupted run resumes and keeps what it paid for; the verdict is
`better` or `worse` only if the interval excludes zero for every possible score of unjudged rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.store.store import Store
from ratchet.trainer.controller.judges.truncation import shortened
from ratchet.trainer.errors import BudgetExceeded, TooManyFailures, TuningError, Unjudged
from ratchet.trainer.statistics import Compared, ComparisonVerdict, compare
from ratchet.tuner.prompts.budget import Budget
from ratchet.tuner.prompts.optimizer import REFLECTION_MINIBATCH_SIZE, PromptOptimizer, Reflection, Search
from ratchet.tuner.prompts.seed_prompt import PROBES, Mode, SeedPrompt, captured
from ratchet.tuner.prompts.task_splits import Sets
from ratchet.tuner.prompts.trials import SEED, Trials, Tried

log = logging.getLogger(__name__)

_MAX_RECORDED_CHARS = 2_000  # of a tried prompt in the record
_MAX_PROMPTS_RECORDED = 200  # prompts

Verdict = Literal["better", "no better", "worse", "inconclusive"]


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Parameters of a run.

    `attempts` per held-out task; `seed_prompt` None: the agent's own; `mode` None: automatic.
    """

    sets: Sets
    attempts: int
    seed: int
    max_prompt_chars: int = 20_000
    seed_prompt: SeedPrompt | None = None
    mode: Mode | None = None
    failure_score: float = 0.0

    @property
    def held_out_rollouts(self) -> int:
        """Rollouts of the held-out comparison."""
        return 2 * len(self.sets.held_out) * self.attempts

    @property
    def min_rollouts(self) -> int:
        """Minimum budget: the seed and one proposal on validation tasks, and the comparison."""
        first = min(REFLECTION_MINIBATCH_SIZE, len(self.sets.train))
        return PROBES + 2 * (first + len(self.sets.validation)) + self.held_out_rollouts

    def check_budget(self, rollouts: int) -> None:
        """Raise TuningError if so many rollouts cannot give a result."""
        if rollouts < self.min_rollouts:
            raise TuningError(
                f"--max-rollouts {rollouts} is too small: these tasks need at least {self.min_rollouts}, including "
                f"{self.held_out_rollouts} for the held-out comparison"
            )


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a run. `best` is the seed's candidate if nothing was better on validation tasks."""

    seed: SeedPrompt
    baseline: str  # candidates: `seed`, or a prompt's id
    best: str
    prompt: str  # text of the best one
    verdict: Verdict
    why: str
    gain: Compared | None  # on held-out tasks; None: nothing to compare
    tried: tuple[Tried, ...]
    ended_by: str  # why the search ended


class PromptTuning:
    """Runs one plan."""

    def __init__(
        self,
        store: Store,
        trials: Trials,
        budget: Budget,
        optimizer: PromptOptimizer,
        reflection: Callable[[SeedPrompt], Reflection],
        plan: PromptPlan,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store = store
        self._trials = trials
        self._budget = budget
        self._optimizer = optimizer
        self._reflection = reflection
        self._plan = plan
        self._report = report

    def run(self) -> Found:
        """Run until the budget ends. Raises TuningError, Unjudged."""
        plan = self._plan
        plan.check_budget(self._budget.rollouts)
        self._budget.reserved_rollouts = plan.held_out_rollouts - self._trials.known(plan.sets.held_out)
        seed = self._seed()
        self._report(f"seed prompt: {seed.note}")
        ended_by = self._search(seed)
        tried = self._trials.tried(plan.sets.validation)
        baseline = self._trials.candidate(seed.text)
        best = self._best(tried, baseline)
        self._report(f"{len(tried)} prompts were tried on all validation tasks; {ended_by}")
        if best == baseline:
            why = "no proposed prompt was better than the seed on the validation tasks"
            return self._found(seed, baseline, best, "no better", why, None, tried, ended_by)
        gain = self._compared(best, baseline)
        verdict, why = judged(gain)
        return self._found(seed, baseline, best, verdict, why, gain, tried, ended_by)

    def _seed(self) -> SeedPrompt:
        plan = self._plan
        seed = plan.seed_prompt
        if seed is None:
            probed = plan.sets.train[:PROBES]
            self._trials.ensure_rollouts([(SEED, task, 0) for task in probed])
            seen = [one for task in probed if (one := self._trials.transcript(SEED, task)) is not None]
            failure = self._trials.failure_of_all(SEED, probed)
            if failure is not None and not seen:
                raise TooManyFailures(f"the agent failed before calling a model: {failure}")
            seed = captured(seen, plan.mode)
        self._trials.begin(seed.text, plan.sets.validation, is_agents_own=seed.is_agents_own, mode=seed.mode)
        return seed

    def _search(self, seed: SeedPrompt) -> str:
        """Search; return why it ended."""
        plan = self._plan
        search = Search(
            train=plan.sets.train,
            validation=plan.sets.validation,
            seed=plan.seed,
            rollouts=self._budget.rollouts - plan.held_out_rollouts,
            max_prompt_chars=plan.max_prompt_chars,
        )
        try:
            self._trials.scores(seed.text, plan.sets.validation)
        except Unjudged as error:
            raise Unjudged(f"the seed prompt cannot be scored: {error}; see `ratchet judge try`") from error
        except BudgetExceeded as error:
            raise TuningError(f"the budget ended before the seed prompt was scored: {error}") from error
        failure = self._trials.failure_of_all(self._trials.candidate(seed.text), plan.sets.validation)
        if failure is not None:
            raise TooManyFailures(f"every rollout of the seed prompt failed: {failure}")
        try:
            self._optimizer.optimize(seed.text, self._trials, self._reflection(seed), search)
        except BudgetExceeded as spent:
            return f"the budget ended: {spent}"
        return "the search ended"

    def _best(self, tried: Sequence[Tried], baseline: str) -> str:
        """Return the candidate with the highest validation mean; on ties the seed, then the first."""
        known = [(one.mean, one.candidate) for one in tried if one.mean is not None]
        most = max(mean for mean, _ in known)
        equal = [candidate for mean, candidate in known if mean == most]
        return baseline if baseline in equal else equal[0]

    def _compared(self, best: str, baseline: str) -> Compared:
        plan = self._plan
        held_out = plan.sets.held_out
        both = [[(one, task, n) for n in range(plan.attempts) for one in (baseline, best)] for task in held_out]
        enough = self._trials.affordable_rollouts(both)
        if enough < len(both):
            held_out = held_out[:enough]
            self._report(
                f"compared on {enough} of {len(both)} held-out tasks: interrupted rollouts used the budget of the rest"
            )
        try:  # together, so that a judge that ranks sees both
            self._trials.ensure_rollouts([place for task in both[:enough] for place in task], held_out=True)
        except BudgetExceeded as spent:
            self._report(f"the comparison on held-out tasks was cut short: {spent}")
        marks, against = (self._trials.marks(one, held_out, plan.attempts) for one in (best, baseline))
        return compare(marks, against, names=(best, baseline), failure_score=plan.failure_score)

    def _found(
        self,
        seed: SeedPrompt,
        baseline: str,
        best: str,
        verdict: Verdict,
        why: str,
        gain: Compared | None,
        tried: Sequence[Tried],
        ended_by: str,
    ) -> Found:
        log.info("event=prompt_tuned verdict=%s best=%s tried=%d", verdict.replace(" ", "_"), best, len(tried))
        prompt = self._trials.prompt_of(best)
        return Found(seed, baseline, best, prompt, verdict, why, gain, tuple(tried), ended_by)


def judged(gain: Compared) -> tuple[Verdict, str]:
    """Return the verdict of a held-out comparison and its reason."""
    if gain.verdict is ComparisonVerdict.BETTER:
        return "better", "the interval on the held-out tasks lies above zero"
    if gain.verdict is ComparisonVerdict.WORSE:
        return (
            "worse",
            "the interval on the held-out tasks lies below zero: the prompt fits only the tasks of the search",
        )
    if gain.verdict is ComparisonVerdict.INCONCLUSIVE or gain.difference is None:
        return "inconclusive", f"{gain.unjudged} attempts are unjudged and could change the verdict"
    if gain.difference <= 0:
        return "no better", "on the held-out tasks it scores no higher than the seed prompt"
    return "inconclusive", "the interval on the held-out tasks contains zero: use more tasks or attempts"


def details(found: Found, plan: PromptPlan, budget: Budget, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the record that only prompt tuning has."""
    return {
        **about,
        "verdict": found.verdict,
        "why": found.why,
        "mode": found.seed.mode,
        "seed_prompt": found.seed.text,
        "seed_from": found.seed.note,
        "prompt_id": None if found.best == SEED else found.best,
        "prompt": found.prompt,
        "validation": [
            {"candidate": one.candidate, "mean": one.mean, "prompt": shortened(one.prompt, _MAX_RECORDED_CHARS)}
            for one in found.tried[:_MAX_PROMPTS_RECORDED]
        ],
        "tasks": {
            "train": len(plan.sets.train),
            "validation": len(plan.sets.validation),
            "held_out": len(plan.sets.held_out),
        },
        "search_ended_by": found.ended_by,
        "budget": {
            "rollouts": budget.rollouts,
            "rollouts_begun": budget.started_rollouts,
            "tokens": budget.tokens,
            "agent_tokens": budget.agent_tokens,
            "reflection_tokens": budget.reflection_tokens,
            "reflections": budget.reflections,
            "reflection_cost": budget.cost,
        },
    }
