"""The frozen records of the tuner: prompts, tasks, tunings and their rollouts. Times are Unix seconds (float, UTC)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.store.records import Record
from ratchet.store.states import PromptMode, RolloutState, TuningKind, TuningState


class Prompt(Record, frozen=True):
    """A system prompt that the proxy applies, identified by its content."""

    id: str  # prm_ and 16 hex characters of a hash of mode, text and families
    mode: PromptMode
    text: str  # for families without a text of their own; empty: calls are unchanged
    origin: str = ""  # its first author
    created_at: float = 0.0
    families: Mapping[str, str] = {}  # texts by task family (`Trajectory.family`)

    def text_for(self, family: str | None) -> str:
        """Return the text for calls of a family; empty: the call is unchanged."""
        return self.families.get(family, self.text) if family is not None else self.text


class TaskRow(Record, frozen=True):
    """One task of a set, as in its file. `id` is the task key of its rollouts."""

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
    """One attempt of the workflow at a task. It shares its id with its trajectory."""

    id: str
    tuning_id: str
    task_id: str
    split: str
    attempt: int
    candidate: str
    planned_at: float
    model: str | None = None  # served instead of the requested one
    purpose: str = "live"  # live: may be trained; gathered: on request; eval: never
    prompt_id: str | None = None  # applied by the proxy
    key_id: str | None = None  # only calls with this key are served as this rollout; None: any key
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
    judge: str | None = None  # of the score or the judge failure
    judge_failure: str | None = None

    @property
    def planned(self) -> bool:
        """Whether it has not ended."""
        return self.state is RolloutState.PLANNED

    @property
    def counts(self) -> bool:
        """Whether it ended or failed. Planned rollouts have no end, and abandoned ones are repeated."""
        return self.state in (RolloutState.ENDED, RolloutState.FAILED)
