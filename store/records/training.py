"""The frozen records of judging and training: verdicts, judge requests, groups, rounds and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.store.records.base import Record
from ratchet.store.states import GroupState, RoundState
from ratchet.store.statistics import Sums

REQUESTED = "gathered:"  # start of the key of a group that a caller scored


class Verdict(Record, frozen=True):
    """A judge's verdict on a trajectory: either a score or the failure, never both."""

    trajectory_id: str
    group_id: str | None
    judge: str
    judge_version: str  # hash of the judge's code and rubric
    score: float | None = None
    failure: str | None = None
    explanation: str = ""
    components: Mapping[str, float] = {}
    cost: float | None = None  # money, if the price is known
    latency: float = 0.0  # seconds
    judged_at: float = 0.0
    judge_request_id: str | None = None  # the last model request behind it, if any
    baseline_mean: float | None = None  # for an ungrouped trajectory: earlier scores of its family
    baseline_std: float | None = None


class AnswerLogprobs(Record, frozen=True):
    """The logprobs of one answer's tokens under another model."""

    call_id: str
    choice: int
    logprobs: bytes  # packed, one per token


class TeacherScore(Record, frozen=True):
    """What a teacher said of a trajectory's sampled tokens. Answers that it could not score are missing."""

    trajectory_id: str
    teacher: str
    answers: tuple[AnswerLogprobs, ...]


class AnswerTraining(Record, frozen=True):
    """What a round did with a sampled answer: an advantage if its tokens carry loss, else the reason why not."""

    call_id: str
    choice: int
    advantage: float | None = None
    untrained: str | None = None
    mismatch: bytes = b""  # trainer - vLLM logprob of each token, little-endian float16; empty: not compared
    advantages: bytes = b""  # of each token, little-endian float16, if they differ; `advantage` is their mean
    round_id: str = ""


class PastScore(Record, frozen=True):
    """A past score with the family and cohort of its trajectory."""

    trajectory_id: str
    family: str
    cohort: str
    version: int  # that sampled it
    score: float
    judged_at: float


class JudgeRequest(Record, frozen=True):
    """A judge's request to a language model and the response, unchanged, without API keys.

    Of a teacher without the token ids and their logprobs, which calls and teacher scores hold.
    """

    id: str
    group_id: str | None
    judge: str
    url: str
    request: bytes  # JSON
    response: bytes  # truncated to a million bytes
    status: int  # 0: no response
    error: str | None  # why the response could not be used
    prompt_tokens: int
    completion_tokens: int
    cost: float | None  # money, if the price is known
    latency: float  # seconds
    requested_at: float


class Group(Record, frozen=True):
    """Attempts at one task, compared with each other."""

    id: str
    key: str
    alias: str
    state: GroupState
    formed_at: float
    members: tuple[str, ...]
    failures: int = 0  # judge failures so far
    drop_reason: str | None = None
    initial_size: int = 0  # members when it was formed, including those dropped since

    @property
    def is_requested(self) -> bool:
        """Whether a caller asked for its training (`ratchet.train`), so that its round does not wait for others."""
        return self.key.startswith(REQUESTED)


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
    """Sums over the scores of one version on one cohort (a task, or a prompt)."""

    version: int
    family: str
    cohort: str
    sums: Sums
    least: float
    largest: float
