"""What prompts score on tasks: rollouts where they are not known yet, and the memory of all that are.

Promises: a pair of prompt and task that was rolled out once is never rolled out again in the same run, also after
`kill -9`, since the memory is the store; what a kill cut off counts against the budget; a failed rollout counts as the
failure score, never as more than the seed's lowest; a rollout that the judge failed on is judged once more, and after
that has no score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ratchet.store.records import Transcript
from ratchet.store.records.tuning import Rollout
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.controller.judges.truncation import shortened
from ratchet.trainer.errors import PromptRefused, Unjudged
from ratchet.trainer.statistics.paired_comparison import Mark, Missing
from ratchet.trainer.tasks.task_set import Task
from ratchet.tuner.prompts.budget import Budget
from ratchet.tuner.prompts.optimizer import Example
from ratchet.tuner.rollouts.runner import RolloutJob

SEED = "seed"  # the candidate that is served as the agent came
_LONGEST_TASK = 2_000  # characters of a task, as a reflection model is shown it
_LONGEST_COURSE = 6_000  # characters of what an agent did
MAX_FEEDBACK_CHARS: Final = 1_000

Run = Callable[[Sequence[RolloutJob]], Sequence[Rollout]]  # makes rollouts and has them scored
Judge = Callable[[Sequence[Rollout]], Sequence[Rollout]]
Place = tuple[str, str, int]  # candidate, task, attempt


@dataclass(frozen=True, slots=True)
class Tried:
    """A prompt that was tried on all validation tasks. `mean` None where the judge failed on one of them."""

    candidate: str
    prompt: str
    mean: float | None


class Trials:
    """The rollouts of one run, by candidate and task. Implements what optimisers are given as `evaluate`."""

    def __init__(
        self,
        store: Store,
        tuning_id: str,
        tasks: Mapping[str, Task],
        run: Run,
        judge: Judge,
        budget: Budget,
        *,
        mode: str = "replace",
        max_prompt_chars: int = 20_000,
        failure_score: float = 0.0,
        model: str | None = None,
        said: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._store = store
        self._tasks = tasks
        self._run = run
        self._judge = judge
        self._budget = budget
        self._mode = mode
        self._max_prompt_chars = max_prompt_chars
        self._failure_score = failure_score
        self._model = model
        self._said = said  # rollout -> the judge's words on it; grows while rollouts are judged
        self._rollouts: dict[Place, Rollout] = {}
        self._prompts: dict[str, str] = {}  # candidate -> prompt
        self._names: dict[str, str] = {}  # prompt -> candidate
        self._measure: list[Place] = []  # the seed on validation tasks
        self._cut_off: list[Rollout] = []
        for rollout in store.rollouts.of_tuning(tuning_id):
            if rollout.counts:
                self._take(rollout)
            elif rollout.state is RolloutState.ABANDONED:
                self._cut_off.append(rollout)
        self._count_abandoned_tokens()

    def begin(self, seed_prompt: str, validation: Sequence[str], *, as_it_comes: bool, mode: str) -> None:
        """Say what the search begins from; `as_it_comes` the agent sends it by itself, and nothing is swapped in."""
        self._mode = mode
        self._measure = [(self.candidate(seed_prompt) if not as_it_comes else SEED, task, 0) for task in validation]
        if as_it_comes:
            self._prompts[SEED] = seed_prompt
            self._names[seed_prompt] = SEED

    def text(self, task_id: str) -> str:
        """Return a task as text, bounded."""
        return shortened(json.dumps(dict(self._tasks[task_id].row), ensure_ascii=False, default=str), _LONGEST_TASK)

    def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
        """Return a score for each task. Raises Unjudged, PromptRefused, BudgetExceeded, TuningError."""
        scores = self.judged(prompt, task_ids)
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            raise Unjudged(f"the judge failed on {len(scores) - len(known)} of {len(scores)} rollouts of a prompt")
        return known

    def judged(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
        """Return a score for each task, None where the judge failed. Raises PromptRefused, BudgetExceeded,
        TuningError.
        """
        candidate = self.candidate(prompt)
        self.roll([(candidate, task, 0) for task in task_ids])
        return [self._score(self._rollouts[candidate, task, 0]) for task in task_ids]

    def example(self, prompt: str, task_id: str) -> Example:
        """Return a rollout of a pair that was scored, as a reflection model is shown it."""
        rollout = self._rollouts[self.candidate(prompt), task_id, 0]
        score = self._score(rollout)
        transcript = self.transcript(rollout.candidate, task_id)
        return Example(
            task=self.text(task_id),
            course="" if transcript is None else shortened(course(transcript), _LONGEST_COURSE),
            score=math.nan if score is None else score,
            feedback=shortened(self._feedback(rollout), MAX_FEEDBACK_CHARS),
        )

    def candidate(self, prompt: str) -> str:
        """Return the name of a prompt, which is written down. Raises PromptRefused."""
        if prompt not in self._names:
            if not prompt.strip() or len(prompt) > self._max_prompt_chars:
                raise PromptRefused(
                    f"a proposed prompt has {len(prompt)} characters, not 1 to {self._max_prompt_chars}"
                )
            name = self._store.prompts.register(prompt, self._mode, "ratchet tune prompt").id
            self._names[prompt] = name
            self._prompts[name] = prompt
        return self._names[prompt]

    def roll(self, wanted: Sequence[Place], *, held_out: bool = False) -> None:
        """See to it that there are rollouts at these places. Raises BudgetExceeded, TuningError."""
        places = list(dict.fromkeys(wanted))
        self._judge_again([self._rollouts[place] for place in places if place in self._rollouts])
        missing = [place for place in places if place not in self._rollouts]
        while missing:
            some = missing[: self._budget.allow(len(missing), held_out=held_out)]
            for rollout in self._run([self._job(*place) for place in some]):
                self._take(rollout)
            missing = missing[len(some) :]

    def marks(self, candidate: str, task_ids: Sequence[str], attempts: int) -> dict[str, list[Mark]]:
        """Return what a candidate's attempts came to, by task; one that was not made is unjudged."""
        return {
            task: [self._mark(self._rollouts.get((candidate, task, n))) for n in range(attempts)] for task in task_ids
        }

    def tried(self, task_ids: Sequence[str]) -> list[Tried]:
        """Return the prompts that were tried on all of these tasks, in the order in which they were first tried."""
        tried = []
        for candidate in dict.fromkeys(name for name, _, _ in self._rollouts):
            found = [self._rollouts.get((candidate, task, 0)) for task in task_ids]
            if candidate in self._prompts and None not in found:
                scores = [self._score(one) for one in found if one is not None]
                known = [score for score in scores if score is not None]
                mean = math.fsum(known) / len(known) if len(known) == len(scores) else None
                tried.append(Tried(candidate, self._prompts[candidate], mean))
        return tried

    def transcript(self, candidate: str, task_id: str) -> Transcript | None:
        """Return what the agent of a rollout did; None where it made no call."""
        rollout = self._rollouts.get((candidate, task_id, 0))
        if rollout is None or not self._store.trajectories.last_active([rollout.id]):
            return None
        return self._store.trajectories.read(rollout.id)

    def known(self, task_ids: Sequence[str]) -> int:
        """Return how many rollouts there are at these tasks."""
        wanted = set(task_ids)
        return sum(task in wanted for _, task, _ in self._rollouts)

    def failure_of_all(self, candidate: str, task_ids: Sequence[str]) -> str | None:
        """Return why a candidate's rollouts at these tasks failed, if every one of them did."""
        found = [self._rollouts.get((candidate, task, 0)) for task in task_ids]
        failures = [one.failure for one in found if one is not None and one.failure is not None]
        return failures[0] if len(failures) == len(found) else None

    def affordable_rollouts(self, places: Sequence[Sequence[Place]]) -> int:
        """Return how many of these sets of places, from the first on, the rollouts that are left suffice for."""
        left = self._budget.left(held_out=True)
        for number, some in enumerate(places):
            left -= sum(place not in self._rollouts for place in some)
            if left < 0:
                return number
        return len(places)

    @property
    def rollouts(self) -> list[Rollout]:
        """Every rollout that ended, and every one that was cut off under way: what was paid for."""
        return [*self._rollouts.values(), *self._cut_off]

    def prompt_of(self, candidate: str) -> str:
        """Return the text of a candidate."""
        return self._prompts[candidate]

    def _job(self, candidate: str, task: str, attempt: int) -> RolloutJob:
        swapped = candidate != SEED
        return RolloutJob(
            task=self._tasks[task],
            attempt=attempt,
            candidate=candidate,
            model=self._model,
            purpose="eval",
            prompt_id=candidate if swapped else None,
            system_prompt=self._prompts[candidate] if swapped else None,
            scenario={},
            step=len(self._prompts),
        )

    def _count_abandoned_tokens(self) -> None:
        """Count what a killed run had under way; what it had only planned cost nothing."""
        began = self._store.trajectories.last_active([one.id for one in self._cut_off])
        self._cut_off = [one for one in self._cut_off if one.id in began]
        for one in self._cut_off:
            self._budget.record_rollout(one.prompt_tokens + one.completion_tokens)

    def _take(self, rollout: Rollout) -> None:
        self._budget.record_rollout(rollout.prompt_tokens + rollout.completion_tokens)
        self._rollouts[rollout.candidate, rollout.task_id, rollout.attempt] = rollout

    def _judge_again(self, rollouts: Sequence[Rollout]) -> None:
        unjudged = [one for one in rollouts if one.state is RolloutState.ENDED and one.score is None]
        for rollout in self._judge(unjudged) if unjudged else ():
            self._rollouts[rollout.candidate, rollout.task_id, rollout.attempt] = rollout

    def _score(self, rollout: Rollout) -> float | None:
        return self._failure() if rollout.state is RolloutState.FAILED else rollout.score

    def _failure(self) -> float:
        """Return what a failure counts as: never more than the worst of the seed, which what wins must beat.

        It stays the same while a search lasts, so that one that goes on after a kill takes the same way.
        """
        measured = (self._rollouts[place].score for place in self._measure if place in self._rollouts)
        return min((self._failure_score, *(score for score in measured if score is not None)))

    def _mark(self, rollout: Rollout | None) -> Mark:
        if rollout is not None and rollout.state is RolloutState.FAILED:
            return Missing.FAILED
        return Missing.UNJUDGED if rollout is None or rollout.score is None else rollout.score

    def _feedback(self, rollout: Rollout) -> str:
        if rollout.failure is not None:
            return f"The agent failed: {rollout.failure}"
        return self._said.get(rollout.id, "")


def course(transcript: Transcript) -> str:
    """Return what an agent and its tools said, a paragraph for each message, without the system prompt."""
    told = []
    for message in transcript.messages:
        role = message.get("role")
        if role in ("system", "developer"):
            continue
        words = [text_of(message.get("content"))]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            words.append(f"calls {function.get('name')}({function.get('arguments')})")
        told.append(f"[{role}] {' '.join(word for word in words if word)}")
    return "\n\n".join(told)


def text_of(content: object) -> str:
    """Return a message's content as text; parts that are none are left out."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, Sequence) else ()
    return "".join(
        str(part["text"]) for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)
    )
