"""One run of prompt tuning: the seed is found, a search runs until its budget ends, held-out tasks decide.

    seed        the agent's own system prompt, as two rollouts show it, or what the user gave
    search      an optimiser proposes prompts; training and validation tasks score them; the best on validation is kept
    held out    seed and best on tasks that the search never saw: a paired comparison, which alone names a winner

Promises: the search never learns of a held-out task; a run that was killed goes on where it was, with what it paid for;
a verdict is `better` or `worse` only where the interval excludes zero, whatever unjudged rollouts would have got.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.store.store import Store
from ratchet.trainer.controller.judges.truncation import shortened
from ratchet.trainer.errors import BudgetExceeded, BudgetTooSmall, TooManyFailures, Unjudged
from ratchet.trainer.statistics.paired_comparison import Compared, compare
from ratchet.trainer.statistics.paired_comparison import Verdict as Shown
from ratchet.tuner.prompts.budget import Budget
from ratchet.tuner.prompts.optimizer import PromptOptimizer, Reflection, Search
from ratchet.tuner.prompts.seed_prompt import PROBES, Mode, SeedPrompt, captured
from ratchet.tuner.prompts.task_splits import Sets
from ratchet.tuner.prompts.trials import SEED, Trials, Tried

log = logging.getLogger(__name__)

_SHOWN = 2_000  # characters of a prompt that was tried, as the record shows it
_MOST_SHOWN = 200  # prompts

Verdict = Literal["better", "no better", "worse", "inconclusive"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes. `attempts` at a held-out task; `seed_prompt` None: the agent's own; `mode` None: as it fits."""

    sets: Sets
    attempts: int
    seed: int
    reflection_minibatch_size: int = 3
    max_prompt_chars: int = 20_000
    seed_prompt: SeedPrompt | None = None
    mode: Mode | None = None
    failure_score: float = 0.0

    @property
    def held_out_rollouts(self) -> int:
        """Rollouts of the comparison at the end."""
        return 2 * len(self.sets.held_out) * self.attempts

    @property
    def min_rollouts(self) -> int:
        """Fewer cannot come to a result: the seed and one proposal on validation tasks, and the comparison."""
        first = min(self.reflection_minibatch_size, len(self.sets.train))
        return PROBES + 2 * (first + len(self.sets.validation)) + self.held_out_rollouts


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found. `best` is the seed's candidate where nothing was better on validation tasks."""

    seed: SeedPrompt
    baseline: str  # candidates: `seed`, or a prompt's id
    best: str
    prompt: str  # the best one's text
    verdict: Verdict
    why: str
    gain: Compared | None  # on held-out tasks; None where there was nothing to compare
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
        plan: Plan,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store = store
        self._trials = trials
        self._budget = budget
        self._optimizer = optimizer
        self._reflection = reflection
        self._plan = plan
        self._tell = tell

    def run(self) -> Found:
        """Run to the end of the budget. Raises BudgetTooSmall, SeedPromptUnknown, Unjudged, TuningError."""
        plan = self._plan
        if self._budget.rollouts < plan.min_rollouts:
            raise BudgetTooSmall(
                f"--max-rollouts {self._budget.rollouts} cannot come to a result: these tasks need at least "
                f"{plan.min_rollouts}, {plan.held_out_rollouts} of them for the comparison on held-out tasks"
            )
        self._budget.reserved_rollouts = plan.held_out_rollouts - self._trials.known(plan.sets.held_out)
        seed = self._seed()
        self._tell(f"seed prompt: {seed.note}")
        ended_by = self._search(seed)
        tried = self._trials.tried(plan.sets.validation)
        baseline = self._trials.candidate(seed.text)
        best = self._best(tried, baseline)
        self._tell(f"{len(tried)} prompts were tried on all validation tasks; {ended_by}")
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
            self._trials.roll([(SEED, task, 0) for task in probed])
            seen = [one for task in probed if (one := self._trials.transcript(SEED, task)) is not None]
            failure = self._trials.failure_of_all(SEED, probed)
            if failure is not None and not seen:
                raise TooManyFailures(f"the agent fails before it calls a model: {failure}")
            seed = captured(seen, plan.mode)
        self._trials.begin(seed.text, plan.sets.validation, as_it_comes=seed.as_it_comes, mode=seed.mode)
        return seed

    def _search(self, seed: SeedPrompt) -> str:
        """Search; return why it ended."""
        plan = self._plan
        search = Search(
            train=plan.sets.train,
            validation=plan.sets.validation,
            seed=plan.seed,
            rollouts=self._budget.rollouts - plan.held_out_rollouts,
            reflection_minibatch_size=plan.reflection_minibatch_size,
            max_prompt_chars=plan.max_prompt_chars,
        )
        try:
            self._trials.scores(seed.text, plan.sets.validation)
        except Unjudged as error:
            raise Unjudged(f"the seed prompt itself cannot be scored: {error}; see `ratchet judge try`") from error
        except BudgetExceeded as error:
            raise BudgetTooSmall(f"the budget ended before the seed prompt was scored: {error}") from error
        failure = self._trials.failure_of_all(self._trials.candidate(seed.text), plan.sets.validation)
        if failure is not None:
            raise TooManyFailures(f"every rollout of the seed prompt failed: {failure}")
        try:
            self._optimizer.optimize(seed.text, self._trials, self._reflection(seed), search)
        except BudgetExceeded as spent:
            return f"the budget ended: {spent}"
        return "the search came to its end"

    def _best(self, tried: Sequence[Tried], baseline: str) -> str:
        """Return the candidate with the highest mean on validation tasks; of equal ones the seed, else the first."""
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
            self._tell(
                f"compared on {enough} of {len(both)} held-out tasks: what was cut off took the rollouts of the rest"
            )
        try:  # at once, so that a judge that ranks sees them side by side
            self._trials.roll([place for task in both[:enough] for place in task], held_out=True)
        except BudgetExceeded as spent:
            self._tell(f"the comparison on held-out tasks was cut short: {spent}")
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
    """Return what a comparison on held-out tasks shows, and why it shows no more."""
    if gain.verdict is Shown.BETTER:
        return "better", "the interval on the held-out tasks lies above zero"
    if gain.verdict is Shown.WORSE:
        return (
            "worse",
            "the interval on the held-out tasks lies below zero: what was found fits the search's tasks only",
        )
    if gain.verdict is Shown.INCONCLUSIVE or gain.difference is None:
        return "inconclusive", f"{gain.unjudged} attempts are unjudged and could change it"
    if gain.difference <= 0:
        return "no better", "on the held-out tasks it scores no higher than the seed"
    return "inconclusive", "the interval on the held-out tasks holds zero: more tasks or attempts could tell"


def details(found: Found, plan: Plan, budget: Budget, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the record of a run holds beside what all methods' records do."""
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
            {"candidate": one.candidate, "mean": one.mean, "prompt": shortened(one.prompt, _SHOWN)}
            for one in found.tried[:_MOST_SHOWN]
        ],
        "tasks": {
            "train": len(plan.sets.train),
            "validation": len(plan.sets.validation),
            "held_out": len(plan.sets.held_out),
        },
        "search_ended_by": found.ended_by,
        "budget": {
            "rollouts": budget.rollouts,
            "rollouts_begun": budget.begun,
            "tokens": budget.tokens,
            "agent_tokens": budget.agent_tokens,
            "reflection_tokens": budget.reflection_tokens,
            "reflections": budget.reflections,
            "reflection_cost": budget.cost,
        },
    }
