"""The frozen records of operation: the tuner's runs, keys, the audit log, alarms, leases, progress and deletions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from ratchet.store.records import BigInt, CallId, Id, Record, Text16, Text32, Text64, Text128, Text256, TrajectoryId
from ratchet.store.states import KeyScope, RolloutState, TuningKind, TuningState


class TaskRow(Record, frozen=True):
    """One task of a set, as in its file. `id` is the task key of its rollouts."""

    id: Text256
    task_set: str
    split: str
    content: Mapping[str, Any]


class Tuning(Record, frozen=True, kw_only=True):
    """One run of the tuner."""

    id: Id
    kind: TuningKind
    alias: Text128
    state: TuningState
    config: Mapping[str, Any]
    result: Mapping[str, Any] | None = None  # progress while it runs
    error: str | None = None  # why it failed
    started_at: float
    ended_at: float | None = None


class Rollout(Record, frozen=True, kw_only=True):
    """One attempt of the workflow at a task. It shares its id with its trajectory."""

    id: TrajectoryId
    tuning_id: Id
    task_id: Text256
    split: str
    attempt: int
    candidate: Text256
    model: Text128 | None = None  # served instead of the requested one
    purpose: Text16 = "live"  # live: may be trained; gathered: on request; eval: never
    prompt_id: Id | None = None  # applied by the proxy
    key_id: Text64 | None = None  # only calls with this key are served as this rollout; None: any key
    scenario: Mapping[str, Any] = {}
    step: int = 0
    planned_at: float
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


class Key(Record, frozen=True):
    """An API key, by the SHA-256 hex of the key. None: no limit of its own.

    `agents`, and `models` of `model_list`: those that it may call; None: all.
    """

    id: Id
    name: str
    hash: Text64
    scope: KeyScope
    created_at: float
    revoked_at: float | None = None
    last_used_at: float | None = None  # to the minute
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    agents: tuple[str, ...] | None = None
    max_parallel_requests: int | None = None
    expires_at: float | None = None
    models: tuple[str, ...] | None = None
    max_tokens: int | None = None  # of each answer
    tokens_per_day: BigInt | None = None
    tokens_per_month: BigInt | None = None


class KeyTokens(Record, frozen=True):
    """The prompt and completion tokens of a key on a UTC day (`2026-11-23`), and in its month up to then."""

    day: str
    today: int = 0
    this_month: int = 0


class Usage(Record, frozen=True):
    """Calls and tokens of a UTC day, a key, an agent or model, and a purpose; None: of all.

    A key id of "" stands for all calls without a checked key. `key_name` is None for keys of the environment.
    """

    day: str | None
    key_id: str | None
    key_name: str | None
    alias: str | None
    purpose: str | None
    calls: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


class AuditEntry(Record, frozen=True):
    """Requests of one operator: one change, or equal reads of a quarter of an hour.

    `key_id` is null on a proxy without keys and for the command line, where `actor` is the user's name. `target` are
    the values that name what was read or changed. `status` is 0 for the command line, and null while the outcome is
    unknown: for good if the process died in between.
    """

    id: CallId
    at: float
    last_at: float
    count: int
    actor: str
    method: Annotated[str, 8]  # CLI for the command line
    route: str  # without the values
    target: dict[str, str]
    key_id: Id | None = None
    client: Text64 | None = None  # its address
    status: int | None = None


class ProxyInstance(Record, frozen=True):
    """The state of one proxy: the versions that it serves and the trajectories pinned to each."""

    id: Text64
    url: str
    live_versions: Mapping[str, int]  # alias -> version of new trajectories
    pinned_trajectories: Mapping[str, int]  # "alias@version" -> open trajectories pinned to it
    shipped_until: float  # its records up to this time are in the store
    heartbeat_at: float


class Alarm(Record, frozen=True):
    """A condition that needs a person, with the reason in one sentence."""

    name: Text128
    reason: str
    raised_at: float
    last_raised_at: float
    count: int
    cleared_at: float | None = None
    sent_at: float | None = None  # when the webhook last took it, raised or cleared


class LeaseHolder(Record, frozen=True):
    """The holder of a lease and its expiry (Unix seconds)."""

    name: Text128
    owner: Text128
    expires_at: float


class ProgressRate:
    """Pace and remaining time of a phase with `done` of `total` items after `seconds`."""

    __slots__ = ()
    done: float
    total: float
    seconds: float

    @property
    def seconds_per_item(self) -> float | None:
        """Mean seconds per item so far; None before the first one."""
        return self.seconds / self.done if self.done else None

    @property
    def eta_seconds(self) -> float | None:
        """Seconds until the total at this pace; None before the first item."""
        each = self.seconds_per_item
        return None if each is None else each * max(0.0, self.total - self.done)


class JobProgress(Record, ProgressRate, frozen=True):
    """Progress of a phase at `updated_at`; `seconds` since its start; `means` by metric."""

    alias: Text128
    phase: Text32
    done: float
    total: float
    seconds: float
    means: Mapping[str, float]
    ended: bool
    updated_at: float


class Observation(Record, frozen=True):
    id: int
    alias: Text128
    kind: Text32
    subject: str
    content: Mapping[str, Any]
    recorded_at: float


class AffectedVersion(Record, frozen=True):
    """A version that was trained on deleted trajectories, directly or through the version that it continues."""

    alias: str
    version: int
    state: str
    adapter: str | None
    trained_directly: bool


class Deletion(Record, frozen=True):
    """The result of a deletion."""

    id: Id
    reason: str
    started_at: float
    updated_at: float
    trajectory_count: int = 0
    call_count: int = 0
    # The next four are returned once and not stored.
    messages: int = 0  # deleted messages and tool lists
    groups_dropped: int = 0  # that were not trained
    unswept_messages: int = 0  # that wait for a proxy
    feedback: int = 0  # that was not attached to a call
    policies: tuple[AffectedVersion, ...] = ()
