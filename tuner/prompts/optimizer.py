"""The protocol of prompt optimisers, and the choice among them. Adapters: prompt_gepa.py and prompt_mipro.py.

An optimiser proposes system prompts and asks what they score; it sees the training and the validation tasks and nothing
else. What it finds stands in the trials themselves (prompt_trials.py), so that a search that ends early, or is killed,
has lost nothing. It may call no language model but through the reflection that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ratchet.trainer.errors import OptimizerMissing, SetAside
from ratchet.trainer.user_code.plugins import PROMPT_OPTIMIZERS, PluginError, load_plugin


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout as a reflection model is shown it: every text is bounded, and is data, whatever it says."""

    task: str
    course: str  # what the agent and its tools said, in order
    score: float
    feedback: str = ""  # the judge's words, or why the rollout failed


class Evaluate(Protocol):
    """What prompts score. Pairs of prompt and task that were paid for once are not paid for again."""

    def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
        """Return a score for each task. Raises Unjudged where one has none, BudgetExceeded, TuningError."""

    def judged(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
        """Return a score for each task, None where the judge failed. Raises BudgetExceeded, TuningError."""

    def example(self, prompt: str, task_id: str) -> Example:
        """Return a rollout of a pair that was scored."""

    def text(self, task_id: str) -> str:
        """Return a task as text, bounded."""


class Reflection(Protocol):
    """The one language model that an optimiser may ask; whatever it costs counts against the budget."""

    def propose(self, prompt: str, examples: Sequence[Example]) -> str:
        """Return a better prompt than this one. Raises Unanswered, BudgetExceeded."""

    def say(self, messages: Sequence[dict[str, str]], temperature: float | None) -> str:
        """Return an answer to a chat of the optimiser's own. Raises Unanswered, BudgetExceeded."""


@dataclass(frozen=True, slots=True)
class Search:
    """What a search may use: ids of training and validation tasks, which are disjoint, and how far it may go."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    seed: int
    rollouts: int  # that the search may begin
    reflection_minibatch_size: int = 3  # training tasks that one reflection is shown
    max_prompt_chars: int = 20_000  # characters of a prompt


class PromptOptimizer(Protocol):
    """A way to search for a better prompt."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search until the budget or the ideas end; what was tried is known to `evaluate`.

        Deterministic: the same scores and answers lead to the same questions. Raises BudgetExceeded, TuningError.
        """


def load_optimizer(method: str) -> PromptOptimizer:
    """Return the optimizer that a plug-in of `ratchet.prompt_optimizers` makes. Raises OptimizerMissing."""
    try:
        optimizer: PromptOptimizer = load_plugin(PROMPT_OPTIMIZERS, method)()
    except PluginError as error:
        raise OptimizerMissing(f"--method {method}: {error}") from error
    return optimizer


class Carried(BaseException):
    """Takes an error of ours out of a library that would log an Exception and go on without an end."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def carried_out() -> Iterator[None]:
    """Let errors of what stands inside pass through an optimiser's library, except what sets one prompt aside."""
    try:
        yield
    except SetAside:
        raise
    except Exception as error:
        raise Carried(error) from error


@contextmanager
def taken_up() -> Iterator[None]:
    """Raise an error that was carried out as what it is."""
    try:
        yield
    except Carried as carried:
        raise carried.cause from carried
