"""The frozen records that components exchange: what the proxy ships, and what the trainer and the API read.

Token ids are packed int32, logprobs packed float32, both little-endian. Times are Unix seconds (float, UTC).
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from ratchet.store.states import (
    CallState,
    GroupState,
    PolicyAction,
    PolicyState,
    PromptMode,
    ResampleState,
    RoundState,
    ToolOutcome,
    ToolResult,
    TrajectoryState,
)
from ratchet.store.statistics import Sums

# Lossless packing: token ids as little-endian int32 bytes, logprobs as little-endian float32 bytes.


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes. Raises struct.error for a value beyond 32 bits."""
    return struct.Struct(f"<{len(ids)}i").pack(*ids)  # twice as fast as array


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    """Return the token ids of `pack_ids`."""
    ids = array("i")
    ids.frombytes(packed)
    return tuple(_little_endian(ids))


def pack_logprobs(logprobs: Iterable[float]) -> bytes:
    """Return natural-log probabilities as little-endian float32 bytes."""
    return _little_endian(array("f", logprobs)).tobytes()


def unpack_logprobs(packed: bytes) -> tuple[float, ...]:
    logprobs = array("f")
    logprobs.frombytes(packed)
    return tuple(_little_endian(logprobs))


def unpack_halves(packed: bytes) -> tuple[float, ...]:
    """Return little-endian float16 values."""
    return struct.unpack(f"<{len(packed) // 2}e", packed)


def _little_endian(values: array[Any]) -> array[Any]:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values


# The base class of the store's records, and the conversion of database rows.
#
# Records that are rows of a table declare its columns: schema.py makes them of the fields, in their order. A field's
# type may say the longest text that is stored, or the form in which the value is.

Text16 = Annotated[str, 16]
Text32 = Annotated[str, 32]
Text64 = Annotated[str, 64]
Text128 = Annotated[str, 128]
Text256 = Annotated[str, 256]
Id = Annotated[str, 40]
CallId = Annotated[str, "call id"]
TrajectoryId = Annotated[str, "trajectory id"]
Hash = Annotated[str, "hash"]
Body = Annotated[bytes, "body"]
Ids = Annotated[bytes, "token ids"]
BigInt = Annotated[int, "bigint"]


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen record; `msgspec.structs.replace` makes changed copies."""


_R = TypeVar("_R", bound=Record)


def row_to(record: type[_R], row: Any, **values: Any) -> _R:
    """Return a row as a record. `values`: fields that are not columns of the same name."""
    for name, kind in _fields(record):
        if name not in values:
            value = getattr(row, name)
            values[name] = value if kind is None or value is None else _convert(value, kind)
    return record(**values)


def _convert(value: Any, kind: type[StrEnum | Record]) -> Any:
    return kind(value) if issubclass(kind, StrEnum) else msgspec.convert(value, kind, strict=False, str_keys=True)


@lru_cache(maxsize=64)
def _fields(record: type[Record]) -> tuple[tuple[str, type[StrEnum | Record] | None], ...]:
    hints = get_type_hints(record)
    return tuple((name, _kind(hints[name])) for name in record.__struct_fields__)


def _kind(hint: Any) -> type[StrEnum | Record] | None:
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum | Record)), None)


# The frozen records of releases: how a trajectory's version was drawn, what came of it, and a version's evidence.


class VersionDraw(Record, frozen=True):
    """How the version of a new trajectory was drawn.

    `shares`: the probability of each version at the time of the draw, 1 in sum. `unit`: what one draw decides for, as a
    digest: a user or a session; None: this trajectory alone. `counted` is False if the trajectory is no evidence about
    its version: a rollout of the tuner or of a training set.
    """

    shares: Mapping[int, float]
    unit: str | None = None
    counted: bool = True


class ReleaseOutcome(Record, frozen=True):
    """What came of a counted trajectory. It is settled: later verdicts do not change it.

    `score` None: it was never scored. If `finished` is False, too, it did not end before its deadline or its last call
    was cut off, which is as bad as the worst score; otherwise nothing is known about its score (no peers, no feedback,
    a failed judge).
    """

    trajectory_id: str
    started_at: float
    seconds: float | None  # from its start to its last activity; None: it is still open
    version: int
    shares: Mapping[int, float]
    unit: str | None
    score: float | None
    group_scores: tuple[float, ...]  # of the other members of its group, whatever their versions
    finished: bool
    calls: int
    failed_calls: int  # answered with an error, or cut off


class ReleaseEvidence(Record, frozen=True):
    """What the release controller knows about one version. docs/release.md lists the keys of `evidence`."""

    alias: Text128
    version: int
    evidence: Mapping[str, Any]
    updated_at: float


# The frozen records of tool calls, their results and their counts.


class ToolCall(Record, frozen=True):
    """A sampled tool call with its outcome; `result` is None until a later request contains it."""

    call_id: CallId
    choice: int
    place: int  # among the tool calls of the choice, from 0
    alias: Text128
    version: int
    tool: str
    tool_call_id: str
    outcome: Annotated[ToolOutcome, 24]
    result: ToolResult | None = None
    detail: str | None = None  # the mismatch, without values


class ToolCallResult(Record, frozen=True):
    """The result of an earlier call's tool call, found in a later request."""

    call_id: str  # the earlier call
    choice: int
    tool_call_id: str
    result: ToolResult


class ToolCallCounts(Record, frozen=True):
    """Counts of a tool's calls under one policy version, by outcome and by result."""

    alias: str
    version: int
    tool: str
    calls: int
    outcomes: Mapping[str, int]
    results: Mapping[str, int]


# The frozen records of judging and training: verdicts, judge requests, groups, rounds and scores.

REQUESTED = "gathered:"  # start of the key of a group that a caller scored


class Verdict(Record, frozen=True):
    """A judge's verdict on a trajectory: either a score or the failure, never both."""

    trajectory_id: TrajectoryId
    group_id: Id | None
    judge: str
    judge_version: Text64  # hash of the judge's code and rubric
    score: float | None = None
    failure: str | None = None
    explanation: str = ""
    components: Mapping[str, float] = {}
    cost: float | None = None  # money, if the price is known
    latency: float = 0.0  # seconds
    judged_at: float = 0.0
    judge_request_id: Id | None = None  # the last model request behind it, if any
    baseline_mean: float | None = None  # for an ungrouped trajectory: earlier scores of its family
    baseline_std: float | None = None


class AnswerLogprobs(Record, frozen=True):
    """The logprobs of one answer's tokens under another model."""

    call_id: str
    choice: int
    logprobs: bytes  # packed, one per token


class TeacherScore(Record, frozen=True):
    """What a teacher said of a trajectory's sampled tokens. Answers that it could not score are missing."""

    trajectory_id: TrajectoryId
    teacher: str
    answers: tuple[AnswerLogprobs, ...]


class AnswerTraining(Record, frozen=True):
    """What a round did with a sampled answer: an advantage if its tokens carry loss, else the reason why not."""

    call_id: CallId
    choice: int
    round_id: Id = ""
    advantage: float | None = None
    untrained: str | None = None
    mismatch: bytes = b""  # trainer - vLLM logprob of each token, little-endian float16; empty: not compared
    advantages: bytes = b""  # of each token, little-endian float16, if they differ; `advantage` is their mean


class PastScore(Record, frozen=True):
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

    id: Id
    group_id: Id | None
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

    id: Id
    key: str
    alias: Text128
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

    id: Id
    alias: Text128
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


BASE_VERSION = 0  # version 0 of every alias is the base model without an adapter
REDACTED = "redacted"  # why a call with redacted content is untrainable
OTHER = "other_model"  # purpose of calls to a model that is not trained here
TOOL_GRAMMAR = "tool_grammar"  # sampling parameter: vLLM constrained the tool calls with a grammar
MOVED = "moved"  # purpose of the rest of a trajectory whose version was rolled back at once: never trained
UNLINKED = "unlinked"  # purpose of a trajectory that began while calls of other workers were unknown: never trained
GATHERED = "gathered"  # purpose of a trajectory that is grouped, scored and trained on request only
RESAMPLE = "resample"  # purpose of a further answer to a recorded prompt: trained with it, not counted as traffic


class MessageNode(Record, frozen=True):
    """A message and its position: `hash` covers it and all messages before it; `body` is canonical JSON."""

    hash: Hash
    parent: Hash
    role: Text32
    body: Body


class CallStarted(Record, frozen=True, tag="started"):
    """A call at its arrival: identity, policy and sampling parameters, which never change."""

    call_id: str
    trajectory_id: str
    started_at: float
    alias: str
    version: int
    dialect: str  # chat, completions, responses, messages
    streamed: bool
    linked_by: str  # how the trajectory was found; see docs/linking.md
    prompt_node: (
        str  # hash of the last message of the prompt; a text completion's prompt is one message of the role "prompt"
    )
    tools_hash: str = ""
    parent_call: str | None = None
    parent_choice: int = 0
    key_id: str | None = None
    task: str | None = None
    role: str | None = None
    tags: tuple[str, ...] = ()
    purpose: str = "live"  # live, resample, gathered: may be trained; eval (a version by name) and all others: never
    sampling: Mapping[str, Any] = {}  # sampling parameters of the request, e.g. temperature, top_p, seed
    nodes: tuple[MessageNode, ...] = ()  # messages of the prompt that this proxy has not shipped before
    tools: bytes = b""  # canonical JSON of the tool list, if not shipped before
    draw: VersionDraw | None = None  # of the trajectory's version, if this call drew it

    @property
    def policy(self) -> str:
        """The model that answered: `alias@version`, or the name of a model that is not trained here."""
        return self.alias if self.purpose == OTHER else f"{self.alias}@{self.version}"


class Choice(Record, frozen=True, kw_only=True):
    """One sampled answer, with the engine's own `token_ids` (n int32) and `logprobs` (n float32)."""

    index: int
    finish_reason: Text32 | None
    reply_node: Hash = ""
    link_key: Hash = ""
    skip_last_key: Hash | None = None  # its key without the prompt's last message, if that may be a reminder
    tool_call_ids: tuple[str, ...] = ()
    token_ids: Ids
    logprobs: bytes


class CallEnded(Record, frozen=True, tag="ended"):
    """A call's end. `start` repeats the start, so that this record alone is enough for the row; in the journal without
    messages and tools, which are in the start's own record.

    `prompt_ids` depends on `context`: `root` and `fork` hold the whole prompt, `exact` only the tokens after the
    parent's prompt and completion, with which this prompt begins, id for id.
    """

    start: CallStarted
    state: CallState
    ended_at: float
    status: int
    context: str = "root"  # root, exact, fork
    prompt_ids: bytes = b""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_byte_at: float | None = None
    choices: tuple[Choice, ...] = ()
    untrainable: str | None = None  # why no token of this call is trained, e.g. "no_token_ids", "image", "echo"
    error: str | None = None
    upstream: str | None = None
    nodes: tuple[MessageNode, ...] = ()  # the answers
    response_id: str | None = None  # the engine's id in the response, unless it is derived from the call id


class Feedback(Record, frozen=True, tag="feedback"):
    """Feedback on an answer or a trajectory. Only its assignment and `applied_at` change.

    `trajectory_id` and `call_id` are set when its `target` is stored.
    """

    id: CallId
    kind: Text16  # what `target` names: trajectory, call, response
    target: Text256
    source: Text256  # end user, else the key; later feedback of the same source is a revision
    given_at: float
    key_id: Text64 | None = None  # the target must belong to this key
    trusted: bool = False  # from an operator: any target
    value: float | None = None  # higher is better; None: only a comment or demonstration
    comment: str = ""
    demonstration: str | None = None  # the correct answer
    trajectory_id: TrajectoryId | None = None
    call_id: CallId | None = None  # None: on the whole trajectory
    applied_at: float | None = None  # when a verdict first used it


CallRecord = CallStarted | CallEnded
Shipment = CallStarted | CallEnded | Feedback


class OpenLeaf(Record, frozen=True):
    """An answer that a request may continue, for the linking state of a restarted proxy."""

    trajectory_id: str
    call_id: str
    choice: int
    alias: str
    version: int
    link_key: str
    tool_call_ids: tuple[str, ...]
    key_id: str | None
    purpose: str
    sequence: bytes  # token ids of the context and the answer (int32)
    last_active_at: float
    family: str | None = None  # of the trajectory
    extended: bool = False  # a later call continues it
    reply: bytes = b""  # the answer as canonical JSON
    skip_last_key: str | None = None
    prompt_messages: tuple[bytes, ...] = ()  # first prompt message of the trajectory, and the one answered, as JSON


class UnansweredCall(Record, frozen=True):
    """An unanswered call of an open trajectory, for the linking state of a restarted proxy."""

    trajectory_id: str
    alias: str
    version: int
    purpose: str
    key_id: str | None
    prompt_node: str
    tools_hash: str
    linked_by: str
    parent_call: str | None
    parent_choice: int
    ended_at: float
    last_active_at: float  # of its trajectory
    family: str | None = None  # likewise


class Call(Record, frozen=True):
    id: CallId
    trajectory_id: TrajectoryId
    state: CallState
    alias: Text128
    version: int
    dialect: Text16
    streamed: bool
    linked_by: Text32
    parent_call: CallId | None
    parent_choice: int
    role: Text128 | None
    sampling: Mapping[str, Any]
    prompt_node: Hash
    tools_hash: Hash
    context: Annotated[str, 8]
    prompt_ids: Ids
    prompt_tokens: int
    completion_tokens: int
    started_at: float
    first_byte_at: float | None
    ended_at: float | None
    status: int | None
    untrainable: str | None
    error: str | None
    choices: tuple[Choice, ...]
    response_id: Text128 | None = None


def cohort_of(task: str | None, root_node: str, tools_hash: str) -> str:
    """Return the key that attempts at one task share: the task, else the root prompt and tools."""
    return f"task:{task}" if task else f"root:{root_node}:{tools_hash}"


def family_of(task: str | None, tools_hash: str) -> str:
    """Return the family of a task: `math` of `math/17`; without a task, the tools."""
    return f"task:{task.rpartition('/')[0]}" if task else f"tools:{tools_hash}"


class Trajectory(Record, frozen=True, kw_only=True):
    """A trajectory without its content."""

    id: TrajectoryId
    alias: Text128
    version: int
    state: TrajectoryState
    purpose: Text16 = "live"
    task: str | None
    root_node: Hash
    tools_hash: Hash
    key_id: Text64 | None
    opened_at: float
    last_active_at: float
    sealed_at: float | None = None
    sealed_by: Text16 | None = None  # idle, or finish (on request)
    group_id: Id | None = None
    round_id: Id | None = None
    drop_reason: str | None = None
    draw: VersionDraw | None = None  # of its version; None: nothing was drawn
    calls: int = 0

    @property
    def group_key(self) -> str:
        """Trajectories with equal keys are attempts at one task."""
        return cohort_of(self.task, self.root_node, self.tools_hash)

    @property
    def family(self) -> str:
        """The task family; scores of one family are comparable."""
        return family_of(self.task, self.tools_hash)


class WorkflowResult(Record, frozen=True):
    """The result of a rollout's workflow; all None while it runs."""

    response: str | None = None  # JSON text
    reward: float | None = None  # the workflow's own
    failure: str | None = None  # the exception of a failed workflow
    tuning_id: str | None = None  # the run of the tuner that it belongs to


class Transcript(Record, frozen=True):
    """A trajectory with its content: calls in order, and messages up to its last answer (`content.messages`)."""

    trajectory: Trajectory
    calls: tuple[Call, ...]
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...]
    feedback: tuple[Feedback, ...] = ()  # oldest first
    row: Mapping[str, Any] | None = None  # the task's row, if its task set is known
    returned: WorkflowResult | None = None  # None: not a rollout of the tuner
    tool_calls: tuple[ToolCall, ...] = ()  # with their outcomes, in order; see docs/tools.md


class Policy(Record, frozen=True):
    """One version of an alias: an adapter, a prompt, or both; version 0 has neither. A prompt shares its adapter."""

    alias: Text128
    version: int
    state: PolicyState
    served_name: str  # model name in vLLM
    adapter: str | None  # its folder; None: the base model
    created_at: float
    round_id: Id | None = None
    evidence: Mapping[str, Any] = {}
    share: float | None = None  # of new trajectories, in a ramp or held back; the live version has the rest
    pruned_at: float | None = None  # when its folder was deleted; it cannot serve again
    pinned_at: float | None = None  # when a person pinned it: it stays live, and nothing is released
    recalled_at: float | None = None  # when its open trajectories had to go on with the live version, if rejected
    prompt_id: Id | None = None  # of the system prompt that it is served with
    replicas: Sequence[str] = ()  # URLs of the replicas that are proven to serve it; empty: not recorded


class Prompt(Record, frozen=True):
    """A system prompt that the proxy applies, identified by its content."""

    id: Id  # prm_ and 16 hex characters of a hash of mode, text and families
    mode: PromptMode
    text: str  # for families without a text of their own; empty: calls are unchanged
    families: Mapping[str, str] = {}  # texts by task family (`Trajectory.family`)
    origin: str = ""  # its first author
    created_at: float = 0.0

    def text_for(self, family: str | None) -> str:
        """Return the text for calls of a family; empty: the call is unchanged."""
        return self.families.get(family, self.text) if family is not None else self.text


_PARTS = ("config", "weights", "tokenizer", "chat_template")  # of a base model's files


class BaseModel(Record, frozen=True):
    """A base model; `name`: the folder or hub name at its registration."""

    id: Id
    name: str
    file_digests: Mapping[str, str]
    server_fingerprint: Mapping[str, Any]
    registered_at: float

    def differing_parts(self, files: Mapping[str, str]) -> list[str]:
        """Return the parts whose digests are known for both and differ."""
        return [
            part
            for part in _PARTS
            if part in self.file_digests and part in files and self.file_digests[part] != files[part]
        ]


class Decision(Record, frozen=True):
    """A decision about a version: its author, reason and evidence."""

    id: int
    alias: Text128
    version: int
    action: PolicyAction
    decided_by: str  # proof, release, tuner, or a person
    reason: str
    evidence: Mapping[str, Any]
    decided_at: float


class Resample(Record, frozen=True):
    """A further answer to the prompt of `original_id`. Its id is that of its trajectory."""

    id: TrajectoryId
    original_id: TrajectoryId
    alias: Text128
    version: int  # of the original
    tokens: int  # of prompt and answer; of the original until it is answered
    planned_at: float
    requested_at: float | None = None
    ended_at: float | None = None
    state: ResampleState = ResampleState.PLANNED
    failure: str | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state in (ResampleState.ANSWERED, ResampleState.FAILED)
