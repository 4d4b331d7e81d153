"""The frozen records of judging and training: verdicts, judge requests, groups, rounds and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.store.records.base import Record
from ratchet.store.states import GroupState, RoundState
from ratchet.store.statistics import Sums


class Verdict(Record, frozen=True):
    """What a judge said of one trajectory: a score, or the reason why there is none. Never both, never neither."""

    trajectory_id: str
    group_id: str | None
    judge: str
    judge_version: str  # hash of the judge's code and rubric
    score: float | None = None
    failure: str | None = None
    explanation: str = ""
    components: Mapping[str, float] = {}
    cost: float | None = None  # money, where the price is known
    latency: float = 0.0  # seconds
    judged_at: float = 0.0
    judge_request_id: str | None = None  # the last exchange that led to it, where the judge asked somebody
    baseline_mean: float | None = None  # of a single: what its family scored before, as it was then
    baseline_std: float | None = None


class PastScore(Record, frozen=True):
    """A score as later ones are compared with it: `family` and `cohort` are those of its trajectory."""

    trajectory_id: str
    family: str
    cohort: str
    version: int  # that it was sampled from
    score: float
    judged_at: float


class JudgeRequest(Record, frozen=True):
    """One question of a judge to a language model and what came back, word for word, without keys."""

    id: str
    group_id: str | None
    judge: str
    url: str
    request: bytes  # JSON
    response: bytes  # what came back, cut at a million bytes
    status: int  # 0 where nothing answered
    error: str | None  # why it could not be used
    prompt_tokens: int
    completion_tokens: int
    cost: float | None  # money, where the price is known
    latency: float  # seconds
    requested_at: float


class Group(Record, frozen=True):
    """Attempts at the same thing, compared with each other."""

    id: str
    key: str
    alias: str
    state: GroupState
    formed_at: float
    members: tuple[str, ...]
    failures: int = 0  # judge failures so far
    drop_reason: str | None = None
    initial_size: int = 0  # members when it was formed: some may have been dropped since


class Round(Record, frozen=True):
    """One training round."""

    id: str
    alias: str
    state: RoundState
    from_version: int
    to_version: int | None
    started_at: float
    ended_at: float | None
    checkpoint: str | None
    metrics: Mapping[str, Any]
    reason: str | None


class Tally(Record, frozen=True):
    """The scores of one version at one cohort (a task, or a prompt), added up."""

    version: int
    family: str
    cohort: str
    sums: Sums
    least: float
    largest: float
