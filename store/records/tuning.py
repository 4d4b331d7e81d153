"""The frozen records of the tuner: prompts, tasks, tunings and their rollouts. Times are Unix seconds (float, UTC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.store.records.base import Record
from ratchet.store.states import PromptMode, RolloutState, TuningKind, TuningState


class Prompt(Record, frozen=True):
    """A system prompt that the proxy swaps in, known by its content."""

    id: str  # prm_ and 16 hex characters of a hash of mode, text and families
    mode: PromptMode
    text: str  # for every family that is not named; nothing: those calls stay as they are
    origin: str = ""  # who or what wrote it; the first that did
    created_at: float = 0.0
    families: Mapping[str, str] = {}  # another text for a task family (`Trajectory.family`)

    def text_for(self, family: str | None) -> str:
        """Return the text for calls of a family; nothing means that the call stays as it is."""
        return self.families.get(family, self.text) if family is not None else self.text


class TaskRow(Record, frozen=True):
    """One task of a set, as the set's file has it. `id` is the task key of its rollouts."""

    id: str
    task_set: str
    split: str
    content: Mapping[str, Any]


class Tuning(Record, frozen=True):
    """One run of the tuner."""

    id: str
    kind: TuningKind
    alias: str
    state: TuningState
    config: Mapping[str, Any]
    started_at: float
    result: Mapping[str, Any] | None = None  # progress while it runs
    error: str | None = None  # why it failed
    ended_at: float | None = None


class Rollout(Record, frozen=True):
    """One attempt of the workflow at a task. Its id is that of its trajectory."""

    id: str
    tuning_id: str
    task_id: str
    split: str
    attempt: int
    candidate: str
    planned_at: float
    model: str | None = None  # served instead of the one that the agent asks for
    purpose: str = "live"  # live: may be trained; eval: never
    prompt_id: str | None = None  # swapped in
    key_id: str | None = None  # whose calls alone are served as this rollout; None: anybody's
    scenario: Mapping[str, Any] = {}
    step: int = 0
    started_at: float | None = None
    ended_at: float | None = None
    state: RolloutState = RolloutState.PLANNED
    failure: str | None = None  # the exception of a failed one
    response: str | None = None  # JSON text of what the workflow returned
    reward: float | None = None  # the workflow's own
    metrics: Mapping[str, float] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    score: float | None = None
    judge: str | None = None  # who gave the score, or failed to
    judge_failure: str | None = None

    @property
    def planned(self) -> bool:
        """Whether it is under way, or has not begun."""
        return self.state is RolloutState.PLANNED

    @property
    def counts(self) -> bool:
        """Whether it is known how it ended: what is planned is under way, what was abandoned is made anew."""
        return self.state in (RolloutState.ENDED, RolloutState.FAILED)
