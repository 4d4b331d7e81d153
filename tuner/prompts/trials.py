"""Trials: the scores of prompts on tasks, by rollouts, each run once and stored, within a budget.

Guarantees: a pair of prompt and task is rolled out at most once per run, even across `kill -9`, because the record is
the store; rollouts interrupted by a kill count against the budget; a failed rollout counts as the failure score, never
higher than the lowest score of the seed; a rollout that the judge failed on is judged once more, then has no score. No
rollout starts beyond the rollout limit; the token limit can be exceeded only by requests in progress, by the amount
that they are larger than every earlier one. The rollouts of the held-out comparison are reserved.

The seed is the system prompt that the agent sends, as observed in rollouts. If it differs between tasks, it contains
task-specific facts (a name, a date, user data) that no single text can replace; the search then tunes a text that the
proxy appends. An agent without a system prompt gets one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final, Literal

from ratchet.store.operation_records import Rollout
from ratchet.store.records import Transcript
from ratchet.store.states import RolloutState
from ratchet.store.store import Store
from ratchet.trainer.errors import BudgetExceeded, SetAside, TuningError, Unjudged
from ratchet.trainer.judges.judgement import text_of
from ratchet.trainer.judges.transcript_json import shortened
from ratchet.trainer.statistics import Mark
from ratchet.trainer.tasks import Task
from ratchet.tuner.prompts.optimizer import MAX_PROMPT_CHARS, Example
from ratchet.tuner.rollouts.runner import RolloutJob
from ratchet.tuner.selection import mark_of

_CHARACTERS_PER_TOKEN = 3  # of a request, before any was measured; a low estimate for English


@dataclass(slots=True)
class Budget:
    """Limits and spending. `tokens` None: no limit; `reserved_rollouts`: for the held-out tasks.

    `concurrency`: with a token limit, at most this many rollouts start before the tokens of earlier ones are known.
    """

    rollouts: int
    tokens: int | None = None
    reserved_rollouts: int = 0
    concurrency: int = 8
    started_rollouts: int = 0
    agent_tokens: int = 0
    reflection_tokens: int = 0
    reflections: int = 0
    cost: float | None = 0.0  # money of the reflections; None: unknown price
    _measured: int = field(default=0, init=False)
    _largest_rollout: int = field(default=0, init=False)
    _largest_reflection: int = field(default=0, init=False)

    @property
    def tokens_spent(self) -> int:
        return self.agent_tokens + self.reflection_tokens

    def left(self, *, held_out: bool = False) -> int:
        """Return how many more rollouts may start."""
        return max(0, self.rollouts - self.started_rollouts - (0 if held_out else self.reserved_rollouts))

    def allow(self, wanted: int, *, held_out: bool = False) -> int:
        """Return how many of the wanted rollouts may start now. Raises BudgetExceeded if none may.

        A set that exceeds the rollout limit is not started at all.
        """
        if wanted > self.left(held_out=held_out):
            raise BudgetExceeded(
                f"{wanted} rollouts exceed the {self.left(held_out=held_out)} that are left of --max-rollouts"
            )
        if self.tokens is None:
            return wanted
        if not self._measured:
            return 1
        affordable = self._tokens_left(held_out) // max(1, self._largest_rollout)
        if affordable < 1:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or reserved"
            )
        return min(wanted, affordable, self.concurrency)

    def allow_reflection(self, characters: int) -> None:
        """Check that a request of this length is allowed. Raises BudgetExceeded."""
        needed = max(self._largest_reflection, characters // _CHARACTERS_PER_TOKEN)
        if self.tokens is not None and self._tokens_left(False) < needed:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or reserved"
            )

    def record_rollout(self, tokens: int) -> None:
        """Count a started rollout."""
        self.started_rollouts += 1
        self.agent_tokens += tokens
        if tokens:
            self._measured += 1
            self._largest_rollout = max(self._largest_rollout, tokens)

    def record_reflection(self, tokens: int, cost: float | None) -> None:
        """Count one proposal or answer of the reflection model, including its retries."""
        self.reflections += 1
        self.reflection_tokens += tokens
        self.cost = None if cost is None or self.cost is None else self.cost + cost
        self._largest_reflection = max(self._largest_reflection, tokens)

    def _tokens_left(self, held_out: bool) -> int:
        kept = 0 if held_out else self.reserved_rollouts * self.agent_tokens // max(1, self._measured)
        return (self.tokens or 0) - self.tokens_spent - kept


SEED = "seed"  # the candidate without a changed prompt
_MAX_TASK_CHARS = 2_000  # of a task, for the reflection model
_MAX_TRANSCRIPT_CHARS = 6_000  # of a transcript, for the reflection model
MAX_FEEDBACK_CHARS: Final = 1_000

Run = Callable[[Sequence[RolloutJob]], Sequence[Rollout]]  # runs and scores rollouts
Judge = Callable[[Sequence[Rollout]], Sequence[Rollout]]
RolloutKey = tuple[str, str, int]  # candidate, task, attempt


@dataclass(frozen=True, slots=True)
class Tried:
    """A prompt tried on all validation tasks. `mean` None: the judge failed on one of them."""

    candidate: str
    prompt: str
    mean: float | None


@dataclass
class Trials:
    """The rollouts of one run, by candidate and task. Implements `Evaluate` for optimizers."""

    store: Store
    tuning_id: str
    tasks: Mapping[str, Task]
    run: Run
    judge: Judge
    budget: Budget
    _: KW_ONLY
    mode: str = "replace"
    failure_score: float = 0.0
    model: str | None = None
    explanations: Mapping[str, str] = field(default_factory=dict)  # of the judge, by rollout; grows meanwhile

    def __post_init__(self) -> None:
        self._rollouts: dict[RolloutKey, Rollout] = {}
        self._prompts: dict[str, str] = {}  # candidate -> prompt
        self._names: dict[str, str] = {}  # prompt -> candidate
        self._seed_keys: list[RolloutKey] = []  # the seed on validation tasks
        self._abandoned: list[Rollout] = []
        for rollout in self.store.rollouts.of_tuning(self.tuning_id):
            if rollout.counts:
                self._record(rollout)
            elif rollout.state is RolloutState.ABANDONED:
                self._abandoned.append(rollout)
        self._count_abandoned_tokens()

    def begin(self, seed_prompt: str, validation: Sequence[str], *, is_agents_own: bool, mode: str) -> None:
        """Set the seed prompt. `is_agents_own`: the agent already sends it, so the proxy replaces nothing."""
        self.mode = mode
        self._seed_keys = [(self.candidate(seed_prompt) if not is_agents_own else SEED, task, 0) for task in validation]
        if is_agents_own:
            self._prompts[SEED] = seed_prompt
            self._names[seed_prompt] = SEED

    def text(self, task_id: str) -> str:
        return shortened(json.dumps(dict(self.tasks[task_id].row), ensure_ascii=False, default=str), _MAX_TASK_CHARS)

    def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
        """Return a score for each task. Raises Unjudged, SetAside, BudgetExceeded, TuningError."""
        scores = self.scores_or_none(prompt, task_ids)
        known = [score for score in scores if score is not None]
        if len(known) < len(scores):
            raise Unjudged(f"the judge failed on {len(scores) - len(known)} of {len(scores)} rollouts of a prompt")
        return known

    def scores_or_none(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
        """Return a score for each task, None if the judge failed.

        Raises SetAside, BudgetExceeded, TuningError.
        """
        candidate = self.candidate(prompt)
        self.ensure_rollouts([(candidate, task, 0) for task in task_ids])
        return [self._score(self._rollouts[candidate, task, 0]) for task in task_ids]

    def example(self, prompt: str, task_id: str) -> Example:
        """Return the rollout of a scored pair for the reflection model."""
        rollout = self._rollouts[self.candidate(prompt), task_id, 0]
        score = self._score(rollout)
        transcript = self.transcript(rollout.candidate, task_id)
        return Example(
            task=self.text(task_id),
            transcript="" if transcript is None else shortened(format_transcript(transcript), _MAX_TRANSCRIPT_CHARS),
            score=math.nan if score is None else score,
            feedback=shortened(self._feedback(rollout), MAX_FEEDBACK_CHARS),
        )

    def candidate(self, prompt: str) -> str:
        """Return the candidate id of a prompt, which is stored. Raises SetAside."""
        if prompt not in self._names:
            if not prompt.strip() or len(prompt) > MAX_PROMPT_CHARS:
                raise SetAside(f"a proposed prompt has {len(prompt)} characters, not 1 to {MAX_PROMPT_CHARS}")
            name = self.store.prompts.register(prompt, self.mode, "ratchet tune prompt").id
            self._names[prompt] = name
            self._prompts[name] = prompt
        return self._names[prompt]

    def ensure_rollouts(self, wanted: Sequence[RolloutKey], *, held_out: bool = False) -> None:
        """Make the missing rollouts of these keys. Raises BudgetExceeded, TuningError."""
        places = list(dict.fromkeys(wanted))
        self._judge_again([self._rollouts[place] for place in places if place in self._rollouts])
        missing = [place for place in places if place not in self._rollouts]
        while missing:
            some = missing[: self.budget.allow(len(missing), held_out=held_out)]
            for rollout in self.run([self._job(*place) for place in some]):
                self._record(rollout)
            missing = missing[len(some) :]

    def marks(self, candidate: str, task_ids: Sequence[str], attempts: int) -> dict[str, list[Mark]]:
        """Return the results of a candidate's attempts by task; a missing attempt is unjudged."""
        return {task: [mark_of(self._rollouts.get((candidate, task, n))) for n in range(attempts)] for task in task_ids}

    def tried(self, task_ids: Sequence[str]) -> list[Tried]:
        """Return the prompts that were tried on all of these tasks, oldest first."""
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
        """Return the transcript of a rollout; None if it sent no call."""
        rollout = self._rollouts.get((candidate, task_id, 0))
        if rollout is None or not self.store.trajectories.last_active([rollout.id]):
            return None
        return self.store.trajectories.read(rollout.id)

    def known(self, task_ids: Sequence[str]) -> int:
        wanted = set(task_ids)
        return sum(task in wanted for _, task, _ in self._rollouts)

    def failure_of_all(self, candidate: str, task_ids: Sequence[str]) -> str | None:
        """Return a failure of a candidate on these tasks if all of its rollouts failed; else None."""
        found = [self._rollouts.get((candidate, task, 0)) for task in task_ids]
        failures = [one.failure for one in found if one is not None and one.failure is not None]
        return failures[0] if len(failures) == len(found) else None

    def affordable_rollouts(self, places: Sequence[Sequence[RolloutKey]]) -> int:
        """Return how many of these sets of keys, from the first, the remaining rollouts suffice for."""
        left = self.budget.left(held_out=True)
        for number, some in enumerate(places):
            left -= sum(place not in self._rollouts for place in some)
            if left < 0:
                return number
        return len(places)

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts that were paid for: finished, and interrupted ones."""
        return [*self._rollouts.values(), *self._abandoned]

    def prompt_of(self, candidate: str) -> str:
        return self._prompts[candidate]

    def _job(self, candidate: str, task: str, attempt: int) -> RolloutJob:
        swapped = candidate != SEED
        return RolloutJob(
            task=self.tasks[task],
            attempt=attempt,
            candidate=candidate,
            model=self.model,
            purpose="eval",
            prompt_id=candidate if swapped else None,
            system_prompt=self._prompts[candidate] if swapped else None,
            scenario={},
            step=len(self._prompts),
        )

    def _count_abandoned_tokens(self) -> None:
        """Count the tokens of rollouts that a killed run left in progress; planned ones cost nothing."""
        began = self.store.trajectories.last_active([one.id for one in self._abandoned])
        self._abandoned = [one for one in self._abandoned if one.id in began]
        for one in self._abandoned:
            self.budget.record_rollout(one.prompt_tokens + one.completion_tokens)

    def _record(self, rollout: Rollout) -> None:
        self.budget.record_rollout(rollout.prompt_tokens + rollout.completion_tokens)
        self._rollouts[rollout.candidate, rollout.task_id, rollout.attempt] = rollout

    def _judge_again(self, rollouts: Sequence[Rollout]) -> None:
        unjudged = [one for one in rollouts if one.state is RolloutState.ENDED and one.score is None]
        for rollout in self.judge(unjudged) if unjudged else ():
            self._rollouts[rollout.candidate, rollout.task_id, rollout.attempt] = rollout

    def _score(self, rollout: Rollout) -> float | None:
        return self._failure() if rollout.state is RolloutState.FAILED else rollout.score

    def _failure(self) -> float:
        """Return the score of a failure: never higher than the seed's lowest, so that failing cannot win.

        It is constant during a search, so that a resumed search takes the same steps.
        """
        measured = (self._rollouts[place].score for place in self._seed_keys if place in self._rollouts)
        return min((self.failure_score, *(score for score in measured if score is not None)))

    def _feedback(self, rollout: Rollout) -> str:
        if rollout.failure is not None:
            return f"The agent failed: {rollout.failure}"
        return self.explanations.get(rollout.id, "")


def format_transcript(transcript: Transcript) -> str:
    """Return the messages of an agent and its tools as paragraphs, without the system prompt."""
    paragraphs = []
    for message in transcript.messages:
        role = message.get("role")
        if role in ("system", "developer"):
            continue
        words = [text_of(message)]
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            words.append(f"calls {function.get('name')}({function.get('arguments')})")
        paragraphs.append(f"[{role}] {' '.join(word for word in words if word)}")
    return "\n\n".join(paragraphs)


Mode = Literal["replace", "append"]

PROBES = 2  # rollouts of different tasks


@dataclass(frozen=True, slots=True)
class SeedPrompt:
    """Start of a search. `is_agents_own`: the agent already sends it; `note`: a description."""

    text: str
    mode: Mode
    is_agents_own: bool
    note: str


def given(text: str) -> SeedPrompt:
    """Return the user's seed prompt. Raises TuningError if it is empty."""
    if not text.strip():
        raise TuningError("the file of --seed-prompt is empty")
    return SeedPrompt(text.strip(), "replace", False, "given by --seed-prompt")


def serving(store: Store, alias: str, mode: Mode | None = None) -> SeedPrompt | None:
    """Return the prompt of the live version; None if it has none, or one that does not fit `mode`.

    A prompt with texts per task family (lessons) is not a single text: it stays the baseline, and the agent's own
    prompt is improved.
    """
    live = store.policies.live().get(alias)
    if live is None or live.prompt_id is None:
        return None
    prompt = store.prompts.get(live.prompt_id)
    if prompt.families or mode not in (None, prompt.mode.value):
        return None
    note = f"the prompt of {alias}@{live.version}, which is live"
    return SeedPrompt(prompt.text, prompt.mode.value, True, note)


def captured(transcripts: Sequence[Transcript], mode: Mode | None = None) -> SeedPrompt:
    """Return the system prompt of rollouts of different tasks. Raises TuningError if no model was called."""
    sent = {system_prompt(one) for one in transcripts if one.calls}
    if not sent:
        raise TuningError(
            "the agent called no model through the proxy in its first rollouts: see `ratchet doctor --workflow`, "
            "or give --seed-prompt FILE"
        )
    if mode == "append":
        return SeedPrompt("", "append", True, "a text is appended to the agent's system prompt")
    if len(sent) > 1:
        if mode == "replace":
            raise TuningError(
                "the agent's system prompt differs between tasks: to replace it, give --seed-prompt FILE; to tune a "
                "text "
                "that is appended to it, leave --mode replace out"
            )
        note = "the agent's system prompt differs between tasks: a text that is appended to it is tuned"
        return SeedPrompt("", "append", True, note)
    (text,) = sent
    note = "the agent's own system prompt" if text else "the agent sends no system prompt: it gets one"
    return SeedPrompt(text, "replace", True, note)


def system_prompt(transcript: Transcript) -> str:
    """Return the system prompt of a trajectory's first call, or an empty string."""
    words = []
    for message in transcript.messages:
        if message.get("role") not in ("system", "developer"):
            break
        words.append(text_of(message))
    return "\n\n".join(words)
