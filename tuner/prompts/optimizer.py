"""Prompt optimizers: the protocol, and the plug-ins of `ratchet.prompt_optimizers` (gepa.py, mipro, or a user's).

An optimizer proposes system prompts and requests their scores. It sees training and validation tasks only. The trials
record every score (trials.py), so a search that is interrupted loses nothing. It calls no language model except the
given reflection model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ratchet.trainer.errors import PluginError, SetAside, TuningError
from ratchet.trainer.user_code import PROMPT_OPTIMIZERS, load_plugin

MAX_PROMPT_CHARS = 20_000
REFLECTION_MINIBATCH_SIZE = 3  # rollouts that one reflection reads


@dataclass(frozen=True, slots=True)
class Example:
    """A rollout for the reflection model. Every text is bounded and must be treated as data."""

    task: str
    transcript: str  # messages of the agent and its tools, in order
    score: float
    feedback: str = ""  # the judge's explanation, or why the rollout failed


class Evaluate(Protocol):
    """Scores prompts. Each pair of prompt and task is rolled out at most once."""

    def scores(self, prompt: str, task_ids: Sequence[str]) -> list[float]:
        """Return a score for each task. Raises Unjudged if one has none, BudgetExceeded, TuningError."""

    def scores_or_none(self, prompt: str, task_ids: Sequence[str]) -> list[float | None]:
        """Return a score for each task, None if the judge failed. Raises BudgetExceeded, TuningError."""

    def example(self, prompt: str, task_id: str) -> Example:
        """Return the rollout of a scored pair."""

    def text(self, task_id: str) -> str:
        """Return a task as bounded text."""


class Reflection(Protocol):
    """The only language model that an optimizer may call; its cost counts against the budget."""

    def propose(self, prompt: str, examples: Sequence[Example]) -> str:
        """Return a proposal to improve a prompt. Raises Unanswered, BudgetExceeded."""

    def chat(self, messages: Sequence[dict[str, str]], temperature: float | None) -> str:
        """Return the answer to a chat. Raises Unanswered, BudgetExceeded."""


@dataclass(frozen=True, slots=True)
class Search:
    """Inputs of a search: disjoint ids of training and validation tasks, and its limits."""

    train: tuple[str, ...]
    validation: tuple[str, ...]
    seed: int
    rollouts: int  # limit of the search
    max_prompt_chars: int = MAX_PROMPT_CHARS


class PromptOptimizer(Protocol):
    """A way to search for a better prompt."""

    def optimize(self, seed_prompt: str, evaluate: Evaluate, reflection: Reflection, search: Search) -> None:
        """Search until the budget or the proposals end; `evaluate` records what was tried.

        Must be deterministic: the same scores and answers lead to the same requests, so that an interrupted search can
        be repeated from the record. Raises BudgetExceeded, TuningError.
        """


def load_optimizer(method: str) -> PromptOptimizer:
    """Return the optimizer that a plug-in of `ratchet.prompt_optimizers` makes. Raises TuningError."""
    try:
        optimizer: PromptOptimizer = load_plugin(PROMPT_OPTIMIZERS, method)()
    except PluginError as error:
        raise TuningError(f"--method {method}: {error}") from error
    return optimizer


class WrappedError(BaseException):
    """Carries an error through a library that would log any Exception and continue."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def wrap_errors() -> Iterator[None]:
    """Wrap errors of the block so that they pass through the library, except those that only skip one prompt."""
    try:
        yield
    except SetAside:
        raise
    except Exception as error:
        raise WrappedError(error) from error


@contextmanager
def unwrap_errors() -> Iterator[None]:
    try:
        yield
    except WrappedError as wrapped:
        raise wrapped.cause from wrapped
